"""Means and sums over dimensions, with the division inside the requantization multiplier; adaptive pooling.

Windows that give the wanted output size are of one size or of sizes that differ by one.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import largest_size, product_node, shape_of, size_node
from fxquant.numerics.grids import INT32, INT32_MAX
from fxquant.numerics.rounding import clamped
from fxquant.ops.core import FLOAT32_EXACT, Call, Clamp, Instead, Lowering, Quantized, Ratio, Same, TensorFact, Trait, selected
from fxquant.ops.core.declare import NO_DIMENSIONS, Guard, are_fixed, first_reason, known_sizes, lowered
from fxquant.ops.core.matrix import box, onnx_matrices, uneven_windows, weighted_sums, window_sizes
from fxquant.ops.core.record import operator_named
from fxquant.ops.core.samples import IMAGES, sample, sampled
from fxquant.ops.core.weighted import Product, lower_uniform
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.ops.pooling.pool import needs_batch, onnx_average_pool, onnx_layer, too_many, with_places_too
from fxquant.primitives import accumulate, elementwise, pool, shape
from fxquant.primitives.pool import POOLED_EXACT
from fxquant.primitives.resize import transform

LARGEST_TABLE = 2**18  # of constants by the number of elements of a mean


def _dims(shape: tuple[Any, ...], dim: Any) -> list[int]:
    chosen = range(len(shape)) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    return [int(d) for d in chosen]


def lower_total(
    lowering: Lowering, input: Quantized, dims: list[int], keepdim: bool, divisor: int, clamp: Clamp | None, count: Any = None
) -> Quantized:
    """Return the sum over dimensions, divided inside the requantization multiplier: by `divisor`, or by `count`.

    `count` is the number of elements of a mean, where sizes of the model vary: an int, or a node in a graph. Then constants are tables.
    """
    terms = math.prod(largest_size(input.shape[d]) for d in dims)  # type: ignore[misc]
    images = len(input.shape) == 4 and sorted(dim % 4 for dim in dims) == [2, 3] and input.dtype.bits <= 8
    if lowering.arithmetic.rescales_by_layers and images and are_fixed(input.shape[1:]) and divisor == terms and count is None:
        channels, *size = known_sizes(input.shape[1:])
        attributes = ([1, 1], [0, 0], [1, 1], channels)
        form = Product(accumulate.convolution, accumulate.convolution_wide, attributes, 2, in_parts=True)
        averaged = lower_uniform(lowering, form, input, (channels, 1, *size), 1 / terms, clamp)
        return averaged if keepdim else averaged.with_value(lowering.call(shape.reshape, averaged.value, [-1, channels]))
    largest = lowering.prove(terms * input.grid.magnitude, "the sum")
    total = lowering.call(pool.sum, input.value, dims, keepdim, largest >= FLOAT32_EXACT)
    number = torch.tensor(float(divisor if count is None else terms), dtype=torch.float32, device=input.scale.device)
    if isinstance(count, fx.Node):
        lowering.count, number = count, torch.arange(terms + 1, dtype=torch.float32, device=input.scale.device).clamp_min(1)
    ratio = Ratio((input.scale,), (number,))
    averages = images and (divisor == terms or count is not None)
    if not (lowering.arithmetic.rounds_image_means and averages) or lowering.output.dtype == INT32:
        return lowering.requantize(total, ratio, clamp)

    def lift(scale: Tensor) -> Tensor:
        return lowering.arithmetic.half_of_first_shift(ratio.over(scale), lowering.output.grid)

    half = None if lowering.lifts_late else lift(lowering.output.grid.scale)
    if half is not None and bool(half.any()):
        total = lowering.call(elementwise.add_constant, total, lowering.constant("first_half", half, torch.int32))
    return lowering.requantize(total, ratio, clamp, lift=lift)


def _refuses_reduction(verb: str) -> Guard:
    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        shape = shape_of(arguments["input"])
        if not shape:
            return NO_DIMENSIONS
        reduced = [largest_size(shape[d]) for d in _dims(shape, arguments["dim"])]
        sizes = [size for size in reduced if size is not None]
        if len(sizes) < len(reduced):
            return f"it {verb} over the batch, whose size is not fixed"
        if arguments.get("count") is not None and math.prod(sizes) > LARGEST_TABLE:
            remedy = "declare smaller sizes: torch.export.Dim(…, max=…)"
            return f"it {verb} up to {math.prod(sizes)} elements, and a table by their number has at most {LARGEST_TABLE}; {remedy}"
        return too_many(sizes, INT32_MAX if arguments.get("count") is not None else FLOAT32_EXACT)

    return refuses


def _reduction_arguments(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> dict[str, Any] | str:
    if dtype not in (None, torch.float32):
        return "a dtype argument has no integer form"
    return {"input": input, "dim": dim, "keepdim": keepdim}


def _on_integers(arguments: dict[str, Any], operand: TensorFact | None) -> tuple[Any, dict[str, Any]] | None:
    """Return a sum of integers, whose dimensions are named one by one."""
    if operand is None:
        return None
    dim = arguments.get("dim")
    chosen = list(dim) if isinstance(dim, list | tuple) else [] if dim is None else [dim]
    return WHOLE["sum"], {"input": arguments["input"], "dim": chosen or list(range(len(operand.shape))), "keepdim": arguments["keepdim"]}


def _onnx_reduction(c: Call, operator: str) -> str:
    layer = onnx_layer(c)
    if layer is not None:
        reduced = c.epilogue(layer)
        return reduced if c["keepdim"] else c.do("Flatten", reduced, axis=1)
    axes = None if c["dim"] is None else _dims((), c["dim"])
    return c.epilogue(c.reduced(operator, c.input, axes or None, c["keepdim"]))


def _reduces(verb: str, operator: str) -> dict[str, Any]:
    """Return the fields that sums and means have alike: with ONNX's operator, and the verb for the reason of one over the batch."""
    return {
        "adapt": _reduction_arguments,
        "absorbs": frozenset({"clamp"}),
        "refuses": _refuses_reduction(verb),
        "traits": frozenset({Trait.REDUCTION, Trait.SUMMATION, Trait.HOMOGENEOUS}),
        "onnx": lambda c: _onnx_reduction(c, operator),
        "samples": (sample(input=IMAGES[2], dim=(2, 3)), sample(input=IMAGES[2], dim=-1, keepdim=True), sample(input=IMAGES[2], dim=1)),
    }


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, count: Any = None, *, clamp: Clamp | None = None) -> Tensor:
    value = torch.mean(input, dim, keepdim)
    return value if clamp is None else clamped(value, *clamp)


def _counted(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a mean with the number of its elements, where sizes other than the batch vary."""
    sizes = shape_of(arguments["input"])
    dims = _dims(sizes, arguments["dim"])
    bounded = bool(sizes) and all(largest_size(sizes[dim]) is not None for dim in dims)
    if not bounded or all(isinstance(sizes[dim], int) for dim in dims) or arguments["count"] is not None:
        return arguments
    return {**arguments, "count": product_node([size_node(arguments["input"], dim, node) for dim in dims], node)}


@lowered("nanmean", function=_mean, normalize=_counted, **_reduces("averages", "ReduceMean"))  # a quantized tensor has no NaN
@sampled("torch.mean(x, dim=-1, keepdim=True).relu()")
def mean(
    lowering: Lowering, input: Quantized, dim: Any = None, keepdim: bool = False, count: Any = None, *, clamp: Clamp | None = None
) -> Quantized:
    """Return the mean over the dimensions `dim` (all dimensions if it is None); `count` is their number of elements, where it varies."""
    dims = _dims(input.shape, dim)
    divisor = math.prod(input.shape[d] for d in dims) if count is None else 1  # type: ignore[misc]
    return lower_total(lowering, input, dims, keepdim, divisor, clamp, count)


@lowered("nansum", **_reduces("sums", "ReduceSum"), integers=_on_integers)
@sampled("torch.sum(x, dim=1, keepdim=True).relu()")
def sum(lowering: Lowering, input: Quantized, dim: Any = None, keepdim: bool = False, *, clamp: Clamp | None = None) -> Quantized:
    """Return the sum over the dimensions `dim` (all dimensions if it is None)."""
    return lower_total(lowering, input, _dims(input.shape, dim), keepdim, 1, clamp)


# ---- Adaptive pooling ------------------------------------------------------------------------------------------------
def window_counts(shape: tuple[Any, ...], output_size: Any, rank: int) -> list[int]:
    """Return the number of windows along each of the last `rank` dimensions; None in `output_size` keeps the operand's size."""
    counts = list(output_size) if isinstance(output_size, list | tuple) else [output_size] * rank
    return [size if count is None else count for count, size in zip(counts * (rank if len(counts) == 1 else 1), shape[-rank:], strict=True)]


def _kernel(shape: tuple[Any, ...], counts: list[int]) -> list[int] | None:
    """Return the common window, or None where windows differ."""
    windows = [divmod(length, count) for length, count in zip(shape[-len(counts) :], counts, strict=True)]
    return None if any(rest for _, rest in windows) else [taps for taps, _ in windows]


def _largest(shape: tuple[Any, ...], counts: list[int]) -> list[int]:
    """Return the largest window along each dimension."""
    return [max(b - a for a, b in uneven_windows(length, count)) for length, count in zip(shape[-len(counts) :], counts, strict=True)]


def refuses_adaptive(rank: int, sums: bool) -> Guard:
    """Refuses windows along the batch, and, of sums, windows that are too large."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        shape = shape_of(arguments["input"])
        counts = window_counts(shape, arguments["output_size"], rank)
        if not are_fixed(counts):
            return "its output size is computed"
        window = _kernel(shape, counts)
        limit = POOLED_EXACT if window is not None and window != known_sizes(shape[-rank:]) else FLOAT32_EXACT
        return too_many(_largest(shape, counts), limit) if sums else None

    return first_reason(needs_batch(rank), refuses)


def lower_means(lowering: Lowering, input: Quantized, counts: list[int], clamp: Clamp | None = None) -> Quantized:
    """Return the mean of each window of the last dimensions: sums, with the division inside the requantization multiplier."""
    rank = len(counts)
    lengths = known_sizes(input.shape[-rank:])
    window = _kernel(input.shape, counts)
    if window == lengths:
        return lower_total(lowering, input, list(range(-rank, 0)), True, math.prod(window), clamp)
    if window is not None:
        averaged: Quantized = operator_named(f"avg_pool{rank}d").lower(lowering, input, window, clamp=clamp)
        return averaged
    matrices = [box(length, count) for length, count in zip(lengths, counts, strict=True)]
    steps = Ratio((input.scale,), (window_sizes(lengths, counts).to(input.scale.device),))
    return weighted_sums(lowering, input, matrices, steps, clamp)


def onnx_means(c: Call, counts: list[int]) -> str:
    """Return the means as one standard operator where the windows are alike, and as products with matrices where they are not."""
    if c.primitive(transform) is None:
        return onnx_average_pool(c)
    lengths = known_sizes(c.operand_shape[-len(counts) :])
    boxes = [box(length, count) for length, count in zip(lengths, counts, strict=True)]
    means = [None if one is None else one / one.sum(1, keepdim=True) for one in boxes]
    return c.epilogue(onnx_matrices(c, c.input, c.operand_shape, means))


def _mean_of_all(rank: int) -> Callable[[fx.Node, dict[str, Any]], dict[str, Any] | Instead]:
    """Return a normalizer that makes a pool with one window a mean, where sizes of its operand vary."""

    def normalize(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | Instead:
        sizes = shape_of(arguments["input"])[-rank:]
        if are_fixed(sizes) or set(window_counts(sizes, arguments["output_size"], rank)) != {1}:
            return arguments
        return Instead(mean, {"input": arguments["input"], "dim": list(range(-rank, 0)), "keepdim": True, "count": None})

    return normalize


def _adaptive_avg_pool(rank: int) -> Callable[..., Tensor]:
    @lowered(
        name=f"adaptive_avg_pool{rank}d",
        normalize=_mean_of_all(rank),
        idle=lambda arguments: True,
        absorbs=frozenset({"clamp"}),
        refuses=refuses_adaptive(rank, True),
        traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
        onnx=lambda c: onnx_means(c, window_counts(c.operand_shape, c["output_size"], rank)),
        samples=tuple(sample(input=IMAGES[rank], output_size=size) for size in (1, 3, 4, (2, None, 3)[:rank])),
    )
    def adaptive_avg_pool(lowering: Lowering, input: Quantized, output_size: Any, *, clamp: Clamp | None = None) -> Quantized:
        """Return the mean over windows that give the wanted output size in one, two or three dimensions."""
        return lower_means(lowering, input, window_counts(input.shape, output_size, rank), clamp)

    return adaptive_avg_pool


def lower_windows(lowering: Lowering, input: Quantized, counts: list[int]) -> tuple[Any, list[int], list[list[int]]]:
    """Return the operand with its windows laid out one after another, the windows' sizes, and the selected indices of each dimension.

    Where windows differ, a smaller one holds its last element again.
    """
    value, rank = input.value, len(counts)
    lengths = known_sizes(input.shape[-rank:])
    kernel, places = [], []
    for axis, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        windows = uneven_windows(length, count)
        taps = max(stop - start for start, stop in windows)
        chosen = [min(start + tap, stop - 1) for start, stop in windows for tap in range(taps)]
        if chosen != list(range(length)):
            value = selected(lowering, value, axis - rank, chosen, f"indices{axis}")
        kernel.append(taps)
        places.append(chosen)
    return value, kernel, places


def _onnx_adaptive_max(c: Call) -> str:
    node = c.primitive(pool.max_pool)
    assert node is not None
    kernel: Any = node.args[1]
    return c.do("MaxPool", c.selected(), kernel_shape=list(kernel), strides=list(kernel))


def _adaptive_max_pool(rank: int) -> Callable[..., Tensor]:
    name = f"adaptive_max_pool{rank}d"

    @lowered(
        getattr(F, name),  # but not torch.adaptive_max_pool1d, which returns places, too
        name=name,
        function=lambda input, output_size: getattr(F, name)(input, output_size),
        by_name=False,
        **with_places_too(name),
        demand=Same(),
        idle=lambda arguments: True,
        refuses=refuses_adaptive(rank, False),
        traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
        onnx=_onnx_adaptive_max,
        samples=tuple(sample(input=IMAGES[rank], output_size=size) for size in (4, 1, (2, None, 3)[:rank])),
    )
    def adaptive_max_pool(lowering: Lowering, input: Quantized, output_size: Any) -> Quantized:
        """Return the maximum over windows that give the wanted output size in one, two or three dimensions."""
        value, kernel, _ = lower_windows(lowering, input, window_counts(input.shape, output_size, rank))
        return input.with_value(lowering.call(pool.max_pool, value, kernel, kernel, [0] * rank, [0] * rank, [1] * rank))

    return adaptive_max_pool


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(_adaptive_avg_pool, (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = map(_adaptive_max_pool, (1, 2, 3))

"""Means and sums over dimensions, with the division inside the requantization multiplier; adaptive pooling; the places of maxima.

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
from fxquant.ops.core import EXACT, FLOAT32_EXACT, Builder, Call, Clamp, Lowering, Quantized, Ratio, TensorFact, selected, written
from fxquant.ops.core.declare import NO_DIMENSIONS, Guard, are_fixed, composite, first_reason, known_sizes, lowered, module_of, with_batch
from fxquant.ops.core.record import Instead, Plain, Same, Trait, operator_named
from fxquant.ops.core.samples import IMAGES, sample, sampled
from fxquant.ops.core.sums import box, onnx_matrices, uneven_windows, weighted_sums, window_sizes
from fxquant.ops.core.weighted import Product, lower_uniform
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.ops.pooling import pool as windows
from fxquant.ops.pooling.pool import onnx_average_pool, onnx_layer, refuses_max_pool, too_many, window_padding, with_places_too
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


def refuses_adaptive(rank: int, sums: bool) -> Guard:
    """Refuses windows along the batch, and, of sums, windows that are too large."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        shape = shape_of(arguments["input"])
        counts = window_counts(shape, arguments["output_size"], rank)
        if not are_fixed(counts):
            return "its output size is computed"
        if not sums:
            return None
        window, lengths = _kernel(shape, counts), known_sizes(shape[-rank:])
        largest = [max(b - a for a, b in uneven_windows(*row)) for row in zip(lengths, counts, strict=True)]
        limit = POOLED_EXACT if window is not None and window != lengths else FLOAT32_EXACT
        return too_many(largest, limit)

    return first_reason(windows.needs_batch(rank), refuses)


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


# ---- Maximum pooling that says where the maxima are, and its inverse -------------------------------------------------
def _is_wide(input: Quantized, planes: list[int]) -> bool:
    """Return whether keys of an element and its place exceed float32; stored integers may be larger by a zero point."""
    return (input.grid.magnitude + 256) * math.prod(planes) >= FLOAT32_EXACT


def _values(name: str) -> Callable[..., dict[str, Any]]:
    """Return the adapter of a pooling that returns places: its arguments by name, without `return_indices`."""

    def adapt(*args: Any, return_indices: bool = True, **kwargs: Any) -> dict[str, Any]:
        operator = operator_named(name)
        return operator.bind(args[: len(operator.parameter_names)], kwargs)

    return adapt


def _with_places(rank: int) -> tuple[Callable[..., Tensor], ...]:
    """Declare maximum poolings of this rank that return values and indices, and others that return the indices alone."""
    name, adaptive = f"max_pool{rank}d", f"adaptive_max_pool{rank}d"

    @lowered(
        name=f"max_pool_indices{rank}d",
        function=lambda input, *window, **named: getattr(F, f"{name}_with_indices")(input, *window, **named)[1],
        demand=Plain("int64"),
        refuses=refuses_max_pool(rank),
        settings=windows.WINDOW,
        samples=written(f"F.max_pool{rank}d(x, 2, return_indices=True)[1]", x=IMAGES[rank]),
    )
    def max_pool_indices(lowering: Lowering, input: Quantized, **window: Any) -> Any:
        """Return the positions of the maxima of windows in one, two or three dimensions: int64."""
        planes = known_sizes(input.shape[-rank:])
        placed = window_padding(planes, **window)
        return lowering.call(pool.pool_indices, input.value, *placed, planes, _is_wide(input, planes))

    with_places = f"{name}_with_indices"

    @composite(name=with_places, adapt=_values(with_places), refuses=refuses_max_pool(rank), settings=windows.WINDOW)
    @sampled(f"F.{name}(x, 3, 2, 1, return_indices=True)[0]", f"{with_places}(x, 2)[0]", within=EXACT, x=IMAGES[rank])
    def max_pool_with_indices(build: Builder, input: fx.Node, **window: Any) -> Any:
        """Return the maxima of windows in one, two or three dimensions, and their positions."""
        return build(operator_named(name).function, input, **window), build(max_pool_indices, input, **window)

    @lowered(
        name=f"adaptive_max_indices{rank}d",
        function=lambda input, output_size: getattr(F, f"{adaptive}_with_indices")(input, output_size)[1],
        demand=Plain("int64"),
        refuses=refuses_adaptive(rank, False),
        samples=written(f"F.{adaptive}(x, 4, return_indices=True)[1]", x=IMAGES[rank]),
    )
    def adaptive_max_indices(lowering: Lowering, input: Quantized, output_size: Any) -> Any:
        """Return the positions of the maxima of windows that give the wanted size in one, two or three dimensions: int64."""
        lengths = known_sizes(input.shape[-rank:])
        value, kernel, chosen = lower_windows(lowering, input, window_counts(input.shape, output_size, rank))
        position_of = torch.arange(math.prod(lengths), device="cpu").reshape(lengths)
        for axis, elements in enumerate(chosen):
            position_of = position_of.index_select(axis, torch.tensor(elements, device="cpu", dtype=torch.int64))
        places = lowering.constant("places", position_of.flatten().to(input.scale.device), torch.int64)
        planes, zeros, ones = [len(elements) for elements in chosen], [0] * rank, [1] * rank
        wide = _is_wide(input, planes)
        return lowering.call(pool.pool_indices, value, kernel, kernel, zeros, zeros, ones, planes, wide, places)

    @composite(
        *([torch.adaptive_max_pool1d] if rank == 1 else []),
        name=f"{adaptive}_with_indices",
        adapt=_values(f"{adaptive}_with_indices"),
        refuses=refuses_adaptive(rank, False),
    )
    @sampled(f"F.{adaptive}(x, 4, return_indices=True)[0]", f"F.{adaptive}_with_indices(x, 3)[0]", within=EXACT, x=IMAGES[rank])
    @sampled(*["torch.adaptive_max_pool1d(x, 2)[0]"] * (rank == 1), within=EXACT, x=IMAGES[rank])
    def adaptive_max_pool_with_indices(build: Builder, input: fx.Node, output_size: Any) -> Any:
        """Return the maxima of windows that give the wanted size in one, two or three dimensions, and their positions."""
        return build(operator_named(adaptive).function, input, output_size), build(adaptive_max_indices, input, output_size)

    return max_pool_indices, max_pool_with_indices, adaptive_max_indices, adaptive_max_pool_with_indices


max_pool_indices1d, max_pool1d_with_indices, adaptive_max_indices1d, adaptive_max_pool1d_with_indices = _with_places(1)
max_pool_indices2d, max_pool2d_with_indices, adaptive_max_indices2d, adaptive_max_pool2d_with_indices = _with_places(2)
max_pool_indices3d, max_pool3d_with_indices, adaptive_max_indices3d, adaptive_max_pool3d_with_indices = _with_places(3)
INDICES = {1: max_pool_indices1d, 2: max_pool_indices2d, 3: max_pool_indices3d}


def _unpool(input: Tensor, indices: Tensor, size: list[int]) -> Tensor:
    planes = torch.zeros(*input.shape[:2], math.prod(size), dtype=input.dtype, device=input.device)
    return planes.scatter(2, indices.flatten(2), input.flatten(2)).reshape(*input.shape[:2], *size)


def _refuses_unpool(rank: int) -> Guard:
    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        if not arguments["disjoint"]:
            return "its windows overlap, so that two elements may share an index"
        indices = arguments["indices"]
        if not isinstance(indices, fx.Node) or INDICES[rank] is not indices.target:
            return "its indices are not those of a maximum pooling"
        kernel, steps, _, _, spread = window_padding([0] * rank, indices.args[1], indices.args[2], 0, indices.args[4], False)
        if any(step < apart * (taps - 1) + 1 for taps, step, apart in zip(kernel, steps, spread, strict=True)):
            return "its windows overlap, so that two elements may share an index"
        planes = shape_of(indices.args[0])[2:]  # type: ignore[arg-type]
        fits = math.prod(planes) <= math.prod(arguments["size"])  # type: ignore[arg-type]
        return None if fits else "its result is smaller than the input of the pooling"

    return refuses


def _max_unpool(rank: int) -> Callable[..., Tensor]:
    name = f"max_unpool{rank}d"

    def arguments(
        input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
    ) -> dict[str, Any]:
        return {"input": input, "indices": indices, "size": [], "disjoint": _disjoint(kernel_size, stride, rank)}

    @lowered(
        name=name,
        function=lambda input, indices, size, disjoint=True: _unpool(input, indices, size),
        by_name=False,
        calls={getattr(F, name): arguments},
        modules=dict.fromkeys(module_of(name), lambda m: {"size": [], "disjoint": _disjoint(m.kernel_size, m.stride, rank)}),
        demand=Same(),
        reads=("indices",),
        read_off=frozenset({"output_size"}),
        normalize=_planes,
        refuses=(with_batch(rank), _refuses_unpool(rank)),
        onnx=_onnx_unpool,
        samples=written(
            f"F.{name}(*F.max_pool{rank}d(x, 3, return_indices=True), 3, output_size=x.shape).relu()",
            f"v, p = {{nn.MaxPool{rank}d(2, return_indices=True)}}(x); return {{nn.MaxUnpool{rank}d(2)}}(v, p, output_size=x.shape)",
            x=IMAGES[rank],
        ),
    )
    def max_unpool(lowering: Lowering, input: Quantized, indices: Any, size: list[int], disjoint: bool = True) -> Quantized:
        """Return planes of this size in one, two or three dimensions that hold each element where it was, and 0 elsewhere."""
        return input.with_value(lowering.call(pool.unpool, input.value, lowering.given("indices", indices, torch.int64), list(size), 0))

    return max_unpool


def _onnx_unpool(c: Call) -> str:
    """Write the primitive's form on float values, flattened first on the result's grid, which is the operand's."""
    size = c["size"]
    flat = c.integers([0, 0, -1])
    value = c.rounded(c.do("Reshape", c.input, flat))
    planes = c.do("Slice", c.do("Shape", c.input), c.integers([0]), c.integers([2]))
    zero = c.e.constant(torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu"))
    empty = c.do("Expand", zero, c.do("Concat", planes, c.integers([math.prod(size)]), axis=0))
    placed = c.do("ScatterElements", empty, c.do("Reshape", c.operand("indices"), flat), value, axis=2)
    return c.do("Reshape", placed, c.integers([0, 0, *size]))


def _disjoint(kernel_size: Any, stride: Any, rank: int) -> bool:
    """Return whether windows do not overlap."""
    return all(step >= taps for taps, step in zip(*windows.kernel_and_steps(kernel_size, stride, rank), strict=True))


def _planes(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    size = list(shape_of(node)[2:])
    return {**arguments, "size": size} if all(isinstance(one, int) for one in size) else "its size depends on the batch size"


max_unpool1d, max_unpool2d, max_unpool3d = map(_max_unpool, (1, 2, 3))

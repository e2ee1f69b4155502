"""Adaptive pooling: windows that give the wanted output size, of one size or of sizes that differ by one."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import shape_of
from fxquant.ops.core import FLOAT32_EXACT, IMAGES, Call, Clamp, Instead, Lowering, Quantized, Ratio, Same, Trait, sample, selected
from fxquant.ops.core.declare import Guard, are_fixed, first_reason, known_sizes, lowered
from fxquant.ops.core.matrix import box, onnx_matrices, uneven_windows, weighted_sums, window_sizes
from fxquant.ops.core.record import operator_named
from fxquant.ops.pooling.pool import needs_batch, onnx_average_pool, too_many, with_places_too
from fxquant.ops.pooling.totals import lower_total, mean
from fxquant.primitives import pool
from fxquant.primitives.pool import POOLED_EXACT
from fxquant.primitives.resize import transform


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

"""Adaptive pooling: windows that give the wanted output size, of one size or of sizes that differ by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import fact
from fxquant.lowering.epilogue import Clamp
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.clamping import clamped
from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.demands import Same
from fxquant.ops.core.form import Call
from fxquant.ops.core.matrix import box, onnx_matrices, uneven_windows, weighted_sums, window_sizes
from fxquant.ops.core.record import Instead, Operator, operator_named, register
from fxquant.ops.core.traits import Trait
from fxquant.ops.pooling.pool import LOWER_AVG_POOLS, needs_batch, onnx_average_pool, spatial, too_many
from fxquant.ops.pooling.totals import lower_total
from fxquant.primitives import pool, shape
from fxquant.primitives.matrix import transform
from fxquant.primitives.pool import POOLED_EXACT

AVG_POOLS: dict[int, Callable[..., Tensor]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
MAX_POOLS: dict[int, Callable[..., Tensor]] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


def window_counts(shape: tuple[Any, ...], output_size: Any, rank: int) -> list[int]:
    """Return how many windows there are along each of the last dimensions; None wants as many as there are elements."""
    wanted = list(output_size) if isinstance(output_size, list | tuple) else [output_size] * rank
    return [size if count is None else count for count, size in zip(wanted * (rank if len(wanted) == 1 else 1), shape[-rank:], strict=True)]


def _kernel(shape: tuple[Any, ...], counts: list[int]) -> list[int] | None:
    """Return the common window, or None where windows differ."""
    lengths = shape[-len(counts) :]
    return None if any(s % o for s, o in zip(lengths, counts, strict=True)) else [s // o for s, o in zip(lengths, counts, strict=True)]


def _largest(shape: tuple[Any, ...], counts: list[int]) -> list[int]:
    """Return the largest window along each dimension."""
    return [max(b - a for a, b in uneven_windows(length, count)) for length, count in zip(shape[-len(counts) :], counts, strict=True)]


def refuses_adaptive(rank: int, sums: bool) -> Callable[[fx.Node, dict[str, Any]], str | None]:
    """Refuses windows along the batch, and, of sums, windows that are too large."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        reason = needs_batch(rank)(node, arguments)
        if reason is not None:
            return reason
        known = fact(arguments["input"]).shape
        counts = window_counts(known, arguments["output_size"], rank)
        if not all(isinstance(count, int) for count in counts):
            return "its output size is computed"
        if not sums:
            return None
        window = _kernel(known, counts)
        limit = POOLED_EXACT if window is not None and window != spatial(known, rank) else FLOAT32_EXACT
        return too_many(_largest(known, counts), limit)

    return refuses


# ---- average --------------------------------------------------------------------------------------------------------


def lower_means(lowering: Lowering, input: Quantized, counts: list[int], clamp: Clamp | None = None) -> Quantized:
    """Return the mean of each window of the last dimensions: sums, with the division inside the requantization multiplier."""
    rank = len(counts)
    lengths = spatial(input.shape, rank)
    window = _kernel(input.shape, counts)
    if window == lengths:
        return lower_total(lowering, input, list(range(-rank, 0)), True, math.prod(window), clamp)
    if window is not None:
        counted = {"count_include_pad": True, "divisor_override": None}
        return LOWER_AVG_POOLS[rank](lowering, input, window, None, 0, False, clamp=clamp, **counted)
    matrices = [box(length, count) for length, count in zip(lengths, counts, strict=True)]
    steps = Ratio((input.scale,), (window_sizes(lengths, counts).to(input.scale.device),))
    return weighted_sums(lowering, input, matrices, steps, clamp)


def onnx_means(c: Call, counts: list[int]) -> str:
    """Return the means as one standard operator where the windows are alike, and as products with matrices where they are not."""
    if c.primitive(transform) is None:
        return onnx_average_pool(c)
    lengths = spatial(c.operand_shape, len(counts))
    boxes = [box(length, count) for length, count in zip(lengths, counts, strict=True)]
    means = [None if one is None else one / one.sum(1, keepdim=True) for one in boxes]
    return c.epilogue(onnx_matrices(c, c.input, c.operand_shape, means))


def _adaptive_avg_pool(rank: int) -> Callable[..., Tensor]:
    def function(input: Tensor, output_size: Any, *, clamp: Clamp | None = None) -> Tensor:
        value = AVG_POOLS[rank](input, output_size)
        return value if clamp is None else clamped(value, *clamp)

    def lower(lowering: Lowering, input: Quantized, output_size: Any, *, clamp: Clamp | None = None) -> Quantized:
        return lower_means(lowering, input, window_counts(input.shape, output_size, rank), clamp)

    def onnx(c: Call) -> str:
        return onnx_means(c, window_counts(c.operand_shape, c["output_size"], rank))

    function.__name__ = function.__qualname__ = f"adaptive_avg_pool{rank}d"
    function.__doc__ = f"The mean over windows that give the wanted output size, in {rank} dimensions."
    register(
        Operator(
            function.__name__,
            function,
            ("input",),
            lower,
            functions={AVG_POOLS[rank]: None},
            modules={getattr(nn, f"AdaptiveAvgPool{rank}d"): lambda m: {"output_size": m.output_size}},
            idle=lambda arguments: True,
            absorbs=frozenset({"clamp"}),
            refuses=refuses_adaptive(rank, True),
            traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
            onnx=onnx,
        )
    )
    return function


# ---- maximum --------------------------------------------------------------------------------------------------------


def _filled(windows: list[tuple[int, int]], taps: int) -> list[int]:
    """Return the elements of windows that all have this many."""
    return [min(start + tap, stop - 1) for start, stop in windows for tap in range(taps)]


def lower_windows(lowering: Lowering, input: Quantized, counts: list[int]) -> tuple[Any, list[int], list[list[int]]]:
    """The integers with the elements of windows one window after the other, these windows' size, and which elements of each dimension.

    Where windows differ, a smaller one holds its last element again.
    """
    value, rank = input.value, len(counts)
    lengths = spatial(input.shape, rank)
    kernel, places = [], []
    for axis, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        windows = uneven_windows(length, count)
        taps = max(stop - start for start, stop in windows)
        chosen = _filled(windows, taps)
        if chosen != list(range(length)):
            stored = lowering.constant(f"indices{axis}", torch.tensor(chosen, device=input.scale.device, dtype=torch.int64), torch.int64)
            value = lowering.call(shape.select, value, axis - rank, stored)
        kernel.append(taps)
        places.append(chosen)
    return value, kernel, places


def _adaptive_max_pool(rank: int) -> Callable[..., Tensor]:
    def function(input: Tensor, output_size: Any) -> Tensor:
        return MAX_POOLS[rank](input, output_size)

    def lower(lowering: Lowering, input: Quantized, output_size: Any) -> Quantized:
        value, kernel, _ = lower_windows(lowering, input, window_counts(input.shape, output_size, rank))
        return input.with_value(lowering.call(pool.max_pool, value, kernel, kernel, [0] * rank, [0] * rank, [1] * rank))

    def onnx(c: Call) -> str:
        node = c.primitive(pool.max_pool)
        assert node is not None
        kernel: Any = node.args[1]
        return c.do("MaxPool", c.selected(), kernel_shape=list(kernel), strides=list(kernel))

    function.__name__ = function.__qualname__ = f"adaptive_max_pool{rank}d"
    function.__doc__ = f"The maximum over windows that give the wanted output size, in {rank} dimensions."
    register(
        Operator(
            function.__name__,
            function,
            ("input",),
            lower,
            Same(),
            functions={MAX_POOLS[rank]: _arguments(rank)},
            modules={getattr(nn, f"AdaptiveMaxPool{rank}d"): _module(rank)},
            idle=lambda arguments: True,
            refuses=refuses_adaptive(rank, False),
            traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
            onnx=onnx,
        )
    )
    return function


def _arguments(rank: int) -> Callable[..., dict[str, Any] | Instead]:
    def function(input: Any, output_size: Any, return_indices: bool = False) -> dict[str, Any] | Instead:
        given = {"input": input, "output_size": output_size}
        return Instead(operator_named(f"adaptive_max_pool{rank}d_with_indices").function, given) if return_indices else given

    return function


def _module(rank: int) -> Callable[[Any], dict[str, Any] | Instead]:
    def module(m: Any) -> dict[str, Any] | Instead:
        given = {"output_size": m.output_size}
        return Instead(operator_named(f"adaptive_max_pool{rank}d_with_indices").function, given) if m.return_indices else given

    return module


adaptive_avg_pool1d = _adaptive_avg_pool(1)
adaptive_avg_pool2d = _adaptive_avg_pool(2)
adaptive_avg_pool3d = _adaptive_avg_pool(3)
adaptive_max_pool1d = _adaptive_max_pool(1)
adaptive_max_pool2d = _adaptive_max_pool(2)
adaptive_max_pool3d = _adaptive_max_pool(3)

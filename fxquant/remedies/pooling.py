"""Pooling in steps: means of means and maxima of maxima, and reductions of several dimensions as poolings."""

import math

import torch
from torch import fx

from fxquant.ir.graph import Size, shape_of
from fxquant.ops.core.weighted import sizes
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.comparison import amax
from fxquant.ops.layers.convolution import conv2d
from fxquant.ops.movement.pad import pad
from fxquant.ops.movement.repeating import cat
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.ops.pooling.pool import avg_pool2d, window_divisor
from fxquant.ops.pooling.totals import adaptive_avg_pool2d, mean
from fxquant.ops.pooling.totals import sum as total
from fxquant.remedies.rewriting import Rewriting, even, remedy

LARGEST_KERNEL = 1024  # the largest mean that becomes a convolution with weights
AVERAGES = "avg_pool2d adaptive_avg_pool2d"


def window(b: Rewriting, rank: int = 2) -> tuple[list[int], list[int], list[int]]:
    """Return kernel, stride and padding of a pooling, a number for each dimension."""
    kernel, padding = (sizes(b.arguments[name], rank) for name in ("kernel_size", "padding"))
    return kernel, kernel if b.arguments["stride"] in (None, []) else sizes(b.arguments["stride"], rank), padding


def _whole_window(b: Rewriting) -> tuple[list[int], list[int], list[int]] | None:
    """Return kernel, stride and padding of an average over windows in two dimensions; None if its last windows are truncated."""
    spatial, results = b.shape[2:], _results(b)
    if not all(isinstance(size, int) for size in (*spatial, *results)):
        return None
    if "kernel_size" not in b.arguments:
        if any(size % out for size, out in zip(spatial, results, strict=True)):
            return None  # windows of different sizes
        kernel = [size // out for size, out in zip(spatial, results, strict=True)]
        return kernel, kernel, [0, 0]
    if b.arguments["divisor_override"] is not None:
        return None
    kernel, stride, padding = window(b)
    if any(padding) and not b.arguments["count_include_pad"]:
        return None
    rows = zip(spatial, kernel, stride, padding, results, strict=True)
    if any((out - 1) * s + k > size + 2 * p for size, k, s, p, out in rows):  # type: ignore[operator]
        return None  # ceil_mode
    return kernel, stride, padding


def _results(b: Rewriting) -> tuple[Size, ...]:
    """Return the height and width of an average; (1, 1) of a mean over the image."""
    return (1, 1) if b.operator.function is mean else b.result[2:]


@remedy("in two steps", f"{AVERAGES} mean", "kernel", "side of an averaged image")
def average_in_steps(b: Rewriting) -> fx.Node | None:
    """Average adjacent equal windows, and then their means."""
    whole = _whole_window(b)
    if whole is None:
        return None
    kernel, stride, padding = whole
    results, most = _results(b), b.most
    # A window starts where one of the first step does: at multiples of its size, or at the beginning if there is one window only.
    steps = [0 if out == 1 else s for out, s in zip(results, stride, strict=True)]
    divisors = [[d for d in range(1, most + 1) if math.gcd(k, s) % d == 0] for k, s in zip(kernel, steps, strict=True)]
    first = [max(some, default=1) if k > most else 1 for k, some in zip(kernel, divisors, strict=True)]
    if math.prod(first) == 1 and (not b.adapts or b.operator.function is mean):
        return as_pooling(b) if b.adapts else None
    if math.prod(first) == 1:
        return _whole_in_parts(b) if list(b.shape[2:]) == kernel else _as_depthwise(b, kernel, stride, padding)
    operand = b.input
    if any(padding):
        operand = b(pad, operand, [size for size in reversed(padding) for _ in range(2)])
    inner = b(avg_pool2d, operand, first, first)
    rest = [k // f for k, f in zip(kernel, first, strict=True)]
    if [size // f for size, f in zip(shape_of(operand)[2:], first, strict=True)] == rest:  # type: ignore[operator]
        return b(adaptive_avg_pool2d, inner, 1, clamp=b.clamp) if "kernel_size" in b.arguments else b.again(input=inner)
    ahead = [max(s // f, 1) if out != 1 else r for s, f, r, out in zip(stride, first, rest, results, strict=True)]
    return b(avg_pool2d, inner, rest, ahead, clamp=b.clamp)


def _whole_in_parts(b: Rewriting) -> fx.Node:
    """Return the mean of the whole image as the weighted sum of the means of two halves."""
    dim = 2 if b.shape[2] > b.shape[3] else 3
    size = b.shape[dim]
    halves = even(size, 2)
    parts = [b(mul, b(adaptive_avg_pool2d, b.cut(b.input, dim, *half), 1), (half[1] - half[0]) / size) for half in halves]
    return b(add, *parts, clamp=b.clamp)


def _as_depthwise(b: Rewriting, kernel: list[int], stride: list[int], padding: list[int]) -> fx.Node | None:
    """Return a depthwise convolution with equal weights, which can be split where a mean cannot."""
    channels = b.shape[1]
    if not isinstance(channels, int) or math.prod(kernel) > LARGEST_KERNEL:
        return None
    weight = b.constant(torch.full((channels, 1, *kernel), 1 / math.prod(kernel), device="cpu", dtype=torch.float32))
    return b(conv2d, b.input, weight, None, stride, padding, groups=channels, clamp=b.clamp)


@remedy("counted after it", "avg_pool2d", "count_include_pad")
def counted_after(b: Rewriting) -> fx.Node | None:
    """Return the mean over whole windows, times a factor for each position."""
    arguments = b.arguments
    if arguments["ceil_mode"] or arguments["divisor_override"] is not None or not all(isinstance(size, int) for size in b.shape[2:]):
        return None
    kernel, stride, padding = window(b)
    counts = window_divisor(b.shape, {"count_include_pad": False}, kernel, stride, padding, padding)
    inner = b(avg_pool2d, b.input, kernel, stride, padding)
    shares = math.prod(kernel) / counts
    channels = b.shape[1] if isinstance(b.shape[1], int) else 1  # a number for each element: tools multiply a channel's alone in float
    return b(mul, inner, b.constant(shares.expand(1, channels, *shares.shape).contiguous()), clamp=b.clamp)


@remedy("as a pooling", "mean sum", "reduced dimension", "number of reduced dimensions", "rank of an averaged image")
def as_pooling(b: Rewriting) -> fx.Node | None:
    """Pool height and width by an average pooling. Reduce other dimensions one after another, if the target supports them."""
    rank = len(b.shape)
    dim = b.arguments["dim"]
    dims = sorted(int(d) % rank for d in (range(rank) if dim in (None, (), []) else dim if isinstance(dim, list | tuple) else [dim]))
    if any(not isinstance(b.shape[d], int) for d in dims):
        return None
    clamp, keepdim, averages = b.clamp, b.arguments["keepdim"], b.operator.function is mean
    if rank == 4 and dims == [2, 3]:
        result = b(adaptive_avg_pool2d, b.input, 1, clamp=clamp if averages else None)
        if not averages:
            result = b(mul, result, float(b.shape[2] * b.shape[3]), clamp=b.clamp)
    elif b.limit.measure != "number of reduced dimensions" or len(dims) < 2:
        return None
    else:
        result = b.input
        for d in reversed(dims):
            last = d == dims[0]
            result = b(mean if averages else total, result, [d], True, clamp=clamp if last else None, dtype=b.dtype if last else b.partial)
    return result if keepdim else b(reshape, result, numbers(b.result))


@remedy("in two steps", "amax", "reduced size")
def largest_in_steps(b: Rewriting) -> fx.Node | None:
    """Return the maximum of the maxima of parts; the integers are unchanged."""
    rank = len(b.shape)
    dim = b.arguments["dim"]
    dims = [int(d) % rank for d in (dim if isinstance(dim, list | tuple) else [dim])]
    if len(dims) != 1:
        return None
    size = b.shape[dims[0]]
    parts = [b(amax, b.cut(b.input, dims[0], start, stop), dims, True) for start, stop in even(size, b.pieces)]
    joined = b(cat, parts, dims[0])
    b.tie(*parts, joined)
    return b(amax, joined, dims, b.arguments["keepdim"])

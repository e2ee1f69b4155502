"""Reductions: sums and maxima over windows and over dimensions, the positions of maxima, and unpooling by such positions."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.primitives.accumulate import onnx_split, window_padding
from fxquant.primitives.record import Emitter, Range, Role, Value, ZeroPoint, constant_of, exact_below, need, primitive, stored, within
from fxquant.primitives.steps import Op, over_rows

POOLED_EXACT = 2**22  # sums over windows stay below, so that ONNX can recover them from a float32 mean
HALF_BITS = 8  # where a wide sum over windows cuts its operand
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def need_elements(kernel: list[int], begin: list[int], end: list[int], dilation: list[int]) -> None:
    """Raise Unproved if a window may cover padding only."""
    for taps, before, after, spread in zip(kernel, begin, end, dilation, strict=True):
        need(0 <= before <= spread * (taps - 1) and 0 <= after <= spread * (taps - 1), "one of its windows covers padding only")


def attributes_of(kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int]) -> dict[str, object]:
    """Return the attributes of an ONNX max pool."""
    return {"kernel_shape": list(kernel), "strides": list(stride), "pads": [*begin, *end], "dilations": list(dilation)}


def _onnx_max_pool(e: Emitter, input: str, *window: list[int]) -> str:
    pooled = e.node("MaxPool", e.node("Cast", input, to=torch.float32), **attributes_of(*window))
    return e.node("Cast", pooled, to=e.dtype(input))


def _bounds_max_pool(input: Value, kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int]) -> Range:
    need_elements(kernel, begin, end, dilation)
    return Range(input.low, input.high)


def _is_one_window(
    sizes: Sequence[Any], kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int]
) -> bool:
    return list(kernel) == [sizes[-1]] and not any(begin) and not any(end) and list(dilation) == [1]


@primitive(
    _onnx_max_pool,
    bounds=_bounds_max_pool,
    zero_point=ZeroPoint.EQUIVARIANT,
    layout="windows",
    reduces=lambda *window: Op.HIGHEST if _is_one_window(*window) else None,
)
def max_pool(input: Tensor, kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int]) -> Tensor:
    """Compute the maximum over each window, without its padding."""
    if _is_one_window(input.shape, kernel, stride, begin, end, dilation):
        if not input.is_floating_point():
            return input.amax(-1, keepdim=True)
        if input.requires_grad:
            return input.float().max(-1, keepdim=True).values  # also which of equal ones has the gradient; but it keeps the places alone
    value, padding = input.float(), 0 if not any(begin) else list(begin)
    if begin != end or any(2 * before > taps for before, taps in zip(begin, kernel, strict=True)):  # more than PyTorch pads by itself
        value, padding = F.pad(value, window_padding(begin, end), value=-torch.inf), 0
    return stored(MAX_POOLS[len(kernel)](value, kernel, stride, padding, dilation), input, input.dtype)


def _onnx_sum_pool(
    e: Emitter, input: str, kernel: list[int], stride: list[int], begin: list[int], end: list[int], wide: bool = False
) -> str:
    count = math.prod(kernel)

    def total(value: str) -> str:
        pads = [*begin, *end]
        if len(set(pads)) > 1:
            # onnxruntime 1.21 to 1.23 counts uneven padding wrongly, from opset 19 on. Round is a barrier against fusing the two again.
            value = e.node("Round", e.node("Pad", value, e.constant([0, 0, *begin, 0, 0, *end])))
            pads = [0] * len(pads)
        mean = e.node("AveragePool", value, kernel_shape=list(kernel), strides=list(stride), pads=pads, count_include_pad=1)
        # The mean times its count is within half of the whole sum, so Round recovers it exactly.
        return e.node("Round", e.node("Mul", mean, e.constant(float(count))))

    value = e.node("Cast", input, to=torch.float32)
    if not wide:
        return total(value)
    low, high = (e.node("Cast", total(half), to=torch.float64) for half in onnx_split(e, value, 2, HALF_BITS))
    return e.node("Add", e.node("Mul", high, e.constant(float(2**HALF_BITS), torch.float64)), low)


def _bounds_sum_pool(input: Value, kernel: list[int], stride: list[int], begin: list[int], end: list[int], wide: bool = False) -> Range:
    terms = math.prod(kernel)
    need(terms * 2**7 < POOLED_EXACT, f"its windows have {terms} elements")
    return within(terms * input.largest, exact_below(wide) if wide else POOLED_EXACT)


@primitive(_onnx_sum_pool, bounds=_bounds_sum_pool, kind="accumulator", chip_bits=8, role=Role.SUM, casts=True, layout="windows")
def sum_pool(input: Tensor, kernel: list[int], stride: list[int], begin: list[int], end: list[int], wide: bool = False) -> Tensor:
    """Sum each window of the zero-padded input, as int32; below 2^22 in magnitude, or, if `wide`, below 2^30."""
    value = input.to(torch.float64 if wide else torch.float32)
    if any(begin) or any(end):
        value = F.pad(value, window_padding(begin, end))
    if len(kernel) == 1:
        total = F.avg_pool2d(value.unsqueeze(-2), [1, *kernel], [1, *stride], divisor_override=1).squeeze(-2)
    elif len(kernel) == 2:
        total = F.avg_pool2d(value, kernel, stride, divisor_override=1)
    else:
        total = F.avg_pool3d(value, kernel, stride, divisor_override=1)
    return total if input.is_floating_point() else total.to(torch.int32)


def _onnx_sum(e: Emitter, input: str, dim: list[int], keepdim: bool, wide: bool = False) -> str:
    axes = e.constant(list(dim), torch.int64)
    return e.node("ReduceSum", e.node("Cast", input, to=torch.float64 if wide else torch.float32), axes, keepdims=int(keepdim))


def _bounds_sum(input: Value, dim: list[int], keepdim: bool, wide: bool = False) -> Range:
    return within(input.terms(*dim) * input.largest, exact_below(wide))


@primitive(_onnx_sum, bounds=_bounds_sum, kind="accumulator", role=Role.SUM, casts=True, reduces=over_rows(Op.TOTAL))
def sum(input: Tensor, dim: list[int], keepdim: bool, wide: bool = False) -> Tensor:
    """Sum over dimensions, as int32; below 2^24 in magnitude unless `wide`."""
    if not input.is_floating_point():
        return torch.sum(input, dim, keepdim=keepdim, dtype=torch.int32)
    return torch.sum(input.to(torch.float64 if wide else torch.float32), dim, keepdim=keepdim)


# ---- Positions of the largest elements of windows, and unpooling by such positions -----------------------------------
# An element and its position are one number, q · count + (count - 1 - position): the largest of a window is its largest element, and
# of several equally large ones the first.


def _positions(sizes: list[int], width: torch.dtype, device: torch.device) -> Tensor:
    count = math.prod(sizes)
    return torch.arange(count - 1, -1, -1, dtype=width, device=device).reshape(1, 1, *sizes)


def _onnx_pool_indices(e: Emitter, input: str, *window_and_plane: Any) -> str:
    window, (sizes, wide, *places) = window_and_plane[:5], window_and_plane[5:]
    width, count = torch.float64 if wide else torch.float32, math.prod(sizes)
    whole = e.constant(float(count), width)
    key = e.node("Mul", e.node("Cast", input, to=width), whole)
    key = e.node("Add", key, e.constant(_positions(sizes, width, torch.device("cpu"))))
    largest = e.node("MaxPool", key, **attributes_of(*window))
    rest = e.node("Sub", largest, e.node("Mul", e.node("Floor", e.node("Div", largest, whole)), whole))
    indices = e.node("Cast", e.node("Sub", e.constant(count - 1.0, width), rest), to=torch.int64)
    return indices if not places or places[0] is None else e.node("Gather", e.constant(places[0]), indices, axis=0)


def _bounds_pool_indices(input: Value, sizes: list[int], wide: bool, places: Value | None = None, **window: list[int]) -> Range:
    need(list(input.fact.shape[2:]) == list(sizes), "its operand and its annotation differ in size")
    need((input.largest + 1) * math.prod(sizes) < exact_below(wide), "an element and its position do not fit in one number")
    need_elements(*(window[name] for name in ("kernel", "begin", "end", "dilation")))
    if places is None:
        return Range(0.0, float(math.prod(sizes) - 1))
    numbers = constant_of(places, "places")
    need(list(numbers.shape) == [math.prod(sizes)], "it does not give a position for each element")
    return Range(float(numbers.min()), float(numbers.max()))


@primitive(_onnx_pool_indices, bounds=_bounds_pool_indices, kind="plain")
def pool_indices(
    input: Tensor, kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int], sizes: list[int],
    wide: bool, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the flat index, int64, of each window's largest element in a plane of `sizes`; the first of equal elements.

    `places`, if it is not None, maps each index to the number that is returned in its place.
    """
    width, count = torch.float64 if wide else torch.float32, math.prod(sizes)
    key = input.detach().to(width) * count + _positions(sizes, width, input.device)
    if any(begin) or any(end):
        key = F.pad(key, window_padding(begin, end), value=-torch.inf)
    largest = MAX_POOLS[len(kernel)](key, kernel, stride, 0, dilation).to(torch.int64)
    indices = count - 1 - largest % count
    return indices if places is None else places[indices]


def _onnx_unpool(e: Emitter, input: str, indices: str, sizes: list[int], outside: int) -> str:
    planes = e.node("Slice", e.node("Shape", input), e.constant([0]), e.constant([2]))
    filling = e.constant(torch.full((1, 1, 1), outside, dtype=e.dtype(input), device="cpu"))
    empty = e.node("Expand", filling, e.node("Concat", planes, e.constant([math.prod(sizes)]), axis=0))
    flat = e.constant([0, 0, -1])
    placed = e.node("ScatterElements", empty, e.node("Reshape", indices, flat), e.node("Reshape", input, flat), axis=2)
    return e.node("Reshape", placed, e.constant([0, 0, *sizes]))


def _bounds_unpool(input: Value, indices: Value, sizes: list[int], outside: int) -> Range:
    need(indices.low.min() >= 0 and indices.high.max() < math.prod(sizes), "it writes elements outside of the plane")
    return Range(input.low.min().clamp_max(outside), input.high.max().clamp_min(outside))


@primitive(_onnx_unpool, bounds=_bounds_unpool, zero_point=ZeroPoint.EQUIVARIANT, shifted=("outside",))
def unpool(input: Tensor, indices: Tensor, sizes: list[int], outside: int) -> Tensor:
    """Return planes of this size with each element at its position, counted row by row, and `outside` elsewhere.

    No two elements of a plane have the same position.
    """
    empty = torch.full((*input.shape[:2], math.prod(sizes)), float(outside), device=input.device, dtype=input.dtype)
    return empty.scatter(2, indices.flatten(2), input.flatten(2)).reshape(*input.shape[:2], *sizes)

"""Positions of the largest elements of windows, and unpooling by such positions."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.primitives.accumulate import window_padding
from fxquant.primitives.pool import MAX_POOLS, attributes_of, need_elements
from fxquant.primitives.record import Emitter, Range, Value, ZeroPoint, constant_of, exact_below, need, primitive

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
    input: Tensor,
    kernel: list[int],
    stride: list[int],
    begin: list[int],
    end: list[int],
    dilation: list[int],
    sizes: list[int],
    wide: bool,
    places: Tensor | None = None,
) -> Tensor:
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

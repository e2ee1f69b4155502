"""Scatter reductions by int64 indices, any number of elements to one place; and counts of booleans that are true.

A source and its index have equal shapes, so no place gets more elements than the source has along the dimension.
"""

import math

import torch
from torch import Tensor

from fxquant.primitives.record import Emitter, Range, Value, ZeroPoint, exact_below, need, primitive, union, within
from fxquant.primitives.shape import named

LEAST_OPSET = 18  # whose ScatterElements keeps the larger or the smaller of several elements


def _onnx_sum_along(e: Emitter, source: str, dim: int, index: str | Tensor, size: int, wide: bool) -> str:
    width = torch.float64 if wide else torch.float32
    value, places = e.node("Cast", source, to=width), named(e, index)
    sizes = e.node("Shape", source)
    first = e.constant([0])
    parts = [e.node("Slice", sizes, first, e.constant([dim]))] if dim else []
    sizes = e.node("Concat", *parts, e.constant([size]), e.node("Slice", sizes, e.constant([dim + 1]), e.constant([2**31])), axis=0)
    zeros = e.node("Expand", e.constant(0.0, width), sizes)
    return e.node("ScatterElements", zeros, places, value, axis=dim, reduction="add")


def _bounds_sum_along(source: Value, dim: int, index: Value | None, size: int, wide: bool) -> Range:
    need(0 <= dim < len(source.fact.shape), f"its source has no dimension {dim}")
    return within(source.size(dim) * source.largest, exact_below(wide))


@primitive(_onnx_sum_along, bounds=_bounds_sum_along, kind="accumulator")
def sum_along(source: Tensor, dim: int, index: Tensor, size: int, wide: bool) -> Tensor:
    """Sum the elements of `source` at the places along `dim` that `index`, int64, gives: 0 to size - 1.

    The result is int32 and has `size` elements along `dim`; |result| < 2^24 unless `wide`.
    """
    value = source.double() if wide else source.float()
    zeros = value.new_zeros([*source.shape[:dim], size, *source.shape[dim + 1 :]])
    total = zeros.scatter_add(dim, index, value)
    return total if source.is_floating_point() else total.to(torch.int32)


def _onnx_extremum_along(
    e: Emitter, input: str | Tensor, source: str | Tensor, dim: int, index: str | Tensor, terms: int, largest: bool
) -> str:
    names, places = [named(e, value) for value in (input, source)], named(e, index)
    dtype = e.dtype(names[0])
    total, values = (e.node("Cast", name, to=torch.float32) for name in names)
    if e.opset >= LEAST_OPSET:
        result = e.node("ScatterElements", total, places, values, axis=dim, reduction="max" if largest else "min")
        return e.node("Cast", result, to=dtype)
    for term in range(terms):  # one after another: indices of one term are distinct
        bounds = (e.constant([term]), e.constant([term + 1]), e.constant([dim]))
        at, value = (e.node("Slice", each, *bounds) for each in (places, values))
        extremes = e.node("Max" if largest else "Min", e.node("GatherElements", total, at, axis=dim), value)
        total = e.node("ScatterElements", total, at, extremes, axis=dim)
    return e.node("Cast", total, to=dtype)


def _bounds_extremum_along(input: Value, source: Value, dim: int, index: Value | None, terms: int, largest: bool) -> Range:
    need(source.size(dim) == terms, "its source and its annotation differ in size")
    return union(input, source)


@primitive(_onnx_extremum_along, bounds=_bounds_extremum_along, casts=True, zero_point=ZeroPoint.EQUIVARIANT)
def extremum_along(input: Tensor, source: Tensor, dim: int, index: Tensor, terms: int, largest: bool) -> Tensor:
    """Scatter `source` into `input` along `dim` at `index`, int64, with maximum or minimum, as torch.scatter_reduce.

    Both are integers on one scale. `terms` is the size of `source` along `dim`.
    """
    return torch.scatter_reduce(input, dim, index, source, "amax" if largest else "amin")


def _onnx_count(e: Emitter, input: str, dim: list[int], keepdim: bool) -> str:
    return e.node("ReduceSum", e.node("Cast", input, to=torch.int64), e.constant(list(dim)), keepdims=int(keepdim))


@primitive(_onnx_count, bounds=lambda input, dim, keepdim: Range(0.0, float(math.prod(map(input.size, dim)))), kind="plain")
def count(input: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Count the true elements of a bool tensor along dimensions: int64."""
    return input.to(torch.int64).sum(dim, keepdim)

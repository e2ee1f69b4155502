"""Indices of elements, int64, and the elements at such indices.

Where elements are ranked, the first of equal ones comes first.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxquant.primitives.record import BOOLEAN, Emitter, Range, Role, Value, ZeroPoint, need, primitive, union
from fxquant.primitives.shape import named
from fxquant.primitives.steps import Op, over_rows


def _real(e: Emitter, value: str) -> str:
    plain = e.dtype(value).is_floating_point or e.dtype(value) == torch.int64  # an int64 tensor without a grid
    return value if plain else e.node("Cast", value, to=torch.float32)


@primitive(
    lambda e, input, dim, keepdim, largest: e.node("ArgMax" if largest else "ArgMin", _real(e, input), axis=dim, keepdims=int(keepdim)),
    bounds=lambda input, dim, keepdim, largest: Range(0.0, float(max(input.size(dim) - 1, 0))),
    kind="plain",
    zero_point=ZeroPoint.INVARIANT,
)
def arg_extremum(input: Tensor, dim: int, keepdim: bool, largest: bool) -> Tensor:
    """Return the index of the largest, or the smallest, element along `dim`, as int64: the first of equal ones."""
    return torch.argmax(input, dim, keepdim) if largest else torch.argmin(input, dim, keepdim)


def _onnx_ranking(e: Emitter, input: str, dim: int, count: int, largest: bool) -> str:
    return e.node("TopK", _real(e, input), e.constant([count]), axis=dim, largest=int(largest), sorted=1)


def _bounds_ranking(input: Value, dim: int, count: int, largest: bool) -> Range:
    need(0 < count <= input.size(dim), f"it ranks {count} of {input.size(dim)} elements")
    return Range(0.0, float(input.size(dim) - 1))


@primitive(_onnx_ranking, bounds=_bounds_ranking, kind="plain", zero_point=ZeroPoint.INVARIANT)
def ranking(input: Tensor, dim: int, count: int, largest: bool) -> Tensor:
    """Return the indices of the `count` largest, or smallest, elements along `dim`, in their order, as int64.

    Of equal elements the first comes first.
    """
    return torch.argsort(input, dim=dim, descending=largest, stable=True).narrow(dim, 0, count)


def _onnx_take_along(e: Emitter, input: str | Tensor, dim: int, index: str | Tensor) -> str:
    value = named(e, input)
    dtype = e.dtype(value)
    if dtype in (torch.int64, torch.bool):
        return e.node("GatherElements", value, named(e, index), axis=dim)
    elements = e.node("GatherElements", e.node("Cast", value, to=torch.float32), named(e, index), axis=dim)
    return e.node("Cast", elements, to=dtype)


_TAKEN: dict[str, Any] = {"bounds": lambda input, dim, index: union(input), "role": Role.MOVEMENT, "zero_point": ZeroPoint.EQUIVARIANT}


@primitive(_onnx_take_along, **_TAKEN)
def take_along(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Gather the elements at these indices, int64, along `dim`: result[…, i, …] = input[…, index[…, i, …], …]."""
    return torch.gather(input, dim, index)


@primitive(lambda e, input, dim, index: e.node("Gather", named(e, input), named(e, index), axis=dim), **_TAKEN)
def pick(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the slices along `dim` at these indices, int64; the dimensions of `index` replace `dim`.

    Negative indices count from the end.
    """
    places: tuple[Any, ...] = (*[slice(None)] * dim, index)
    return input[places]


def _onnx_put_along(e: Emitter, input: str | Tensor, source: str | Tensor, dim: int, index: str | Tensor, number: bool = False) -> str:
    value, put, places = (named(e, each) for each in (input, source, index))
    dtype = e.dtype(value)
    if dtype != torch.int64:  # which has more bits than a float
        value, put = (e.node("Cast", each, to=torch.float32) for each in (value, put))
    put = e.node("Expand", put, e.node("Shape", places)) if number else put
    result = e.node("ScatterElements", value, places, put, axis=dim)
    return result if dtype == torch.int64 else e.node("Cast", result, to=dtype)


def _bounds_put_along(input: Value, source: Value, dim: int, index: Value | None, number: bool = False) -> Range:
    need(not number or not source.fact.shape, "the value it scatters is not a number")
    return union(input, source)


@primitive(_onnx_put_along, bounds=_bounds_put_along, zero_point=ZeroPoint.EQUIVARIANT)
def put_along(input: Tensor, source: Tensor, dim: int, index: Tensor, number: bool = False) -> Tensor:
    """Replace the elements of `input` at `index`, int64, along `dim` with the elements of `source`; both have one scale.

    No index occurs twice. If `number` is true, `source` has no dimensions and its one value replaces all of them.
    """
    return torch.scatter(input, dim, index, source.to(input.dtype).expand(index.shape) if number else source)


def onnx_reduced(e: Emitter, operator: str, value: str, dim: list[int], keepdim: bool) -> str:
    """Emit ReduceMax or ReduceMin of a float tensor; before opset 18 its axes are an attribute."""
    if e.opset < 18:
        return e.node(operator, value, axes=list(dim), keepdims=int(keepdim))
    return e.node(operator, value, e.constant(list(dim), torch.int64), keepdims=int(keepdim))


def _onnx_extreme(operator: str, e: Emitter, input: str, dim: list[int], keepdim: bool) -> str:
    extreme = onnx_reduced(e, operator, e.node("Cast", input, to=torch.float32), dim, keepdim)
    return e.node("Cast", extreme, to=e.dtype(input))


def _bounds_extreme(input: Value, dim: list[int], keepdim: bool) -> Range:
    input.terms(*dim)
    return union(input)


_EXTREME: dict[str, Any] = {"bounds": _bounds_extreme, "zero_point": ZeroPoint.EQUIVARIANT}


@primitive(partial(_onnx_extreme, "ReduceMax"), **_EXTREME)
def greatest(input: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Return the largest element along dimensions."""
    return torch.amax(input, dim, keepdim)


@primitive(partial(_onnx_extreme, "ReduceMin"), **_EXTREME, reduces=over_rows(Op.LOWEST))
def least(input: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Return the smallest element along dimensions."""
    return torch.amin(input, dim, keepdim)


def _onnx_truth(e: Emitter, input: str, dim: list[int], keepdim: bool, every: bool) -> str:
    reduced = onnx_reduced(e, "ReduceMin" if every else "ReduceMax", e.node("Cast", input, to=torch.float32), dim, keepdim)
    return e.node("Cast", reduced, to=torch.bool)


@primitive(_onnx_truth, bounds=lambda **_: BOOLEAN, kind="plain")
def truth(input: Tensor, dim: list[int], keepdim: bool, every: bool) -> Tensor:
    """Reduce a bool tensor along dimensions: whether every element is true, or, unless `every`, whether any is."""
    for reduced in sorted((d % input.dim() for d in dim), reverse=True):
        input = torch.all(input, reduced, keepdim) if every else torch.any(input, reduced, keepdim)
    return input

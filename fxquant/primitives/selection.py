"""Indices of elements, int64, the elements at such indices, and sums and extrema of elements that indices bring to one place.

Where elements are ranked, the first of equal ones comes first. Comparisons of integers, logical operations on booleans, and selection by a
boolean condition follow.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.primitives.record import BOOLEAN, Emitter, Range, Role, Value, ZeroPoint, exact_below, need, primitive, union, within
from fxquant.primitives.shape import named, one_node
from fxquant.primitives.steps import Op, Writer, over_rows


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


# ---- Scatter reductions, any number of elements to one place; and counts of booleans ---------------------------------
#
# A source and its index have equal shapes, so no place gets more elements than the source has along the dimension.
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


# ---- Comparisons -----------------------------------------------------------------------------------------------------
class Relation(NamedTuple):
    """The relation of one number to another."""

    function: Callable[[Tensor, Tensor], Tensor]  # compares tensors
    onnx: str  # the operator of ONNX; of "ne" the opposite one
    swapped: str  # the relation of the other number to the first
    # "floor" or "ceil" of a bound is the integer to which the same integers are in this relation; None: only an integer has one.
    rounding: str | None = None


RELATIONS = {
    "eq": Relation(torch.eq, "Equal", "eq"),
    "ne": Relation(torch.ne, "Equal", "ne"),
    "lt": Relation(torch.lt, "Less", "gt", "ceil"),
    "le": Relation(torch.le, "LessOrEqual", "ge", "floor"),
    "gt": Relation(torch.gt, "Greater", "lt", "floor"),
    "ge": Relation(torch.ge, "GreaterOrEqual", "le", "ceil"),
}
LOGIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor}


def _onnx_compare(e: Emitter, input: str | Tensor, other: str | Tensor, relation: str) -> str:
    names = [named(e, value) for value in (input, other)]
    # An int64 tensor without a grid may need all of its bits; floats hold everything else, and every runtime compares floats.
    width = next((dtype for dtype in (torch.int64, torch.float64) if dtype in map(e.dtype, names)), torch.float32)
    result = e.node(RELATIONS[relation].onnx, *(name if e.dtype(name) == width else e.node("Cast", name, to=width) for name in names))
    return e.node("Not", result) if relation == "ne" else result


def _bounds_compare(input: Value, other: Value, relation: str) -> Range:
    need(relation in RELATIONS, f"its relation is {relation!r}")
    return BOOLEAN


def _steps_compare(w: Writer, input: Any, other: Any, relation: str) -> int | None:
    """Write 1 or 0: the difference of integers, limited to 0 and 1."""
    name = RELATIONS[relation].onnx
    if name == "Equal":
        return None
    closed = name.endswith("OrEqual")
    a, b = (other, input) if name.startswith("Less") != closed else (input, other)
    above = w.write(Op.CLIP, w.write(Op.SUBTRACT, a, b), None, 0, 1)
    return w.write(Op.SUBTRACT, w.operand(1), above) if closed else above


@primitive(_onnx_compare, bounds=_bounds_compare, kind="plain", steps=_steps_compare)
def compare(input: Tensor, other: Tensor, relation: str) -> Tensor:
    """Compare `input` with `other` element by element, by "eq", "ne", "lt", "le", "gt" or "ge"; the result is bool.

    Both are integers on one scale, or int64 tensors without a grid. One may be a constant, whose values may exceed the other's dtype.
    """
    dtype = torch.promote_types(input.dtype, other.dtype)  # a tensor without dimensions would be brought to the dtype of the other
    return RELATIONS[relation].function(input.to(dtype), other.to(dtype))


def _onnx_logic(e: Emitter, input: str | Tensor, other: str | Tensor, operation: str) -> str:
    return e.node(operation.capitalize(), named(e, input), named(e, other))


def _bounds_logic(input: Value | None, other: Value | None, operation: str) -> Range:
    need(operation in LOGIC, f"its operation is {operation!r}")
    return BOOLEAN


@primitive(_onnx_logic, bounds=_bounds_logic, kind="plain")
def logic(input: Tensor, other: Tensor, operation: str) -> Tensor:
    """Combine two bool tensors element by element, by "and", "or" or "xor"."""
    return LOGIC[operation](input, other)


@primitive(one_node("Not"), bounds=lambda input: BOOLEAN, kind="plain")
def opposite(input: Tensor) -> Tensor:
    """Negate a bool tensor element by element."""
    return torch.logical_not(input)


def _onnx_choose(e: Emitter, input: str | Tensor, other: str | Tensor, condition: str | Tensor) -> str:
    names = [named(e, value) for value in (input, other)]
    dtype = e.dtype(names[0])
    if dtype == torch.int64:  # more bits than a float has
        return e.node("Where", named(e, condition), *names)
    # Not every runtime has the operator for every integer dtype.
    chosen = e.node("Where", named(e, condition), *(e.node("Cast", name, to=torch.float32) for name in names))
    return e.node("Cast", chosen, to=dtype)


def _steps_choose(w: Writer, input: Any, other: Any, condition: Any) -> int:
    return w.write(Op.ADD, other, w.write(Op.MULTIPLY, w.write(Op.SUBTRACT, input, other), condition))


@primitive(_onnx_choose, bounds=lambda input, other, condition: union(input, other), zero_point=ZeroPoint.EQUIVARIANT, steps=_steps_choose)
def choose(input: Tensor, other: Tensor, condition: Tensor) -> Tensor:
    """Return the element of `input` where the condition (bool) holds, else that of `other`; both are integers on one grid."""
    return torch.where(condition, input, other)

"""Comparisons of integers, logical operations on booleans, and selection by a boolean condition."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.primitives.record import BOOLEAN, Emitter, Range, Value, ZeroPoint, need, primitive, union
from fxquant.primitives.shape import named, one_node
from fxquant.primitives.steps import Op, Writer


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

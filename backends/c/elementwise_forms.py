"""The C forms of elementwise primitives, and of quantization and dequantization at the ends of the integer part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxquant.backends.c.program import C_TYPES, Call, Value, form
from fxquant.primitives import accumulate, comparison, elementwise, product, quantization, whole

# ---- Strides for reading tensors of different shapes together over common dimensions, with as few dimensions as possible ----


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def steps(shape: Sequence[int], to: Sequence[int]) -> list[int]:
    """Return the strides of a tensor of one shape along the dimensions of a larger shape that it is broadcast to."""
    return [0] * (len(to) - len(shape)) + [step if size != 1 else 0 for size, step in zip(shape, strides_of(shape), strict=True)]


def joined(size: Sequence[int], *moved: Sequence[int]) -> tuple[list[int], ...]:
    """Merge adjacent dimensions that all tensors traverse contiguously; return the sizes and each tensor's strides, at least one."""
    dims = [dim for dim in range(len(size)) if size[dim] != 1]
    sizes, strides = [size[dim] for dim in dims], [[step[dim] for dim in dims] for step in moved]
    for dim in reversed(range(len(sizes) - 1)):
        if all(step[dim] == step[dim + 1] * sizes[dim + 1] for step in strides):
            sizes[dim] *= sizes.pop(dim + 1)
            for step in strides:
                step[dim] = step.pop(dim + 1)
    return (sizes or [1], *([*step] or [0] for step in strides))


def around(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Return the products of the sizes before, at and after a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


ROUNDINGS = {"floor": 0, "half_up": 1, quantization.HALF_STEP: 2, quantization.NEAREST_HALF_STEP: 3}
ROUNDINGS |= {quantization.HALF_AWAY: 4, quantization.HALF_EVEN: 5}


def sum_types(call: Call, input: Value, weight: Value, bias: Value | None) -> list[torch.dtype]:
    """Return the element types of a sum of products; without a bias its place is that of an int32 one."""
    return [input.dtype, weight.dtype, torch.int32 if bias is None else bias.dtype, call.dtype]


def _beside(call: Call, *operands: Value) -> tuple[Any, ...]:
    """Return the first arguments of an elementwise call over several operands: count, rank, sizes, and the strides of each."""
    sizes, *moved = joined(call.shape, *(steps(operand.shape, call.shape) for operand in operands))
    return (call.count, len(sizes), sizes, *moved)


def _in_one_shape(call: Call, *constants: Value) -> list[Value]:
    """Return constants broadcast to their common shape, so that they share one index."""
    if len({value.shape for value in constants}) == 1:
        return list(constants)
    tensors = [value.constant for value in constants]
    assert all(tensor is not None for tensor in tensors)
    return [call.constant(tensor) for tensor in torch.broadcast_tensors(*tensors)]  # type: ignore[no-untyped-call]


@form(quantization.quantize)
def _quantize(call: Call, input: Value, scale: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> None:
    assert scale.constant is not None
    call.emit("quantize", [input.dtype, call.dtype], call.count, input, float(scale.constant), low, high, zero_point)


@form(quantization.dequantize)
def _dequantize(call: Call, input: Value, scale: Value, dtype: torch.dtype = torch.float32, zero_point: int = 0) -> None:
    call.emit("dequantize", [input.dtype, call.dtype], *_beside(call, scale), input, scale, zero_point)


@form(quantization.requantize_fixed)
def _requantize_fixed(call: Call, acc: Value, shift: Value, multiplier: Value, right: Value, *settings: Any) -> None:
    bits, rounding, low, high, _ = settings
    constants, numbers = _in_one_shape(call, shift, multiplier, right), (bits, ROUNDINGS[rounding], low, high)
    call.emit("requantize_fixed", [acc.dtype, call.dtype], *_beside(call, constants[0]), acc, *constants, *numbers)


@form(quantization.requantize_real)
def _requantize_real(call: Call, acc: Value, multiplier: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> None:
    call.emit("requantize_real", [acc.dtype, call.dtype], *_beside(call, multiplier), acc, multiplier, low, high, zero_point)


def _by_constants(name: str, residual: bool = False) -> Any:
    """Return the form of a primitive that reads an accumulator, a residual if it has one, and constants for its channels."""

    def written(call: Call, input: Value, *rest: Any) -> None:
        operands, tensors = rest[:residual], [each for each in rest[residual:] if isinstance(each, Value)]
        constants = _in_one_shape(call, *tensors)
        types = [input.dtype, *(operand.dtype for operand in operands), call.dtype]
        call.emit(name, types, *_beside(call, *operands, constants[0]), input, *operands, *constants)

    return written


form(elementwise.align_fixed)(_by_constants("align_fixed"))
form(elementwise.align_real)(_by_constants("align_real"))
form(accumulate.add_residual)(_by_constants("add_residual", residual=True))
form(accumulate.add_residual_shifted)(_by_constants("add_residual_shifted", residual=True))


@form(quantization.clamp_accumulator)
def _clamp_accumulator(call: Call, input: Value, low: Value, high: Value) -> None:
    limits = _in_one_shape(call, low, high)
    call.emit("clamp_accumulator", [input.dtype, limits[0].dtype, call.dtype], *_beside(call, limits[0]), input, *limits)


@form(elementwise.lookup)
def _lookup(call: Call, input: Value, table: Value, first: int | None = None) -> None:
    call.emit("lookup", [input.dtype, call.dtype], call.count, input, table, -(table.count // 2) if first is None else first)


@form(product.rectify)
def _rectify(call: Call, input: Value, positive: int, negative: Value, wide: bool = False) -> None:
    call.emit("rectify", [input.dtype, negative.dtype, call.dtype], *_beside(call, negative), input, positive, negative)


@form(product.scale_channels, product.scale_channels_wide)
def _scale_channels(call: Call, input: Value, weight: Value, bias: Value | None, trailing: int) -> None:
    place = _beside(call, Value("", weight.dtype, (weight.count, *[1] * trailing)))
    call.emit("scale_channels", sum_types(call, input, weight, bias), *place, input, weight, bias)


@form(whole.truncated)
def _truncated(call: Call, input: Value, scale: Value, margin: Value) -> None:
    assert scale.constant is not None
    assert margin.constant is not None
    call.emit("truncated", [input.dtype], call.count, input, float(scale.constant), float(margin.constant))


def _each(name: str, numbers: int = 0) -> Any:
    """Return the form of a primitive that reads a single tensor, and this many numbers."""

    def written(call: Call, input: Value, *rest: Any) -> None:
        call.emit(name, [input.dtype, call.dtype], call.count, input, *rest[:numbers])

    return written


form(quantization.accumulator_output)(_each("accumulator_output"))
form(elementwise.widen)(_each("widen"))
form(elementwise.negate)(_each("negate"))
form(comparison.opposite)(_each("opposite"))
form(whole.converted)(_each("converted"))
form(elementwise.centre)(_each("centre", 1))
form(elementwise.shift_right)(_each("shift_right", 1))
form(elementwise.clamp)(_each("clamp", 2))

RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LOGIC = {"and": "a && b", "or": "a || b", "xor": "!a != !b"}
WHOLE = {
    "add": "wrapped((uint64_t)(int64_t)a + (uint64_t)(int64_t)b)",
    "subtract": "wrapped((uint64_t)(int64_t)a - (uint64_t)(int64_t)b)",
    "multiply": "wrapped((uint64_t)(int64_t)a * (uint64_t)(int64_t)b)",
    "larger": "(int64_t)a > (int64_t)b ? (int64_t)a : (int64_t)b",
    "smaller": "(int64_t)a < (int64_t)b ? (int64_t)a : (int64_t)b",
    "and": "(int64_t)a & (int64_t)b",
}
NEGATED, LESS_REMAINDER = "wrapped(0 - (uint64_t)a)", "wrapped((uint64_t)a - (uint64_t)remainder_of(a, b))"
DIVISIONS = {
    "quotient": ("floor(a / b), modulo 2^64. 1 where b is 0.", f"b == -1 ? {NEGATED} : {LESS_REMAINDER} / b"),
    "remainder": ("The remainder of a / b, which has the sign of b. 1 where b is 0.", "remainder_of(a, b)"),
}


def pair(call: Call, name: str, document: str, expression: str, input: Value, other: Value) -> None:
    """Emit a function of two tensors, element by element."""
    words = {"DOCUMENT": document, "EXPRESSION": expression.replace("(Y)", f"({C_TYPES[call.dtype]})")}
    call.emit(name, [input.dtype, other.dtype, call.dtype], *_beside(call, input, other), input, other, template="PAIR", replaced=words)


def _pair_form(primitive: Any, document: str, expression: str) -> None:
    name = primitive.__name__

    def written(call: Call, input: Value, other: Value, *_: Any) -> None:
        pair(call, name, document, expression, input, other)

    form(primitive)(written)


_pair_form(elementwise.add, "The sum of two accumulators.", "(Y)a + (Y)b")
_pair_form(elementwise.subtract, "The difference of two accumulators.", "(Y)a - (Y)b")
_pair_form(elementwise.add_constant, "An accumulator and a whole number.", "(Y)a + (Y)b")
_pair_form(elementwise.multiply, "Section 16: the product of two integers.", "(Y)a * (Y)b")
_pair_form(product.maximum, "The larger of two integers on one scale.", "a > b ? a : b")
_pair_form(product.minimum, "The smaller of two integers on one scale.", "a < b ? a : b")


@form(comparison.compare)
def _compare(call: Call, input: Value, other: Value, relation: str) -> None:
    width = torch.promote_types(input.dtype, other.dtype)
    kind = {torch.float32: "float", torch.float64: "double"}.get(width, "int64_t")
    pair(call, f"compare_{relation}", "Section 16, truth values.", f"({kind})a {RELATIONS[relation]} ({kind})b", input, other)


@form(comparison.logic)
def _logic(call: Call, input: Value, other: Value, operation: str) -> None:
    pair(call, f"logic_{operation}", "Two truth values joined.", LOGIC[operation], input, other)


@form(whole.joined)
def _joined(call: Call, input: Value, other: Value, operation: str) -> None:
    if operation in WHOLE:
        pair(call, f"joined_{operation}", "Section 16: two whole numbers, modulo 2^64.", WHOLE[operation], input, other)
        return
    words = dict(zip(("DOCUMENT", "EXPRESSION"), DIVISIONS[operation], strict=True))
    place = _beside(call, input, other)
    call.emit(f"joined_{operation}", [input.dtype, other.dtype], *place, input, other, template="DIVISION", replaced=words, fails=True)


@form(comparison.choose, whole.chosen)
def _choose(call: Call, input: Value, other: Value, condition: Value) -> None:
    types = [input.dtype, other.dtype, condition.dtype, call.dtype]
    call.emit("choose", types, *_beside(call, input, other, condition), input, other, condition)

"""Element by element: bringing operands to a common scale, adding, clamping, and looking up tables."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.numerics import power_of_two
from fxquant.primitives.record import Emitter, primitive, stored


def _onnx_align_fixed(e: Emitter, input: str | Tensor, multiplier: Tensor, right_shift: Tensor) -> str:
    def body(e: Emitter, x: str, factor: str) -> str:
        return e.node("Floor", e.node("Mul", e.node("Cast", x, to=torch.float32), factor))

    return e.call("align_fixed", body, _named(e, input), e.constant(multiplier.double() * power_of_two(-right_shift), torch.float32))


def _align_fixed_real(input: Tensor, multiplier: Tensor, right_shift: Tensor) -> Tensor:
    return input * (multiplier.double() * power_of_two(-right_shift)).float()


@primitive(_onnx_align_fixed, surrogate=_align_fixed_real, kind="accumulator")
def align_fixed(input: Tensor, multiplier: Tensor, right_shift: Tensor) -> Tensor:
    """⌊q · multiplier / 2^right_shift⌋ as int32: an operand on a finer common scale. |q · multiplier| < 2^24."""
    if input.is_floating_point():
        return torch.floor(input * (multiplier.double() * power_of_two(-right_shift)).float())
    return (input.to(torch.int32) * multiplier) >> right_shift


def _onnx_align_real(e: Emitter, input: str | Tensor, multiplier: Tensor) -> str:
    def body(e: Emitter, x: str, multiplier: str) -> str:
        return e.node("Round", e.node("Mul", e.node("Cast", x, to=torch.float32), multiplier))

    return e.call("align_real", body, _named(e, input), e.constant(multiplier))


def _align_real_real(input: Tensor, multiplier: Tensor) -> Tensor:
    return input * multiplier


@primitive(_onnx_align_real, surrogate=_align_real_real, kind="accumulator")
def align_real(input: Tensor, multiplier: Tensor) -> Tensor:
    """round_half_even(float32(q) · multiplier) as int32: an operand on a finer common scale."""
    return stored((input.float() * multiplier).round_(), input, torch.int32)


def _named(e: Emitter, value: str | Tensor) -> str:
    """The name of an operand that may be a constant."""
    return value if isinstance(value, str) else e.constant(value)


def _onnx_add(e: Emitter, input: str, other: str) -> str:
    return e.node("Add", input, other)


@primitive(_onnx_add, kind="accumulator")
def add(input: Tensor, other: Tensor) -> Tensor:
    """The sum of two accumulators on one scale."""
    return input + other


def _onnx_subtract(e: Emitter, input: str, other: str) -> str:
    return e.node("Sub", input, other)


@primitive(_onnx_subtract, kind="accumulator")
def subtract(input: Tensor, other: Tensor) -> Tensor:
    """The difference of two accumulators on one scale."""
    return input - other


def _onnx_add_constant(e: Emitter, input: str, constant: Tensor) -> str:
    return e.node("Add", input, e.constant(constant, e.dtype(input)))


@primitive(_onnx_add_constant, kind="accumulator")
def add_constant(input: Tensor, constant: Tensor) -> Tensor:
    """An accumulator and a whole number on its scale."""
    return input + constant.to(input.dtype)


def _onnx_multiply(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    operands = [e.node("Cast", _named(e, operand), to=torch.float32) for operand in (input, other)]
    # Round is a barrier: without it the runtime may join a constant operand with the multiplier that follows.
    return e.node("Round", e.node("Mul", *operands))


@primitive(_onnx_multiply, kind="accumulator")
def multiply(input: Tensor, other: Tensor) -> Tensor:
    """The product of two quantized tensors as int32; below 2^24 in magnitude."""
    if input.is_floating_point() or other.is_floating_point():
        return input.float() * other.float()
    return input.to(torch.int32) * other


def _onnx_widen(e: Emitter, input: str) -> str:
    return e.node("Cast", input, to=torch.float32)


@primitive(_onnx_widen, kind="accumulator")
def widen(input: Tensor) -> Tensor:
    """A quantized tensor as an accumulator."""
    return input if input.is_floating_point() else input.to(torch.int32)


def _onnx_negate(e: Emitter, input: str) -> str:
    return e.node("Neg", e.node("Cast", input, to=torch.float32))


@primitive(_onnx_negate, kind="accumulator")
def negate(input: Tensor) -> Tensor:
    """The negative of a quantized tensor or accumulator, as an accumulator."""
    return -input if input.is_floating_point() else -input.to(torch.int32)


def _onnx_clamp(e: Emitter, input: str, low: int, high: int) -> str:
    dtype = e.dtype(input)
    if dtype == torch.int8:
        return e.node("Clip", input, e.constant(low, dtype), e.constant(high, dtype))
    clipped = e.node("Clip", e.node("Cast", input, to=torch.float32), e.constant(float(low)), e.constant(float(high)))
    return e.node("Cast", clipped, to=dtype)


@primitive(_onnx_clamp)
def clamp(input: Tensor, low: int, high: int) -> Tensor:
    """The integers, limited to [low, high]."""
    return input.clamp(low, high)


def _onnx_lookup(e: Emitter, input: str, table: Tensor) -> str:
    def body(e: Emitter, x: str, table: str) -> str:
        offset = e.constant(table_offset, torch.int64)
        return e.node("Gather", table, e.node("Add", e.node("Cast", x, to=torch.int64), offset))

    table_offset = table.numel() // 2
    return e.call(f"lookup_{table.numel()}", body, input, e.constant(table))


@primitive(_onnx_lookup)
def lookup(input: Tensor, table: Tensor) -> Tensor:
    """table[q + half the table's length], for q in the signed range the table covers."""
    index = input.to(torch.int32) + table.numel() // 2
    entries = table.index_select(0, index.flatten()).view(input.shape)
    return entries.float() if input.is_floating_point() else entries

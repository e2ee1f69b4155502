"""Requantization from an accumulator's scale to a tensor's scale: the two arithmetics, *fixed* and *real*.

The parameters come from `numerics.grids.fixed_requantization` and `numerics.grids.real_multiplier`, shaped to broadcast
against the accumulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import FLOAT32_EXACT, power_of_two
from fxquant.numerics.rounding import clamped
from fxquant.primitives.accumulate import DEQUANTIZES
from fxquant.primitives.bounds import FLOAT64_EXACT, Range, Value, constant_of, multipliers, need, stored_limits, within
from fxquant.primitives.quantization import clipped, offset
from fxquant.primitives.quotient import QUOTIENT_LIMIT, Rounded, onnx_constants, onnx_rounded, rounded, steps_of_fixed, steps_of_half_step
from fxquant.primitives.record import Emitter, Role, primitive, stored

HALF_STEP, NEAREST_HALF_STEP = "half_step", "nearest_half_step"
HALF_STEPS = (HALF_STEP, NEAREST_HALF_STEP)
HALF_AWAY, HALF_EVEN = "half_away", "half_even"
TIES = (HALF_AWAY, HALF_EVEN)  # to the nearest, ties by sign or parity, which no added constant computes


def half_step(shift: Tensor, multiplier: Tensor, right_shift: Tensor, rounding: str = HALF_STEP) -> Tensor:
    """Compute min(⌊2^(shift + right_shift - 1) / multiplier⌋, 2^31): half a step of the result, in steps of the accumulator, float64.

    It is ⌊… + ½⌋ where the rounding is NEAREST_HALF_STEP. It is 0 where a step of the accumulator is at least as large as one of the
    result, and for the multiplier 0. The limit changes nothing: a 32-bit accumulator is requantized to 0 where half a step of the
    result is more than 2^31 of its steps.
    """
    step = power_of_two(shift + right_shift - 1) / multiplier.double()
    step = step + 0.5 if rounding == NEAREST_HALF_STEP else step
    return torch.where(multiplier > 0, step.clamp_max(2.0**31), 0.0).floor()  # exact: the quotient of a number below 2^21


def _as_float(e: Emitter, value: str) -> str:
    return value if e.dtype(value).is_floating_point else e.node("Cast", value, to=torch.float32)


def _rounded_fixed(multiplier: Tensor, right_shift: Tensor, limit: int, low: int, high: int) -> Rounded | None:
    """Return what follows the first shift as one rounded operation; None where it is not proved to be equal."""
    steps = steps_of_fixed(multiplier, right_shift, low, high)
    whole = multiplier != 0
    held = steps[whole.flatten()]
    if held.numel() and not -limit < int(held.min()) <= int(held.max()) < limit:
        return None  # where the intermediate saturates
    size = torch.where(whole, power_of_two(right_shift) / multiplier.double(), 2.0 * FLOAT32_EXACT)
    return rounded(steps, size, low, high)


def _rounded_floor(multiplier: Tensor, right_shift: Tensor, limit: int, low: int, high: int) -> Rounded | None:
    """Return what follows the first shift, rounded down, as one rounded operation after a sum; None where it is not proved equal."""
    whole = multiplier != 0
    steps = steps_of_half_step(torch.zeros_like(multiplier), multiplier, right_shift, torch.zeros_like(multiplier), low, high)
    held = steps[whole.flatten()]
    if held.numel() and not -limit < int(held.min()) <= int(held.max()) < limit:
        return None  # where the intermediate saturates
    size = torch.where(whole, power_of_two(right_shift) / multiplier.double().clamp_min(1), 2.0 * FLOAT32_EXACT)
    if float(size.max()) > limit:
        return None
    return rounded(steps, size, low, high, lowered=True)


def _rounded_half_step(
    shift: Tensor, multiplier: Tensor, right_shift: Tensor, limit: int, low: int, high: int, rounding: str
) -> Rounded | None:
    """Return the complete requantization as one rounded operation; None where it is not proved to be equal."""
    half = half_step(shift, multiplier, right_shift, rounding)
    step = multiplier.double() * power_of_two(-right_shift)
    if bool(((multiplier != 0) & ((step * (limit - 1) < high) | (step * limit < -low))).any()):
        return None  # where the intermediate saturates
    size = torch.where(multiplier != 0, power_of_two(shift + right_shift) / multiplier.double(), 2.0 * FLOAT32_EXACT)
    steps = steps_of_half_step(shift, multiplier, right_shift, half, low, high)
    return rounded(steps, size, low, high, torch.where(half > 0, 0.5, 0.0).float())


def _onnx_rounded_fixed(
    e: Emitter, value: str, shift: Tensor | None, how: Rounded, limit: int, low: int, high: int, dtype: torch.dtype
) -> str:
    first = None if shift is None else _first_product(e, value, shift)
    if first is None or first.operator == "Mul":
        value = _as_float(e, value)
    width = e.dtype(value)
    by = [] if first is None else [e.constant(first.by, width if first.operator == "Mul" else torch.float32)]
    # A product with a power of two is exact, so runtimes may fuse it, and the Relu after it, into the convolution.
    rectified = low == 0 and width != torch.int32

    def body(e: Emitter, x: str, *constants: str) -> str:
        if first is not None:
            by, *constants = constants  # type: ignore[assignment]
            x = e.node(first.operator, x, by, **first.attributes)
        x = e.node("Relu", x) if rectified else x
        if first is not None:
            x = e.node("Floor", x)
        elif not rectified:  # Round changes no integer: it keeps runtimes from adding the constant to the bias, whose sum would be rounded
            x = e.node("Round", x)
        if width == torch.float64:
            x = e.node("Clip", x, e.constant(float(-limit), width), e.constant(float(limit), width))
            x = e.node("Cast", x, to=torch.float32)
        return onnx_rounded(e, x, how, constants, torch.iinfo(dtype).min if rectified else low, high, dtype)

    name = f"requantize_fixed_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, value, *by, *onnx_constants(e, how, dtype))


class _Product(NamedTuple):
    """An operator that multiplies by a constant."""

    operator: str
    by: Tensor
    attributes: dict[str, int]


def _first_product(e: Emitter, value: str, shift: Tensor) -> _Product:
    """Return the operator that multiplies an accumulator by 2^-shift.

    For int32 it is DequantizeLinear, without a cast, where the channels are not the last dimension.
    """
    by = power_of_two(-shift)
    channels = [dim - by.dim() for dim, count in enumerate(by.shape) if count > 1]
    if e.dtype(value) != torch.int32 or e.opset < DEQUANTIZES or len(channels) > 1 or -1 in channels:
        return _Product("Mul", by, {})
    return _Product("DequantizeLinear", by.flatten() if channels else by.reshape(()), {"axis": channels[0]} if channels else {})


def _onnx_requantize_fixed(
    e: Emitter,
    accumulator: str,
    shift: Tensor,
    multiplier: Tensor,
    right_shift: Tensor,
    intermediate_bits: int,
    rounding: str,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> str:
    width = torch.float64 if e.dtype(accumulator) == torch.float64 else torch.float32
    limit = 2 ** (intermediate_bits - 1)
    how = None
    if dtype.itemsize == 1 and rounding == "half_up":
        how = _rounded_fixed(multiplier, right_shift, limit, low, high)
    elif dtype.itemsize == 1 and rounding == "floor":
        how = _rounded_floor(multiplier, right_shift, limit, low, high)
    elif dtype.itemsize == 1 and rounding in HALF_STEPS and width == torch.float32:
        how = _rounded_half_step(shift, multiplier, right_shift, limit, low, high, rounding)
    if how is not None:
        floored = rounding not in HALF_STEPS and bool((shift > 0).any())
        return _onnx_rounded_fixed(e, accumulator, shift if floored else None, how, limit, low, high, dtype)
    value = _as_float(e, accumulator)
    if (intermediate_bits > 24 or rounding in HALF_STEPS) and width == torch.float32:
        value, width = e.node("Cast", value, to=torch.float64), torch.float64

    def body(e: Emitter, x: str, first: str, product: str, low: str, high: str, *half: str) -> str:
        bounds = e.constant(float(-limit), width), e.constant(float(limit - 1), width)
        x = e.node("Add", x, half[0]) if half else x
        x = e.node("Clip", e.node("Floor", e.node("Mul", x, first)), *bounds)
        x = e.node("Mul", x if width == torch.float64 else e.node("Cast", x, to=torch.float64), product)
        if rounding == "half_up":
            x = e.node("Add", x, e.constant(0.5, torch.float64))
        elif rounding == HALF_AWAY:
            x = e.node("Add", x, e.node("Mul", e.node("Sign", x), e.constant(0.5, torch.float64)))
            x = e.node("Mul", e.node("Sign", x), e.node("Floor", e.node("Abs", x)))
        x = e.node("Round" if rounding == HALF_EVEN else "Floor", x)
        return e.node("Cast", e.node("Clip", x, low, high), to=dtype)

    first = e.constant(power_of_two(-shift), width)
    product = e.constant(multiplier.double() * power_of_two(-right_shift), torch.float64)
    bounds = e.constant(float(low), torch.float64), e.constant(float(high), torch.float64)
    half = [e.constant(half_step(shift, multiplier, right_shift, rounding), torch.float64)] if rounding in HALF_STEPS else []
    name = f"requantize_fixed_{intermediate_bits}_{rounding}_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, value, first, product, *bounds, *half)


def _bounds_requantize_fixed(shift: Value, multiplier: Value, right_shift: Value, low: int, high: int, **_: Any) -> Range:
    for name, value in (("shift", shift), ("multiplier", multiplier), ("right shift", right_shift)):
        need(constant_of(value, name).dtype == torch.int32, f"its {name} is not int32")
    return Range(float(low), float(high))


@primitive(_onnx_requantize_fixed, bounds=_bounds_requantize_fixed, role=Role.REQUANTIZATION)
def requantize_fixed(
    accumulator: Tensor,
    shift: Tensor,
    multiplier: Tensor,
    right_shift: Tensor,
    intermediate_bits: int,
    rounding: str,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute clip(round( sat(⌊acc / 2^shift⌋) · multiplier / 2^right_shift ), low, high).

    `sat` saturates to `intermediate_bits` signed bits. The last rounding is "half_up" (⌊v + ½⌋), "floor", one of HALF_STEPS, or one of
    TIES. HALF_STEPS round down after `half_step` was added to the accumulator; TIES round to the nearest, halves away from zero or to
    the even integer. `shift`, `multiplier` and `right_shift` are int32, shaped to broadcast. The result has `dtype`.
    """
    limit = 2 ** (intermediate_bits - 1)
    half = half_step(shift, multiplier, right_shift, rounding) if rounding in HALF_STEPS else None
    if accumulator.is_floating_point():
        real = accumulator.double() if half is None else accumulator.double() + half
        narrowed = torch.floor(real * power_of_two(-shift)).clamp_(-limit, limit - 1)
        product = narrowed.mul_(multiplier.double() * power_of_two(-right_shift))
        if rounding in TIES:
            whole = product.round() if rounding == HALF_EVEN else product.sign() * (product.abs() + 0.5).floor_()
            return whole.clamp_(low, high).float()
        return (product.add_(0.5) if rounding == "half_up" else product).floor_().clamp_(low, high).float()
    # 16 bits times 15 bits and the half fit int32; wider ones take int64.
    wide = torch.int32 if intermediate_bits <= 16 and accumulator.dtype != torch.int64 and half is None else torch.int64
    whole = accumulator.to(wide) if half is None else accumulator.to(wide) + half.to(wide)
    value = (whole >> shift).clamp_(-limit, limit - 1).mul_(multiplier)
    if rounding == "half_up":
        value += torch.ones((), dtype=wide, device=value.device) << (right_shift.to(wide) - 1)
    lower = value >> right_shift
    if rounding in TIES:
        rest, half = value - (lower << right_shift), torch.ones((), dtype=wide, device=value.device) << (right_shift.to(wide) - 1)
        up = value >= 0 if rounding == HALF_AWAY else lower.bitwise_and(1) == 1
        lower += ((rest > half) | ((rest == half) & up)).to(wide)
    return lower.clamp_(low, high).to(dtype)


def _onnx_requantize_real_byte(
    e: Emitter, accumulator: str, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int
) -> str:
    """Emit `requantize_real` to an 8-bit dtype as QuantizeLinear, which rounds, saturates and stores in one operator."""
    width = e.dtype(accumulator)
    limited = width not in (torch.float32, torch.int8, torch.uint8, torch.int16) or float(multiplier.max()) * FLOAT32_EXACT > QUOTIENT_LIMIT

    def body(e: Emitter, x: str, multiplier: str, zero: str) -> str:
        x = x if width == torch.float32 else e.node("Cast", x, to=torch.float32)
        # The accumulator is an integer, so Round changes nothing: it is a barrier that keeps the runtime from multiplying the
        # constant into the weights. Relu is a barrier, too, which the runtime fuses into the convolution.
        x = e.node("Mul", e.node("Relu" if low == 0 else "Round", x), multiplier)
        if limited:  # beyond the range of int32 not every runtime saturates
            x = e.node("Clip", x, e.constant(-float(QUOTIENT_LIMIT)), e.constant(float(QUOTIENT_LIMIT)))
        stored = e.node("QuantizeLinear", x, e.constant(1.0), zero)
        return clipped(e, stored, torch.iinfo(dtype).min if low == 0 else low + zero_point, high + zero_point, dtype)

    name = f"requantize_real_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, accumulator, e.constant(multiplier), e.constant(zero_point, dtype))


def _onnx_requantize_real(
    e: Emitter, accumulator: str, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str:
    width = e.dtype(accumulator)
    if dtype.itemsize == 1:
        return _onnx_requantize_real_byte(e, accumulator, multiplier, low, high, dtype, zero_point)

    def body(e: Emitter, x: str, multiplier: str, low: str, high: str, *zero_point: str) -> str:
        x = x if width == torch.float32 else e.node("Cast", x, to=torch.float32)
        x = e.node("Mul", e.node("Round", x), multiplier)  # Round as above
        x = e.node("Clip", e.node("Round", x), low, high)
        return e.node("Cast", e.node("Add", x, zero_point[0]) if zero_point else x, to=dtype)

    name = f"requantize_real_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}{'_offset' * bool(zero_point)}"
    operands = e.constant(multiplier), e.constant(float(low)), e.constant(float(high))
    return e.call(name, body, accumulator, *operands, *offset(e, zero_point))


def _bounds_requantize_real(accumulator: Value, multiplier: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    multipliers(multiplier)
    return stored_limits(low, high, zero_point)


@primitive(_onnx_requantize_real, bounds=_bounds_requantize_real, role=Role.REQUANTIZATION)
def requantize_real(accumulator: Tensor, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    """Compute clip(round_half_even(float32(acc) · multiplier), low, high) + zero_point: one float32 product, rounded once.

    `multiplier` is float32, shaped to broadcast. `low` and `high` limit the centred integers. The result has `dtype`.
    """
    value = (accumulator.float() * multiplier).round_().clamp_(low, high)
    return stored(value.add_(zero_point) if zero_point else value, accumulator, dtype)


def _onnx_accumulator_output(e: Emitter, accumulator: str) -> str:
    return e.node("Cast", accumulator, to=torch.int32)


def _bounds_accumulator_output(accumulator: Value) -> Range:
    return within(accumulator.magnitude, FLOAT64_EXACT)


@primitive(_onnx_accumulator_output, bounds=_bounds_accumulator_output)
def accumulator_output(accumulator: Tensor) -> Tensor:
    """Return the accumulator itself as a quantized tensor, int32: the output of a last layer."""
    return stored(accumulator, accumulator, torch.int32)


def _onnx_clamp_accumulator(e: Emitter, input: str, low: Tensor, high: Tensor) -> str:
    width = torch.float64  # runtimes clip floats and doubles; int32 does not fit a float
    value = e.node("Max", e.node("Cast", input, to=width), e.constant(low, width))
    return e.node("Cast", e.node("Min", value, e.constant(high, width)), to=torch.int32)


def _bounds_clamp_accumulator(input: Value, low: Value, high: Value) -> Range:
    need((constant_of(low, "limit") <= constant_of(high, "limit")).all(), "its lower limit exceeds its upper limit")
    return within(torch.maximum(low.magnitude, high.magnitude), FLOAT64_EXACT)


@primitive(_onnx_clamp_accumulator, bounds=_bounds_clamp_accumulator)
def clamp_accumulator(input: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Limit the integers of an accumulator to bounds that may differ between channels, shaped to broadcast."""
    return clamped(input, low.to(input.dtype), high.to(input.dtype))

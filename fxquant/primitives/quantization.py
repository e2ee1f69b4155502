"""Quantize float tensors, requantize from an accumulator's scale to a tensor's scale, and dequantize.

There are two arithmetics of requantization, *fixed* and *real*. Their parameters come from `numerics.grids.fixed_requantization` and
`numerics.grids.real_multiplier`, shaped to broadcast against the accumulator.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import BOUNDARY_LIMIT, FLOAT32_EXACT, is_scale, power_of_two, quantized_value
from fxquant.numerics.rounding import clamped
from fxquant.primitives import record
from fxquant.primitives.accumulate import DEQUANTIZES
from fxquant.primitives.record import FLOAT64_EXACT, Emitter, Range, Role, Value, ZeroPoint, constant_of, need, primitive, stored, within
from fxquant.primitives.shape import one_node
from fxquant.primitives.steps import Op, Writer

Placed = Callable[[Tensor, torch.dtype], str]  # emits what is made of a constant: the constant, or a row of a table that the file looks up


def as_float32(e: Emitter, input: str) -> str:
    """Emit a cast of a float tensor to float32, where it has another dtype."""
    return input if e.dtype(input) == torch.float32 else e.node("Cast", input, to=torch.float32)


def _onnx_quantize_byte(e: Emitter, input: str, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int) -> str:
    """Emit `quantize` to an 8-bit dtype as QuantizeLinear."""

    def body(e: Emitter, x: str, scale: str, limit: str) -> str:
        x = e.node("Where", e.node("IsNaN", x), e.constant(0.0), x)
        stored = e.node("QuantizeLinear", e.node("Clip", x, e.node("Neg", limit), limit), scale, e.constant(zero_point, dtype))
        return clipped(e, stored, low + zero_point, high + zero_point, dtype)

    name = f"quantize_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, as_float32(e, input), e.constant(scale), e.constant(scale * BOUNDARY_LIMIT))


def clipped(e: Emitter, stored: str, low: int, high: int, dtype: torch.dtype) -> str:
    """Emit a Clip of an integer tensor to these limits, where they are narrower than its dtype."""
    limits = torch.iinfo(dtype)
    return stored if (low, high) == (limits.min, limits.max) else e.node("Clip", stored, e.constant(low, dtype), e.constant(high, dtype))


def _onnx_quantize(e: Emitter, input: str, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> str:
    if dtype.itemsize == 1:
        return _onnx_quantize_byte(e, input, scale, low, high, dtype, zero_point)

    def body(e: Emitter, x: str, scale: str, limit: str, low: str, high: str, *zero_point: str) -> str:
        zero = e.constant(0.0)
        x = e.node("Where", e.node("IsNaN", x), zero, x)
        x = e.node("Clip", x, e.node("Neg", limit), limit)
        x = e.node("Clip", e.node("Round", e.node("Div", x, scale)), low, high)
        return e.node("Cast", e.node("Add", x, zero_point[0]) if zero_point else x, to=dtype)

    limit = e.constant(scale * BOUNDARY_LIMIT)
    bounds = e.constant(float(low)), e.constant(float(high))
    name = f"quantize_{str(dtype).removeprefix('torch.')}{'_offset' * bool(zero_point)}"
    return e.call(name, body, as_float32(e, input), e.constant(scale), limit, *bounds, *offset(e, zero_point))


def offset(e: Emitter, zero_point: int, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return the zero point as a further operand, where it is not 0; else nothing."""
    return [e.constant(float(zero_point), dtype)] if zero_point else []


def _surrogate_quantize(input: Tensor, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    return clamped(input / scale, low, high) + zero_point


def _bounds_quantize(input: Value | None, scale: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    tensor = constant_of(scale, "scale")
    need(tensor.dim() == 0 and tensor.dtype == torch.float32 and is_scale(float(tensor)), f"its scale is {tensor.tolist()}")
    return record.stored_limits(low, high, zero_point)


@primitive(_onnx_quantize, bounds=_bounds_quantize, surrogate=_surrogate_quantize)
def quantize(input: Tensor, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    """Compute clip(round_half_even(x / scale), low, high) + zero_point, with IEEE float32 division; NaN gives the zero point.

    `input` is a float tensor and `scale` a float32 tensor of shape (). `low` and `high` limit the centred integers. The result has
    the shape of `input` and `dtype`.
    """
    return quantized_value(input, scale, low, high).add_(zero_point).to(dtype)


def _onnx_dequantize(e: Emitter, input: str, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: int = 0) -> str:
    # DequantizeLinear is this very product, but the reference evaluator lacks it before opset 19.
    value = e.node("Cast", input, to=torch.float32)
    if zero_point:  # Round changes no integer: it keeps OpenVINO from computing x · scale - zero · scale
        value = e.node("Round", e.node("Sub", value, e.constant(float(zero_point))))
    product = e.node("Mul", value, e.constant(scale))
    return product if dtype == torch.float32 else e.node("Cast", product, to=dtype)


def _steps_dequantize(w: Writer, input: int, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: int = 0) -> int | None:
    if dtype != torch.float32:
        return None
    centred = w.write(Op.SUBTRACT, input, w.operand(zero_point)) if zero_point else input
    return w.write(Op.SCALE, centred, scale)


@primitive(_onnx_dequantize, bounds=None, kind="float", zero_point=ZeroPoint.INVARIANT, shifted=("zero_point",), steps=_steps_dequantize)
def dequantize(input: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: int = 0) -> Tensor:
    """Compute float32(q - zero_point) · scale, rounded to `dtype`; `scale` is float32."""
    value = input.float()
    return ((value - zero_point if zero_point else value) * scale).to(dtype)


# ---- requantization to 8 bits by one rounded float32 product in ONNX files -------------------------------------------
#
# It is proved at every integer where the result steps. The requantizations below are monotonic in the accumulator, and so is a rounded
# float32 product with a positive number. Two such functions are equal everywhere if both step to each of the 255 results at the same
# integer. For each channel, a factor that places every step correctly is searched among the float32 numbers next to one over the step's
# size, for a Round and for a Floor of the product. QuantizeLinear of a scale of 1 then saturates and stores: it reads integers, of which
# no runtime's error makes others. Only where neither is right is a constant added first, as far from ties as can be, since runtimes
# multiply it out, x · factor + constant · factor. The search returns None where it finds none.
NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3)  # float32 numbers from the nearest one, in the order in which they are tried
QUOTIENT_LIMIT = 2**30  # reference implementations round larger quotients wrongly


def steps_of(shift: Tensor, multiplier: Tensor, right_shift: Tensor, half: Tensor, low: int, high: int, up: bool = False) -> Tensor:
    """Return the least integers a with ⌊⌊(a + half) / 2^shift⌋ · multiplier / 2^right_shift⌋ ≥ k, for k from low + 1 to high.

    With `up`, half a result is added before it is rounded down. The result is int64 of shape (channels, results). `multiplier` has fewer
    than 24 bits. Where it is 0, an integer above 2^24 means that none reaches k, and one below -2^24 that all do.
    """
    doubled = 2 * torch.arange(low + 1, high + 1, device="cpu") - int(up)
    whole, first, last = (tensor.flatten().to(torch.int64)[:, None] for tensor in (multiplier, shift, right_shift))
    floored = -torch.div(-(doubled << last), 2 * whole.clamp_min(1), rounding_mode="floor")
    return torch.where(whole == 0, doubled.sign() * 2 * FLOAT32_EXACT, (floored << first) - half.flatten().to(torch.int64)[:, None])


class Rounded(NamedTuple):
    """One float32 product, rounded to the nearest integer or down."""

    by: Tensor  # factors, float32, which broadcast against the integers
    ties: float  # 0.5 where the product is rounded to the nearest integer, 0.0 where it is rounded down
    add: Tensor | None = None  # the float32 constant that is added to the integers first, which broadcasts against them; None for nothing

    def constants(self, e: Emitter) -> list[str]:
        """Return the constants that `emit` reads besides the value; as operands of a function, they let layers share it."""
        return [e.constant(constant) for constant in (self.by, self.add) if constant is not None]

    def emit(self, e: Emitter, value: str, constants: Sequence[str], low: int, high: int, dtype: torch.dtype) -> str:
        """Emit clip(round_half_even or floor((value + add) · by), low, high), stored as `dtype`; `value` is float32."""
        by, *add = constants
        product = e.node("Mul", e.node("Add", value, *add) if add else value, by)
        integers = e.node("Round" if self.ties else "Floor", product)
        return clipped(e, e.node("QuantizeLinear", integers, e.constant(1.0), e.constant(0, dtype)), low, high, dtype)


def rounded(steps: Tensor, size: Tensor, low: int, high: int) -> Rounded | None:
    """Return one rounded float32 product that changes its result exactly at `steps`; None if there is none.

    It equals the integer function for all integers below 2^24 in magnitude. `steps`, int64 (channels, results), are the integers at which
    each result begins. `size`, float64, is about the number of integers per result, shaped to broadcast against them.
    """
    nearest = (1 / size).flatten().float()
    if low == high or not bool((torch.isfinite(nearest) & (nearest > torch.finfo(torch.float32).tiny)).all()):  # one result has no steps
        return None
    for ties, adds in ((0.5, False), (0.0, False), (0.5, True)):
        by, more = torch.zeros_like(nearest), torch.zeros_like(nearest)
        distance = torch.full_like(nearest, -torch.inf, dtype=torch.float64)  # from a tie, of a result; the farthest is taken
        for neighbour in NEIGHBOURS:
            tried = (nearest.view(torch.int32) + neighbour).view(torch.float32)
            step = 1 / tried.double()
            least, most = _constants(steps, step, low, high, ties)
            add = ((least + most) / 2).nan_to_num(0.0, 0.0, 0.0).float() if adds else torch.zeros_like(nearest)
            reached = torch.minimum(add - least, most - add) / step
            farther = (reached > distance) & _is_right(steps, tried, add, low, high, ties)
            by, more, distance = torch.where(farther, tried, by), torch.where(farther, add, more), torch.where(farther, reached, distance)
        if bool((by > 0).all()):
            return Rounded(by.reshape(size.shape), ties, more.reshape(size.shape) if adds else None)
    return None


def _constants(steps: Tensor, step: Tensor, low: int, high: int, ties: float) -> tuple[Tensor, Tensor]:
    """Return the limits, float64 (channels,), of a constant by which (c + constant) / step reaches k - ties exactly from the step of k on.

    `step` is float64 (channels,). The limits are infinite for a channel that no integer leads from one result to another.
    """
    begins = (torch.arange(low + 1, high + 1, device="cpu") - ties) * step[:, None]
    never, always = steps > FLOAT32_EXACT, steps - 1 < -FLOAT32_EXACT  # results beyond what the integers can be
    least = torch.where(never | always, -torch.inf, begins - steps).amax(1)
    most = torch.where(never | always, torch.inf, begins - (steps - 1)).amin(1)
    return (torch.maximum(least, -ties * step) if low == 0 else least), most


def _is_right(steps: Tensor, by: Tensor, add: Tensor, low: int, high: int, ties: float) -> Tensor:
    """Return whether the rounded (c + add) · by is k or more exactly from the step of k on, in float32, for each channel.

    Where `low` is 0, the integer 0 gives 0 or more: a rectified operand needs no other lower limit.
    """
    results = torch.arange(low + 1, high + 1, device="cpu")
    limit = torch.full((1,), FLOAT32_EXACT, dtype=torch.int64, device="cpu")
    reached, below, last = (whole.clamp(-FLOAT32_EXACT, FLOAT32_EXACT).float() + add[:, None] for whole in (steps, steps - 1, limit))
    never, always = steps > FLOAT32_EXACT, steps - 1 < -FLOAT32_EXACT
    over, under, largest, zero = (whole * by[:, None] for whole in (reached, below, last, add[:, None]))
    over, under, zero = (product.round() if ties else product.floor() for product in (over, under, zero))
    right = (never | (over >= results)) & (always | (under < results)) & (largest < QUOTIENT_LIMIT)
    return (right & (zero >= 0) if low == 0 else right).all(1)


# ---- the arithmetics of requantization, and the primitives of accumulators -------------------------------------------
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


def _rounded_fixed(multiplier: Tensor, right_shift: Tensor, limit: int, low: int, high: int, lowered: bool) -> Rounded | None:
    """Return the multiplication and last shift of *fixed* as one rounded float operation; None if it is not proved equal."""
    whole, none = multiplier != 0, torch.zeros_like(multiplier)
    steps = steps_of(none, multiplier, right_shift, none, low, high, up=not lowered)
    nonzero = steps[whole.flatten()]
    if nonzero.numel() and not -limit < int(nonzero.min()) <= int(nonzero.max()) < limit:
        return None  # where the intermediate saturates
    size = torch.where(whole, power_of_two(right_shift) / multiplier.double(), 2.0 * FLOAT32_EXACT)
    return rounded(steps, size, low, high)


def _rounded_half_step(
    shift: Tensor, multiplier: Tensor, right_shift: Tensor, limit: int, low: int, high: int, rounding: str
) -> Rounded | None:
    """Return the complete requantization as one rounded operation; None where it is not proved to be equal."""
    half = half_step(shift, multiplier, right_shift, rounding)
    step = multiplier.double() * power_of_two(-right_shift)
    if bool(((multiplier != 0) & ((step * (limit - 1) < high) | (step * limit < -low))).any()):
        return None  # where the intermediate saturates
    size = torch.where(multiplier != 0, power_of_two(shift + right_shift) / multiplier.double(), 2.0 * FLOAT32_EXACT)
    steps = steps_of(shift, multiplier, right_shift, half, low, high)
    return rounded(steps, size, low, high)


def _onnx_rounded_fixed(e: Emitter, value: str, shift: Tensor | None, how: Rounded, low: int, high: int, dtype: torch.dtype) -> str:
    first, powers, attributes = ("", None, {}) if shift is None else _first_product(e, value, shift)
    value = value if first == "DequantizeLinear" else as_float32(e, value)
    width = e.dtype(value)
    by = [] if powers is None else [e.constant(powers, torch.float32)]
    # A product with a power of two is exact, so runtimes may fuse it, and the Relu after it, into the convolution.
    rectified = low == 0 and width != torch.int32

    def body(e: Emitter, x: str, *constants: str) -> str:
        if first:
            by, *constants = constants  # type: ignore[assignment]
            x = e.node(first, x, by, **attributes)
        x = e.node("Relu", x) if rectified else x
        if first:
            x = e.node("Floor", x)
        elif not rectified:  # Round changes no integer: it keeps runtimes from multiplying the factor into the weights
            x = e.node("Round", x)
        return how.emit(e, x, constants, torch.iinfo(dtype).min if rectified else low, high, dtype)

    name = f"requantize_fixed_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, value, *by, *how.constants(e))


def _first_product(e: Emitter, value: str, shift: Tensor) -> tuple[str, Tensor, dict[str, int]]:
    """Return the operator that multiplies an accumulator by 2^-shift, the powers of two, and the operator's attributes.

    For int32 it is DequantizeLinear, without a cast, where the channels are not the last dimension.
    """
    by = power_of_two(-shift)
    channels = [dim - by.dim() for dim, count in enumerate(by.shape) if count > 1]
    if e.dtype(value) != torch.int32 or e.opset < DEQUANTIZES or len(channels) > 1 or -1 in channels:
        return "Mul", by, {}
    return "DequantizeLinear", by.flatten() if channels else by.reshape(()), {"axis": channels[0]} if channels else {}


def _onnx_requantize_fixed(e: Emitter, accumulator: str, shift: Tensor, multiplier: Tensor, right_shift: Tensor, *rest: Any) -> str:
    intermediate_bits, rounding, low, high, dtype = rest
    limit, in_float32 = 2 ** (intermediate_bits - 1), dtype.itemsize == 1 and e.dtype(accumulator) not in (e.wide, torch.float64)
    how = None
    if in_float32 and rounding in ("half_up", "floor"):
        how = _rounded_fixed(multiplier, right_shift, limit, low, high, rounding == "floor")
    elif in_float32 and rounding in HALF_STEPS:
        how = _rounded_half_step(shift, multiplier, right_shift, limit, low, high, rounding)
    if how is not None:
        floored = rounding not in HALF_STEPS and bool((shift > 0).any())
        return _onnx_rounded_fixed(e, accumulator, shift if floored else None, how, low, high, dtype)
    return onnx_general_fixed(e, accumulator, shift, multiplier, right_shift, *rest)


def onnx_general_fixed(
    e: Emitter, accumulator: str, shift: Tensor, multiplier: Tensor, right_shift: Tensor, intermediate_bits: int, rounding: str, low: int,
    high: int, dtype: torch.dtype, placed: Placed | None = None,
) -> str:  # fmt: skip
    """Emit `requantize_fixed`, one ONNX operator for each step of its formula; `placed` emits each constant tensor, by default as it is.

    Products below 2^31 are int32 in a portable file, and float64, which takes fewer operators, in another.
    """
    placed = placed or e.constant
    width = torch.float64 if e.dtype(accumulator) == torch.float64 else torch.float32
    limit = 2 ** (intermediate_bits - 1)
    added = torch.ones_like(right_shift) << (right_shift - 1).clamp_min(0) if rounding == "half_up" else torch.zeros_like(right_shift)
    largest = int(limit * multiplier.long().abs().max() + added.long().max())
    fits = largest < 2**31 and max(int(shift.max()), int(right_shift.max())) < 31
    if e.portable and fits and width == torch.float32 and rounding in ("half_up", "floor"):
        return _onnx_fixed_int32(e, accumulator, (shift, multiplier, added, right_shift), (limit, low, high, dtype), placed)
    if width == torch.float32 and (intermediate_bits > 24 or rounding in HALF_STEPS or e.dtype(accumulator) == e.wide):
        width = torch.float64
    value = accumulator if e.dtype(accumulator) == width else e.node("Cast", accumulator, to=width)

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

    first = placed(power_of_two(-shift), width)
    product = placed(multiplier.double() * power_of_two(-right_shift), torch.float64)
    bounds = e.constant(float(low), torch.float64), e.constant(float(high), torch.float64)
    half = [placed(half_step(shift, multiplier, right_shift, rounding), torch.float64)] if rounding in HALF_STEPS else []
    name = f"requantize_fixed_{intermediate_bits}_{rounding}_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, value, first, product, *bounds, *half)


def _onnx_fixed_int32(
    e: Emitter, value: str, constants: Sequence[Tensor], limits: tuple[int, int, int, torch.dtype], placed: Placed
) -> str:
    """Emit `requantize_fixed` by an int32 product, of an accumulator that is float32, or int32 beyond 2^24."""
    shift, multiplier, half, right_shift = constants
    limit, low, high, dtype = limits
    wide = e.dtype(value) == e.wide
    value = value if wide else as_float32(e, value)

    def body(e: Emitter, x: str, first: str, multiplier: str, half: str, second: str, *powers: str) -> str:
        x = onnx_shifted_down(e, x, first, powers[1]) if wide else e.node("Floor", e.node("Mul", x, first))
        x = e.node("Cast", e.node("Clip", x, e.constant(float(-limit)), e.constant(float(limit - 1))), to=torch.int32)
        x = onnx_shifted_down(e, e.node("Add", e.node("Mul", x, multiplier), half), second, powers[0])
        return e.node("Cast", e.node("Clip", x, e.constant(float(low)), e.constant(float(high))), to=dtype)

    powers = [power_of_two(by).to(torch.int32) for by in (right_shift, shift)[: 1 + wide]]
    reciprocals = [placed(power_of_two(-by), torch.float32) for by in (shift, right_shift)]
    operands = reciprocals[0], placed(multiplier, torch.int32), placed(half, torch.int32), reciprocals[1]
    name = f"requantize_fixed_{'wide' if wide else 'float32'}_product_{limit}_{low}_{high}_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, value, *operands, *(placed(power, torch.int32) for power in powers))


def onnx_shifted_down(e: Emitter, value: str, reciprocal: str, power: str) -> str:
    """Emit ⌊value / power⌋, float32, of an int32 value and a power of two, int32, with its float32 reciprocal.

    Its cast to float32 is off by up to 64, so that the quotient can be off by one or more; the rest is exact.
    """
    quotient = e.node("Floor", e.node("Mul", e.node("Cast", value, to=torch.float32), reciprocal))
    rest = e.node("Sub", value, e.node("Mul", e.node("Cast", quotient, to=torch.int32), power))
    return e.node("Add", quotient, e.node("Floor", e.node("Mul", e.node("Cast", rest, to=torch.float32), reciprocal)))


def requantized_range(shift: Value, multiplier: Value, right_shift: Value, low: int, high: int, **_: Any) -> Range:
    """Return the limits of `requantize_fixed`; raise Unproved where a constant is not int32."""
    for name, value in (("shift", shift), ("multiplier", multiplier), ("right shift", right_shift)):
        need(constant_of(value, name).dtype == torch.int32, f"its {name} is not int32")
    return Range(float(low), float(high))


def _steps_requantize_fixed(
    w: Writer, input: int, shift: Tensor, multiplier: Tensor, right_shift: Tensor, bits: int, rounding: str, low: int, high: int, _: Any
) -> int | None:
    if rounding in TIES:
        return None
    w.wide |= bits > 16 or rounding in HALF_STEPS
    if rounding in HALF_STEPS:
        input = w.write(Op.ADD, input, half_step(shift, multiplier, right_shift, rounding).to(torch.int64))
    narrowed = w.write(Op.CLIP, w.write(Op.SHIFT, input, shift), None, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    product = w.write(Op.MULTIPLY, narrowed, multiplier)
    if rounding == "half_up":
        product = w.write(Op.ADD, product, torch.ones_like(right_shift, dtype=torch.int64) << (right_shift.long() - 1))
    return w.write(Op.CLIP, w.write(Op.SHIFT, product, right_shift), None, low, high)


def _steps_requantize_real(w: Writer, input: int, multiplier: Tensor, low: int, high: int, _: Any, zero_point: int = 0) -> int:
    rounded = w.write(Op.ROUND, input, multiplier, low, high)
    return w.write(Op.ADD, rounded, w.operand(zero_point)) if zero_point else rounded


@primitive(_onnx_requantize_fixed, bounds=requantized_range, role=Role.REQUANTIZATION, steps=_steps_requantize_fixed)
def requantize_fixed(
    accumulator: Tensor, shift: Tensor, multiplier: Tensor, right_shift: Tensor, intermediate_bits: int, rounding: str, low: int, high: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
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


def _onnx_requantize_real(
    e: Emitter, accumulator: str, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str:
    return onnx_placed_real(e, accumulator, multiplier, low, high, dtype, zero_point, e.constant)


def onnx_placed_real(
    e: Emitter, accumulator: str, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int, placed: Placed
) -> str:
    """Emit `requantize_real`, whose multiplier `placed` emits; QuantizeLinear saturates and stores 8 bits, other operators more."""
    width, in_bytes = e.dtype(accumulator), dtype.itemsize == 1
    limited = width not in (torch.float32, torch.int8, torch.uint8, torch.int16) or float(multiplier.max()) * FLOAT32_EXACT > QUOTIENT_LIMIT

    def body(e: Emitter, x: str, multiplier: str, *rest: str) -> str:
        x = x if width == torch.float32 else e.node("Cast", x, to=torch.float32)
        # The accumulator is an integer, so Round changes nothing: it is a barrier that keeps the runtime from multiplying the
        # constant into the weights. Relu is a barrier, too, which the runtime fuses into the convolution.
        x = e.node("Mul", e.node("Relu" if in_bytes and low == 0 else "Round", x), multiplier)
        if not in_bytes:
            x = e.node("Clip", e.node("Round", x), *rest[:2])
            return e.node("Cast", e.node("Add", x, rest[2]) if zero_point else x, to=dtype)
        if limited:  # beyond the range of int32 not every runtime saturates
            x = e.node("Clip", x, e.constant(-float(QUOTIENT_LIMIT)), e.constant(float(QUOTIENT_LIMIT)))
        # OpenVINO adds the zero point before it rounds, and divides by a range of 255 steps: integers it stores as they are.
        stored = e.node("QuantizeLinear", e.node("Round", x), e.constant(1.0), rest[0])
        return clipped(e, stored, torch.iinfo(dtype).min if low == 0 else low + zero_point, high + zero_point, dtype)

    name = f"requantize_real_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}{'_offset' * bool(zero_point)}"
    limits = [e.constant(zero_point, dtype)] if in_bytes else [e.constant(float(low)), e.constant(float(high)), *offset(e, zero_point)]
    return e.call(name, body, accumulator, placed(multiplier, torch.float32), *limits)


def real_range(accumulator: Value, multiplier: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    """Return the limits of `requantize_real`; raise Unproved where a multiplier is out of range."""
    record.multipliers(multiplier)
    return record.stored_limits(low, high, zero_point)


@primitive(_onnx_requantize_real, bounds=real_range, role=Role.REQUANTIZATION, steps=_steps_requantize_real)
def requantize_real(accumulator: Tensor, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    """Compute clip(round_half_even(float32(acc) · multiplier), low, high) + zero_point: one float32 product, rounded once.

    `multiplier` is float32, shaped to broadcast. `low` and `high` limit the centred integers. The result has `dtype`.
    """
    value = (accumulator.float() * multiplier).round_().clamp_(low, high)
    return stored(value.add_(zero_point) if zero_point else value, accumulator, dtype)


@primitive(one_node("Cast", to=torch.int32), bounds=lambda accumulator: within(accumulator.magnitude, FLOAT64_EXACT), layout="same")
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

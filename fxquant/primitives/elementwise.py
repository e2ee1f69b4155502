"""Elementwise primitives: alignment of operands to a common scale, sums, products, clamps and lookup tables."""

from typing import Any

import torch
from torch import Tensor

from fxquant.numerics.grids import FLOAT32_EXACT, power_of_two
from fxquant.numerics.rounding import clamped
from fxquant.primitives.record import Emitter, Range, Role, Value, ZeroPoint, constant_of, exact_below, multipliers, need, primitive, within
from fxquant.primitives.shape import named, one_node
from fxquant.primitives.steps import MOST_REAL, Op, Writer, binary


def _steps_align_fixed(w: Writer, input: int, multiplier: Tensor, right_shift: Tensor, wide: bool = False) -> int:
    w.wide |= wide
    return w.write(Op.SHIFT, w.write(Op.MULTIPLY, input, multiplier), right_shift)


def _steps_shift_right(w: Writer, input: int, bits: int) -> int:
    w.wide |= bits > 30
    return w.write(Op.SHIFT, w.write(Op.ADD, input, w.operand(2 ** (bits - 1))), w.operand(bits))


def _width(wide: bool) -> torch.dtype:
    """Return the float dtype that is exact for integers below 2^24, or, if `wide`, below 2^53."""
    return torch.float64 if wide else torch.float32


def _onnx_align_fixed(e: Emitter, input: str | Tensor, multiplier: Tensor, right_shift: Tensor, wide: bool = False) -> str:
    width = e.wide if wide else torch.float32
    if not width.is_floating_point and not bool(right_shift.any()):
        return e.node("Mul", e.node("Cast", named(e, input), to=width), e.constant(multiplier, width))
    exact = _width(wide)

    def body(e: Emitter, x: str, factor: str) -> str:
        aligned = e.node("Floor", e.node("Mul", e.node("Cast", x, to=exact), factor))
        return aligned if exact == width else e.node("Cast", aligned, to=width)

    name = f"align_fixed_{str(width).removeprefix('torch.')}"
    return e.call(name, body, named(e, input), e.constant(multiplier.double() * power_of_two(-right_shift), exact))


def _bounds_align_fixed(input: Value, multiplier: Value, right_shift: Value, wide: bool = False) -> Range:
    factors, shift = constant_of(multiplier, "multiplier").double(), constant_of(right_shift, "shift").double()
    need((factors >= 0).all() and (shift >= 0).all() and (shift <= 63).all(), "its multiplier or its shift is out of range")
    need(float((factors * input.largest).max()) < (2.0**63 if wide else FLOAT32_EXACT), "its product is too large for its width")
    return within(torch.ceil(factors * input.largest * torch.exp2(-shift)), exact_below(wide))


_ALIGNMENT: dict[str, Any] = {"kind": "accumulator", "role": Role.ALIGNMENT}
_ADDITION: dict[str, Any] = {"kind": "accumulator", "role": Role.ADDITION}


def _align_fixed_real(input: Tensor, multiplier: Tensor, right_shift: Tensor, wide: bool = False) -> Tensor:
    return input * (multiplier.double() * power_of_two(-right_shift)).to(_width(wide))


@primitive(_onnx_align_fixed, bounds=_bounds_align_fixed, surrogate=_align_fixed_real, steps=_steps_align_fixed, **_ALIGNMENT)
def align_fixed(input: Tensor, multiplier: Tensor, right_shift: Tensor, wide: bool = False) -> Tensor:
    """Compute ⌊q · multiplier / 2^right_shift⌋ as int32: an operand on a finer common scale. |q · multiplier| < 2^24 unless `wide`."""
    if input.is_floating_point():
        return torch.floor(input.to(_width(wide)) * (multiplier.double() * power_of_two(-right_shift)).to(_width(wide)))
    return ((input.to(torch.int64 if wide else torch.int32) * multiplier) >> right_shift).to(torch.int32)


def _onnx_align_real(e: Emitter, input: str | Tensor, multiplier: Tensor, wide: bool = False) -> str:
    def body(e: Emitter, x: str, multiplier: str) -> str:
        aligned = e.node("Round", e.node("Mul", e.node("Cast", x, to=torch.float32), multiplier))
        return e.node("Cast", aligned, to=e.wide) if wide else aligned

    return e.call("align_real_wide" if wide else "align_real", body, named(e, input), e.constant(multiplier))


@primitive(
    _onnx_align_real,
    bounds=lambda input, multiplier, wide=False: within(torch.round(input.largest * multipliers(multiplier)), exact_below(wide)),
    surrogate=lambda input, multiplier, wide=False: (input * multiplier).to(_width(wide)),
    casts=True,
    steps=lambda w, input, multiplier, *_: w.write(Op.ROUND, input, multiplier, -MOST_REAL, MOST_REAL),
    **_ALIGNMENT,
)
def align_real(input: Tensor, multiplier: Tensor, wide: bool = False) -> Tensor:
    """Compute round_half_even(float32(q) · multiplier) as int32: an operand on a finer common scale. Below 2^24 unless `wide`."""
    aligned = (input.float() * multiplier).round_()
    return aligned.to(_width(wide)) if input.is_floating_point() else aligned.to(torch.int32)


def _bounds_add(input: Value, other: Value) -> Range:
    need(input.exact == other.exact, "its operands have different widths")
    return within(input.magnitude + other.magnitude, input.exact)


@primitive(one_node("Add"), bounds=_bounds_add, steps=binary(Op.ADD), **_ADDITION)
def add(input: Tensor, other: Tensor) -> Tensor:
    """Add two accumulators on one scale."""
    return input + other


@primitive(one_node("Sub"), bounds=_bounds_add, steps=binary(Op.SUBTRACT), **_ADDITION)
def subtract(input: Tensor, other: Tensor) -> Tensor:
    """Subtract `other` from `input`, two accumulators on one scale."""
    return input - other


@primitive(
    lambda e, input, constant: e.node("Add", input, e.constant(constant, e.dtype(input))),
    bounds=lambda input, constant: within(input.magnitude + constant.magnitude, input.exact),
    steps=binary(Op.ADD),
    **_ADDITION,
)
def add_constant(input: Tensor, constant: Tensor) -> Tensor:
    """Add an integer constant on an accumulator's scale to it; the result has the accumulator's dtype."""
    return input + constant.to(input.dtype)


def _onnx_multiply(e: Emitter, input: str | Tensor, other: str | Tensor, wide: bool = False) -> str:
    width = e.wide if wide else torch.float32
    product = e.node("Mul", *(e.node("Cast", named(e, operand), to=width) for operand in (input, other)))
    # Round is a barrier: without it the runtime may fuse a constant operand with the multiplier that follows.
    return e.node("Round", product) if width.is_floating_point else product


def _bounds_multiply(input: Value, other: Value, wide: bool = False) -> Range:
    return within(input.largest * other.largest, exact_below(wide))


@primitive(_onnx_multiply, bounds=_bounds_multiply, kind="accumulator", role=Role.MULTIPLICATION, casts=True, steps=binary(Op.MULTIPLY))
def multiply(input: Tensor, other: Tensor, wide: bool = False) -> Tensor:
    """Multiply two quantized tensors, as int32; below 2^24 in magnitude unless `wide`."""
    if input.is_floating_point() or other.is_floating_point():
        return input.to(_width(wide)) * other.to(_width(wide))
    return input.to(torch.int32) * other.to(torch.int32)  # both: a tensor without dimensions would not widen another


_SAME_MAGNITUDE: dict[str, Any] = {"bounds": lambda input: within(input.magnitude, input.exact), "kind": "accumulator", "casts": True}


@primitive(one_node("Cast", to=torch.float32), role=Role.POINTWISE, steps=lambda w, input: input, **_SAME_MAGNITUDE)
def widen(input: Tensor) -> Tensor:
    """Return a quantized tensor as an accumulator, int32."""
    return input if input.is_floating_point() else input.to(torch.int32)


def _bounds_centre(input: Value, zero_point: int) -> Range:
    need(type(zero_point) is int, f"its zero point is {zero_point!r}")
    return Range(input.low - zero_point, input.high - zero_point, input.exact)


@primitive(
    lambda e, input, zero_point: e.node("Sub", e.node("Cast", input, to=torch.float32), e.constant(float(zero_point))),
    bounds=_bounds_centre,
    kind="accumulator",
    role=Role.POINTWISE,
    steps=lambda w, input, zero_point: w.write(Op.SUBTRACT, input, w.operand(zero_point)),
)
def centre(input: Tensor, zero_point: int) -> Tensor:
    """Compute q - zero_point: the centred integers of an affine tensor, as an accumulator, int32; 0 stands for the float value 0."""
    return (input if input.is_floating_point() else input.to(torch.int32)) - zero_point


def _onnx_negate(e: Emitter, input: str) -> str:
    return e.node("Neg", input if e.dtype(input).is_floating_point else e.node("Cast", input, to=torch.float32))


@primitive(_onnx_negate, role=Role.ADDITION, steps=lambda w, input: w.write(Op.SUBTRACT, w.operand(0), input), **_SAME_MAGNITUDE)
def negate(input: Tensor) -> Tensor:
    """Negate a quantized tensor or an accumulator; the result is an accumulator, int32."""
    return -input if input.is_floating_point() else -input.to(torch.int32)


def _onnx_shift_right(e: Emitter, input: str, bits: int) -> str:
    dtype = e.dtype(input)
    width = dtype if dtype.is_floating_point else torch.float32

    def body(e: Emitter, x: str, step: str) -> str:
        shifted = e.node("Mul", x if dtype == width else e.node("Cast", x, to=width), step)
        floor = e.node("Floor", e.node("Add", shifted, e.constant(0.5, width)))
        return floor if dtype == width else e.node("Cast", floor, to=dtype)

    return e.call(f"shift_right_{str(dtype).removeprefix('torch.')}", body, input, e.constant(2.0**-bits, width))


def _bounds_shift_right(input: Value, bits: int) -> Range:
    need(0 < bits < 64, f"it shifts by {bits} bits")
    low, high = (torch.floor(end * 2.0**-bits + 0.5) for end in (input.low, input.high))
    return Range(low, high, input.exact)


@primitive(
    _onnx_shift_right,
    bounds=_bounds_shift_right,
    surrogate=lambda input, bits: input * 2.0**-bits,
    kind="accumulator",
    role=Role.POINTWISE,
    steps=_steps_shift_right,
)
def shift_right(input: Tensor, bits: int) -> Tensor:
    """Compute ⌊q / 2^bits + ½⌋ of a quantized tensor or an accumulator: the same values on a scale 2^bits larger, in the same dtype."""
    if input.is_floating_point():
        return torch.floor(input * 2.0**-bits + 0.5)
    shifted: Tensor = (input.to(torch.int64) + 2 ** (bits - 1)) >> bits
    return shifted.to(input.dtype)


def _onnx_clamp(e: Emitter, input: str, low: int, high: int) -> str:
    dtype = e.dtype(input)
    if dtype in (torch.int8, torch.uint8):
        return e.node("Clip", input, e.constant(low, dtype), e.constant(high, dtype))
    clipped = e.node("Clip", e.node("Cast", input, to=torch.float32), e.constant(float(low)), e.constant(float(high)))
    return e.node("Cast", clipped, to=dtype)


def _bounds_clamp(input: Value, low: int, high: int) -> Range:
    need(low <= high, f"its limits are {low} and {high}")
    return Range(input.low.clamp(low, high), input.high.clamp(low, high))


@primitive(
    _onnx_clamp,
    bounds=_bounds_clamp,
    role=Role.POINTWISE,
    zero_point=ZeroPoint.EQUIVARIANT,
    shifted=("low", "high"),
    steps=lambda w, input, low, high: w.write(Op.CLIP, input, None, low, high),
)
def clamp(input: Tensor, low: int, high: int) -> Tensor:
    """Limit the integers to [low, high]."""
    return clamped(input, low, high)


def _onnx_lookup(e: Emitter, input: str, table: Tensor, first: int | None = None) -> str:
    lowest = _first(table, first)

    def body(e: Emitter, x: str, table: str) -> str:
        return e.node("Gather", table, e.node("Add", e.node("Cast", x, to=torch.int64), e.constant(-lowest, torch.int64)))

    return e.call(f"lookup_{table.numel()}" + ("" if first is None else f"_{-first}"), body, input, e.table(table))


def _first(table: Tensor, first: int | None) -> int:
    return -(table.numel() // 2) if first is None else first


def _bounds_lookup(input: Value, table: Value, first: int | None = None) -> Range:
    entries = constant_of(table, "table")
    need(entries.dim() == 1 and (first is not None or entries.numel() % 2 == 0), f"its table has {entries.numel()} entries")
    lowest = _first(entries, first)
    covers = lowest <= int(input.low.min()) and int(input.high.max()) < lowest + entries.numel()
    need(covers, f"its table of {entries.numel()} entries does not cover its operand")
    return Range(table.low.min(), table.high.max())


@primitive(
    _onnx_lookup,
    bounds=_bounds_lookup,
    role=Role.POINTWISE,
    zero_point=ZeroPoint.INVARIANT,
    shifted=("first",),
    steps=lambda w, input, table, first=None: w.write(Op.LOOK_UP, input, low=_first(table, first), table=table),
)
def lookup(input: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """Return table[q - first], in the table's dtype, for q in the range that the table covers from `first` on.

    `table` has one dimension. `first` None is minus half its length, for a signed range.
    """
    index = input.to(torch.int32) - _first(table, first)
    entries = table.index_select(0, index.flatten()).view(input.shape)
    return entries.float() if input.is_floating_point() else entries

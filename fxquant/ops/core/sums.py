"""Lowering of sums of two operands, of which one may be a constant."""

import math
from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.lowering import Clamp, Lowering, Quantized
from fxquant.numerics import grids
from fxquant.numerics.grids import FLOAT32_EXACT, INT32, LARGEST_NARROW_MULTIPLIER, WEIGHT_INT8, Ratio, narrow_multipliers, power_of_two
from fxquant.numerics.rounding import clamped, straight_through
from fxquant.primitives import elementwise
from fxquant.primitives.arithmetic import SUM, ShiftedSums

Operand = Quantized | Tensor | float
LARGEST_CONSTANT = 2**22  # steps of the common scale; with int8 terms beside it the sum stays below 2^24
LARGEST_CONSTANT_WIDE = 2**29  # the same beside an int16 term, for sums below 2^31


def lower_add(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    """Lower input + alpha · other."""
    return _lower_sum(lowering, {"input": (input, 1), "other": (other, alpha)}, clamp)


def lower_sub(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    """Lower input - alpha · other."""
    return _lower_sum(lowering, {"input": (input, 1), "other": (other, -alpha)}, clamp)


def _lower_sum(lowering: Lowering, terms: dict[str, tuple[Operand, float]], clamp: Clamp | None) -> Quantized:
    """Add the activations on a common scale, and a constant in whole steps of it, and requantize once."""
    terms = {role: grids.to_float32(term) for role, term in terms.items()}
    tensors = {role: (operand, factor) for role, (operand, factor) in terms.items() if isinstance(operand, Quantized)}
    wide = any(operand.dtype.bits > 8 for operand, _ in tensors.values())
    narrow = not wide and lowering.output.dtype.bits <= 8
    if len(tensors) == len(terms) and narrow and lowering.arithmetic.adds_in_output_steps:
        return _lower_narrow_sum(lowering, tensors, clamp)
    constants = {role: (operand, factor) for role, (operand, factor) in terms.items() if not isinstance(operand, Quantized)}
    plain = {role: (operand, factor) for role, (operand, factor) in terms.items() if not isinstance(operand, Tensor)}
    counting = all(isinstance(operand, Quantized) or operand * factor != 0 for operand, factor in plain.values())
    if lowering.arithmetic.shifted_sums is not None and len(plain) == 2 and counting:
        return _lower_shifted_sum(lowering, plain, lowering.arithmetic.shifted_sums, clamp)
    steps = {role: _step(operand, factor) for role, (operand, factor) in tensors.items()}
    larger = max(steps.values(), key=lambda ratio: float(ratio.approximate()))
    lowering.parameters |= {f"its constant {role!r}": operand for role, (operand, _) in constants.items() if isinstance(operand, Tensor)}
    magnitude = max((_magnitude(operand) * abs(factor) for operand, factor in constants.values()), default=0.0)
    if not math.isfinite(magnitude):
        raise lowering.not_finite()
    bits = _fraction_bits(lowering.arithmetic.add_fraction_bits, magnitude, larger, LARGEST_CONSTANT_WIDE if wide else LARGEST_CONSTANT)
    unit = _factor(2.0**bits, larger)

    bound = torch.zeros((), dtype=torch.float64, device="cpu")
    total: Any = None
    for role, (operand, factor) in tensors.items():
        aligned = lowering.align(operand, steps[role].times(unit).over(*larger.numerators), role, wide)
        total = _added(lowering, total, aligned, factor)
        bound = bound + math.ceil(2.0**bits * operand.grid.magnitude)
    for role, (constant, factor) in constants.items():
        if magnitude:
            integers = _held(lowering, role, constant, factor, Ratio((unit,), larger.numerators))
            bound = bound + float(integers.detach().abs().max())
            name = role if isinstance(constant, Tensor) else "number"
            total = lowering.call(elementwise.add_constant, total, lowering.constant(name, integers, torch.int32))
    lowering.prove(bound, "the sum")
    return lowering.requantize(total, Ratio(larger.numerators, (unit,)), clamp)


def _added(lowering: Lowering, total: Any, term: Any, factor: float) -> Any:
    """Return total + term, or total - term if `factor` is negative; a `total` of None is an empty sum."""
    if total is None:
        return term if factor > 0 else lowering.call(elementwise.negate, term)
    return lowering.call(elementwise.add if factor > 0 else elementwise.subtract, total, term)


LARGEST_FACTOR = 2**15 - 1  # of the operand of the smaller scale: a ratio that rounds up to 2^15 is one less


def _lower_shifted_sum(
    lowering: Lowering, terms: dict[str, tuple[Quantized | float, float]], how: ShiftedSums, clamp: Clamp | None
) -> Quantized:
    """Compute x · 2^n + e · E, where x has the larger scale, and requantize once; a number is ±127 on its own scale."""
    device = next(operand.scale.device for operand, _ in terms.values() if isinstance(operand, Quantized))
    steps: dict[str, Ratio] = {}
    for role, (operand, factor) in terms.items():
        if isinstance(operand, Quantized):
            steps[role] = _step(operand, factor)
        else:
            steps[role] = Ratio((torch.tensor(abs(float(operand) * factor), dtype=torch.float32, device=device) / WEIGHT_INT8.high,))
    (larger, x), (smaller, e) = sorted(steps.items(), key=lambda item: -float(item[1].approximate()))
    ratio = e.over(*x.numerators)
    wide_x, wide_e = (isinstance(operand, Quantized) and operand.dtype.bits > 8 for operand, _ in (terms[larger], terms[smaller]))
    # A bit is spared, or a sum of 16-bit integers would saturate after the largest first shift of its requantization to 8 bits.
    spared = (wide_x or wide_e) and lowering.output.grid.type.bits <= 8
    largest = how.largest_wide if wide_x else how.largest
    exponent = ratio.mantissa(15 - spared, carries=False)[1].clamp_max(largest - spared)
    exponent = exponent if how.fixed is None else torch.full_like(exponent, how.fixed)
    factors = {larger: torch.ones_like(exponent) << exponent, smaller: ratio.rounded(exponent).clamp_max(LARGEST_FACTOR)}
    bound = torch.zeros((), dtype=torch.float64, device=device)
    for role, (operand, _) in terms.items():
        magnitude = operand.grid.magnitude if isinstance(operand, Quantized) else WEIGHT_INT8.high
        bound = bound + factors[role].double() * magnitude
    wide = lowering.prove(bound, "the sum") >= FLOAT32_EXACT
    total: Any = None
    for role, (operand, factor) in terms.items():
        if isinstance(operand, Quantized):
            zero = torch.zeros((), dtype=torch.int32, device=device)
            stored = lowering.constant(f"{role}_multiplier", factors[role], torch.int32)
            shift = lowering.constant(f"{role}_right_shift", zero, torch.int32)
            exact = steps[role].over(*x.numerators).times(power_of_two(exponent))
            term = lowering.multiplied(elementwise.align_fixed, operand.value, exact, stored, shift, wide)
            total = _added(lowering, total, term, factor)
    for role, (operand, factor) in terms.items():
        if not isinstance(operand, Quantized):
            whole = factors[role] * int(math.copysign(WEIGHT_INT8.high, operand * factor))
            total = lowering.call(elementwise.add_constant, total, lowering.constant("number", whole, torch.int32))
    unit = x.over(power_of_two(exponent))
    if terms[larger][1] > 0 or not isinstance(terms[larger][0], Quantized) or lowering.output.dtype == INT32:
        return lowering.requantize(total, unit, clamp, kind=SUM)

    def lift(scale: Tensor) -> Tensor:  # it is x · 2^n - e · E that is rounded, and multiplied by a negative number
        return lowering.arithmetic.negated(unit.over(scale), lowering.output.grid)

    if not lowering.lifts_late:
        stored = lowering.constant("rest", lift(lowering.output.grid.scale), torch.int32)
        total = lowering.call(elementwise.add_constant, total, stored)
    return lowering.requantize(total, unit, clamp, lift=lift, kind=SUM)


def _lower_narrow_sum(lowering: Lowering, terms: dict[str, tuple[Quantized, float]], clamp: Clamp | None) -> Quantized:
    """Add the terms as integers in units of 2^-n of a step of the result, with 15-bit multipliers.

    They are so small that float32 adds them and the zero point exactly, in any order.
    """

    def total() -> tuple[Any, Tensor]:
        ratios = {role: _step(operand, factor).over(lowering.output.grid.scale) for role, (operand, factor) in terms.items()}
        bits, multipliers = narrow_multipliers(list(ratios.values()))
        total: Any = None
        for (role, (operand, factor)), multiplier in zip(terms.items(), multipliers, strict=True):
            stored = lowering.constant(f"{role}_multiplier", multiplier.float(), torch.float32)
            step = ratios[role].times(_factor(2.0**bits, ratios[role]))
            aligned = lowering.multiplied(elementwise.align_real, operand.value, step, stored, False)
            total = _added(lowering, total, aligned, factor)
        return total, _factor(2.0**-bits, next(iter(ratios.values())))

    def real() -> Tensor:
        summed: Any = sum(operand.real() * factor for operand, factor in terms.values())
        result: Tensor = summed if clamp is None else clamped(summed, *clamp)
        return result

    largest = sum(LARGEST_NARROW_MULTIPLIER * operand.grid.magnitude for operand, _ in terms.values())
    lowering.prove(largest, "the sum")
    return lowering.requantize_in_steps(total, real, clamp, [operand.scale for operand, _ in terms.values()])


def _magnitude(constant: Tensor | float) -> float:
    return float(constant.detach().double().abs().max()) if isinstance(constant, Tensor) else abs(constant)


def _held(lowering: Lowering, role: str, constant: Tensor | float, factor: float, steps: Ratio) -> Tensor:
    """Compute round_half_even(constant · factor · steps), exactly, with its sign: the constant in whole steps of the common scale.

    The gradient of a tensor is that of the identity (straight-through).
    """
    value = constant if isinstance(constant, Tensor) else _factor(float(constant), steps)
    exponent = torch.zeros((), dtype=torch.int64, device="cpu")
    whole = steps.times(value.detach().double().abs(), _factor(abs(factor), steps)).rounded(exponent)
    exact = whole * torch.sign(value.detach() * factor).long()
    if isinstance(constant, Tensor):
        lowering.describe(role, (1 / (steps.approximate() * factor)).float())
    if value.requires_grad and torch.is_grad_enabled():
        return straight_through(value * (steps.approximate() * factor), exact.double())
    return exact


def _step(operand: Quantized, factor: float) -> Ratio:
    factors = () if abs(factor) == 1 else (torch.tensor(abs(float(factor)), dtype=torch.float64, device="cpu"),)
    return Ratio((operand.scale, *factors))


def _factor(value: float, like: Ratio) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.numerators[0].device)


def _fraction_bits(most: int, magnitude: float, larger: Ratio, largest: int) -> int:
    """Return the n for which the common scale is 2^-n of the larger step: the largest, up to `most`, at which a constant has few steps.

    It is negative where a constant is much larger than the terms: the output's scale covers the constant, so it is coarser still.
    """
    if not magnitude:
        return most
    steps = magnitude / float(larger.approximate())
    return min(most, math.floor(math.log2(largest / steps)))

"""Rescale: exact ratios of scales, and the multipliers and shifts that *fixed*, *real* and narrow sums make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fxquant.numerics.grids import LARGEST_FLOAT32, IntType, power_of_two

NARROW_BITS = 14  # of a step, in the sums of ARITHMETIC.md, section 21
LARGEST_NARROW_MULTIPLIER = 2**NARROW_BITS

# ---- exact ratios -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """An exact positive rational: the product of `numerators` over the product of `denominators`.

    The factors are float32 scales or small integers, as tensors that broadcast together. Kept as
    factors because a product of them is not a float.
    """

    numerators: tuple[Tensor, ...]
    denominators: tuple[Tensor, ...] = ()

    def times(self, *numerators: Tensor) -> Ratio:
        """Return this ratio multiplied by more factors."""
        return Ratio(self.numerators + numerators, self.denominators)

    def over(self, *denominators: Tensor) -> Ratio:
        """Return this ratio divided by more factors."""
        return Ratio(self.numerators, self.denominators + denominators)

    def numbers(self) -> tuple[list[float], list[float]] | None:
        """Return the factors as Python numbers, which are faster, if all are scalars on the CPU without gradients.

        Return None otherwise, and while PyTorch traces or transforms.
        """
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
            return None
        gradients = torch.is_grad_enabled()
        for factor in self.numerators + self.denominators:
            if type(factor) not in _PLAIN or factor.dim() or factor.device.type != "cpu" or (gradients and factor.requires_grad):
                return None
        return [float(factor) for factor in self.numerators], [float(factor) for factor in self.denominators]

    def approximate(self) -> Tensor:
        """Return the ratio in float64, within a few units in the last place."""
        numbers = self.numbers()
        if numbers is not None and all(numbers[1]):
            return torch.tensor(_quotient(*numbers), dtype=torch.float64, device="cpu")
        value = torch.ones((), dtype=torch.float64, device=self.numerators[0].device)
        for factor in self.numerators:
            value = value * factor.double()
        for factor in self.denominators:
            value = value / factor.double()
        return value

    def exact(self) -> list[Fraction]:
        """Return the ratio of every element, in order of the broadcast shape, as exact fractions. Slow."""
        factors = torch.broadcast_tensors(*(f.detach().double().cpu() for f in self.numerators + self.denominators))  # type: ignore[no-untyped-call]
        rows = zip(*(f.flatten().tolist() for f in factors), strict=True)
        above = len(self.numerators)
        return [
            math.prod(map(Fraction, row[:above]), start=Fraction(1)) / math.prod(map(Fraction, row[above:]), start=Fraction(1))
            for row in rows
        ]

    def rounded(self, exponent: Tensor, halves_up: bool = False) -> Tensor:
        """Return the integers round_half_even(ratio · 2^exponent), exactly, as int64; `halves_up` rounds ties up.

        Computed in float64; an element so near a tie that the few roundings on the way could decide it is
        computed again with fractions. Requires results below 2^31.
        """
        approximate = self.approximate().detach() * power_of_two(exponent)
        result = torch.round(approximate)
        doubtful = ((approximate - torch.floor(approximate)) - 0.5).abs() <= approximate * 2.0**-48
        if bool(doubtful.any()):
            exponents = exponent.expand_as(approximate).flatten().tolist()
            shape = approximate.shape
            chosen = torch.nonzero(doubtful.flatten()).flatten().tolist()
            fractions = Ratio(
                tuple(f.expand(shape).flatten()[chosen] for f in self.numerators),
                tuple(f.expand(shape).flatten()[chosen] for f in self.denominators),
            ).exact()
            flat = result.flatten()
            for index, value in zip(chosen, fractions, strict=True):
                flat[index] = _nearest(value * Fraction(2) ** exponents[index], halves_up)
            result = flat.view(shape)
        return result.to(torch.int64)

    def mantissa(self, bits: int, largest_exponent: int = 1000, carries: bool = True) -> tuple[Tensor, Tensor]:
        """Return (M, k) with ratio ≈ M · 2^-k: M = round_half_even(ratio · 2^k) of `bits` bits, as int64 tensors.

        k is the one that puts M in [2^(bits-1), 2^bits), but at most `largest_exponent`: below that M has
        fewer bits, down to 0. An M that rounds up to 2^bits is halved, with k less by one, if it `carries`. Without `carries` it is
        2^bits - 1, and ties round up, as the vendor's compiler computes it.
        """
        with torch.no_grad():
            numbers = self.numbers()
        found = None if numbers is None else _mantissa(*numbers, bits, largest_exponent, carries)
        if found is not None:
            return torch.tensor(found[0], dtype=torch.int64, device="cpu"), torch.tensor(found[1], dtype=torch.int64, device="cpu")
        k = (bits - torch.frexp(self.approximate()).exponent.to(torch.int64)).clamp_max(largest_exponent)
        mantissa = self.rounded(k, halves_up=not carries)
        if not carries:
            return mantissa.clamp_max(2**bits - 1), k
        carried = mantissa >> bits  # 1 where rounding went up to 2^bits
        return mantissa >> carried, k - carried


_PLAIN = (Tensor, torch.nn.Parameter)


def _nearest(value: Fraction, halves_up: bool) -> int:
    return math.floor(value + Fraction(1, 2)) if halves_up else round(value)


def _quotient(numerators: list[float], denominators: list[float]) -> float:
    """Compute `Ratio.approximate` on Python numbers: the same operations in the same order."""
    value = 1.0
    for factor in numerators:
        value *= factor
    for factor in denominators:
        value /= factor
    return value


def _mantissa(
    numerators: list[float], denominators: list[float], bits: int, largest_exponent: int, carries: bool = True
) -> tuple[int, int] | None:
    """Compute `Ratio.mantissa` on Python numbers; return None if a factor is not positive and finite, or the ratio is extreme."""
    if not all(0 < factor < math.inf for factor in (*numerators, *denominators)):
        return None
    value = _quotient(numerators, denominators)
    if not 2.0**-960 < value < 2.0**960:
        return None
    k = min(bits - math.frexp(value)[1], largest_exponent)
    scaled = math.ldexp(value, k)
    if abs(scaled - math.floor(scaled) - 0.5) <= scaled * 2.0**-48:
        exact = Ratio(*(tuple(torch.tensor(f, dtype=torch.float64, device="cpu") for f in each) for each in (numerators, denominators)))
        mantissa = _nearest(exact.exact()[0] * Fraction(2) ** k, halves_up=not carries)
    else:
        mantissa = round(scaled)
    if not carries:
        return min(mantissa, 2**bits - 1), k
    carried = mantissa >> bits
    return mantissa >> carried, k - carried


# ---- requantization -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedWidths:
    """The widths of *fixed* requantization for one output dtype."""

    intermediate_bits: int  # of the accumulator after the first shift, saturated
    multiplier_bits: int  # of M, unsigned
    first_shift: bool  # whether the accumulator is shifted before it is multiplied
    largest_shift: int = 31

    @property
    def last_shift(self) -> int:
        """The largest last shift of any requantization."""
        return self.largest_shift

    def constants(self, ratio: Ratio, output: IntType, accumulator_bits: int, layer: bool, wide: bool = False) -> FixedRequantization:
        """Return the integers that multiply an accumulator of so many bits by `ratio`, the same whether or not it is a layer's."""
        return fixed_requantization(ratio, self, output, accumulator_bits)

    def aligning(self, ratio: Ratio) -> tuple[Tensor, Tensor]:
        """Return (M, k), int64, that bring an operand to a common scale: ⌊q · M / 2^k⌋, with k of 31 at most."""
        return ratio.mantissa(self.multiplier_bits, largest_exponent=31)


@dataclass(frozen=True)
class MeasuredWidths(FixedWidths):
    """The widths that the compiler of bernoulli2, bayes and bayes-e chooses, for one output dtype (backends/bpu/CHIP.md, section 8).

    The last shift b is the largest that there is, and the remainder of the exponent k is the first shift. A multiplier that
    rounds up to 2^multiplier_bits is one less.
    """

    largest_shift: int = 22
    layer_shift: int = 22  # the largest last shift of a layer with weights, where the product reaches the output's limit by it
    largest_first_shift: int = 15
    wide_first_shift: int = 8  # the least first shift of a layer whose operand has 16 bits

    @property
    def last_shift(self) -> int:
        """The largest last shift of any requantization."""
        return 31

    def constants(self, ratio: Ratio, output: IntType, accumulator_bits: int, layer: bool, wide: bool = False) -> FixedRequantization:
        """Return the integers that multiply an accumulator of so many bits by `ratio`.

        A `layer` with weights may have `layer_shift`; that of a `wide` operand, of 16 bits, has at least `wide_first_shift`.
        """
        if accumulator_bits <= 16:  # a quantized tensor is multiplied as it is
            multiplier, k = ratio.mantissa(self.multiplier_bits, largest_exponent=31, carries=False)
            return self._limited(torch.zeros_like(k), multiplier, k)
        first = max(self.largest_first_shift, accumulator_bits - 17)
        multiplier, k = ratio.mantissa(self.multiplier_bits, largest_exponent=first + self.largest_shift, carries=False)
        last = torch.full_like(k, self.largest_shift)
        if layer and self.layer_shift > self.largest_shift:
            product = ratio.approximate().detach() * power_of_two(k - self.layer_shift) * (2 ** (self.intermediate_bits - 1) - 1)
            last = torch.where(product >= output.high, self.layer_shift, last)
        right_shift = torch.minimum(k, last)
        if wide:
            right_shift = torch.minimum(right_shift, (k - self.wide_first_shift).clamp_min(1))
        return self._limited(k - right_shift, multiplier, right_shift)

    def _limited(self, shift: Tensor, multiplier: Tensor, right_shift: Tensor) -> FixedRequantization:
        overflow = right_shift < 1  # every accumulator but 0 saturates
        return FixedRequantization(
            shift.int(), torch.where(overflow, 2**self.multiplier_bits - 1, multiplier).int(), torch.where(overflow, 1, right_shift).int()
        )


@dataclass(frozen=True)
class FixedRequantization:
    """y = sat(round( sat_t(⌊acc / 2^shift⌋) · multiplier / 2^right_shift )), per channel (int32 tensors)."""

    shift: Tensor
    multiplier: Tensor
    right_shift: Tensor


def fixed_requantization(ratio: Ratio, widths: FixedWidths, output: IntType, accumulator_bits: int = 32) -> FixedRequantization:
    """Return the integers of *fixed* for multiplying an accumulator of so many bits by `ratio` into `output`.

    The multiplier is the nearest M · 2^-k with M of `multiplier_bits` bits. The first shift a is the smallest
    one for which the intermediate, times M · 2^(a-k), still covers the output's limit and a half; the last
    shift is k - a. An accumulator of more than 32 bits always has a first shift. A ratio of 2^(multiplier_bits-1)
    or more takes the largest representable multiplier: every non-zero accumulator saturates either way, so no
    result changes.
    """
    bits = widths.multiplier_bits
    first_shift = widths.first_shift or accumulator_bits > 32
    largest_exponent = 1000 if first_shift else widths.largest_shift
    with torch.no_grad():
        numbers = ratio.numbers()
    found = None if numbers is None else _mantissa(*numbers, bits, largest_exponent)
    if found is not None:
        return _fixed_of_numbers(*found, widths, output, accumulator_bits if first_shift else 0)
    multiplier, k = ratio.mantissa(bits, largest_exponent)
    largest_intermediate = 2 ** (widths.intermediate_bits - 1) - 1
    if first_shift:
        # The largest right shift r with largest_intermediate · M ≥ (high + ½) · 2^r is one of two neighbours.
        least = (largest_intermediate << (bits - 1)) * 2 // (2 * output.high + 1)
        smaller = least.bit_length() - 1
        covers = 2 * largest_intermediate * multiplier >= (2 * output.high + 1) << (smaller + 1)
        shift = (k - smaller - covers.to(torch.int64)).clamp(0, accumulator_bits - 1)
    else:
        shift = torch.zeros_like(k)
    right_shift = k - shift
    overflow = right_shift < 1
    multiplier = torch.where(overflow, 2**bits - 1, multiplier)
    right_shift = torch.where(overflow, 1, right_shift)
    underflow = right_shift > widths.largest_shift  # only where the first shift met its limit: the product rounds to 0
    multiplier = torch.where(underflow, 0, multiplier)
    right_shift = torch.where(underflow, widths.largest_shift, right_shift)
    return FixedRequantization(shift.int(), multiplier.int(), right_shift.int())


def _fixed_of_numbers(multiplier: int, k: int, widths: FixedWidths, output: IntType, shifted_bits: int) -> FixedRequantization:
    """Compute `fixed_requantization` of one mantissa; `shifted_bits` are those of an accumulator with a first shift, else 0."""
    shift, bits = 0, widths.multiplier_bits
    if shifted_bits:
        largest_intermediate = 2 ** (widths.intermediate_bits - 1) - 1
        smaller = ((largest_intermediate << (bits - 1)) * 2 // (2 * output.high + 1)).bit_length() - 1
        covers = 2 * largest_intermediate * multiplier >= (2 * output.high + 1) << (smaller + 1)
        shift = min(max(k - smaller - covers, 0), shifted_bits - 1)
    right_shift = k - shift
    if right_shift < 1:
        multiplier, right_shift = 2**bits - 1, 1
    if right_shift > widths.largest_shift:
        multiplier, right_shift = 0, widths.largest_shift
    return FixedRequantization(*(torch.tensor(each, dtype=torch.int32, device="cpu") for each in (shift, multiplier, right_shift)))


def real_multiplier(ratio: Ratio) -> Tensor:
    """Return the ratio rounded once, half to even, to float32; at most the largest float32, with which every non-zero integer saturates."""
    mantissa, k = ratio.mantissa(24)
    return (mantissa.double() * power_of_two(-k)).clamp_max(LARGEST_FLOAT32).float()


def narrow_multipliers(ratios: Sequence[Ratio]) -> tuple[int, list[Tensor]]:
    """Return (n, [M, …]): the terms of a sum in fractions of 2^-n of a step, M = min(round_half_even(ratio · 2^n), 2^14), int64 scalars.

    n is the largest of 0…14 for which no M but that minimum exceeds 2^14; 0 if there is none. Three times 255 · 2^14 is below 2^24:
    float32 adds two terms of 8 bits and a zero point exactly, in any order.
    """
    for bits in range(NARROW_BITS, -1, -1):
        found = [_limited_multiplier(ratio, bits) for ratio in ratios]
        if bits == 0 or all(int(multiplier) <= LARGEST_NARROW_MULTIPLIER for multiplier in found):
            break
    return bits, [multiplier.clamp_max(LARGEST_NARROW_MULTIPLIER) for multiplier in found]


def _limited_multiplier(ratio: Ratio, bits: int) -> Tensor:
    """Return round_half_even(ratio · 2^bits); where that is much larger than 2^14, some number larger than 2^14."""
    large = float(ratio.approximate()) > 2.0 * LARGEST_NARROW_MULTIPLIER
    exponent = torch.tensor(bits, dtype=torch.int64, device=ratio.numerators[0].device)
    return torch.full_like(exponent, 2 * LARGEST_NARROW_MULTIPLIER) if large else ratio.rounded(exponent)

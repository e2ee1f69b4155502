"""The arithmetic of backends/bpu/ARITHMETIC.md once more, slowly: Python integers and exact fractions.

Nothing here is shared with the implementation, and nothing is computed by torch: a tensor is a nested list,
a float32 or float64 number is the `Fraction` that equals it, or a Python float where the definition says
IEEE float64. Every function follows the numbered section it names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

HALF = Fraction(1, 2)
SCALE_OF_ZEROS = Fraction(1, 2**23)
SMALLEST_SCALE = Fraction(1, 2**48)


# ---- rounding (section 1) -------------------------------------------------------------------------------------------


def half_even(value: Fraction) -> int:
    """The nearest integer, the even one of two that are equally near."""
    below = math.floor(value)
    rest = value - below
    if rest == HALF:
        return below if below % 2 == 0 else below + 1
    return below if rest < HALF else below + 1


def half_up(value: Fraction) -> int:
    """⌊value + ½⌋."""
    return math.floor(value + HALF)


def exponent_of(value: Fraction) -> int:
    """The e with 2^e ≤ |value| < 2^(e+1)."""
    magnitude = abs(value)
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** e > magnitude:
        e -= 1
    while Fraction(2) ** (e + 1) <= magnitude:
        e += 1
    return e


def float32(value: Fraction | int | float) -> Fraction:
    """The IEEE binary32 number nearest to the value, ties to even; its magnitude must be below 2^127."""
    value = Fraction(value)
    if value == 0:
        return value
    step = Fraction(2) ** (max(exponent_of(value), -126) - 23)
    return half_even(value / step) * step


def limited(value: int, low: int, high: int) -> int:
    """The value, or the bound that it exceeds."""
    return low if value < low else high if value > high else value


# ---- scales (section 3) ---------------------------------------------------------------------------------------------


def scale_from_range(low: Fraction, high: Fraction, divisor: Fraction) -> Fraction:
    """max(|low|, |high|) / divisor in float32, at least 2^-48; 2^-23 for zeros."""
    largest = max(abs(low), abs(high))
    return max(float32(largest / divisor), SMALLEST_SCALE) if largest else SCALE_OF_ZEROS


def affine_grid(low: Fraction, high: Fraction) -> tuple[Fraction, int]:
    """(scale, zero point) of uint8 for values in [low, high]: the interval with 0, in 255 float32 steps."""
    low, high = min(low, Fraction(0)), max(high, Fraction(0))
    span = float32(high - low)
    scale = max(float32(span / 255), SMALLEST_SCALE) if span else SCALE_OF_ZEROS
    return scale, limited(half_even(float32(-low / scale)), 0, 255)


def power_of_two_scale(scale: Fraction) -> Fraction:
    """The smallest power of two that is not below the scale."""
    e = exponent_of(scale)
    return Fraction(2) ** e if Fraction(2) ** e == scale else Fraction(2) ** (e + 1)


# ---- boundary (section 4) -------------------------------------------------------------------------------------------


def quantize(x: float, scale: Fraction, low: int, high: int) -> int:
    """The integer of a float32 number."""
    if math.isnan(x):
        return 0
    limit = scale * 2**20
    value = (limit if x > 0 else -limit) if math.isinf(x) else min(max(Fraction(x), -limit), limit)
    return limited(half_even(float32(value / scale)), low, high)


def dequantize(q: int, scale: Fraction) -> Fraction:
    """float32(q) · scale, one float32 product."""
    return float32(float32(q) * scale)


# ---- weights, biases and residuals (sections 5 and 7) ----------------------------------------------------------------


def weight_integer(weight: Fraction, scale: Fraction) -> int:
    """round_half_even of the float32 quotient."""
    return half_even(float32(weight / scale))


def bias_integer(bias: float, input_scale: float, weight_scale: float) -> int:
    """round_half_even of the float64 quotient; Python's floats are IEEE float64."""
    return half_even(Fraction(bias / (input_scale * weight_scale)))


def raised_scale(scale: Fraction, bias: float, input_scale: float) -> Fraction:
    """The weight scale, raised so that the bias integer stays below 2^23."""
    return max(scale, float32(abs(bias) / (input_scale * float(2**23 - 2))))


def residual_multiplier(residual_scale: Fraction, input_scale: Fraction, weight_scale: Fraction) -> int:
    """round_half_even(s_r / (s_x · s_w)), exactly."""
    return half_even(residual_scale / (input_scale * weight_scale))


# ---- requantization (sections 8 and 9) -------------------------------------------------------------------------------


def mantissa(ratio: Fraction, bits: int, largest_exponent: int | None = None) -> tuple[int, int]:
    """(M, k) with ratio ≈ M · 2^-k and M of `bits` bits, fewer where k would exceed `largest_exponent`."""
    k = bits - 1 - exponent_of(ratio)
    if largest_exponent is not None:
        k = min(k, largest_exponent)
    whole = half_even(ratio * Fraction(2) ** k)
    return (2 ** (bits - 1), k - 1) if whole == 2**bits else (whole, k)


@dataclass(frozen=True)
class Widths:
    """The widths of *fixed* for one output dtype."""

    intermediate_bits: int
    multiplier_bits: int
    first_shift: bool
    largest_shift: int = 31


INT8_WIDTHS = Widths(16, 15, True)
INT16_WIDTHS = Widths(32, 21, False, 47)


def fixed_parameters(ratio: Fraction, widths: Widths, high: int, accumulator_bits: int = 32) -> tuple[int, int, int]:
    """(a, M, b) of *fixed* for multiplying by `ratio` into an output whose largest value is `high`."""
    first_shift = widths.first_shift or accumulator_bits > 32
    multiplier, k = mantissa(ratio, widths.multiplier_bits, None if first_shift else widths.largest_shift)
    a = 0
    if first_shift:
        largest = 2 ** (widths.intermediate_bits - 1) - 1
        while a < accumulator_bits - 1 and largest * 2**a * multiplier * Fraction(2) ** -k < high + HALF:
            a += 1
    b = k - a
    if b < 1:
        return a, 2**widths.multiplier_bits - 1, 1
    if b > widths.largest_shift:
        return a, 0, widths.largest_shift
    return a, multiplier, b


def requantize_fixed(accumulator: int, a: int, multiplier: int, b: int, intermediate_bits: int, rounding: str, low: int, high: int) -> int:
    """One accumulator by *fixed*."""
    limit = 2 ** (intermediate_bits - 1)
    t = limited(math.floor(Fraction(accumulator, 2**a)), -limit, limit - 1)
    value = Fraction(t * multiplier, 2**b)
    return limited({"half_up": half_up, "floor": math.floor}[rounding](value), low, high)


def real_multiplier(ratio: Fraction) -> Fraction:
    """The ratio, rounded once to float32."""
    return float32(ratio)


def requantize_real(accumulator: int, multiplier: Fraction, low: int, high: int) -> int:
    """One accumulator by *real*: two float32 roundings, then half to even."""
    return limited(half_even(float32(float32(accumulator) * multiplier)), low, high)


# ---- clamps, addition and tables (sections 10, 11 and 13) ------------------------------------------------------------


def align_fixed(q: int, multiplier: int, shift: int) -> int:
    """⌊q · M / 2^k⌋."""
    return math.floor(Fraction(q * multiplier, 2**shift))


def align_real(q: int, multiplier: Fraction) -> int:
    """round_half_even of one float32 product."""
    return half_even(float32(float32(q) * multiplier))


def add(q: int, r: int, scale: Fraction, other: Fraction, output: Fraction, arithmetic: str, low: int, high: int) -> int:
    """q · scale + r · other on the scale `output`, int8."""
    larger = max(scale, other)
    ratios = scale * 2**14 / larger, other * 2**14 / larger
    step = larger / 2**14 / output
    if arithmetic == "real":
        total = sum(align_real(value, real_multiplier(ratio)) for value, ratio in zip((q, r), ratios, strict=True))
        return requantize_real(total, real_multiplier(step), low, high)
    total = sum(align_fixed(value, *mantissa(ratio, 15, 31)) for value, ratio in zip((q, r), ratios, strict=True))
    return requantize_fixed(total, *fixed_parameters(step, INT8_WIDTHS, 127), 16, "half_up", low, high)


def add_number(q: int, scale: Fraction, number: Fraction, output: Fraction, arithmetic: str, low: int, high: int) -> int:
    """q · scale + number on the scale `output`, of the type of q (section 16)."""
    wide = high > 127
    fraction_bits = 14
    while abs(number) * Fraction(2) ** fraction_bits / scale > (2**29 if wide else 2**22):
        fraction_bits -= 1
    ratio = Fraction(2) ** fraction_bits
    unit = scale / ratio
    held = half_even(abs(number) / unit)
    constant = held if number > 0 else -held
    if arithmetic == "real":
        return requantize_real(align_real(q, real_multiplier(ratio)) + constant, real_multiplier(unit / output), low, high)
    widths = INT16_WIDTHS if wide else INT8_WIDTHS
    total = align_fixed(q, *mantissa(ratio, widths.multiplier_bits, 31)) + constant
    return requantize_fixed(total, *fixed_parameters(unit / output, widths, high), widths.intermediate_bits, "half_up", low, high)


def clamp_bound(value: float | None, scale: float, default: int, low: int, high: int) -> int:
    """⌊value / scale + ½⌋ in float64, saturated."""
    if value is None or math.isinf(value):
        return default
    return limited(math.floor(value / scale + 0.5), low, high)


def table(function: Callable[[float], float], input_scale: float, output_scale: float, inputs: range, low: int, high: int) -> list[int]:
    """The table of a unary function, from the smallest input to the largest."""
    entries = []
    for q in inputs:
        try:
            value = function(q * input_scale) / output_scale
        except OverflowError:
            value = math.inf
        if math.isnan(value):
            entries.append(0)
        elif math.isinf(value):
            entries.append(high if value > 0 else low)
        else:
            entries.append(limited(math.floor(value + 0.5), low, high))
    return entries


# ---- sums of products (section 6) -----------------------------------------------------------------------------------

Nested = list[Any]


def at(values: Any, index: Sequence[int]) -> Any:
    """The element of a nested list."""
    for position in index:
        values = values[position]
    return values


def shape_of(values: Any) -> tuple[int, ...]:
    """The lengths of a nested list."""
    return (len(values), *shape_of(values[0])) if isinstance(values, list) else ()


def every(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index below the sizes, the last one fastest."""
    return itertools.product(*(range(size) for size in sizes))


def nested(sizes: Sequence[int], element: Callable[[tuple[int, ...]], int], index: tuple[int, ...] = ()) -> Any:
    """The nested list whose element at each index is `element(index)`."""
    if len(index) == len(sizes):
        return element(index)
    return [nested(sizes, element, (*index, position)) for position in range(sizes[len(index)])]


def convolution(
    input: Nested, weight: Nested, bias: list[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Nested:  # fmt: skip
    """Σ x·w + bias over every window; what lies outside the input is 0."""
    batch, _, *spatial = shape_of(input)
    outputs, inputs, *kernel = shape_of(weight)
    sizes = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in zip(spatial, padding, dilation, kernel, stride, strict=True)]

    def element(index: tuple[int, ...]) -> int:
        sample, channel, *position = index
        group = channel // (outputs // groups)
        total = 0 if bias is None else bias[channel]
        for tap in every((inputs, *kernel)):
            places = [o * s - p + d * t for o, s, p, d, t in zip(position, stride, padding, dilation, tap[1:], strict=True)]
            if all(0 <= place < size for place, size in zip(places, spatial, strict=True)):
                total += at(input, (sample, group * inputs + tap[0], *places)) * at(weight, (channel, *tap))
        return total

    return nested((batch, outputs, *sizes), element)


def linear(rows: list[list[int]], weight: list[list[int]], bias: list[int] | None) -> list[list[int]]:
    """x · wᵀ + bias, row by row."""
    offsets = [0] * len(weight) if bias is None else bias
    return [[sum(x * w for x, w in zip(row, column, strict=True)) + b for column, b in zip(weight, offsets, strict=True)] for row in rows]


def split(value: int, bits: int) -> tuple[int, int]:
    """(high, low) with value = high · 2^bits + low and -2^(bits-1) ≤ low < 2^(bits-1)."""
    low = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return (value - low) // 2**bits, low


# ---- pooling (sections 14 and 15) -----------------------------------------------------------------------------------


def window_starts(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> list[int]:
    """Where each window starts, counted from the first element of the input; at least one window must exist.

    The windows that fit into the padded input; with `ceil_mode` also one that starts within the input or the
    padding before it and reaches beyond the padding after it.
    """
    extent = dilation * (kernel - 1) + 1
    starts = []
    for start in itertools.count(-padding, stride):
        fits = start + extent <= size + padding
        reaches = ceil_mode and start < size and start - stride + extent < size + padding
        if not (fits or reaches):
            return starts
        starts.append(start)
    raise AssertionError


def max_pool(
    input: Nested, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool
) -> Nested:
    """The maximum of the elements of the input in each window."""
    batch, channels, *spatial = shape_of(input)
    starts = [window_starts(*row, ceil_mode) for row in zip(spatial, kernel, stride, padding, dilation, strict=True)]

    def element(index: tuple[int, ...]) -> int:
        first = [along[position] for along, position in zip(starts, index[2:], strict=True)]
        taps = ([f + d * t for f, d, t in zip(first, dilation, tap, strict=True)] for tap in every(kernel))
        inside = (places for places in taps if all(0 <= place < size for place, size in zip(places, spatial, strict=True)))
        return max(at(input, (*index[:2], *places)) for places in inside)

    return nested((batch, channels, *(len(along) for along in starts)), element)


def sum_pool(input: Nested, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool) -> Nested:
    """The sum of the elements of the input in each window."""
    batch, channels, *spatial = shape_of(input)
    starts = [window_starts(size, k, s, p, 1, ceil_mode) for size, k, s, p in zip(spatial, kernel, stride, padding, strict=True)]

    def element(index: tuple[int, ...]) -> int:
        first = [along[position] for along, position in zip(starts, index[2:], strict=True)]
        places = itertools.product(*(range(max(f, 0), min(f + k, size)) for f, k, size in zip(first, kernel, spatial, strict=True)))
        return sum(at(input, (*index[:2], *place)) for place in places)

    return nested((batch, channels, *(len(along) for along in starts)), element)


def window_counts(
    spatial: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool, include_padding: bool
) -> Nested:
    """How many elements the mean of each window divides by."""
    starts = [window_starts(size, k, s, p, 1, ceil_mode) for size, k, s, p in zip(spatial, kernel, stride, padding, strict=True)]

    def element(index: tuple[int, ...]) -> int:
        count = 1
        for along, position, size, k, p in zip(starts, index, spatial, kernel, padding, strict=True):
            low, high = (-p, size + p) if include_padding else (0, size)
            count *= len([place for place in range(along[position], along[position] + k) if low <= place < high])
        return count

    return nested([len(along) for along in starts], element)

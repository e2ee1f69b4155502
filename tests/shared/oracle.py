"""The arithmetic of backends/bpu/ARITHMETIC.md and of CHIP.md once more, slowly: Python integers and exact fractions.

Nothing here is shared with the implementation, and nothing is computed by torch: a tensor is a nested list or an
array of Python's numbers, a float32 or float64 number is the `Fraction` that equals it, or a Python float where the definition says
IEEE float64. Every function follows the numbered section it names.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

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


def half_away(value: Fraction) -> int:
    """The nearest integer, the one farther from 0 of two that are equally near."""
    return half_up(value) if value >= 0 else -half_up(-value)


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


def raised_scale(scale: Fraction, bias: float, input_scale: float, limit: int = 2**23) -> Fraction:
    """The weight scale, raised so that the bias integer stays below the limit."""
    return max(scale, float32(abs(bias) / (input_scale * float(limit - limit // 2**22))))


def measured_bias(bias: float, step: Fraction) -> int:
    """The bias in steps of the sum, a float64 quotient, halves away from zero."""
    return half_away(Fraction(bias / float(step)))


def lifted_bias(bias: int, step: Fraction, output_scale: Fraction, bias_bits: int = 32) -> int:
    """The bias with half a step of the output in it, below 2^30; where it has few bits, its last ones are 0, rounded towards zero."""
    whole = limited(bias + half_away(Fraction(float(output_scale) / (2 * float(step)))), 1 - 2**30, 2**30 - 1)
    if bias_bits == 32:
        return whole
    shift = 0
    while not -(2 ** (bias_bits - 1)) <= whole >> shift < 2 ** (bias_bits - 1):
        shift += 1
    return int(math.copysign(abs(whole) >> shift << shift, whole))


def residual_term(residual: int, residual_scale: Fraction, step: Fraction) -> int:
    """⌊r · E / 2^n⌋, of a multiplier of 15 bits; n may be negative."""
    multiplier, n = measured_mantissa(residual_scale / step, 31)
    return math.floor(residual * multiplier / Fraction(2) ** n)


def residual_multiplier(residual_scale: Fraction, input_scale: Fraction, weight_scale: Fraction) -> int:
    """round_half_even(s_r / (s_x · s_w)), exactly."""
    return half_even(residual_scale / (input_scale * weight_scale))


# ---- requantization (sections 8 and 9) -------------------------------------------------------------------------------
@functools.cache
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


@functools.cache
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
    half = 0
    if rounding in ("half_step", "nearest_half_step") and multiplier:
        step = Fraction(2 ** (a + b - 1), multiplier)
        half = min(math.floor(step) if rounding == "half_step" else half_up(step), 2**31)
    t = limited(math.floor(Fraction(accumulator + half, 2**a)), -limit, limit - 1)
    value = Fraction(t * multiplier, 2**b)
    whole = {"half_up": half_up, "half_even": half_even, "half_away": half_away}.get(rounding, math.floor)(value)
    return limited(whole, low, high)


@functools.cache
def measured_mantissa(ratio: Fraction, largest_exponent: int | None = None) -> tuple[int, int]:
    """(M, k) with ratio ≈ M · 2^-k and M of 15 bits, at most 2^15 - 1: rounding never changes k, and ties round up."""
    k = 14 - exponent_of(ratio)
    k = k if largest_exponent is None else min(k, largest_exponent)
    return min(half_up(ratio * Fraction(2) ** k), 2**15 - 1), k


@functools.cache
def measured_parameters(
    ratio: Fraction, bits: int, accumulator_bits: int = 32, layer: bool = False, wide: bool = False
) -> tuple[int, int, int]:
    """(a, M, b) of the measured targets, for an output of 8 or 16 bits: b is the largest there is, and a is k - b.

    In a layer of a `wide` operand, of 16 bits, a is 8 at least, as far as b stays 1 at least.
    """
    if accumulator_bits <= 16:
        multiplier, b = measured_mantissa(ratio, 31)
        return (0, 2**15 - 1, 1) if b < 1 else (0, multiplier, b)
    largest = 14 if bits == 16 else 22
    first = max(31 if bits == 16 else 15, accumulator_bits - 17)
    multiplier, k = measured_mantissa(ratio, largest + first)
    if layer:  # the product of a layer exceeds the limit of its output: of 16 bits, that of a power of two does not
        high, least = (2**15 - 1, 14) if bits == 16 else (127, 23)
        largest = least if ratio * Fraction(2) ** (k - least) * (2**15 - 1) > high else least - 1
    b = min(k, largest, max(k - 8, 1)) if wide else min(k, largest)
    b = max(b, k - (first if layer or accumulator_bits > 32 else 17))
    return (k - b, 2**15 - 1, 1) if b < 1 else (k - b, multiplier, b)


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


def add(q: int, r: int, scale: Fraction, other: Fraction, output: Fraction, rules: Rules, low: int, high: int) -> int:
    """q · scale + r · other on the scale `output`, int8."""
    to = Grid(output, low, high, 8)
    return added(q, r, replace(to, scale=scale), replace(to, scale=other), to, rules)


def clamp_bound(value: float | None, scale: float, default: int, low: int, high: int) -> int:
    """⌊f32(value) / scale + ½⌋ in float64, saturated."""
    if value is None or math.isinf(value):
        return default
    return limited(math.floor(float(float32(value)) / scale + 0.5), low, high)


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


def measured_table(function: Callable[[float], float], input_scale: Fraction, to: Grid, inputs: range) -> list[int]:
    """The table of a unary function by float32 numbers: of its operand, its value, and the quotient by the output's scale."""
    entries = []
    for q in inputs:
        try:
            value = function(float(float32(q * input_scale)))
        except OverflowError:
            value = math.inf
        if math.isnan(value):
            entries.append(to.low)
        elif abs(value) >= 2.0**126:
            entries.append(to.high if value > 0 else to.low)
        else:
            entries.append(limited(half_away(float32(float32(value) / to.scale)), to.low, to.high))
    return entries


# ---- sums of products (section 6) -----------------------------------------------------------------------------------
Nested = list[Any]


def at(values: Any, index: Sequence[int]) -> Any:
    """The element of a nested list."""
    for position in index:
        values = values[position]
    return values


def shape_of(values: Any) -> tuple[int, ...]:
    """The lengths of a nested list, or of an array."""
    return np.shape(values)


def every(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index below the sizes, the last one fastest."""
    return itertools.product(*(range(size) for size in sizes))


def nested(sizes: Sequence[int], element: Callable[[tuple[int, ...]], int], index: tuple[int, ...] = ()) -> Any:
    """The nested list whose element at each index is `element(index)`."""
    if len(index) == len(sizes):
        return element(index)
    return [nested(sizes, element, (*index, position)) for position in range(sizes[len(index)])]


Array = Any  # of Python's integers and exact fractions: numpy's indexing, and no arithmetic of its own
ITEMS = slice(None), slice(None)  # and channels


def array(values: Nested) -> Array:
    return np.array(values, dtype=object)


def taps(
    x: Array, kernel: Sequence[int], stride: Sequence[int], begin: Sequence[int], end: Sequence[int], dilation: Any, fill: Any
) -> Array:
    """The elements of every window, in a last dimension of their own."""
    padded = np.pad(x, [(0, 0), (0, 0), *zip(begin, end, strict=True)], constant_values=array(fill))  # not of NumPy's integers
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(padded.shape[2:], kernel, stride, dilation, strict=True)]
    windows = []
    for tap in itertools.product(*map(range, kernel)):
        axes = [slice(t * d, t * d + s * (count - 1) + 1, s) for t, d, s, count in zip(tap, dilation, stride, counts, strict=True)]
        windows.append(padded[ITEMS + tuple(axes)])
    return np.stack(windows, -1)


def plus(total: Array, bias: Any) -> Array:
    return total if bias is None else total + bias


def convolution(x: Array, weight: Array, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, cut: Any = None) -> Array:
    windows = taps(x, weight.shape[2:], stride, padding[: len(stride)], padding[-len(stride) :], dilation, 0)
    parts = zip(np.split(windows, groups, 1), np.split(weight.reshape(*weight.shape[:2], -1), groups), strict=True)
    result = [np.moveaxis(np.tensordot(window, factors, ((1, -1), (1, 2))), -1, 1) for window, factors in parts]
    return plus(np.concatenate(result, 1), None if bias is None else bias.reshape(-1, *[1] * len(stride)))


def transposed(x: Array, weight: Array, bias: Any, stride: Any, padding: Any, more: Any, dilation: Any, groups: int, *cut: Any) -> Array:
    """Add each element times the kernel at the kernel's positions; positions in the padding are dropped."""
    outputs, rank = weight.shape[1] * groups, len(stride)
    sizes = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(x.shape[2:], stride, dilation, weight.shape[2:], strict=True)]
    filled = np.full((len(x), outputs, *(n + m for n, m in zip(sizes, more, strict=True))), 0, dtype=object)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        factors = weight[ITEMS + tap].reshape(groups, -1, weight.shape[1])
        parts = zip(np.split(x, groups, 1), factors, strict=True)
        sums = np.concatenate([np.moveaxis(np.tensordot(part, factor, (1, 0)), -1, 1) for part, factor in parts], 1)
        axes = [slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilation, x.shape[2:], stride, strict=True)]
        filled[ITEMS + tuple(axes)] += sums
    kept = [slice(p, n - p + m) for p, n, m in zip(padding, sizes, more, strict=True)]
    return plus(filled[ITEMS + tuple(kept)], None if bias is None else bias.reshape(-1, *[1] * rank))


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


# ---- whole operators (sections 6 to 16, and 20) -----------------------------------------------------------------------
@dataclass(frozen=True)
class Grid:
    """The grid of a tensor's centred integers: their scale, their range, and the bits of their type.

    An integer q of an affine type is q - z here (section 20); [low, high] is [-z, 255 - z].
    """

    scale: Fraction
    low: int
    high: int
    bits: int

    @property
    def magnitude(self) -> int:
        return max(-self.low, self.high)

    @property
    def wide(self) -> bool:
        return self.bits == 16


@dataclass(frozen=True)
class Rules:
    """A column of section 17."""

    arithmetic: str  # "fixed" or "real"
    rounding: str = "half_up"  # the last one of *fixed*
    resize_bits: int = 16
    power_of_two_weights: bool = False
    per_channel: bool = True
    weight_bits: int = 8
    in_output_steps: bool = False  # whether 8-bit tensors are added as section 21 says, residuals among them
    measured: bool = False  # as the vendor's compiler computes: bernoulli2, bayes, bayes-e
    by_layers: bool = False  # bernoulli2: sums of 6 bits that round down, changes of scale and means as layers, biases of 16 bits

    @property
    def bias_bits(self) -> int:
        return 16 if self.by_layers else 32

    def product_step(self, scale: Fraction, other: Fraction) -> Fraction:
        """The step of a product of integers on two scales."""
        return float32(scale * other) if self.measured else scale * other

    def last_rounding(self, kind: str) -> str:
        """That of an accumulator: a "layer", a "wide layer" of 16 bits, a "matrix" product of two, a "sum", a "product", or a "value"."""
        if not self.measured:
            return self.rounding
        if kind.endswith("layer") or (self.by_layers and kind == "sum"):
            return "floor"
        return "nearest_half_step" if self.by_layers and kind == "product" else "half_up"

    @property
    def largest_weight(self) -> int:
        return 2 ** (self.weight_bits - 1) - 1


Clamp = tuple[float | None, float | None]


def limits(to: Grid, clamp: Clamp | None, rules: Rules, kind: str = "value") -> tuple[int, int]:
    """[low, high] of an output with a fused clamp; measured targets drop some bounds."""
    if clamp is None:
        return to.low, to.high
    low, high = (clamp_bound(bound, float(to.scale), end, to.low, to.high) for bound, end in zip(clamp, (to.low, to.high), strict=True))
    if rules.measured and kind.endswith("layer") and clamp[0] == 0:
        return low, to.high
    if rules.measured and low <= -to.high and high >= to.high:
        return to.low, to.high
    return low, high


def requantized(
    accumulator: int, step: Fraction, to: Grid, rules: Rules, clamp: Clamp | None = None, accumulator_bits: int = 32, kind: str = "value"
) -> int:
    """An accumulator with this step on a grid."""
    low, high = limits(to, clamp, rules, kind)
    if rules.arithmetic == "real":
        return requantize_real(accumulator, real_multiplier(step / to.scale), low, high)
    rounding = rules.last_rounding(kind)
    if rules.measured and to.bits >= 8:
        layer = kind in ("layer", "wide layer", "matrix")
        a, multiplier, b = measured_parameters(ratio := step / to.scale, to.bits, accumulator_bits, layer, kind == "wide layer")
        if kind in ("sum", "product") and not rules.by_layers:
            doubles = to.wide and ratio == Fraction(2) ** exponent_of(ratio)  # 2^14 becomes 2^15
            multiplier, b = (2**15 - 2, b + 1) if doubles else (min(multiplier, 2**15 - 2), b)
        return requantize_fixed(accumulator, a, multiplier, b, 16, rounding, low, high)
    widths = INT16_WIDTHS if to.wide else INT8_WIDTHS
    parameters = fixed_parameters(step / to.scale, widths, 2 ** (to.bits - 1) - 1, max(accumulator_bits, 32))
    return requantize_fixed(accumulator, *parameters, widths.intermediate_bits, rounding, low, high)


def bits_of_sum(largest: int) -> int:
    """Return the bits of the accumulator (32 or 48) of a matrix product whose sums reach at most `largest`."""
    return 32 if largest < 2**31 else 48


def aligned(q: int, ratio: Fraction, on: Grid, rules: Rules) -> int:
    """q on a scale that is `ratio` times finer."""
    if rules.arithmetic == "real":
        return align_real(q, real_multiplier(ratio))
    return align_fixed(q, *mantissa(ratio, 21 if on.wide and not rules.measured else 15, 31))


def layer_of(x: Grid) -> str:
    """The kind of a layer's accumulator."""
    return "wide layer" if x.wide else "layer"


def uniform(terms: Sequence[int], value: Fraction, bias: Fraction, x: Grid, to: Grid, rules: Rules, clamp: Clamp | None = None) -> int:
    """value · Σ terms + bias as a layer with one weight, ±127 on the number's own scale."""
    scale = max(float32(float32(abs(value)) / 127), SMALLEST_SCALE)
    step = rules.product_step(x.scale, scale)
    lifted = lifted_bias(measured_bias(float(float32(bias)), step), step, to.scale, rules.bias_bits)
    return requantized((127 if value > 0 else -127) * sum(terms) + lifted, step, to, rules, clamp, kind=layer_of(x))


def averaged(terms: Sequence[int], count: int, x: Grid, to: Grid, rules: Rules, window: bool = False, image: bool = False) -> int:
    """The mean of these integers; `window` if it is that of a pool over two dimensions, whose windows have a size of their own.

    `image` if it is that of a whole image, whose first shift rounds half up on measured targets.
    """
    if rules.measured and not x.wide and (window or rules.by_layers):
        return uniform(terms, Fraction(1, count), Fraction(0), x, to, rules)
    half = 0
    if rules.measured and image and not x.wide:
        ratio = x.scale / count / to.scale
        shift = (
            measured_parameters(ratio, to.bits)[0] if to.bits >= 8 else fixed_parameters(ratio, INT8_WIDTHS, 2 ** (to.bits - 1) - 1, 32)[0]
        )
        half = 2 ** (shift - 1) if shift else 0
    return requantized(sum(terms) + half, x.scale / count, to, rules)


def times_number(q: int, number: Fraction, x: Grid, to: Grid, rules: Rules) -> int:
    """number · q."""
    if rules.measured:
        return uniform([q], number, Fraction(0), x, to, rules)
    return requantized(q if number > 0 else -q, x.scale * abs(number), to, rules)


def added(q: int, r: int, x: Grid, y: Grid, to: Grid, rules: Rules, alpha: Fraction = Fraction(1), clamp: Clamp | None = None) -> int:
    """q + alpha · r, elements of tensors of images of one shape."""
    steps = x.scale, y.scale * abs(alpha)
    narrow = max(x.bits, y.bits, to.bits) <= 8
    if rules.in_output_steps and narrow:
        return added_in_output_steps(q, r if alpha > 0 else -r, [step / to.scale for step in steps], *limits(to, clamp, rules))
    by_layer = alpha != 1 or Fraction(1, 128) <= x.scale / y.scale <= 256
    if rules.measured and narrow and (by_layer if rules.by_layers else abs(alpha) != 1):
        return scaled_sum(q, r, x, y, to, rules, alpha, clamp)
    if rules.measured:
        terms = Term(q, steps[0], x.wide), Term(r if alpha > 0 else -r, steps[1], y.wide, subtracted=alpha < 0)
        return shifted_sum(terms, to, rules, clamp)
    unit = max(steps) / 2**14
    one, other = (aligned(value, step / unit, on, rules) for value, step, on in zip((q, r), steps, (x, y), strict=True))
    return requantized(one + other if alpha > 0 else one - other, unit, to, rules, clamp)


@dataclass(frozen=True)
class Term:
    """An operand of a sum: its integer with its sign, the value of a step, whether it has 16 bits; and of a tensor its sign."""

    integer: int
    step: Fraction
    wide: bool
    subtracted: bool = False


def shifted_sum(terms: Sequence[Term], to: Grid, rules: Rules, clamp: Clamp | None) -> int:
    """x · 2^n + e · E, x the term of the larger step."""
    x, e = sorted(terms, key=lambda term: -term.step)
    ratio = e.step / x.step
    n = 6 if rules.by_layers else measured_mantissa(ratio, 15 if x.wide else 23)[1]
    n -= not rules.by_layers and ratio * 2**n > 2**15 - 1
    if (e.wide or x.wide) and not to.wide and not rules.by_layers:
        n = min(13 - exponent_of(ratio), 14 if x.wide else 22)
    total, unit = x.integer * 2**n + e.integer * min(half_even(ratio * 2**n), 2**15 - 1), x.step / 2**n
    if x.subtracted:
        total += 2 ** measured_parameters(unit / to.scale, to.bits)[0] - 1
    return requantized(total, unit, to, rules, clamp, kind="sum")


def scaled_sum(q: int, r: int, x: Grid, y: Grid, to: Grid, rules: Rules, alpha: Fraction, clamp: Clamp | None) -> int:
    """q + alpha · r: a layer of r with the weight alpha, to whose accumulator q is added."""
    scale = max(float32(float32(abs(alpha)) / 127), SMALLEST_SCALE)
    step = rules.product_step(y.scale, scale)
    total = (127 if alpha > 0 else -127) * r + lifted_bias(0, step, to.scale, rules.bias_bits)
    total += q * half_even(x.scale / step) if rules.by_layers else residual_term(q, x.scale, step)
    return requantized(total, step, to, rules, clamp, kind="layer")


def smaller(q: int, r: int, x: Grid, y: Grid, to: Grid, rules: Rules) -> int:
    """The smaller of two numbers, found on the output's grid; on measured targets on that of the larger scale."""
    if not rules.measured:
        return min(rescaled(q, x, to, rules), rescaled(r, y, to, rules))
    coarse = y if y.scale > x.scale else x

    def brought(value: int, on: Grid, other: Grid) -> int:
        return value if on == other else requantized(value, on.scale, other, rules, accumulator_bits=on.bits)

    return brought(min(brought(q, x, coarse), brought(r, y, coarse)), coarse, to)


def added_number(q: int, number: Fraction, x: Grid, to: Grid, rules: Rules, factor: Fraction = Fraction(1)) -> int:
    """factor · q + number."""
    if not rules.measured:
        return added_constant(q, number, number, x, to, rules, factor)
    if rules.by_layers:
        return uniform([q], factor, number, x, to, rules)
    tensor = Term(q if factor > 0 else -q, x.scale * abs(factor), x.wide, subtracted=factor < 0)
    held = Term(127 if number > 0 else -127, float32(float32(abs(number)) / 127), False)
    return shifted_sum((tensor, held), to, rules, None)


def added_in_output_steps(q: int, r: int, ratios: list[Fraction], low: int, high: int) -> int:
    """q · ratios[0] + r · ratios[1], in fractions of a step (section 21)."""
    fitting = [n for n in range(15) if all(half_even(ratio * 2**n) <= 2**14 for ratio in ratios)]
    n = max(fitting, default=0)
    one, other = (min(half_even(ratio * 2**n), 2**14) for ratio in ratios)
    return limited(half_even(Fraction(q * one + r * other, 2**n)), low, high)


def added_constant(
    q: int, constant: Fraction, largest: Fraction, x: Grid, to: Grid, rules: Rules,
    factor: Fraction = Fraction(1), clamp: Clamp | None = None,
) -> int:  # fmt: skip
    """factor · q + constant, an element of a tensor whose largest magnitude is |largest|."""
    if rules.measured and abs(factor) == 1 and (to.wide or not x.wide):  # a tensor of its own scale
        scale = max(float32(abs(largest) / (2**15 - 1 if to.wide else 127)), SMALLEST_SCALE)
        held = Term(weight_integer(constant, scale), scale, to.wide)
        return shifted_sum((Term(q if factor > 0 else -q, x.scale, x.wide, subtracted=factor < 0), held), to, rules, clamp)
    step, n = x.scale * abs(factor), 14
    while abs(largest) * Fraction(2) ** n / step > (2**29 if x.wide else 2**22):
        n -= 1
    unit = step / Fraction(2) ** n
    held = half_even(abs(constant) / unit)
    term = aligned(q, Fraction(2) ** n, x, rules)
    return requantized((term if factor > 0 else -term) + (held if constant > 0 else -held), unit, to, rules, clamp)


def prelu(q: int, slope: Fraction, steepest: Fraction, x: Grid, to: Grid, rules: Rules) -> int:
    """max(q, 0) + slope · min(q, 0); `steepest` is the largest magnitude of all slopes."""
    if rules.by_layers and not x.wide:
        return by_slope(q, slope, x, to, rules, in_a_byte=True)
    if rules.measured:
        return prelu_by_sign(q, slope, steepest, x, to, rules)
    reach = x.magnitude * max(Fraction(1), steepest)

    def largest(limit: int) -> int:
        n = 40
        while reach * Fraction(2) ** n >= limit:
            n -= 1
        return n

    n = largest(2**30) if x.wide or largest(2**23) < 0 else largest(2**23)
    return requantized(2**n * max(q, 0) + half_even(slope * 2**n) * min(q, 0), x.scale / 2**n, to, rules)


def prelu_by_sign(q: int, slope: Fraction, steepest: Fraction, x: Grid, to: Grid, rules: Rules) -> int:
    """q, or q · A on the operand's grid where it is negative, brought to the output's."""
    unit = max(float32(float32(steepest) / 32767), SMALLEST_SCALE)
    multiplier = limited(half_even(Fraction(float(slope) / float(unit))), -32767, 32767)
    chosen = q if q >= 0 else requantized(q * multiplier, rules.product_step(x.scale, unit), x, rules)
    return requantized(chosen, x.scale, to, rules, accumulator_bits=x.bits)


def by_slope(q: int, slope: Fraction, x: Grid, to: Grid, rules: Rules, in_a_byte: bool) -> int:
    """q, or q · A / 2^7 on the operand's grid where it is negative; `in_a_byte` if what is added to q has 8 bits, as of a prelu."""
    n = 6 if in_a_byte and 2**7 - half_even(slope * 2**7) > 127 else 7
    multiplier = half_even(slope * 2**n)
    value = Fraction(q * multiplier, 2**n)
    below = half_away(value) if in_a_byte and multiplier > 2**n else half_up(value)
    if in_a_byte:
        below = min(below, q + 127)
    return rescaled(q if q >= 0 else limited(below, x.low, x.high), x, to, rules)


def rescaled(q: int, x: Grid, to: Grid, rules: Rules) -> int:
    """Return the number on another grid; on the same one the same integer."""
    if x == to:
        return q
    if rules.by_layers:
        return uniform([q], Fraction(1), Fraction(0), x, to, rules)
    return requantized(q, x.scale, to, rules, accumulator_bits=x.bits)


def resized_nearest(input: Nested, sizes: Sequence[int]) -> Nested:
    """The element at ⌊i · in / out⌋ in every dimension after the channels."""
    batch, channels, *spatial = shape_of(input)
    return nested(
        (batch, channels, *sizes),
        lambda index: at(input, (*index[:2], *(i * old // new for i, old, new in zip(index[2:], spatial, sizes, strict=True)))),
    )


def resize_row(position: int, old: int, new: int, align_corners: bool, bits: int) -> list[tuple[int, int]]:
    """(element, weight in steps of 2^-bits) of the one or two elements between which an output lies."""
    if align_corners:
        source = Fraction(position * (old - 1), max(new - 1, 1))
    else:
        source = max((position + HALF) * Fraction(old, new) - HALF, Fraction(0))
    first = math.floor(source)
    if first >= old - 1:
        return [(old - 1, 2**bits)]
    share = source - first
    smaller = half_up(min(share, 1 - share) * 2**bits)
    second = smaller if share <= HALF else 2**bits - smaller
    return [(first, 2**bits - second), (first + 1, second)]


def stepped_row(position: int, old: int, new: int, align_corners: bool, bits: int) -> list[tuple[int, int]]:
    """(element, weight in steps of 2^-8) between which an output lies, by places in steps of 2^-bits, rounded down."""
    if align_corners:
        place = position * math.floor(Fraction((old - 1) * 2**bits, max(new - 1, 1)))
    else:
        step = math.floor(Fraction(old * 2**bits, new))
        place = position * step + math.floor(Fraction(step - 2**bits, 2))
    place = limited(place, 0, (old - 1) * 2**bits)
    first, fraction = divmod(place, 2**bits)
    second = math.floor(Fraction(fraction, 2 ** (bits - 8)))
    return [(first, 256 - second), (min(first + 1, old - 1), second)]


def resized_by_steps(input: Nested, sizes: Sequence[int], align_corners: bool, rules: Rules) -> Nested:
    """Two taps along each dimension of an image, rounded once; or down along the columns, and down again along the rows."""
    batch, channels, *spatial = shape_of(input)

    def element(index: tuple[int, ...]) -> int:
        down, across = (
            stepped_row(i, old, new, align_corners, rules.resize_bits) for i, old, new in zip(index[2:], spatial, sizes, strict=True)
        )
        sums = [(weight, sum(w * at(input, (*index[:2], row, column)) for column, w in across)) for row, weight in down]
        if rules.by_layers:
            return math.floor(Fraction(sum(weight * math.floor(Fraction(total, 256)) for weight, total in sums), 256))
        return half_up(Fraction(sum(weight * total for weight, total in sums), 2**16))

    return nested((batch, channels, *sizes), element)


def resized_linear(input: Nested, sizes: Sequence[int], align_corners: bool, rules: Rules) -> Nested:
    """Fixed-point weights along every dimension after the channels, and one rounding."""
    if rules.measured:
        return resized_by_steps(input, sizes, align_corners, rules)
    batch, channels, *spatial = shape_of(input)
    bits = rules.resize_bits

    def element(index: tuple[int, ...]) -> int:
        rows = [resize_row(i, old, new, align_corners, bits) for i, old, new in zip(index[2:], spatial, sizes, strict=True)]
        total = 0
        for taps in itertools.product(*rows):
            total += math.prod(weight for _, weight in taps) * at(input, (*index[:2], *(place for place, _ in taps)))
        return half_up(Fraction(total, 2 ** (bits * len(sizes))))

    return nested((batch, channels, *sizes), element)


def cubic_row(position: int, old: int, new: int, bits: int) -> list[tuple[int, int]]:
    """(element, weight in steps of 2^-bits) of the four elements that bicubic interpolation joins; their weights sum to 2^bits."""
    source = (position + HALF) * Fraction(old, new) - HALF
    first = math.floor(source)
    exact: dict[int, Fraction] = {}
    for place in range(first - 1, first + 3):
        x = abs(source - place)
        near = (Fraction(5, 4) * x - Fraction(9, 4)) * x * x + 1
        far = Fraction(-3, 4) * x**3 + Fraction(15, 4) * x**2 - 6 * x + 3
        inside = min(max(place, 0), old - 1)
        exact[inside] = exact.get(inside, Fraction(0)) + (near if x <= 1 else far)
    whole = {place: half_up(weight * 2**bits) for place, weight in exact.items()}
    whole[max(whole, key=lambda place: whole[place])] += 2**bits - sum(whole.values())
    return list(whole.items())


def resized_cubic(input: Nested, sizes: Sequence[int], x: Grid, to: Grid, rules: Rules) -> Nested:
    """Fixed-point weights along both dimensions of an image, and one requantization: 46 bits hold the sum, which may double twice."""
    batch, channels, *spatial = shape_of(input)
    bits = min(rules.resize_bits, (46 - (x.bits - 1) - 2) // 2)
    axes = [[cubic_row(i, old, new, bits) for i in range(new)] for old, new in zip(spatial, sizes, strict=True)]
    largest = x.magnitude * math.prod(max(sum(abs(w) for _, w in row) for row in rows) for rows in axes)

    def element(index: tuple[int, ...]) -> int:
        taps = itertools.product(*(rows[i] for rows, i in zip(axes, index[2:], strict=True)))
        total = sum(math.prod(w for _, w in tap) * at(input, (*index[:2], *(place for place, _ in tap))) for tap in taps)
        return requantized(total, x.scale / 2 ** (2 * bits), to, rules, None, 32 if largest < 2**31 else 48)

    return nested((batch, channels, *sizes), element)


def adaptive_windows(old: int, new: int) -> list[range]:
    """The elements of each window of adaptive pooling."""
    return [range(i * old // new, -(-(i + 1) * old // new)) for i in range(new)]


def read_between(plane: list[list[int]], x: int, y: int, bits: int) -> int:
    """A plane at (x, y), in steps of 2^-bits of a pixel; 0 outside of the plane."""
    (left, right), (top, down) = divmod(x, 2**bits), divmod(y, 2**bits)
    total = 0
    for row, column in itertools.product((0, 1), (0, 1)):
        if 0 <= top + row < len(plane) and 0 <= left + column < len(plane[0]):
            weight = (down if row else 2**bits - down) * (right if column else 2**bits - right)
            total += weight * plane[top + row][left + column]
    return half_up(Fraction(total, 2 ** (2 * bits)))


def sampled(input: Nested, grid: Nested, x: Grid, y: Grid, rules: Rules) -> Nested:
    """Planes read at a grid of (N, 2, H, W) whose -1 and 1 are the outer edges: requantized to 16 bits of 2^-8 pixels about the middle."""
    height, width = shape_of(input)[2:]
    fine = Grid(Fraction(1, 256), -(2**15), 2**15 - 1, 16)

    def position(q: int, size: int) -> int:
        return requantized(q, y.scale * Fraction(size, 2), fine, rules) + (size - 1) * 128

    return [
        [
            [
                [read_between(plane, position(u, width), position(v, height), 8) for u, v in zip(*pair, strict=True)]
                for pair in zip(*where, strict=True)
            ]
            for plane in sample
        ]
        for sample, where in zip(input, grid, strict=True)
    ]


@dataclass(frozen=True)
class Layer:
    """The integers of a layer of section 6: weight and bias, and each channel's weight scale."""

    weight: Nested
    bias: list[int]
    scales: list[Fraction]


def layer(weight: Nested, bias: list[float], x: Grid, rules: Rules) -> Layer:
    """Real weights, with the output channels first, and biases as integers."""
    flat = [[at(channel, index) for index in every(shape_of(channel))] for channel in weight]
    largest = [max(abs(Fraction(w)) for w in channel) for channel in flat]
    offsets = [abs(b) for b in bias]
    if not rules.per_channel:
        largest, offsets = [max(largest)] * len(flat), [max(offsets)] * len(flat)
    limit = 2**46 if rules.weight_bits == 16 else 2**30 if x.wide else 2**23
    scales = [
        raised_scale(scale_from_range(-top, top, Fraction(rules.largest_weight)), b, float(x.scale), limit)
        for top, b in zip(largest, offsets, strict=True)
    ]
    if rules.measured:
        scales = [float32(float32(127 * scale) / 127) for scale in scales]
    if rules.power_of_two_weights:
        scales = [power_of_two_scale(scale) for scale in scales]
    integers = [
        nested(shape_of(channel), lambda index, channel=channel, s=s: weight_integer(Fraction(at(channel, index)), s))  # type: ignore[misc]
        for channel, s in zip(weight, scales, strict=True)
    ]
    if rules.measured:
        biases = [measured_bias(b, rules.product_step(x.scale, s)) for b, s in zip(bias, scales, strict=True)]
    else:
        biases = [bias_integer(b, float(x.scale), float(s)) for b, s in zip(bias, scales, strict=True)]
    return Layer(integers, biases, scales)


def finished(
    sums: Nested, integers: Layer, x: Grid, to: Grid, rules: Rules,
    clamp: Clamp | None = None, residual: tuple[Nested, Grid] | None = None, channels: int = 1, transposed: bool = False,
) -> Nested:  # fmt: skip
    """The sums of a layer, whose channels are that dimension, requantized, with a residual in the accumulator or after it."""
    bias_bits = 16 if transposed else rules.bias_bits
    bits = 48 if rules.weight_bits == 16 else 32
    steps = [rules.product_step(x.scale, scale) for scale in integers.scales]
    inner = replace(to, low=-128, high=127, bits=8) if to.bits == 4 else to
    multipliers = [0] * len(steps)
    fused, shifted = False, rules.measured and not rules.by_layers
    if residual is not None:  # B is far below A for layers of a few elements
        multipliers = [half_even(residual[1].scale / step) for step in steps]
        if shifted:
            fused = max(x.bits, residual[1].bits, to.bits) <= 8
        else:
            least = 1 if rules.by_layers else 16 if residual[1].bits == 4 else 256
            fused = not (rules.in_output_steps and to.bits <= 8) and min(multipliers) >= least

    def lift(channel: int, on: Grid) -> int:
        """Return the addition to the bias for an output on a grid."""
        own = integers.bias[channel]
        return lifted_bias(own, steps[channel], on.scale, bias_bits) - own if rules.measured else 0

    def element(index: tuple[int, ...]) -> int:
        total, channel = at(sums, index), index[channels]
        step = steps[channel]
        if residual is not None and not fused:
            between = requantized(total + lift(channel, inner), step, inner, rules, None, bits, layer_of(x))
            return added(between, at(residual[0], index), inner, residual[1], to, rules, clamp=clamp)
        if residual is not None:
            r = at(residual[0], index)
            total += residual_term(r, residual[1].scale, step) if shifted else r * multipliers[channel]
        return requantized(total + lift(channel, to), step, to, rules, clamp, bits, layer_of(x))

    return nested(shape_of(sums), element)


def each(function: Callable[..., int], *tensors: Nested) -> Nested:
    """A function of the elements at each place of tensors of one shape."""
    return nested(shape_of(tensors[0]), lambda index: function(*(at(tensor, index) for tensor in tensors)))


# ---- layers that are quantized at run time (section 22) -------------------------------------------------------------------
def considered(value: float) -> Fraction:
    """Return a float32 number within ±2^126; NaN and tiny numbers are 0."""
    if math.isnan(value) or abs(value) < 2.0**-110:
        return Fraction(0)
    return Fraction(max(-(2.0**126), min(2.0**126, value)))


def dynamic_linear(rows: Sequence[Sequence[float]], weight: Any, scales: Sequence[Fraction], bias: Any) -> list[list[Fraction]]:
    """The results of all rows, which have one grid together."""
    values = [[considered(value) for value in row] for row in rows]
    low = min(Fraction(0), *(value for row in values for value in row))
    high = max(Fraction(0), *(value for row in values for value in row))
    scale = float32(float32(high - low) / 255) if high != low else Fraction(1)
    zero = half_even(Fraction(limited(-float32(low / scale), 0, 255)))  # type: ignore[arg-type, type-var]
    collected = []
    for row in values:
        centred = [limited(half_even(float32(value / scale)) + zero, 0, 255) - zero for value in row]
        sums = [sum(c * w for c, w in zip(centred, channel, strict=True)) for channel in weight]
        products = [float32(float32(total) * float32(scale * step)) for total, step in zip(sums, scales, strict=True)]
        collected.append(products if bias is None else [float32(one + added) for one, added in zip(products, bias, strict=True)])
    return collected

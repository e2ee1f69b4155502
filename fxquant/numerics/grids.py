"""Integer types, scales, and the exact arithmetic of requantization parameters.

Nothing here knows graphs or modules. Every function is exact in the sense of its docstring; the
definitions are those of backends/bpu/ARITHMETIC.md, and the slow oracle in tests/shared/oracle.py holds them.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.support import Offers

FLOAT32_EPSILON = 2.0**-23  # the scale of what is zero everywhere
SMALLEST_SCALE = 2.0**-48  # of anything else: products and ratios of a few scales stay normal float32 numbers
FLOAT32_EXACT = 2**24  # integers of smaller magnitude, and sums that stay below, are exact in float32
SMALLEST_NORMAL = 2.0**-126  # below it float32 numbers have fewer bits
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
INT32_MAX = 2**31 - 1
INT48_MAX = 2**47 - 1
SMALLEST_DYNAMIC, LARGEST_DYNAMIC = 2.0**-110, 2.0**126  # the magnitudes that a grid which is made at run time distinguishes
LARGEST_PAIR = 128  # times 255 it is below 2^15
BOUNDARY_LIMIT = 2.0**20  # inputs are clipped to ±2^20 steps: far outside every dtype here, and safe to convert

Interval = tuple[float, float]
EVERYTHING: Interval = (-math.inf, math.inf)


@dataclass(frozen=True)
class IntType:
    """A range of integers and the torch dtype that stores it."""

    name: str
    low: int
    high: int
    storage: torch.dtype

    @property
    def affine(self) -> bool:
        """Whether its integers have a zero point: it has no negative ones."""
        return self.low == 0

    @property
    def divisor(self) -> float:
        """The divisor that turns the largest magnitude into the scale: half the number of steps."""
        return (self.high - self.low) / 2

    @property
    def magnitude(self) -> int:
        """The largest absolute value."""
        return max(-self.low, self.high)

    @property
    def bits(self) -> int:
        """Its width, the sign included where it has one."""
        return self.high.bit_length() + (self.low < 0)

    def __str__(self) -> str:
        return self.name


INT4 = IntType("int4", -8, 7, torch.int8)
INT8 = IntType("int8", -128, 127, torch.int8)
UINT8 = IntType("uint8", 0, 255, torch.uint8)
INT16 = IntType("int16", -32768, 32767, torch.int16)
INT32 = IntType("int32", -(2**31), INT32_MAX, torch.int32)
WEIGHT_INT4 = IntType("int4", -7, 7, torch.int8)
WEIGHT_INT8 = IntType("int8", -127, 127, torch.int8)
WEIGHT_INT16 = IntType("int16", -32767, 32767, torch.int16)

ACTIVATION_TYPES: Mapping[str, IntType] = {t.name: t for t in (INT4, INT8, UINT8, INT16, INT32)}
PLAIN_TYPES: Mapping[str, torch.dtype] = {"bool": torch.bool, "int64": torch.int64}  # of results that are not quantized tensors
WEIGHT_TYPES: Mapping[str, IntType] = {t.name: t for t in (WEIGHT_INT4, WEIGHT_INT8, WEIGHT_INT16)}


def float32(value: float) -> float:
    """Return the nearest float32; infinite beyond the largest one.

    A sum, product or quotient of two float32 numbers that is rounded like this is PyTorch's.
    """
    return ctypes.c_float(value).value


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid of a tensor's integers: their type, scale and zero point.

    type         the range of the stored integers q
    scale        float32, a scalar; for a 32-bit output one number per channel, shaped to broadcast
    zero_point   the integer q of 0.0; it is 0 unless the type is affine

    The value of q is (q - zero_point) · scale. Arithmetic uses the *centred* integers c = q - zero_point; `low`, `high` and `magnitude`
    are the limits of c.
    """

    type: IntType
    scale: Tensor
    zero_point: int = 0

    @property
    def low(self) -> int:
        """The smallest centred integer."""
        return self.type.low - self.zero_point

    @property
    def high(self) -> int:
        """The largest centred integer."""
        return self.type.high - self.zero_point

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest centred integer."""
        return self.low, self.high

    @property
    def magnitude(self) -> int:
        """The largest absolute value of a centred integer."""
        return max(-self.low, self.high)

    def quantize(self, value: Tensor) -> Tensor:
        """Return the centred integers of a float tensor, as float32: clip(round_half_even(x / scale), low, high); NaN gives 0."""
        return quantized_value(value, self.scale, self.low, self.high)

    def dequantize(self, centred: Tensor) -> Tensor:
        """Return the dequantized tensor of centred integers in a float tensor: c · scale. Never -0.0, which no integer stands for."""
        real: Tensor = centred * self.scale
        return real.add_(0.0)

    def bound(self, value: float | None, default: int) -> int:
        """Return the centred integer of a clamp's bound, as `clamp_bound` says."""
        return clamp_bound(value, float(self.scale), default, self)

    def equals(self, other: Grid) -> bool:
        """Return whether type, zero point and scale are equal."""
        return self is other or (self.type == other.type and self.zero_point == other.zero_point and bool(self.scale == other.scale))


def quantized_value(input: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Return clip(round_half_even(x / scale), low, high) as float32, by IEEE float32 division; NaN gives 0."""
    limit = scale * BOUNDARY_LIMIT
    x = torch.nan_to_num(input.float(), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return torch.clamp(x, -limit, limit).div_(scale).round_().clamp_(low, high)


def grid_from_range(low: Tensor, high: Tensor, dtype: IntType, on_steps: tuple[bool, bool] = (False, False)) -> tuple[Tensor, Tensor]:
    """Return (scale, zero point), float32 and int64, of an affine type for values in [low, high]: PyTorch's formula.

    The interval is widened to hold 0. scale = (high - low) / (dtype.high - dtype.low), one float32 subtraction and one division,
    at least 2^-48, and 2^-23 where all values are zero; zero_point = clamp(round_half_even(-low / scale), dtype.low, dtype.high).
    Where the rounded zero point leaves an end beyond the last step, and `on_steps` wants that end on a step, the scale becomes longer.
    """
    low, high = low.float().clamp_max(0.0), high.float().clamp_min(0.0)
    steps = torch.tensor(float(dtype.high - dtype.low), dtype=torch.float32, device=low.device)
    span = (high - low).clamp_max(LARGEST_FLOAT32)
    scale = torch.where(span > 0, (span / steps).clamp_min(SMALLEST_SCALE), FLOAT32_EPSILON)
    zero_point = torch.round(-low / scale).clamp(dtype.low, dtype.high)
    for needed, end, steps in zip(on_steps, (-low, high), (zero_point - dtype.low, dtype.high - zero_point), strict=True):
        scale = end_on_step(scale, end, steps) if needed else scale
    return scale, zero_point.to(torch.int64)


def grid_of_numbers(low: float, high: float, dtype: IntType, on_steps: tuple[bool, bool]) -> tuple[float, int]:
    """Compute `grid_from_range` on Python numbers that are float32: the same operations in the same order, each rounded to float32."""
    low, high = min(low, 0.0), max(high, 0.0)
    span = min(float32(high - low), LARGEST_FLOAT32)
    scale = max(float32(span / (dtype.high - dtype.low)), SMALLEST_SCALE) if span > 0 else FLOAT32_EPSILON
    zero_point = min(max(round(float32(-low / scale)), dtype.low), dtype.high)
    for needed, end, steps in zip(on_steps, (-low, high), (zero_point - dtype.low, dtype.high - zero_point), strict=True):
        if needed and steps > 0 and float32(steps * scale) < end < float32((steps + 1) * scale):
            scale = max(float32(end / steps), SMALLEST_SCALE)
    return scale, zero_point


def end_on_step(scale: Tensor, end: Tensor, steps: Tensor | int) -> Tensor:
    """Return the scale, float32, with which `end` is exactly `steps` steps from 0, if it is less than one step beyond; else `scale`."""
    steps = torch.as_tensor(steps, dtype=torch.float32, device=scale.device)
    beyond = (steps > 0) & (end > steps * scale) & (end < (steps + 1) * scale)  # without a step on its side an end is on none
    return torch.where(beyond, (end.float() / steps).clamp_min(SMALLEST_SCALE), scale)


def scale_from_range(low: Tensor, high: Tensor, dtype: IntType) -> Tensor:
    """Return the float32 scale of a tensor whose values lie in [low, high]: max(|low|, |high|) / dtype.divisor.

    This is the one function that computes a scale, for observing, training and converting. The scale is at least 2^-48, so that
    a division by it is always finite; it is 2^-23 where all values are zero, and NaN where one is NaN.
    """
    largest = torch.maximum(low.abs(), high.abs()).float()
    # A tensor divisor: dividing by a Python number may become a product with its reciprocal.
    scale = (largest / torch.tensor(dtype.divisor, dtype=torch.float32, device=largest.device)).clamp_min(SMALLEST_SCALE)
    # The lowest integer is further from 0 than the divisor, and finite too; an infinite scale stays infinite, since callers check for it.
    scale = torch.where(torch.isinf(scale), scale, scale.clamp_max(LARGEST_FLOAT32 / dtype.magnitude))
    return torch.where(largest == 0, FLOAT32_EPSILON, scale)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is not below the scale, of its shape and dtype; NaN for NaN."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent)).where(scale == scale, scale)


def is_scale(value: float) -> bool:
    """Return whether a number can be a scale: as a float32 it is positive, finite, and has all its bits."""
    return SMALLEST_NORMAL <= value <= LARGEST_FLOAT32


def scale_from_threshold(threshold: float, dtype: IntType) -> float:
    """Return the scale fixed by a threshold: threshold / 128 for int8 and uint8, threshold / 32768 for int16."""
    return threshold / ((dtype.high - dtype.low + 1) // 2)


def to_float32(value: Any) -> Any:
    """Return a float, or each float of a tuple, rounded to float32, as PyTorch passes it to functions of float32; others unchanged."""
    if isinstance(value, tuple):
        return tuple(to_float32(item) for item in value)
    return ctypes.c_float(value).value if isinstance(value, float) else value


def round_half_up(value: float) -> int:
    """Return ⌊value + ½⌋, the rounding of tables and clamp bounds."""
    return math.floor(value + 0.5)


def round_away(value: Tensor) -> Tensor:
    """Return the nearest integers, halves away from zero, in the dtype of `value`."""
    below_half = 0.5 - torch.finfo(value.dtype).eps / 4  # by which only a half and more reaches the next integer, as sums are rounded
    return torch.full_like(value, below_half).copysign_(value).add_(value).trunc_()


def clamp_bound(value: float | None, scale: float, default: int, limits: IntType | Grid) -> int:
    """Return the integer bound ⌊f32(value)/scale + ½⌋ of a clamp, limited to the range of the dtype; `default` if `value` is None."""
    if value is None:
        return default
    if math.isinf(value):
        return limits.high if value > 0 else limits.low
    return min(max(round_half_up(to_float32(value) / scale), limits.low), limits.high)


def ends_of(value: Tensor) -> tuple[float, float]:
    """Return the least and the largest element of a tensor; 0 and 0 for a tensor without elements, as from an empty batch."""
    low, high = torch.aminmax(value.detach()) if value.numel() else (0.0, 0.0)
    return float(low), float(high)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent as float64, exactly, for integer exponents in [-1022, 1023] (built from the bits; pow is not exact)."""
    if torch._C._get_tracing_state() is not None:  # TorchScript cannot see one dtype's bits as another's
        powers = torch.tensor([2.0**power for power in range(-1022, 1024)], dtype=torch.float64, device=exponent.device)
        return powers.take(exponent.to(torch.int64) + 1022)
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def weight_scale(weight: Tensor, axis: int | None, dtype: IntType) -> Tensor:
    """Return the scale of a weight per index of `axis` (or one for the whole tensor): max |w| / dtype.divisor, float32, shape (C,)."""
    flat = weight.detach().flatten().unsqueeze(0) if axis is None else weight.detach().movedim(axis, 0).flatten(1)
    largest = flat.abs().amax(dim=1)
    return scale_from_range(-largest, largest, dtype)


def largest_pairs(weight: Tensor) -> Tensor:
    """Return the largest |sum| of two neighbours of one sign in each row of a weight (C, …), shape (C,); a row has the channels last.

    Where a kernel adds products 2j and 2j + 1 of a row with bytes in 16 bits, it must not exceed `LARGEST_PAIR`; two signs always fit.
    """
    rows = weight.detach().movedim(1, -1).flatten(1)
    pairs = F.pad(rows, (0, rows.shape[1] % 2)).reshape(len(rows), -1, 2)
    return torch.maximum(pairs.clamp_min(0).sum(2), pairs.clamp_max(0).sum(2).neg()).amax(1)


def scale_for_pairs(pairs: Tensor, scale: Tensor) -> Tensor:
    """Return scales, (C,) or (1,), raised until the integers of the `largest_pairs` fit, however each weight is rounded."""
    fitting = pairs / torch.tensor(LARGEST_PAIR - 1, dtype=torch.float32, device=pairs.device)
    return torch.maximum(scale, fitting if scale.numel() > 1 else fitting.max())


def least_error_scale(weight: Tensor, axis: int | None, dtype: IntType, p: float = 2.0, power_of_two: bool = False) -> Tensor:
    """Return the scale with which the weight's integers have the least Σ |error|^p, per index of `axis` (or one), float32, shape (C,).

    The 24 candidates are evenly spaced fractions of `weight_scale`, from that down to a quarter of it; of powers of two, that scale
    rounded up, its half and its quarter.
    """
    largest = weight_scale(weight, axis, dtype)
    flat = weight.detach().reshape(1, -1) if axis is None else weight.detach().movedim(axis, 0).flatten(1)
    fractions = [1 - 0.75 * step / 24 for step in range(24)]
    if power_of_two:
        largest, fractions = round_up_to_power_of_two(largest), [1.0, 0.5, 0.25]
    best, least = largest, torch.full_like(largest, math.inf)
    for fraction in fractions:
        scale = (largest * fraction).clamp_min(SMALLEST_SCALE)
        column = scale.unsqueeze(1)
        distance = torch.round(flat / column).clamp_(dtype.low, dtype.high).mul_(column) - flat
        error = (distance.square_() if p == 2 else distance.abs_().pow_(p)).sum(dim=1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def bias_limit(input: IntType, weight: IntType) -> int:
    """Return the limit that a bias integer stays below, so that it leaves room in the accumulator.

    2^23 for an int8 operand, where sums are best below 2^24; half of the accumulator, 2^30 of 32 bits and 2^46
    of the 48 that int16 weights have, where a step is so small that ordinary biases are large numbers of them.
    """
    return 2**46 if weight.bits > 8 else 2**23 if input.bits <= 8 else 2**30


def least_scale_for_bias(bias: Tensor, input_scale: Tensor, limit: int = 2**23) -> Tensor:
    """Return the smallest weight scales for which |round(bias / (input_scale · scale))| < limit, float32, of the bias's shape.

    Only a channel whose weights are tiny compared to its bias has a smaller one (a dead channel after folding).
    """
    return (bias.detach().double().abs() / (input_scale.detach().double() * (limit - limit // 2**22))).float()


def least_scale_for_residual(residual_scale: Tensor, magnitude: int, input_scale: Tensor, limit: int) -> Tensor:
    """Return the smallest weight scale for which a residual of this magnitude stays below `limit`, float32; at most 2^-23.

    The limit is in steps of input_scale · scale. Only a channel whose weights are tiny compared to the residual has a smaller scale; it
    would keep the whole layer from adding its residual.
    """
    needed = residual_scale.detach().double() * magnitude / (input_scale.detach().double() * limit)
    return needed.float().clamp_max(FLOAT32_EPSILON)


def bias_integers(bias: Tensor, input_scale: Tensor, scale: Tensor) -> Tensor:
    """Return the integers round_half_even(bias / (input_scale · scale)), as float64."""
    return torch.round(bias.double() / (input_scale.double() * scale.double()))


def table(
    function: Callable[[float], float] | None, input: Grid, output: Grid, on_tensors: Callable[[Tensor], Tensor] | None = None,
    has_none: Callable[[Tensor], Tensor] | None = None, points: Tensor | None = None, in_float32: bool = False,
) -> Tensor:  # fmt: skip
    """Return the table of a unary function: entry c - input.low is clip(⌊f(c · s_in) / s_out + ½⌋), of centred integers.

    Or, `in_float32`, clip(round_away(f32(f32(f(f32(c · s_in))) / s_out))), with f rounded once to float32; the lowest integer for NaN.

    Its dtype is the output's storage, or int16 where that is affine. `function` is evaluated in float64, element by element, by
    Python's `math`; the result is stored and never computed again. A value that is not finite saturates; NaN becomes 0.

    `on_tensors` is the same function on float64 tensors, good to 2^-32. It saves time: `function` then decides
    only the entries that lie within 2^-30 of a tie or are not finite; where it is None, `on_tensors` decides all.
    """
    input_scale, output_scale = float(input.scale), float(output.scale)
    storage = torch.int16 if output.type.affine else output.type.storage
    if points is None:
        points = torch.arange(input.low, input.high + 1, dtype=torch.float64, device="cpu")
    x = points * input_scale
    if in_float32:
        values = _values(function, (points.float() * input.scale.cpu()).double(), on_tensors)
        integers = round_away(values.float() / output.scale.cpu())
        integers = torch.where(torch.isnan(integers), float(output.low), integers.clamp(output.low, output.high))
        return integers.to(storage)
    if on_tensors is None:
        entries = [_table_entry(function, number, output_scale, output) for number in x.tolist()]
        return torch.tensor(entries, dtype=storage, device="cpu")
    value = on_tensors(x) / output_scale + 0.5
    doubtful = ~torch.isfinite(value) | ((value - torch.round(value)).abs() <= value.abs().clamp_min(1) * 2.0**-30)
    result = torch.nan_to_num(torch.floor(value)).clamp(output.low, output.high).to(storage)
    saturated = torch.isfinite(value) & (value.abs() > 2 * output.magnitude)
    asked = doubtful & ~saturated & (function is not None)
    if has_none is not None:
        without = has_none(x)
        result[without] = 0
        asked &= ~without
    places = torch.nonzero(asked).flatten()
    entries = [_table_entry(function, number, output_scale, output) for number in x[places].tolist()]
    result[places] = torch.tensor(entries, dtype=storage, device="cpu")
    return result


def _values(function: Callable[[float], float] | None, x: Tensor, on_tensors: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return a function's values in float64, by Python's `math` where few are asked for."""
    if on_tensors is not None and (function is None or x.numel() > 2**10):
        return on_tensors(x)
    return torch.tensor([_value(function, number) for number in x.tolist()], dtype=torch.float64, device="cpu")


def _value(function: Callable[[float], float] | None, x: float) -> float:
    assert function is not None
    try:
        return function(x)
    except OverflowError:
        return math.inf


def _table_entry(function: Callable[[float], float] | None, x: float, output_scale: float, output: Grid) -> int:
    value = _value(function, x) / output_scale
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return output.high if value > 0 else output.low
    return min(max(round_half_up(value), output.low), output.high)


# ---- Functions of 16 bits by segments: six tables between two straight lines ------------------------------------------
PLACES, TABLES, LAST, STEP = 256, 6, 63, 256  # distances between places; tables; the last entry of each; positions between two entries
LEAST, OVERFLOW = 1e-6, 2.0**31  # the least operand of a function with a pole; the steps from which an entry becomes the lowest integer


@dataclass(frozen=True)
class Segments:
    """A unary function as a chip evaluates it to find the segments that replace it."""

    function: Callable[[Tensor], Tensor]  # of float32 tensors, rounding to float32 as the chip's compiler does
    parity: int = 0  # 1 for an even function and -1 for an odd one, which are computed of magnitudes
    bends: Interval = EVERYTHING  # outside of it, it is a straight line
    pole: Callable[[Tensor], Tensor] | None = None  # returns the operand at which it reaches a value, if it is infinite at 0


def evenly(start: Tensor, stop: Tensor, parts: int) -> Tensor:
    """Return parts + 1 float32 numbers from `start` to `stop` in a new last dimension, at even distances rounded to float32."""
    distance = ((stop - start) / parts).unsqueeze(-1)
    numbers = start.unsqueeze(-1) + torch.arange(parts + 1, dtype=torch.float32, device="cpu") * distance
    numbers[..., -1] = stop
    return numbers


def _knots(form: Segments, first: Tensor, last: Tensor) -> Tensor:
    """Return the ends of the tables, 7 float32 numbers: from one to the next the slope changes by a sixth of its whole change."""
    places = evenly(first, last, PLACES)
    changes = form.function(places).diff(n=2).abs().double().cumsum(0).float()
    reached = torch.searchsorted(changes / changes[-1], torch.arange(1, TABLES, device="cpu") / TABLES) + 2
    ends = [0, *(min(place, PLACES) for place in reached.tolist()), PLACES]
    at = places[ends].tolist()
    knots, before = at[:1], 0
    while before < TABLES:  # tables that would end at one place share what is before it
        after = max(index for index, end in enumerate(ends) if end == ends[before + 1])
        distance = float32(float32(at[after] - at[before]) / (after - before))
        knots += [*(float32(at[before] + float32(index * distance)) for index in range(1, after - before)), at[after]]
        before = after
    return torch.tensor(knots, dtype=torch.float32, device="cpu")


def _in_short(slope: float, offset: float) -> tuple[int, int, int]:
    """Return v = (q · multiplier + (bias << left)) / 2^right for v = slope · q + offset: multiplier and bias of 16 bits."""
    slope, offset = (number if math.isfinite(number) else 0.0 for number in (slope, offset))
    right = min(max(15 - math.frexp(slope)[1], 0), 16) if slope else 15
    multiplier = _short(slope * 2.0**right)
    shifts = math.frexp(offset * 2.0**right)[1] - 15
    lowered = min(max(shifts - 15, 0), right)
    multiplier, right = multiplier >> lowered, right - lowered
    left = min(max(shifts - lowered, 0), 15)
    return multiplier, _short(offset * 2.0 ** (right - left)) << left, right


def _short(value: float) -> int:
    """Return the nearest integer, halves away from zero, within ±32767."""
    return int(math.copysign(min(math.floor(abs(value) + 0.5), 32767), value))


def wraps(form: Segments, scale: Tensor, step: Tensor) -> bool:
    """Return whether an entry at the end of the operand's range has too many steps, so that the chip stores the lowest integer."""
    return form.pole is None and bool(form.function(32767 * scale.float().cpu()) / step.float().cpu() >= OVERFLOW)


def by_segments(form: Segments, scale: Tensor, output: Grid, integers: Tensor) -> Tensor:
    """Return the integers of a unary function of int16 integers, int64, on a scale, in the output's storage, by the chip's segments."""
    scale, step = scale.cpu(), output.scale.cpu()
    low, high = (end * scale for end in (0.0 if form.parity else -32768.0, 32767.0))
    first, last = low.clamp_min(form.bends[0]), high.clamp_max(form.bends[1])
    if form.pole is not None:
        low, first = torch.full_like(low, LEAST), form.pole(output.high * step).clamp_min(LEAST)
    knots = _knots(form, first, last)
    points = evenly(knots[:-1], knots[1:], LAST)
    real = form.function(points) / step
    entries = round_away(real).nan_to_num(0).clamp(output.low, output.high).masked_fill(real >= OVERFLOW, output.low).long()
    # The straight lines, each through two points: those of the first and of the last entries, or of the ends of what lies outside.
    below, above = torch.stack([low, first]), torch.stack([last, high])
    of_low, *of_at = form.function(torch.stack([low, first, last])).tolist()
    back = torch.stack([knots[-1] - (knots[-1] - knots[-2]) / LAST, knots[-1]])
    ends = points[0, :2] if low >= first or math.isnan(of_low) else below, back if high <= last else above
    two = torch.stack(ends)
    slopes = torch.diff(form.function(two))[:, 0] / torch.diff(two)[:, 0]
    at = torch.stack([first, last])
    outer = slopes / step * scale, (torch.tensor(of_at, dtype=torch.float32, device="cpu") - slopes * at) / step
    per_table = torch.full_like(knots[1:], STEP * LAST) / torch.diff(knots)  # a number over a tensor would be rounded twice
    inner = per_table * scale, -knots[:-1] * per_table
    (first_slope, last_slope), (first_offset, last_offset), *tables = (numbers.tolist() for numbers in (*outer, *inner))
    lines = [(first_slope, first_offset), *zip(*tables, strict=True), (last_slope, last_offset)]
    short = torch.tensor([_in_short(*line) for line in lines], dtype=torch.int64, device="cpu")
    starts = round_away(knots / scale).long()
    kernels = OFFERS.first(integers) if bool((starts.diff() >= 0).all()) else None
    evaluate = _evaluate if kernels is None else kernels.segments
    return evaluate(integers, Lines(starts, short, entries, form.parity, *output.bounds)).to(output.type.storage)


class Lines(NamedTuple):
    """The constants of a function of 16 bits by segments: 7 integers cut its range into 8 segments, and the inner six have tables."""

    starts: Tensor  # int64 of shape (7,): where a line starts, except the first
    lines: Tensor  # int64 of shape (8, 3): multiplier, bias and right shift of each
    entries: Tensor  # int64 of shape (6, 64): the tables
    parity: int  # of the function: 1, -1, or 0 for neither
    low: int  # low, high: the limits of the result
    high: int


def _evaluate(integers: Tensor, lines: Lines) -> Tensor:
    """Return the function's integers of a tensor of int16 integers, int64."""
    multiplier, bias, right = lines.lines.unbind(1)
    place = integers.abs().clamp_max(32767) if lines.parity else integers
    segment = torch.searchsorted(lines.starts, place)
    value = place * multiplier[segment] + bias[segment]
    value = (value + ((1 << right[segment]) >> 1)) >> right[segment]
    position = value.clamp(0, STEP * LAST)
    entry = (position // STEP).clamp_max(LAST - 1)
    beyond, row = position - STEP * entry, (segment - 1).clamp(0, TABLES - 1)
    between = (lines.entries[row, entry] * (STEP - beyond) + lines.entries[row, entry + 1] * beyond + STEP // 2) // STEP
    result = torch.where((segment == 0) | (segment == TABLES + 1), value, between).clamp(lines.low, lines.high)
    signed = torch.where(integers < 0, lines.parity * result, result) if lines.parity else result
    return signed.clamp(lines.low, lines.high)


def accumulator_bound(weight: Tensor, bias: Tensor | None, axis: int, input_magnitude: int) -> Tensor:
    """Return the largest |accumulator| any input can cause, per output channel: Σ|w| · max|x| + |bias| (float64, exact below 2^53).

    The bound covers every partial sum in any order, hence every blocking and thread count.
    """
    bound = weight.detach().double().abs().movedim(axis, 0).flatten(1).sum(dim=1) * input_magnitude
    return bound if bias is None else bound + bias.detach().double().abs()


def bits_of(bound: float) -> int:
    """Return the bits of a signed integer that holds every value of magnitude up to `bound`."""
    return int(bound).bit_length() + 1


# ---- Rescale: exact ratios of scales, and the multipliers and shifts that *fixed*, *real* and narrow sums make of them ----
NARROW_BITS = 14  # of a step, in the sums of ARITHMETIC.md, section 21
LARGEST_NARROW_MULTIPLIER = 2**NARROW_BITS


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
        above, below = (map(Tensor.double, factors) for factors in (self.numerators, self.denominators))
        return reduce(torch.div, below, reduce(torch.mul, above))

    @cached_property
    def detached(self) -> Tensor:
        """Return the same without gradients; it is computed once."""
        return self.approximate().detach()

    def exact(self) -> list[Fraction]:
        """Return the ratio of every element, in order of the broadcast shape, as exact fractions. Slow."""
        factors = torch.broadcast_tensors(*(f.detach().double().cpu() for f in self.numerators + self.denominators))  # type: ignore[no-untyped-call]
        rows = zip(*(f.flatten().tolist() for f in factors), strict=True)
        above = len(self.numerators)
        both = ((map(Fraction, row[:above]), map(Fraction, row[above:])) for row in rows)
        return [math.prod(above_line, start=Fraction(1)) / math.prod(below, start=Fraction(1)) for above_line, below in both]

    def rounded(self, exponent: Tensor, halves_up: bool = False) -> Tensor:
        """Return the integers round_half_even(ratio · 2^exponent), exactly, as int64; `halves_up` rounds ties up.

        Computed in float64; an element so near a tie that the few roundings on the way could decide it is
        computed again with fractions. Requires results below 2^31.
        """
        approximate = self.detached * power_of_two(exponent)
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
        kernels = OFFERS.first(self.detached)
        pair = None if kernels is None else kernels.mantissas(self.detached, bits, largest_exponent, carries)
        if pair is not None:
            return pair  # type: ignore[no-any-return]
        k = (bits - torch.frexp(self.detached).exponent.to(torch.int64)).clamp_max(largest_exponent)
        mantissa = self.rounded(k, halves_up=not carries)
        if not carries:
            return mantissa.clamp_max(2**bits - 1), k
        carried = mantissa >> bits  # 1 where rounding went up to 2^bits
        return mantissa >> carried, k - carried


OFFERS = Offers[Any]()  # kernels of a backend, for a tensor of float64 ratios or int64 integers
_PLAIN = (Tensor, torch.nn.Parameter)


def _nearest(value: Fraction, halves_up: bool) -> int:
    return math.floor(value + Fraction(1, 2)) if halves_up else round(value)


def _quotient(numerators: list[float], denominators: list[float]) -> float:
    """Compute `Ratio.approximate` on Python numbers: the same operations in the same order."""
    return reduce(operator.truediv, denominators, math.prod(numerators, start=1.0))


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
        """Return the shifts and the multiplier that multiply an accumulator of `accumulator_bits` bits by `ratio`, layer or not."""
        return fixed_requantization(ratio, self, output, accumulator_bits)

    def aligning(self, ratio: Ratio) -> tuple[Tensor, Tensor]:
        """Return (M, k), int64, that bring an operand to a common scale: ⌊q · M / 2^k⌋, with k of 31 at most."""
        return ratio.mantissa(self.multiplier_bits, largest_exponent=31)

    def limited(self, shift: Tensor, multiplier: Tensor, right_shift: Tensor) -> FixedRequantization:
        """Return the shifts and the multiplier as given; where the last shift is below 1, the largest multiplier and a last shift of 1."""
        overflow = right_shift < 1  # every accumulator but 0 saturates
        multiplier = torch.where(overflow, 2**self.multiplier_bits - 1, multiplier)
        return FixedRequantization(shift.int(), multiplier.int(), right_shift.clamp_min(1).int())


@dataclass(frozen=True)
class MeasuredWidths(FixedWidths):
    """The widths that the compiler of bernoulli2, bayes and bayes-e chooses, for one output dtype (backends/bpu/CHIP.md, section 8).

    The last shift b is the largest that there is, and the remainder of the exponent k is the first shift. A multiplier that
    rounds up to 2^multiplier_bits is one less.
    """

    largest_shift: int = 22
    layer_shift: int = 22  # that of a layer with weights, where the product exceeds the output's limit by it; else one less
    largest_first_shift: int = 15
    wide_first_shift: int = 8  # the least first shift of a layer whose operand has 16 bits

    @property
    def last_shift(self) -> int:
        """The largest last shift of any requantization."""
        return 31

    def constants(self, ratio: Ratio, output: IntType, accumulator_bits: int, layer: bool, wide: bool = False) -> FixedRequantization:
        """Return the shifts and the multiplier that multiply an accumulator of `accumulator_bits` bits by `ratio`.

        A `layer` with weights may have `layer_shift`; one with a `wide` operand, int16, has at least `wide_first_shift`.
        """
        first = max(self.largest_first_shift, accumulator_bits - 17)
        largest = 31 if accumulator_bits <= 16 else first + self.largest_shift
        most = first if layer or accumulator_bits > 32 else 17  # the first shift: 15 of 32 bits are left
        limits = self.layer_shift if layer else 0, self.wide_first_shift if wide else 0, most
        if (constants := _by_kernel(ratio, self, largest, output, max(accumulator_bits - 16, 0), limits)) is not None:
            return constants
        if accumulator_bits <= 16:  # a quantized tensor is multiplied without a first shift
            multiplier, k = ratio.mantissa(self.multiplier_bits, largest, carries=False)
            return self.limited(torch.zeros_like(k), multiplier, k)
        multiplier, k = ratio.mantissa(self.multiplier_bits, largest, carries=False)
        last = torch.full_like(k, self.largest_shift)
        if layer:
            product = ratio.detached * power_of_two(k - self.layer_shift) * (2 ** (self.intermediate_bits - 1) - 1)
            last = torch.where(product > output.high, self.layer_shift, self.layer_shift - 1)
        right_shift = torch.minimum(k, last)
        right_shift = torch.maximum(right_shift, k - most)
        if wide:
            right_shift = torch.minimum(right_shift, (k - self.wide_first_shift).clamp_min(1))
        return self.limited(k - right_shift, multiplier, right_shift)


@dataclass(frozen=True)
class FixedRequantization:
    """y = sat(round( sat_t(⌊acc / 2^shift⌋) · multiplier / 2^right_shift )), per channel (int32 tensors)."""

    shift: Tensor
    multiplier: Tensor
    right_shift: Tensor


def _by_kernel(ratio: Ratio, widths: FixedWidths, largest: int, output: IntType, *rest: Any) -> FixedRequantization | None:
    kernels = OFFERS.first(ratio.detached)
    constants = None if kernels is None else kernels.constants(ratio.detached, widths, largest, output.high, *rest)
    return None if constants is None else FixedRequantization(*constants)


def fixed_requantization(ratio: Ratio, widths: FixedWidths, output: IntType, accumulator_bits: int = 32) -> FixedRequantization:
    """Return the shifts and the multiplier of *fixed* that requantize an accumulator of `accumulator_bits` bits by `ratio` to `output`.

    The multiplier is the nearest M · 2^-k with M of `multiplier_bits` bits. The first shift a is the smallest
    one for which the intermediate, times M · 2^(a-k), still covers the output's limit and a half; the last
    shift is k - a. An accumulator of more than 32 bits always has a first shift. A ratio of 2^(multiplier_bits-1)
    or more takes the largest representable multiplier: every non-zero accumulator saturates either way, so no
    result changes.
    """
    bits = widths.multiplier_bits
    first_shift = widths.first_shift or accumulator_bits > 32
    largest_exponent = 1000 if first_shift else widths.largest_shift
    if (constants := _by_kernel(ratio, widths, largest_exponent, output, accumulator_bits if first_shift else 0)) is not None:
        return constants
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
    underflow = right_shift > widths.largest_shift  # only where the first shift met its limit: the product rounds to 0
    return widths.limited(shift, torch.where(underflow, 0, multiplier), right_shift.clamp_max(widths.largest_shift))


def real_multiplier(ratio: Ratio) -> Tensor:
    """Return the ratio rounded once, half to even, to float32; at most the largest float32, with which every non-zero integer saturates."""
    approximate = ratio.detached
    near = approximate * (1 - 2.0**-48), approximate * (1 + 2.0**-48)  # the exact ratio is between them
    least, most = (end.clamp_max(LARGEST_FLOAT32).float() for end in near)
    if torch.equal(least, most) and bool((least >= SMALLEST_NORMAL).all()):
        return least
    mantissa, k = ratio.mantissa(24)
    return (mantissa.double() * power_of_two(-k)).clamp_max(LARGEST_FLOAT32).float()


def narrow_multipliers(ratios: Sequence[Ratio]) -> tuple[int, list[Tensor]]:
    """Return (n, [M, …]): the terms of a sum in fractions of 2^-n of a step, M = min(round_half_even(ratio · 2^n), 2^14), int64 scalars.

    n is the largest of 0…14 for which no M but that minimum exceeds 2^14; 0 if there is none. Three times 255 · 2^14 is below 2^24:
    float32 adds two terms of 8 bits and a zero point exactly, in any order.
    """
    for bits in range(NARROW_BITS, -1, -1):
        multipliers = [_limited_multiplier(ratio, bits) for ratio in ratios]
        if bits == 0 or all(int(multiplier) <= LARGEST_NARROW_MULTIPLIER for multiplier in multipliers):
            break
    return bits, [multiplier.clamp_max(LARGEST_NARROW_MULTIPLIER) for multiplier in multipliers]


def _limited_multiplier(ratio: Ratio, bits: int) -> Tensor:
    """Return round_half_even(ratio · 2^bits); where that is much larger than 2^14, some number larger than 2^14."""
    large = float(ratio.approximate()) > 2.0 * LARGEST_NARROW_MULTIPLIER
    exponent = torch.tensor(bits, dtype=torch.int64, device=ratio.numerators[0].device)
    return torch.full_like(exponent, 2 * LARGEST_NARROW_MULTIPLIER) if large else ratio.rounded(exponent)

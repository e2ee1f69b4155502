"""Integer types, scales, and the exact arithmetic of requantization parameters.

Nothing here knows graphs or modules. Every function is exact in the sense of its docstring; the
definitions are those of backends/bpu/ARITHMETIC.md, and the slow oracle in tests/shared/oracle.py holds them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT32_EPSILON = 2.0**-23  # the scale of what is zero everywhere
SMALLEST_SCALE = 2.0**-48  # of anything else: products and ratios of a few scales stay normal float32 numbers
FLOAT32_EXACT = 2**24  # integers of smaller magnitude, and sums that stay below, are exact in float32
SMALLEST_NORMAL = 2.0**-126  # below it float32 numbers have fewer bits
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
INT32_MAX = 2**31 - 1
INT48_MAX = 2**47 - 1
SMALLEST_DYNAMIC, LARGEST_DYNAMIC = 2.0**-110, 2.0**126  # the magnitudes that a grid which is made at run time distinguishes
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


# ---- grids --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid of a tensor's integers: their type, scale and zero point.

    type         the range of the integers q as they are stored
    scale        float32, a scalar; of a 32-bit output one number per channel, shaped to broadcast
    zero_point   the integer that stands for 0; it is 0 unless the type is affine

    q stands for (q - zero_point) · scale. Arithmetic is done on the *centred* integers c = q - zero_point, whose 0 stands for 0.0;
    `low`, `high` and `magnitude` are theirs.
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
        return self.type == other.type and self.zero_point == other.zero_point and bool(self.scale == other.scale)


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
    for wanted, end, steps in zip(on_steps, (-low, high), (zero_point - dtype.low, dtype.high - zero_point), strict=True):
        scale = end_on_step(scale, end, steps) if wanted else scale
    return scale, zero_point.to(torch.int64)


def end_on_step(scale: Tensor, end: Tensor, steps: Tensor | int) -> Tensor:
    """Return the scale, float32, with which `end` is exactly `steps` steps from 0, if it is less than one step beyond; else `scale`."""
    steps = torch.as_tensor(steps, dtype=torch.float32, device=scale.device)
    beyond = (steps > 0) & (end > steps * scale) & (end < (steps + 1) * scale)  # without a step on its side an end is on none
    return torch.where(beyond, (end.float() / steps).clamp_min(SMALLEST_SCALE), scale)


# ---- scales -------------------------------------------------------------------------------------------------------


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


def round_half_up(value: float) -> int:
    """Return ⌊value + ½⌋, the rounding of tables and clamp bounds."""
    return math.floor(value + 0.5)


def round_away(value: Tensor) -> Tensor:
    """Return the nearest integers, halves away from zero, in the dtype of `value`."""
    magnitude = value.abs()
    below = torch.floor(magnitude)
    return torch.copysign(below + (magnitude - below >= 0.5).to(value.dtype), value)  # both differences are exact


def clamp_bound(value: float | None, scale: float, default: int, limits: IntType | Grid) -> int:
    """Return the integer bound ⌊value/scale + ½⌋ of a clamp, saturated to these limits; `default` if `value` is None."""
    if value is None:
        return default
    if math.isinf(value):
        return limits.high if value > 0 else limits.low
    return min(max(round_half_up(value / scale), limits.low), limits.high)


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


# ---- weights ------------------------------------------------------------------------------------------------------


def weight_scale(weight: Tensor, axis: int | None, dtype: IntType) -> Tensor:
    """Return the scale of a weight per index of `axis` (or one for the whole tensor): max |w| / dtype.divisor, float32, shape (C,)."""
    flat = weight.detach().flatten().unsqueeze(0) if axis is None else weight.detach().movedim(axis, 0).flatten(1)
    largest = flat.abs().amax(dim=1)
    return scale_from_range(-largest, largest, dtype)


def least_error_scale(
    weight: Tensor, axis: int | None, dtype: IntType, candidates: int = 24, p: float = 2.0, power_of_two: bool = False
) -> Tensor:
    """Return the scale with which the weight's integers have the least Σ |error|^p, per index of `axis` (or one), float32, shape (C,).

    The candidates are evenly spaced fractions of `weight_scale`, from that down to a quarter of it; of powers of two, that scale
    rounded up, its half and its quarter.
    """
    largest = weight_scale(weight, axis, dtype)
    flat = weight.detach().reshape(1, -1) if axis is None else weight.detach().movedim(axis, 0).flatten(1)
    fractions = [1 - 0.75 * step / candidates for step in range(candidates)]
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
    if weight.bits > 8:
        return 2**46
    return 2**23 if input.bits <= 8 else 2**30


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


# ---- tables -------------------------------------------------------------------------------------------------------


def table(
    function: Callable[[float], float],
    input: Grid,
    output: Grid,
    on_tensors: Callable[[Tensor], Tensor] | None = None,
    has_none: Callable[[Tensor], Tensor] | None = None,
    points: Tensor | None = None,
    in_float32: bool = False,
) -> Tensor:
    """Return the table of a unary function: entry c - input.low is clip(⌊f(c · s_in) / s_out + ½⌋), of centred integers.

    Or, `in_float32`, clip(round_away(f32(f32(f(f32(c · s_in))) / s_out))), with f rounded once to float32.

    Its dtype is the output's storage, or int16 where that is affine. `function` is evaluated in float64, element by element, by
    Python's `math`; the result is stored and never computed again. A value that is not finite saturates; NaN becomes 0.

    `on_tensors` is the same function on float64 tensors, good to 2^-32. It saves time: `function` then decides
    only the entries that lie within 2^-30 of a tie or are not finite.
    """
    input_scale, output_scale = float(input.scale), float(output.scale)
    storage = torch.int16 if output.type.affine else output.type.storage
    if points is None:
        points = torch.arange(input.low, input.high + 1, dtype=torch.float64, device="cpu")
    x = points * input_scale
    if in_float32:
        values = _values(function, (points.float() * input.scale.cpu()).double(), on_tensors)
        found = round_away(values.float() / output.scale.cpu())
        found = torch.where(torch.isnan(found), 0.0, found.clamp(output.low, output.high))
        return found.to(storage)
    if on_tensors is None:
        entries = [_table_entry(function, number, output_scale, output) for number in x.tolist()]
        return torch.tensor(entries, dtype=storage, device="cpu")
    value = on_tensors(x) / output_scale + 0.5
    doubtful = ~torch.isfinite(value) | ((value - torch.round(value)).abs() <= value.abs().clamp_min(1) * 2.0**-30)
    result = torch.nan_to_num(torch.floor(value)).clamp(output.low, output.high).to(storage)
    saturated = torch.isfinite(value) & (value.abs() > 2 * output.magnitude)
    asked = doubtful & ~saturated
    if has_none is not None:
        without = has_none(x)
        result[without] = 0
        asked &= ~without
    left = torch.nonzero(asked).flatten()
    result[left] = torch.tensor(
        [_table_entry(function, number, output_scale, output) for number in x[left].tolist()], dtype=storage, device="cpu"
    )
    return result


def _values(function: Callable[[float], float], x: Tensor, on_tensors: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return a function's values in float64, by Python's `math` where few are asked for."""
    if on_tensors is not None and x.numel() > 2**10:
        return on_tensors(x)
    found = []
    for number in x.tolist():
        try:
            found.append(function(number))
        except OverflowError:
            found.append(math.inf)
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def _table_entry(function: Callable[[float], float], x: float, output_scale: float, output: Grid) -> int:
    try:
        value = function(x) / output_scale
    except OverflowError:
        value = math.inf
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return output.high if value > 0 else output.low
    return min(max(round_half_up(value), output.low), output.high)


# ---- proofs -------------------------------------------------------------------------------------------------------


def accumulator_bound(weight: Tensor, bias: Tensor | None, axis: int, input_magnitude: int) -> Tensor:
    """Return the largest |accumulator| any input can cause, per output channel: Σ|w| · max|x| + |bias| (float64, exact below 2^53).

    The bound covers every partial sum in any order, hence every blocking and thread count.
    """
    bound = weight.detach().double().abs().movedim(axis, 0).flatten(1).sum(dim=1) * input_magnitude
    return bound if bias is None else bound + bias.detach().double().abs()


def bits_of(bound: float) -> int:
    """Return the bits of a signed integer that holds every value of magnitude up to `bound`."""
    return int(bound).bit_length() + 1

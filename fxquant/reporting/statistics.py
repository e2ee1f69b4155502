"""Statistics of a tensor in two forms of a model over the batches: sums, extremes and counts, and nothing of a single batch.

The distribution of the reference is kept as octaves of magnitude, in eighths. They give the noise at any other scale:

    noise(s) = Σ_m count(m) · ((|m| - limit·s)² beyond the grid's end, m² below half a step, s²/12 between)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.analysis.recording import Facts
from fxquant.ir.integer import QParams
from fxquant.numerics.grids import ACTIVATION_TYPES

FINENESS = 8  # of the octaves
LOWEST, HIGHEST = -130, 60  # octaves of magnitudes, in steps of the scale
COLUMNS = 96  # of the histogram that is drawn
DRAWN = 1.5  # how far it reaches, in ranges of the grid


@dataclass(frozen=True)
class Steps:
    """A grid of one scale: its step, and the centred integers that it ends at."""

    scale: float
    low: int
    high: int

    @staticmethod
    def of(grid: QParams | None) -> "Steps | None":
        """Return the steps of a tensor with one known scale; None without a scale, with one per channel, or if it is not calibrated."""
        if grid is None or not isinstance(grid.scale, float) or not math.isfinite(grid.scale):
            return None
        kind = ACTIVATION_TYPES[grid.dtype]
        return Steps(grid.scale, kind.low - grid.zero_point, kind.high - grid.zero_point)

    def rounded(self, value: Tensor) -> Tensor:
        """Return these values rounded to the grid, dequantized, in float64."""
        return (value.double() / self.scale).round_().clamp_(self.low, self.high).mul_(self.scale)


class TensorStatistics:
    """The statistics of one tensor: the reference in one form, and the value in the other, both as floats on one scale.

    real                               whether the reference is floating-point
    elements, not_a_number, infinite   counts of elements; elements that are not finite are in no other figure
    signal, noise, product, power      Σ r², Σ (r - v)², Σ r·v, Σ v²
    largest                            max |r - v|
    low, high                          the ends of the reference
    clipped, zeroed, nonzero           of the reference's elements: beyond the grid's ends; rounded to 0 though they are not; not 0
    truncation, rounding               Σ of the squared error of quantizing the reference: of clipped elements, and of all others
    octaves                            int64 (2, bins): histogram of log magnitudes, in units of the scale, for either sign
    columns                            int64 (COLUMNS + 2,): histogram over DRAWN times the quantization range; both ends count beyond
    channels                           float64: the largest magnitude of each channel
    """

    def __init__(self, grid: QParams | None, axis: int | None) -> None:
        self.steps, self.axis = Steps.of(grid), axis
        self.real = True
        self.elements = self.not_a_number = self.infinite = self.clipped = self.zeroed = self.nonzero = 0
        self.signal = self.noise = self.product = self.power = self.largest = self.truncation = self.rounding = 0.0
        self.low, self.high = math.inf, -math.inf
        self.octaves = torch.zeros(2, (HIGHEST - LOWEST) * FINENESS, dtype=torch.int64, device="cpu")
        self.columns = torch.zeros(COLUMNS + 2, dtype=torch.int64, device="cpu")
        self.channels: Tensor | None = None

    def add(self, reference: Tensor, value: Tensor) -> None:
        """Take the values of one more batch into account."""
        one, other = reference.detach().cpu().double(), value.detach().cpu().double()
        self.real = reference.is_floating_point()
        self.elements += one.numel()
        self.not_a_number += int(torch.isnan(one).sum())
        self.infinite += int(torch.isinf(one).sum())
        if self.axis is not None and one.dim() > 1:
            dims = [dim for dim in range(one.dim()) if dim != self.axis % one.dim()]
            largest = torch.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dims)
            if self.channels is None or self.channels.shape == largest.shape:
                self.channels = largest if self.channels is None else torch.maximum(self.channels, largest)
        finite = torch.isfinite(one) & torch.isfinite(other)
        if not bool(finite.all()):
            one, other = one[finite], other[finite]
        if not one.numel():
            return
        error = one - other
        self.signal += float(one.square().sum())
        self.noise += float(error.square().sum())
        self.product += float((one * other).sum())
        self.power += float(other.square().sum())
        self.largest = max(self.largest, float(error.abs().max()))
        self.low, self.high = min(self.low, float(one.min())), max(self.high, float(one.max()))
        if self.steps is not None:
            self._see_grid(one, self.steps)

    def _see_grid(self, value: Tensor, steps: Steps) -> None:
        number = value / steps.scale
        rounded = number.round().clamp_(steps.low, steps.high)
        beyond = (number < steps.low - 0.5) | (number > steps.high + 0.5)
        error = (rounded - number).mul_(steps.scale).square_()
        self.clipped += int(beyond.sum())
        self.truncation += float(error[beyond].sum())
        self.rounding += float(error.sum()) - float(error[beyond].sum())
        there = number != 0
        self.nonzero += int(there.sum())
        self.zeroed += int((there & (rounded == 0)).sum())
        octave = ((number[there].abs().log2() - LOWEST) * FINENESS).floor().clamp_(0, self.octaves.shape[1] - 1).long()
        sign = (number[there] < 0).long()
        self.octaves += torch.bincount(sign * self.octaves.shape[1] + octave, minlength=self.octaves.numel()).reshape(self.octaves.shape)
        ends = drawn(steps)
        place = ((number - ends[0]) * (COLUMNS / (ends[1] - ends[0]))).floor().clamp_(-1, COLUMNS).long() + 1
        self.columns += torch.bincount(place.flatten(), minlength=COLUMNS + 2)

    def noise_at(self, factor: float) -> float:
        """Return the squared error that a grid of `factor` times the scale would make of the reference, estimated from the octaves."""
        assert self.steps is not None
        total = 0.0
        middle = torch.exp2((torch.arange(self.octaves.shape[1], dtype=torch.float64, device="cpu") + 0.5) / FINENESS + LOWEST)
        for sign, end in enumerate((self.steps.high, -self.steps.low)):
            beyond = (middle - (end + 0.5) * factor).clamp_(min=0).square_()
            between = torch.minimum(middle.square(), torch.full_like(middle, factor * factor / 12))
            between = torch.where(middle < factor / 2, middle.square(), between)
            total += float((self.octaves[sign] * torch.where(beyond > 0, beyond, between)).sum())
        return total * self.steps.scale**2

    def best_factor(self) -> float:
        """Return the factor, a root of a power of two, for which that is least."""
        return min((2 ** (k / 2) for k in range(-24, 80)), key=self.noise_at)

    def populations(self) -> tuple[float, float] | None:
        """Return, in steps, the largest magnitude below and the least above the widest gap without any value; None without a gap."""
        there = torch.nonzero(self.octaves.sum(0)).flatten()
        if len(there) < 2:
            return None
        gaps = there[1:] - there[:-1]
        at = int(gaps.argmax())
        return 2 ** ((int(there[at]) + 1) / FINENESS + LOWEST), 2 ** (int(there[at + 1]) / FINENESS + LOWEST)

    def above(self, magnitude: float) -> tuple[int, float]:
        """Return the number of values of at least this magnitude, in units of the scale, and the ratio of the largest to the smallest."""
        first = max(math.floor((math.log2(magnitude) - LOWEST) * FINENESS + 0.5), 0)
        counts = self.octaves.sum(0)[first:]
        there = torch.nonzero(counts).flatten()
        return int(counts.sum()), 2 ** ((int(there[-1]) - int(there[0])) / FINENESS) if len(there) else 1.0

    @property
    def reach(self) -> float:
        """The end of the reference over the end of the grid, on the side where that is more; 1 where the range just fits."""
        if self.steps is None or self.low > self.high:
            return math.nan
        ends = [value / (limit * self.steps.scale) for value, limit in ((self.low, self.steps.low), (self.high, self.steps.high)) if limit]
        return max(ends, default=math.nan)


def drawn(steps: Steps) -> tuple[float, float]:
    """Return the range of the histogram, in steps."""
    middle, half = (steps.low + steps.high) / 2, (steps.high - steps.low + 1) / 2 * DRAWN
    return middle - half, middle + half


def sqnr_of(signal: float, noise: float) -> float:
    """10·log10 of a ratio of powers; infinite where nothing is lost."""
    return math.inf if noise <= 0 else -math.inf if signal <= 0 else 10 * math.log10(signal / noise)


def in_decibels(value: float, undefined: str = "") -> str:
    """Return a signal-to-noise ratio as text: "equal" where nothing is lost, `undefined` for NaN."""
    return undefined if math.isnan(value) else "equal" if value == math.inf else f"{value:.1f} dB"


def ratio(part: float, whole: float) -> float:
    """Return part / whole, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def json_ready(value: Any) -> Any:
    """Return a nested value with None in place of infinite floats and NaN, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class LayerComparison:
    """The error of one tensor between two forms, in units of the second form.

    name        the layer's name in the second form; "output 0", … for the models' outputs
    reference   the name of the tensor of the first form that it is compared with
    operator    the operator that computes it
    dtype       the dtype of the second form's tensor; "float" if it is not quantized
    grid        its scale and dtype, or None
    source      the user's line
    because     why it is integer or float
    elements    the number of compared elements
    cosine      Σ r·v / √(Σ r² · Σ v²), of the reference r and the value v
    sqnr        10·log10(Σ r² / Σ (r - v)²) in dB, including all errors from earlier layers
    mse         Σ (r - v)² / elements
    largest     max |r - v|
    steps       max |r - v| in units of the scale; NaN without one
    own         the SQNR in dB of quantizing the reference with this scale, without errors from earlier layers
    clipped     share of the reference's elements that are clipped
    zeroed      share of the reference's nonzero elements that become 0
    reach       the largest magnitude of the reference over that of the quantization range: 1 if it just fits
    error       the larger part of the quantization error `own`: "truncation", "rounding", or "none"
    effect      the noise-to-signal ratio at the outputs from quantizing this tensor alone, if it was measured; else NaN
    low, high   the ends of the reference
    """

    name: str
    reference: str
    operator: str
    dtype: str
    grid: QParams | None
    source: str
    because: str
    elements: int
    cosine: float
    sqnr: float
    mse: float
    largest: float
    steps: float
    own: float
    clipped: float
    zeroed: float
    reach: float
    error: str
    effect: float
    low: float
    high: float


def row(name: str, reference: str, facts: Facts, data: TensorStatistics, effect: float = math.nan) -> LayerComparison:
    """Return the row of a tensor; `effect` is its effect on the outputs, NaN where that was not measured."""
    count = max(data.elements - data.not_a_number - data.infinite, 1)
    noise = data.truncation + data.rounding
    worse = "truncation" if data.truncation > data.rounding else "rounding"
    error = "" if data.steps is None else worse if noise else "none"
    dtype = "float" if facts.grid is None else facts.grid.dtype
    cosine = data.product / math.sqrt(data.signal * data.power) if data.signal and data.power else float(data.signal == data.power)
    steps = own = clipped = zeroed = math.nan
    if data.steps is not None:
        steps, own = data.largest / data.steps.scale, sqnr_of(data.signal, noise)
        clipped, zeroed = data.clipped / count, ratio(data.zeroed, data.nonzero)
    return LayerComparison(
        name, reference, facts.operator, dtype, facts.grid, facts.source, facts.because, data.elements,
        cosine, sqnr_of(data.signal, data.noise), data.noise / count, data.largest, steps, own, clipped, zeroed, data.reach,
        error, effect, data.low, data.high,
    )  # fmt: skip

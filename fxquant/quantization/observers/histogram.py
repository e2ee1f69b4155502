"""Observers that count magnitudes in bins, and choose the threshold with the least quantization error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from fxquant.numerics.grids import SMALLEST_SCALE, IntType, end_on_step, grid_from_range, round_up_to_power_of_two, scale_from_range
from fxquant.quantization.observers import ranges
from fxquant.quantization.observers.ranges import Method, MinMaxObserver, MovingAverageMinMaxObserver, Observer, finite_range, finite_ranges
from fxquant.quantization.observers.ranges import sampled as sampled
from fxquant.support.arguments import checked

# ---- Samples of a batch by their norms, so that a few outlier samples do not silently reduce the precision of all others ----
#
# The octave of a sample is how often the reach of a histogram has to be halved to its largest magnitude. The magnitudes of the samples of
# each octave are counted in separate bins over [0, reach / 2^octave], those of positive and of negative values separately. So the noise
# of a grid in samples of large and of small norms can be computed without the samples:
#
#     noise    E_k = Σ n · min(x², Δ²/12) of what the grid covers, Σ n · (|x| - limit)² of what it cuts off
#     a sample 10·log10(E_k / P_k + 10^-3.5) dB, on average over all samples: noise 35 dB below a sample does it no harm
#
# The pooled squared error is dominated by the outlier samples; this average is the expected error of the next sample.
OCTAVES, BINS = 8, 256
SAMPLE = 2**15  # about this number of elements of a batch is counted
MIN_SAMPLE_SIZE = 32  # elements that a sample has at least: the norm of fewer is part of what they mean
APART = 3  # octaves between the outlier samples and those of the smallest norm; with fewer, all samples count alike
HARMLESS_SHARE = 10**-3.5  # of a sample's power: an error below it does no harm
MIN_GAIN_DB = 3.0  # dB: the noise of a sample has to be halved, on average


def empty() -> Tensor:
    """Return empty counts of positive and of negative values for each octave: float64 of shape (2, OCTAVES, BINS)."""
    return torch.zeros(2, OCTAVES, BINS, dtype=torch.float64, device="cpu")


def count(counts: Tensor, value: Tensor, low: Tensor, high: Tensor, reach: float) -> None:
    """Add the histograms of a batch's items (dimension 0), with ranges `low` to `high`, to `counts`; large batches are subsampled."""
    items = value.detach().flatten(1).float()
    octaves = [_octave(largest, reach) for largest in torch.maximum(-low, high).tolist()]
    apart = max(1, items.numel() // SAMPLE) | 1  # odd: it meets every column of an image whose width is a power of two
    counted = -(-items.shape[1] // apart)
    there = sorted(set(octaves))
    for octave in there:
        own = None if len(there) == 1 else [item for item, of in enumerate(octaves) if of == octave]
        histogram = ranges.signed(items, own, apart, 2 * BINS, reach * 2.0**-octave).double() * (items.shape[1] / counted)
        counts[0, octave] += histogram[BINS:]
        counts[1, octave] += histogram[:BINS].flip(0)


def _octave(largest: float, reach: float) -> int:
    """Return the number of times that `reach` can be halved and still cover this magnitude, at most OCTAVES - 1."""
    ratio = reach / max(largest, reach * 2.0**-OCTAVES)
    return min(max(math.frexp(ratio)[1] - 1, 0), OCTAVES - 1)


def doubled(counts: Tensor) -> None:
    """Move the counts of every octave to the next one, after the reach was doubled."""
    last = counts[:, -1].view(2, -1, 2).sum(2)
    counts[:, 1:] = counts[:, :-1].clone()
    counts[:, 0] = 0
    counts[:, -1, : BINS // 2] += last


Functions = tuple[Callable[[Tensor], Tensor], ...]  # of one element each, on tensors


@torch.no_grad()
def distance(functions: Functions, value: Tensor, other: Tensor) -> Tensor:
    """Return |value - other|, float64; with functions, the root mean square over them of f(value) - f(other)."""
    if not functions:
        return (value - other).abs()
    return sum(((f(value) - f(other)).double().square() for f in functions), torch.zeros_like(value)).div(len(functions)).sqrt()


class Items:
    """The norms of the samples that a histogram has counted.

    apart  octaves between the samples with the largest and the smallest norm, from which on they differ
    worth  dB by which the average noise of a sample has to fall for another grid to be taken
    read   the functions that read the tensor: see `distance`
    """

    def __init__(self, counts: Tensor, reach: float, apart: int = APART, worth: float = MIN_GAIN_DB, read: Functions = ()) -> None:
        there = torch.nonzero(counts.sum((0, 2))).flatten()
        self.counts = counts[:, there]
        tops = reach * torch.exp2(-there.double())
        self.magnitudes = (torch.arange(BINS, device=counts.device, dtype=torch.float64) + 0.5) * (tops / BINS).unsqueeze(1)
        self.read = read
        values = torch.stack((self.magnitudes, -self.magnitudes))
        self.power = (self.counts * distance(read, values, torch.zeros_like(values)).square()).sum((0, 2))
        self.differ = len(there) > 1 and int(there[-1] - there[0]) >= apart and bool((self.power > 0).sum() > 1)
        self.worth = worth

    def better(self, pooled: Tensor, steps: Tensor, low: Tensor, high: Tensor, beyond: tuple[float, float]) -> int:
        """Return the index of the grid with the least pooled error, unless another lowers the noise of a sample by `worth`.

        `pooled` is the error of all values together, float64 of shape (grids,). `steps`, `low` and `high` are the grids' scales and the
        magnitudes of their limits, float64 of that shape. `beyond` holds the factors by which later negative and positive values may
        exceed the observed ones; every value counts twice, as observed and multiplied by its factor.
        """
        usual = int(pooled.argmin())
        if not self.differ:
            return usual
        noise = torch.zeros(len(self.power), len(steps), dtype=torch.float64, device=steps.device)
        for counts, sign, limit, further in ((self.counts[0], 1.0, high, beyond[1]), (self.counts[1], -1.0, low, beyond[0])):
            for factor in (sign, sign * further):
                noise += self._noise(counts, factor, steps, sign * limit)
        live = self.power > 0
        share = self.counts.sum((0, 2))[live]
        decibels = 10 * torch.log10(noise[live] / (2 * self.power[live]).unsqueeze(1) + HARMLESS_SHARE)
        mean = (decibels * (share / share.sum()).unsqueeze(1)).sum(0)
        best = int(mean.argmin())
        return best if float(mean[usual] - mean[best]) >= self.worth else usual

    def _noise(self, counts: Tensor, factor: float, steps: Tensor, limit: Tensor) -> Tensor:
        """Return the squared error of each octave on each grid, of shape (octaves, grids)."""
        values = (self.magnitudes * factor).unsqueeze(2)
        rounded = distance(self.read, values + steps / 2, values - steps / 2).square() / 12
        inside = torch.minimum(distance(self.read, values, torch.zeros_like(values)).square(), rounded)
        beyond = distance(self.read, values, limit).square()
        return (torch.where(values.abs() > limit.abs(), beyond, inside) * counts.unsqueeze(2)).sum(1)


class HistogramObserver(Observer, names="histogram"):
    """Covers the range with the smallest mean squared error of the observed values and of the same values a tenth larger.

    Later values exceed those of calibration, and clipping them does more harm than a slightly larger scale. So every value counts twice,
    itself and `ahead` times as large, and the range may reach that far beyond the observed one. Far outliers are clipped
    nevertheless where they would make the range wide, as with few bits. An end of the range at which many values lie, as after a clamp or
    in an image, is taken as the limit of all values, and lies on a step of the grid. `python -m benchmarks.observers` compares observers.

    The samples of a batch with the largest norms dominate the squared error. Where their largest magnitude is 8 times that of the smallest
    ones, or more, another range is considered. It is taken if it halves the average noise of a sample, in dB; it may clip values of a few
    outlier samples (`Items`). An output of the model is exempt. Where only functions of one element read the tensor, such as a SiLU or a
    PReLU, the range is narrowed to the part with the smallest error after these functions.

    Magnitudes are counted in bins over [0, reach], those of negative values a second time on their own. A larger value doubles the reach
    by merging neighbouring bins, so counts stay exact and memory constant for any number of batches. Of a tensor of twice `sample`
    elements or more, that many are counted (see `sampled`); its largest magnitude is always that of all its elements.
    """

    largest: Tensor
    reach: Tensor
    counts: Tensor
    negative: Tensor
    items: Tensor
    ahead = 1.1  # how much larger later values are taken to be; 1 where the observed values count alone
    each = True  # whether every sample of a batch counts alike, whatever its norm
    read: Functions = ()  # see `read_by`
    apart, worth = APART, MIN_GAIN_DB  # octaves between items, and dB that another range gains, for it to be taken

    @checked()
    def __init__(self, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__()
        self.bins, self.sample = bins, sample
        self.register_buffer("largest", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("reach", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.float64, device="cpu"))
        self.register_buffer("negative", torch.zeros(bins, dtype=torch.float64, device="cpu"))
        self.register_buffer("items", empty())

    @property
    def only_zeros(self) -> bool:
        return self.observed and bool(self.largest == 0)

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))

    def take(self, value: Tensor, low: Tensor, high: Tensor, items: tuple[Tensor, Tensor] | None = None) -> None:
        """Observe a batch with range `low` to `high`; `items` holds the ranges of its items if dimension 0 is the batch dimension."""
        largest = max(abs(float(low)), abs(float(high)))
        self._grow(largest)
        reach = float(self.reach)
        if reach > 0:
            counts, negative, share = ranges.magnitudes(value.detach(), self.sample, self.bins, reach, float(low) < 0)
            self.counts.add_(counts.double().mul_(share))
            if negative is not None:
                self.negative.add_(negative.double().mul_(share))
        if items is not None and reach > 0 and value.numel() >= MIN_SAMPLE_SIZE * len(value):
            count(self.items, value, *items, reach)
        self.largest.clamp_min_(largest)
        self.count.add_(1)

    def _grow(self, largest: float) -> None:
        """Make the reach cover a magnitude; a reach of 0 means that every value before was 0."""
        if float(self.reach) == 0:
            self.reach.fill_(largest)
        while float(self.reach) < largest:
            for counts in (self.counts, self.negative):
                joined = counts.view(-1, 2).sum(1)
                counts.zero_()
                counts[: self.bins // 2] = joined
            doubled(self.items)
            self.reach.mul_(2)

    def loss(self, error: Tensor) -> Tensor:
        """Return the loss of errors of this magnitude, float64 of their shape."""
        return error.square()

    def threshold(self, dtype: IntType) -> Tensor:
        """Return the magnitude for the dtype's largest value, float64: one of the 128ths of the largest observed one."""
        largest, ahead = self.largest.double(), self._ahead(self.counts)
        if not self.tells(dtype):
            return largest * ahead
        candidates = _fractions(ahead, largest.device) * largest
        if self.read:
            candidates = candidates[candidates <= self.read_by(()).threshold(dtype)]
        return candidates[self._best(candidates / dtype.divisor, dtype)]

    def tells(self, dtype: IntType) -> bool:
        """Return whether bins are finer than the steps of a dtype over the full range; if they are not, the full range is covered."""
        return dtype.high < self.bins

    def scale(self, dtype: IntType) -> Tensor:
        threshold = self.threshold(dtype).float() if float(self.largest) > 0 else self.largest
        return scale_from_range(-threshold, threshold, dtype)

    def scale_before_rounding(self, dtype: IntType) -> Tensor:
        """Return 0.75 times the power-of-two scale with the least error: in the middle of the scales that are rounded up to it."""
        scale = self.scale(dtype)
        if float(self.largest) == 0 or not self.tells(dtype):
            return scale
        whole = scale_from_range(-self.largest, self.largest * self._ahead(self.counts), dtype)
        widest = round_up_to_power_of_two(self.read_by(()).scale_before_rounding(dtype) if self.read else whole).double()
        steps = widest * 2.0 ** -torch.arange(8, device=widest.device, dtype=torch.float64)
        return (0.75 * steps[self._best(steps, dtype)]).float().clamp_min(SMALLEST_SCALE)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        """Return the interval with the least loss: each end in turn is the best 128th of the range's end, twice.

        Where the norms of samples differ, both ends are first clipped together, at the magnitude that is best for both.
        """
        ends = list(self.ends())
        if float(self.largest) == 0:
            return ends[0], ends[1]
        observed, counts = self.points()
        whole, widest = tuple(ends), self.read_by(()).interval(dtype) if self.read else (-math.inf, math.inf)
        beyond = (self._ahead(self.negative), self._ahead(self._positive()))
        points = torch.cat((observed, torch.where(observed < 0, beyond[0] * observed, beyond[1] * observed)))
        counts, items = torch.cat((counts, counts)), self._items()

        def best(low: Tensor, high: Tensor) -> int:
            scale, zero = (part.double().unsqueeze(1) for part in grid_from_range(low, high, dtype))
            quantized = torch.clamp(torch.round(points / scale), dtype.low - zero, dtype.high - zero) * scale
            pooled, step = (self.loss(distance(self.read, points, quantized)) * counts).sum(1), scale.squeeze(1)
            below, above = ((limit * scale).abs().squeeze(1) for limit in (dtype.low - zero, dtype.high - zero))
            return items.better(pooled, step, below, above, beyond) if items else int(pooled.argmin())

        if items is not None and items.differ and float(whole[0]) < 0 < float(whole[1]):  # a step hardly narrows with one end
            magnitudes = (_fractions(1.0, points.device) * self.largest.double()).float()
            low, high = torch.maximum(ends[0], -magnitudes), torch.minimum(ends[1], magnitudes)
            chosen = best(low, high)
            ends = [low[chosen], high[chosen]]
        for end in (1, 0, 1, 0):
            if float(whole[end]) == 0:
                continue
            candidates = (_fractions(beyond[end], points.device) * whole[end].double()).float()
            candidates = candidates[(candidates >= widest[0]) & (candidates <= widest[1])]
            ends[end] = candidates[best(candidates, ends[1]) if end == 0 else best(ends[0], candidates)]
        return ends[0], ends[1]

    def of_output(self) -> HistogramObserver:
        """Return a copy without the norms of samples: the error of an output of the model counts as it is."""
        observer = copy.copy(self)
        observer.each = False
        return observer

    def read_by(self, functions: Functions) -> HistogramObserver:
        """Return a copy that measures errors after these functions, root mean square over the functions.

        Its range is a part of this observer's, which is already wide: it allows for later values.
        """
        observer = copy.copy(self)
        observer.read = functions
        return observer

    def by(self, method: Method) -> HistogramObserver:
        """Return an observer with the same counts that chooses in this way; by `EACH`, however small the gain."""
        if not self.each or method is Method.ERROR:
            return self
        if method is Method.EACH:
            observer = copy.copy(self)
            observer.apart, observer.worth = 1, 0.0
            return observer
        chooser = PercentileObserver(PERCENTILES[method], self.bins, self.sample)
        chooser._buffers = self._buffers
        return chooser

    @property
    def has_outliers(self) -> bool:
        """Whether there are outlier samples, whose norms are so large that their values may be clipped."""
        items = self._items()
        return items is not None and items.differ

    def _items(self) -> Items | None:
        return Items(self.items, float(self.reach), self.apart, self.worth, self.read) if self.each else None

    def _best(self, steps: Tensor, dtype: IntType) -> int:
        pooled, items, ahead = self._lost(steps, dtype), self._items(), self._ahead(self.counts)
        limit = steps * dtype.high
        return int(pooled.argmin()) if items is None else items.better(pooled, steps, limit, limit, (ahead, ahead))

    def _lost(self, steps: Tensor, dtype: IntType) -> Tensor:
        """Return the loss with each of these steps of a symmetric dtype, float64."""
        there = self.counts > 0
        centres, counts = self.points() if self.read else (self._middles()[there], self.counts[there])
        points, steps = torch.cat((centres, centres * self._ahead(self.counts))), steps.unsqueeze(1)
        quantized = torch.round(points / steps).clamp(dtype.low, dtype.high) * steps
        return (self.loss(distance(self.read, points, quantized)) * torch.cat((counts, counts))).sum(1)

    def _ahead(self, counts: Tensor) -> float:
        """Return `ahead`, or less so that a range within 1 is extended to 1 at most; 1 if many values lie in the last bin of `counts`."""
        if self.ahead == 1:
            return 1.0
        largest = float(self.largest)
        ahead = 1 / largest if 0 < largest <= 1 < largest * self.ahead else self.ahead
        return 1.0 if not bool(counts.any()) or self._crowded(counts, 1 / 1024) else ahead

    def crowded(self, dtype: IntType) -> tuple[bool, bool]:
        """Return whether many values lie at the smallest, and at the largest value; for a symmetric dtype, at the largest magnitude.

        They are many if their squared error of half a step exceeds the error of all values if the range is half a step longer.
        """
        sides = (self.negative, self._positive()) if dtype.affine else (self.counts, self.counts)
        low, high = (self._crowded(counts, 1 / (3 * dtype.divisor)) for counts in sides)
        return low, high

    def _crowded(self, counts: Tensor, share: float) -> bool:
        """Return whether the last bin has more than this share of all values, and than eight times the mean of the 16 bins before it."""
        there = torch.nonzero(counts)
        last = int(there[-1]) if len(there) else 0
        before = counts[max(0, last - 16) : last]
        return last > 0 and float(counts[last]) > max(16.0, float(self.counts.sum()) * share, 8 * float(before.mean()))

    def _middles(self) -> Tensor:
        return (torch.arange(self.bins, device=self.counts.device, dtype=torch.float64) + 0.5) * (self.reach.double() / self.bins)

    def points(self) -> tuple[Tensor, Tensor]:
        """Return the middles of the non-empty bins, with their signs, and their counts: float64."""
        points, counts = torch.cat((-self._middles(), self._middles())), torch.cat((self.negative, self._positive()))
        return points[counts > 0], counts[counts > 0]

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the smallest (at most 0) and the largest (at least 0) observed value, to within a bin, float32."""
        edges = torch.arange(1, self.bins + 1, device=self.counts.device, dtype=torch.float64) * (self.reach.double() / self.bins)
        low, high = ((edges * (counts > 0)).max().float().clamp_max(self.largest) for counts in (self.negative, self._positive()))
        return -low, high

    def _positive(self) -> Tensor:
        return (self.counts - self.negative).clamp_min(0)


class MSEObserver(HistogramObserver, names="mse"):
    """Covers the range with the smallest mean squared error of the observed values."""

    ahead = 1.0
    each = False


class LpObserver(MSEObserver, names="lp"):
    """Covers the range with the smallest mean |error|^p of the observed values. The larger p, the more clipping errors count."""

    @checked()
    def __init__(self, p: float = 3.0, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__(bins, sample)
        self.p = p

    def loss(self, error: Tensor) -> Tensor:
        return error.pow(self.p)


def _fractions(ahead: float, device: torch.device) -> Tensor:
    """128ths, from the first up to `ahead`: float64."""
    return torch.arange(1, int(128 * ahead) + 1, device=device, dtype=torch.float64) / 128


# ---- Which observers gather the same, so that what one has seen serves the others ------------------------------------
@lru_cache
def standard() -> dict[type[Observer], Gathering | None]:
    """Return the observer classes whose statistics suffice for all of fxquant's observers with default settings, with their `gathering`."""
    return {kind: gathering(kind()) for kind in (MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver)}


Gathering = tuple[str, tuple[tuple[str, float], ...]]  # the name of a class, and the settings that say what it gathers


def observe_together(observers: Sequence[Observer], value: Tensor, items: bool = False) -> None:
    """Let observers take in one batch, a float tensor, whose range is computed once for all of fxquant's observers.

    With `items`, dimension 0 is the batch dimension, and the norms of the samples are distinguished.
    Raises ValueError, and changes none of these, if any value is NaN or infinite.
    """
    apart = items and value.dim() > 1 and any(isinstance(observer, HistogramObserver) for observer in observers)
    (low, high), each = finite_ranges(value) if apart else (finite_range(value), None)
    for observer in observers:
        if gathering(observer) is None:
            observer.observe(value)
        else:
            cast(_Gathers, observer).take(value, low, high, each)


def beside(observer: Observer) -> dict[str, nn.Module]:
    """Return new observers, by class name, that gather the statistics of `standard` which `observer` does not gather."""
    there = gathering(observer)
    return {kind.__name__: kind() for kind, gathers in standard().items() if gathers != there}


def many_at_ends(observers: Sequence[Observer], dtype: IntType) -> tuple[bool, bool]:
    """Return whether many values lie at the smallest and at the largest value; of a symmetric dtype, both at the largest magnitude."""
    return next((each.crowded(dtype) for each in observers if isinstance(each, HistogramObserver)), (False, False))


def on_step(scale: Tensor, dtype: IntType, observers: Sequence[Observer]) -> Tensor:
    """Return the scale of a symmetric dtype, float32, changed so that the largest magnitude is the last step if many values lie there.

    Only a magnitude less than one step beyond that changes it.
    """
    histogram = next((each for each in observers if isinstance(each, HistogramObserver)), None)
    return scale if histogram is None or not histogram.crowded(dtype)[1] else end_on_step(scale, histogram.largest, dtype.high)


def gathering(observer: Observer) -> Gathering | None:
    """Return a key of the statistics that an observer collects: observers with equal keys can use each other's statistics.

    Return None if its class overrides `observe`, so that only that class can use them.
    """
    for kind, names in _GATHERING.items():
        if type(observer).observe is kind.observe:
            return kind.__name__, tuple((name, getattr(observer, name)) for name in names)
    return None


_Gathers = MinMaxObserver | HistogramObserver
_GATHERING: Mapping[type[Observer], tuple[str, ...]] = {
    MinMaxObserver: (),
    MovingAverageMinMaxObserver: ("averaging_constant",),
    HistogramObserver: ("bins", "sample"),
}


# ---- observers that choose a threshold by what the distribution of magnitudes looks like -----------------------------
USUAL_PERCENTILE = 99.99
PERCENTILES = {Method.MIN_MAX: 100.0, Method.PERCENTILE: 99.995}


class ThresholdObserver(HistogramObserver):
    """Covers the values up to a magnitude; of an affine dtype, the range as far as that reaches to either side."""

    ahead = 1.0
    each = False

    def read_by(self, functions: Functions) -> HistogramObserver:
        return self

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        threshold = self.threshold(dtype).float() if float(self.largest) > 0 else self.largest
        return within(self, threshold)

    def scale_before_rounding(self, dtype: IntType) -> Tensor:
        return self.scale(dtype)

    def at_percentile(self, percentile: float) -> Tensor:
        """Return the upper edge of the bin that a percentile of the magnitudes lies in."""
        reached = torch.cumsum(self.counts, 0) >= self.counts.sum() * (percentile / 100)
        return torch.minimum((int(reached.to(torch.int8).argmax()) + 1) * (self.reach / self.bins), self.largest)


class PercentileObserver(ThresholdObserver, names="percentile"):
    """Covers a share of the values: the threshold is the given percentile of the magnitudes."""

    @checked()
    def __init__(self, percentile: float = USUAL_PERCENTILE, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__(bins, sample)
        self.percentile = percentile

    def threshold(self, dtype: IntType) -> Tensor:
        return self.at_percentile(self.percentile)


class ClipStdObserver(ThresholdObserver, names="clip_std"):
    """Covers the values within `deviations` standard deviations of the mean, and no more than the observed range."""

    @checked()
    def __init__(self, deviations: float = 3.0, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__(bins, sample)
        self.deviations = deviations

    def threshold(self, dtype: IntType) -> Tensor:
        low, high = self.interval(dtype)
        return torch.maximum(-low, high).double()

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        low, high = self.ends()
        if float(self.largest) == 0:
            return low, high
        points, counts = self.points()
        mean = (points * counts).sum() / counts.sum()
        away = self.deviations * ((points - mean).square() * counts).sum().div(counts.sum()).sqrt()
        zero = torch.zeros_like(low)
        return torch.clamp((mean - away).float(), low, zero), torch.clamp((mean + away).float(), zero, high)


class KLObserver(ThresholdObserver, names="kl entropy"):
    """Covers the range whose quantized distribution is nearest to the observed one, by the Kullback-Leibler divergence.

    The formula is that of S. Migacz, 8-bit Inference with TensorRT, GTC 2017: the counts up to a threshold, those beyond added to the
    last bin, against the same counts without those beyond, made equal within each step of the dtype. The first bin, zeros above all, counts
    as much as the second, as in NVIDIA's pytorch-quantization. It asks how alike two distributions are, and not how large errors
    are, so it clips hard; it is here because other toolkits have it, and is rarely the best.
    """

    def threshold(self, dtype: IntType) -> Tensor:
        """Return the threshold, float64, with the least Kullback-Leibler divergence; the largest magnitude if there are too few bins."""
        levels = dtype.high + 1 if dtype.low < 0 or not bool((self.negative > 0).any()) else (dtype.high + 1) // 2
        counts, largest = self.counts.clone(), self.largest.double()
        counts[0] = counts[1]
        if levels >= self.bins or not bool((counts > 0).any()):
            return largest
        ends = torch.arange(levels, self.bins + 1, max(1, (self.bins - levels) // _ENDS), device=counts.device)
        return torch.minimum(ends[_divergences(counts, ends, levels).argmin()] * (self.reach.double() / self.bins), largest)


def within(histogram: HistogramObserver, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the observed range, clamped to ±threshold: it covers the same values as the threshold does."""
    low, high = histogram.ends()
    return torch.maximum(low, -threshold), torch.minimum(high, threshold)


_ENDS = 64  # about this number of thresholds is tried


def _divergences(counts: Tensor, ends: Tensor, levels: int) -> Tensor:
    """Return the Kullback-Leibler divergence for each end: counts clipped at it, against these averaged within each of `levels` steps."""
    position, end = torch.arange(len(counts), device=counts.device), ends.unsqueeze(1)
    inside = torch.where(position < end, counts, 0)
    clipped = inside + torch.where(position == end - 1, (counts.sum() - inside.sum(1)).unsqueeze(1), 0)
    there = (inside > 0).to(counts.dtype)
    step = (position * levels // end).clamp_max(levels - 1)
    none = torch.zeros(len(ends), levels, dtype=counts.dtype, device=counts.device)
    totals, filled = none.scatter_add(1, step, inside), none.scatter_add(1, step, there)
    shown = (totals / filled.clamp_min(1)).gather(1, step) * there
    clipped, shown = clipped / clipped.sum(1, keepdim=True), shown / shown.sum(1, keepdim=True).clamp_min(1e-300)
    # Where the last bin holds nothing but what lies beyond, `shown` is 0 and the divergence infinite.
    return torch.where(clipped > 0, clipped * (clipped / shown).log(), 0.0).sum(1)

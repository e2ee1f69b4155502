"""Observers that count magnitudes in bins, and choose a threshold by what quantization loses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxquant.numerics.grids import SMALLEST_SCALE, IntType, grid_from_range, round_up_to_power_of_two, scale_from_range
from fxquant.quantization.observers import counting, loudness
from fxquant.quantization.observers.counting import sampled as sampled
from fxquant.quantization.observers.ranges import Observer, finite_range
from fxquant.support.arguments import checked


class HistogramObserver(Observer, names="histogram"):
    """Covers the range with the smallest mean squared error of the observed values and of the same values a tenth larger.

    Calibration is a sample, and later values exceed it. The range with the least error on the sample alone clips the largest of the later
    values, which does more harm than a slightly wider step. So every value counts twice, as it is and `ahead` times as large, and the
    range may reach that far beyond the observed one. A few values far from all others are clipped nevertheless where they would make
    the range wide, as with few bits. An end of the range at which many values lie, as after a clamp or in an image, is taken as the limit
    of all values, and lies on a step of the grid. `python -m benchmarks.observers` compares this observer with the others.

    The squared error is dominated by the samples of a batch with the largest norms. Where the largest magnitude of these outlier samples
    is 8 times that of the smallest ones, or more, another range is considered. It is taken if it halves the average noise of a sample, in
    dB; it may clip values of a few outlier samples (`loudness`). An output of the model is exempt.

    Magnitudes are counted in bins over [0, reach]. A larger value doubles the reach, as often as needed, by
    merging neighbouring bins, so counts stay exact and memory constant for any number of batches. Of a tensor of
    twice `sample` elements or more, that many are counted (see `sampled`); its largest magnitude is always that of all its elements.
    Magnitudes of negative values are counted a second time, on their own, for dtypes whose grid depends on the sign.
    """

    largest: Tensor
    reach: Tensor
    counts: Tensor
    negative: Tensor
    items: Tensor
    ahead = 1.1  # how much larger later values are taken to be; 1 where the observed values count alone
    each = True  # whether every sample of a batch counts alike, whatever its norm
    apart, worth = loudness.APART, loudness.WORTH  # octaves between items, and dB that another range gains, for it to be taken

    @checked()
    def __init__(self, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__()
        self.bins, self.sample = bins, sample
        self.register_buffer("largest", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("reach", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.float64, device="cpu"))
        self.register_buffer("negative", torch.zeros(bins, dtype=torch.float64, device="cpu"))
        self.register_buffer("items", loudness.empty())

    @property
    def only_zeros(self) -> bool:
        return self.observed and bool(self.largest == 0)

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))

    def take(self, value: Tensor, low: Tensor, high: Tensor, items: tuple[Tensor, Tensor] | None = None) -> None:
        """Take in a batch whose range is known, and, where dimension 0 is that of its items, the range of each of them."""
        largest = max(abs(float(low)), abs(float(high)))
        self._grow(largest)
        reach = float(self.reach)
        if reach > 0:
            found, negative, share = counting.magnitudes(value.detach(), self.sample, self.bins, reach, float(low) < 0)
            self.counts.add_(found.double().mul_(share))
            if negative is not None:
                self.negative.add_(negative.double().mul_(share))
        if items is not None and reach > 0 and value.numel() >= loudness.FEWEST * len(value):
            loudness.count(self.items, value, *items, reach)
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
            loudness.doubled(self.items)
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
        return candidates[self._best(candidates / dtype.divisor, dtype)]

    def tells(self, dtype: IntType) -> bool:
        """Whether bins are as fine as the steps of a dtype that covers them all. Where they are not, everything is covered."""
        return dtype.high < self.bins

    def scale(self, dtype: IntType) -> Tensor:
        threshold = self.threshold(dtype).float() if float(self.largest) > 0 else self.largest
        return scale_from_range(-threshold, threshold, dtype)

    def scale_before_rounding(self, dtype: IntType) -> Tensor:
        """In the middle of those that are rounded up to the power of two that loses least, so that training does not move it at once."""
        scale = self.scale(dtype)
        if float(self.largest) == 0 or not self.tells(dtype):
            return scale
        widest = round_up_to_power_of_two(scale_from_range(-self.largest, self.largest * self._ahead(self.counts), dtype)).double()
        steps = widest * 2.0 ** -torch.arange(8, device=widest.device, dtype=torch.float64)
        return (0.75 * steps[self._best(steps, dtype)]).float().clamp_min(SMALLEST_SCALE)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        """Return the interval with the least loss: each end in turn is the best 128th of the range's end, twice.

        Where the norms of samples differ, both ends are first clipped together, at the magnitude that is best for both.
        """
        ends = list(self.ends())
        if float(self.largest) == 0:
            return ends[0], ends[1]
        seen, counts = self.points()
        whole, beyond = tuple(ends), (self._ahead(self.negative), self._ahead(self._positive()))
        points = torch.cat((seen, torch.where(seen < 0, beyond[0] * seen, beyond[1] * seen)))
        counts, items = torch.cat((counts, counts)), self._items()

        def best(low: Tensor, high: Tensor) -> int:
            scale, zero = (part.double().unsqueeze(1) for part in grid_from_range(low, high, dtype))
            quantized = torch.clamp(torch.round(points / scale), dtype.low - zero, dtype.high - zero) * scale
            pooled, step = (self.loss((points - quantized).abs()) * counts).sum(1), scale.squeeze(1)
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
            ends[end] = candidates[best(candidates, ends[1]) if end == 0 else best(ends[0], candidates)]
        return ends[0], ends[1]

    def of_output(self) -> HistogramObserver:
        """Return a copy without the norms of samples: the error of an output of the model counts as it is."""
        found = copy.copy(self)
        found.each = False
        return found

    def per_sample(self) -> HistogramObserver:
        """Return a copy that chooses the grid with the least average noise of a sample, in dB, however small the gain."""
        if not self.each or not bool(self.items.any()):
            return self
        found = copy.copy(self)
        found.apart, found.worth = 1, 0.0
        return found

    @property
    def loud(self) -> bool:
        """Whether there are outlier samples, whose norms are so large that their values may be clipped."""
        items = self._items()
        return items is not None and items.differ

    def _items(self) -> loudness.Items | None:
        return loudness.Items(self.items, float(self.reach), self.apart, self.worth) if self.each else None

    def _best(self, steps: Tensor, dtype: IntType) -> int:
        """Return the index of the best of these steps of a symmetric dtype."""
        pooled, items, ahead = self._lost(steps, dtype), self._items(), self._ahead(self.counts)
        limit = steps * dtype.high
        return int(pooled.argmin()) if items is None else items.better(pooled, steps, limit, limit, (ahead, ahead))

    def _lost(self, steps: Tensor, dtype: IntType) -> Tensor:
        """Return the loss with each of these steps of a symmetric dtype, float64."""
        there = self.counts > 0
        centres, counts = self._middles()[there], self.counts[there]
        magnitudes, steps = torch.cat((centres, centres * self._ahead(self.counts))), steps.unsqueeze(1)
        quantized = torch.round(magnitudes / steps).clamp_max(dtype.high) * steps
        return (self.loss((magnitudes - quantized).abs()) * torch.cat((counts, counts))).sum(1)

    def _ahead(self, counts: Tensor) -> float:
        """`ahead`; 1 where the last of these counts is of many values.

        What stays within 1, as probabilities do, is covered up to 1 and not beyond.
        """
        if self.ahead == 1:
            return 1.0
        largest = float(self.largest)
        ahead = 1 / largest if 0 < largest <= 1 < largest * self.ahead else self.ahead
        return 1.0 if not bool(counts.any()) or self._crowded(counts, 1 / 1024) else ahead

    def crowded(self, dtype: IntType) -> tuple[bool, bool]:
        """Return whether many values lie at the smallest and at the largest value; of a symmetric one, at the largest magnitude.

        They are many if their squared error, of half a step, exceeds what all values lose if the range is half a step longer.
        """
        sides = (self.negative, self._positive()) if dtype.affine else (self.counts, self.counts)
        low, high = (self._crowded(counts, 1 / (3 * dtype.divisor)) for counts in sides)
        return low, high

    def _crowded(self, counts: Tensor, share: float) -> bool:
        """Return whether the last bin has this share of all values or more, and eight times what one of the 16 bins before it has."""
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
        """The smallest and the largest value, as far as bins tell, float32; 0 is between them."""
        edges = torch.arange(1, self.bins + 1, device=self.counts.device, dtype=torch.float64) * (self.reach.double() / self.bins)
        low, high = ((edges * (counts > 0)).max().float().clamp_max(self.largest) for counts in (self.negative, self._positive()))
        return -low, high

    def _positive(self) -> Tensor:
        return (self.counts - self.negative).clamp_min(0)

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Counts over another reach go to the bins where the middles of theirs lie."""
        reach = torch.stack([state["reach"] for state in states]).max()
        middles = torch.arange(self.bins, device=reach.device, dtype=torch.float64) + 0.5
        for name, buffer in (("counts", self.counts), ("negative", self.negative)):
            counts = torch.zeros_like(buffer)
            for state in states:
                bins = (middles * (state["reach"].double() / reach.double())).long() if float(reach) > 0 else middles.long()
                counts.index_add_(0, bins, state[name])
            buffer.copy_(counts)
        self.items.copy_(loudness.merged(states, "items", reach))
        self.reach.copy_(reach)
        self.largest.copy_(torch.stack([state["largest"] for state in states]).max())
        self.count.copy_(torch.stack([state["count"] for state in states]).sum())

    def extra_repr(self) -> str:
        return f"bins={self.bins}"


class LpObserver(HistogramObserver, names="lp"):
    """Covers the range with the smallest mean |error|^p of the observed values. The larger p, the more clipping errors count."""

    ahead = 1.0
    each = False

    @checked()
    def __init__(self, p: float = 3.0, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__(bins, sample)
        self.p = p

    def loss(self, error: Tensor) -> Tensor:
        return error.pow(self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, bins={self.bins}"


class MSEObserver(HistogramObserver, names="mse"):
    """Covers the range with the smallest mean squared error of the observed values."""

    ahead = 1.0
    each = False


def _fractions(ahead: float, device: torch.device) -> Tensor:
    """128ths, from the first up to `ahead`: float64."""
    return torch.arange(1, int(128 * ahead) + 1, device=device, dtype=torch.float64) / 128

"""Observers that choose a threshold by what the distribution of magnitudes looks like."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.numerics.grids import IntType, grid_from_range
from fxquant.quantization.observers.histogram import HistogramObserver
from fxquant.support.arguments import checked

USUAL_PERCENTILE = 99.99


class ThresholdObserver(HistogramObserver):
    """Covers the values up to a magnitude; of an affine dtype, the range as far as that reaches to either side."""

    ahead = 1.0
    each = False

    def threshold(self, dtype: IntType) -> Tensor:
        raise NotImplementedError

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        threshold = self.threshold(dtype).float() if float(self.largest) > 0 else self.largest
        return within(self, threshold)

    def scale_before_rounding(self, dtype: IntType) -> Tensor:
        return self.scale(dtype)


class PercentileObserver(ThresholdObserver, names="percentile"):
    """Covers a share of the values: the threshold is the given percentile of the magnitudes."""

    @checked()
    def __init__(self, percentile: float = USUAL_PERCENTILE, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__(bins, sample)
        self.percentile = percentile

    def threshold(self, dtype: IntType) -> Tensor:
        return percentile_threshold(self, self.percentile)

    def extra_repr(self) -> str:
        return f"percentile={self.percentile}, bins={self.bins}"


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

    def extra_repr(self) -> str:
        return f"deviations={self.deviations}, bins={self.bins}"


class KLObserver(ThresholdObserver, names="kl entropy"):
    """Covers the range whose quantized distribution is nearest to the observed one, by the Kullback-Leibler divergence.

    The formula is that of S. Migacz, 8-bit Inference with TensorRT, GTC 2017: the counts up to a threshold, those beyond added to the
    last bin, against the same counts without those beyond, made equal within each step of the dtype. The first bin, zeros above all, counts
    as much as the second, as in NVIDIA's pytorch-quantization. It asks how alike two distributions are, and not how large errors
    are, so it clips hard; it is here because other toolkits have it, and is rarely the best.
    """

    def threshold(self, dtype: IntType) -> Tensor:
        return kl_threshold(self, dtype)


class MixObserver(ThresholdObserver, names="mix"):
    """Covers the one of four ranges whose quantized values are most alike to what was seen, by their cosine.

    The four are everything, the 99.99th percentile, the least squared error, and the least Kullback-Leibler divergence.
    """

    def threshold(self, dtype: IntType) -> Tensor:
        candidates = (
            self.largest.double(),
            HistogramObserver.threshold(self, dtype),
            percentile_threshold(self, USUAL_PERCENTILE).double(),
            kl_threshold(self, dtype),
        )
        return max(candidates, key=lambda threshold: _similarity(self, threshold, dtype))


def within(histogram: HistogramObserver, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The range as far as a threshold reaches to either side, so that the same values are covered."""
    low, high = histogram.ends()
    return torch.maximum(low, -threshold), torch.minimum(high, threshold)


def percentile_threshold(histogram: HistogramObserver, percentile: float) -> Tensor:
    """Return the upper edge of the bin that a percentile of the magnitudes lies in."""
    reached = torch.cumsum(histogram.counts, 0) >= histogram.counts.sum() * (percentile / 100)
    upper_edge = (int(reached.to(torch.int8).argmax()) + 1) * (histogram.reach / histogram.bins)
    return torch.minimum(upper_edge, histogram.largest)


def kl_threshold(histogram: HistogramObserver, dtype: IntType) -> Tensor:
    """The upper edge of bins, float64, with the smallest divergence; the largest magnitude where there are no more bins than steps."""
    levels = dtype.high + 1 if dtype.low < 0 or not bool((histogram.negative > 0).any()) else (dtype.high + 1) // 2
    counts, largest = histogram.counts.clone(), histogram.largest.double()
    counts[0] = counts[1]
    if levels >= histogram.bins or not bool((counts > 0).any()):
        return largest
    ends = torch.arange(levels, histogram.bins + 1, max(1, (histogram.bins - levels) // _ENDS), device=counts.device)
    best = _divergences(counts, ends, levels).argmin()
    return torch.minimum(ends[best] * (histogram.reach.double() / histogram.bins), largest)


_ENDS = 64  # about so many thresholds are tried


def _divergences(counts: Tensor, ends: Tensor, levels: int) -> Tensor:
    """For each end, of the bins before it, those beyond added to the last, from the same made equal within each of `levels` steps."""
    position, end = torch.arange(len(counts), device=counts.device), ends.unsqueeze(1)
    within_end = position < end
    inside = torch.where(within_end, counts, 0)
    beyond = counts.sum() - inside.sum(1)
    seen = inside + torch.where(position == end - 1, beyond.unsqueeze(1), 0)
    there = (inside > 0).to(counts.dtype)
    step = (position * levels // end).clamp_max(levels - 1)
    none = torch.zeros(len(ends), levels, dtype=counts.dtype, device=counts.device)
    totals, filled = none.scatter_add(1, step, inside), none.scatter_add(1, step, there)
    shown = (totals / filled.clamp_min(1)).gather(1, step) * there
    seen, shown = seen / seen.sum(1, keepdim=True), shown / shown.sum(1, keepdim=True).clamp_min(1e-300)
    # Where the last bin holds nothing but what lies beyond, `shown` is 0 and the divergence infinite.
    return torch.where(seen > 0, seen * (seen / shown).log(), 0.0).sum(1)


def _similarity(histogram: HistogramObserver, threshold: Tensor, dtype: IntType) -> float:
    """Return the cosine similarity of the observed values and their quantized values, with a grid up to a threshold."""
    points, counts = histogram.points()
    if dtype.affine:
        scale, zero = (part.double() for part in grid_from_range(*within(histogram, threshold.float()), dtype))
    else:
        scale, zero = threshold / dtype.divisor, torch.zeros((), dtype=torch.float64, device=points.device)
    quantized = torch.clamp(torch.round(points / scale), dtype.low - zero, dtype.high - zero) * scale
    product, own, other = ((a * b * counts).sum() for a, b in ((points, quantized), (points, points), (quantized, quantized)))
    return float(product / (own * other).sqrt()) if float(other) > 0 else 0.0

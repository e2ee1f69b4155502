"""Observers: they watch a tensor's values and say which scale, or which interval, covers them.

An observer streams: it holds a few numbers however many batches pass. Writing another is a class with
`observe` and `scale`, and with `interval` if affine dtypes are to make use of their zero point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fxquant.arguments import checked
from fxquant.numerics import INT8, IntType, grid_from_range, scale_from_range


class Observer(nn.Module):
    """What every observer offers. `observed` is False until the first batch."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device="cpu"))

    @property
    def observed(self) -> bool:
        return bool(self.count > 0)

    def observe(self, value: Tensor) -> None:
        """Take in one batch of real values. Raises ValueError, and changes nothing, if any is NaN or infinite."""
        raise NotImplementedError

    def scale(self, dtype: IntType) -> Tensor:
        """The float32 scale for what was observed."""
        raise NotImplementedError

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        """The interval of real numbers, float32, that the integers of an affine dtype should stand for.

        Here: what int8 would stand for with this observer's scale; the zero point is then 128.
        """
        scale = self.scale(INT8)
        return scale * INT8.low, scale * INT8.high

    def range_observer(self) -> MinMaxObserver:
        """The observer of the range that this one's scale follows in state TRAIN. Here: a moving average."""
        return MovingAverageMinMaxObserver()

    def reset(self) -> None:
        """Forget everything that was observed. Here: every buffer becomes zero."""
        for buffer in self.buffers():
            buffer.zero_()

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Become the observer that has seen what several have: `states` are their buffers by name, this one's among them.

        Called with the same states in the same order on every rank, so that all ranks agree bit for bit. An observer
        that has seen nothing is left out beforehand. Needed only to calibrate with torch.distributed.
        """
        raise NotImplementedError


class MinMaxObserver(Observer):
    """Covers every value seen: the scale comes from the smallest and the largest."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("high", torch.zeros((), dtype=torch.float32, device="cpu"))

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of the range."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def ends(self) -> Tensor:
        """The range, widened to hold 0: float32 of shape (2,)."""
        return torch.stack((self.low.clamp_max(0.0), self.high.clamp_min(0.0)))

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))

    def take(self, value: Tensor, low: Tensor, high: Tensor) -> None:
        """Take in a batch whose range is known."""
        first = self.count == 0
        self.low.copy_(torch.where(first, low, torch.minimum(self.low, low)))
        self.high.copy_(torch.where(first, high, torch.maximum(self.high, high)))
        self.count += 1

    def scale(self, dtype: IntType) -> Tensor:
        return scale_from_range(self.low, self.high, dtype)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        low, high = self.ends
        return low, high

    def range_observer(self) -> MinMaxObserver:
        return MinMaxObserver()

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self.low.copy_(torch.stack([state["low"] for state in states]).min())
        self.high.copy_(torch.stack([state["high"] for state in states]).max())
        self.count.copy_(torch.stack([state["count"] for state in states]).sum())


class MovingAverageMinMaxObserver(MinMaxObserver):
    """Covers the average of the batches' ranges.

    The first 1/averaging_constant batches count equally; later ones enter with weight `averaging_constant`.
    """

    @checked()
    def __init__(self, averaging_constant: float = 0.01) -> None:
        super().__init__()
        self.averaging_constant = averaging_constant

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))

    def take(self, value: Tensor, low: Tensor, high: Tensor) -> None:
        """Take in a batch whose range is known."""
        self.count += 1
        weight = torch.clamp_min(1 / self.count, self.averaging_constant)
        self.low += (low - self.low) * weight
        self.high += (high - self.high) * weight

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Every range counts as many times as there were batches."""
        counts = torch.stack([state["count"] for state in states])
        for name in ("low", "high"):
            values = torch.stack([state[name] for state in states]).double()
            getattr(self, name).copy_((values * counts).sum() / counts.sum())
        self.count.copy_(counts.sum())

    def range_observer(self) -> MinMaxObserver:
        return MovingAverageMinMaxObserver(self.averaging_constant)

    def extra_repr(self) -> str:
        return f"averaging_constant={self.averaging_constant}"


class HistogramObserver(Observer):
    """Covers the range that loses least: the scale has the smallest mean squared quantization error.

    Magnitudes are counted in bins over [0, reach]. A larger value doubles the reach, as often as needed, by
    joining neighbouring bins, so counts stay exact and memory constant however many batches pass. Of a tensor of
    twice `sample` elements or more that many are counted (see `sampled`); its largest magnitude is always taken from all of it.
    Those of negative values are counted a second time, on their own, for the dtypes that tell the signs apart.
    """

    largest: Tensor
    reach: Tensor
    counts: Tensor
    negative: Tensor

    @checked()
    def __init__(self, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__()
        self.bins, self.sample = bins, sample
        self.register_buffer("largest", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("reach", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.float64, device="cpu"))
        self.register_buffer("negative", torch.zeros(bins, dtype=torch.float64, device="cpu"))

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))

    def take(self, value: Tensor, low: Tensor, high: Tensor) -> None:
        """Take in a batch whose range is known."""
        largest = torch.maximum(low.abs(), high.abs())
        self._grow(float(largest))
        values = sampled(value.detach(), self.sample).float()
        reach, share = float(self.reach), value.numel() / values.numel()
        if reach > 0:
            self.counts += torch.histc(values.abs(), self.bins, 0.0, reach).double() * share
        if float(low) < 0 and (below := -values[values < 0]).numel():
            self.negative += torch.histc(below, self.bins, 0.0, reach).double() * share
        self.largest.copy_(torch.maximum(self.largest, largest))
        self.count += 1

    def _grow(self, largest: float) -> None:
        """Make the reach cover a magnitude; everything seen before was zero where it is still zero."""
        if float(self.reach) == 0:
            self.reach.fill_(largest)
        while float(self.reach) < largest:
            for counts in (self.counts, self.negative):
                joined = counts.view(-1, 2).sum(1)
                counts.zero_()
                counts[: self.bins // 2] = joined
            self.reach *= 2

    def threshold(self, dtype: IntType) -> Tensor:
        """The magnitude that the dtype's largest value should stand for."""
        candidates = torch.arange(1, 129, device=self.counts.device, dtype=torch.float64) / 128 * self.largest.double()
        centres = (torch.arange(self.bins, device=self.counts.device, dtype=torch.float64) + 0.5) * (self.reach.double() / self.bins)
        steps = (candidates / dtype.divisor).unsqueeze(1)
        quantized = torch.round(centres / steps).clamp_max(dtype.high) * steps
        errors = ((centres - quantized).square() * self.counts).sum(1)
        return candidates[int(errors.argmin())]

    def scale(self, dtype: IntType) -> Tensor:
        threshold = self.threshold(dtype).float() if float(self.largest) > 0 else self.largest
        return scale_from_range(-threshold, threshold, dtype)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value, as far as bins tell, float32; 0 is between them."""
        edges = torch.arange(1, self.bins + 1, device=self.counts.device, dtype=torch.float64) * (self.reach.double() / self.bins)
        low, high = ((edges * (counts > 0)).max().float().clamp_max(self.largest) for counts in (self.negative, self._positive()))
        return -low, high

    def _positive(self) -> Tensor:
        return (self.counts - self.negative).clamp_min(0)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        """The one with the least squared error: each end in turn is the best of 128 fractions of the range's, twice."""
        ends = list(self._ends())
        if float(self.largest) == 0:
            return ends[0], ends[1]
        centres = (torch.arange(self.bins, device=self.counts.device, dtype=torch.float64) + 0.5) * (self.reach.double() / self.bins)
        points, counts = torch.cat((-centres, centres)), torch.cat((self.negative, self._positive()))
        points, counts = points[counts > 0], counts[counts > 0]
        fractions = torch.arange(1, 129, device=points.device, dtype=torch.float64) / 128
        whole = tuple(ends)
        for end in (1, 0, 1, 0):
            if float(whole[end]) == 0:
                continue
            candidates = (fractions * whole[end].double()).float()
            low, high = (candidates, ends[1]) if end == 0 else (ends[0], candidates)
            scale, zero = (part.double().unsqueeze(1) for part in grid_from_range(low, high, dtype))
            quantized = torch.clamp(torch.round(points / scale), dtype.low - zero, dtype.high - zero) * scale
            ends[end] = candidates[int(((points - quantized).square() * counts).sum(1).argmin())]
        return ends[0], ends[1]

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
        self.reach.copy_(reach)
        self.largest.copy_(torch.stack([state["largest"] for state in states]).max())
        self.count.copy_(torch.stack([state["count"] for state in states]).sum())

    def extra_repr(self) -> str:
        return f"bins={self.bins}"


class PercentileObserver(HistogramObserver):
    """Covers a share of the values: the threshold is the given percentile of the magnitudes."""

    @checked()
    def __init__(self, percentile: float = 99.99, bins: int = 2048, sample: int = 2**18) -> None:
        super().__init__(bins, sample)
        self.percentile = percentile

    def threshold(self, dtype: IntType) -> Tensor:
        reached = torch.cumsum(self.counts, 0) >= self.counts.sum() * (self.percentile / 100)
        upper_edge = (int(reached.to(torch.int8).argmax()) + 1) * (self.reach / self.bins)
        return torch.minimum(upper_edge, self.largest)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        """The range as far as the threshold reaches to either side, so that the same values are covered."""
        low, high = self._ends()
        threshold = self.threshold(dtype).float() if float(self.largest) > 0 else self.largest
        return torch.maximum(low, -threshold), torch.minimum(high, threshold)

    def extra_repr(self) -> str:
        return f"percentile={self.percentile}, bins={self.bins}"


@lru_cache
def standard() -> dict[type[Observer], Gathering | None]:
    """Observers that gather, between them, what each of fxquant's needs with its usual settings, and how each of them gathers."""
    return {kind: gathering(kind()) for kind in (MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver)}


Gathering = tuple[str, tuple[tuple[str, float], ...]]  # the name of a class, and the settings that say what it gathers


def observe_together(observers: Sequence[Observer], value: Tensor) -> None:
    """Let observers take in one batch of real values, whose range is computed once for all of fxquant's.

    Raises ValueError, and changes none of these, if any value is NaN or infinite.
    """
    low, high = finite_range(value)
    for observer in observers:
        if gathering(observer) is None:
            observer.observe(value)
        else:
            cast(_Gathers, observer).take(value, low, high)


def gathering(observer: Observer) -> Gathering | None:
    """How an observer gathers, so that observers of one way, which differ in how they choose a scale, can take over from each other.

    None if its class has a method `observe` of its own, whose statistics mean something to that class alone.
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


def settings(observer: Observer) -> tuple[Any, ...]:
    """What tells an observer that has seen nothing from others: its class, its attributes, and the same of observers inside of it.

    Buffers are what was observed, and no settings.
    """
    own = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in observer.__dict__.items()
        if name not in _EVERY_MODULES
    }
    return type(observer), own, [(name, settings(child)) for name, child in observer.named_children() if isinstance(child, Observer)]


_EVERY_MODULES = frozenset(nn.Module().__dict__)


def sampled(value: Tensor, count: int) -> Tensor:
    """So many of a tensor's elements, one-dimensional; all of them if there are fewer than twice as many.

    The tensor, read in the order of its dimensions, is cut into `count` stretches of one length, and one element is
    taken at a random place of each: every element is as likely as any other, whatever lies how many elements apart.
    The places follow from the two numbers alone: neither the layout in memory nor the generators of random numbers
    take part, so the same values give the same sample on every thread and rank.
    """
    size = value.numel()
    if size < 2 * count:
        return value.flatten()
    places = ((torch.arange(count, dtype=torch.float64, device="cpu") + _places(count)) * (size / count)).long().clamp_max_(size - 1)
    return torch.take(value, places.to(value.device))


@lru_cache(maxsize=4)
def _places(count: int) -> Tensor:
    """Where in its stretch each element is taken, in [0, 1), float64."""
    return torch.rand(count, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))


def finite_range(value: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest value, float32. Raises ValueError if any is NaN or infinite, or if there is none."""
    if value.numel() == 0:
        raise ValueError("the tensor is empty")
    low, high = torch.aminmax(value.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        kind = "NaN" if bool(torch.isnan(low)) else "infinite values"
        raise ValueError(f"the tensor holds {kind}")
    return low.float(), high.float()

"""Samples of a batch by their norms, so that a few outlier samples do not silently reduce the precision of all others.

The octave of a sample is how often the reach of a histogram has to be halved to its largest magnitude. The magnitudes of the samples of
each octave are counted in separate bins over [0, reach / 2^octave], those of positive and of negative values separately. So the noise
of a grid in samples of large and of small norms can be computed without the samples:

    noise    E_k = Σ n · min(x², Δ²/12) of what the grid covers, Σ n · (|x| - limit)² of what it cuts off
    a sample 10·log10(E_k / P_k + 10^-3.5) dB, on average over all samples: noise 35 dB below a sample does it no harm

The pooled squared error is dominated by the outlier samples; this average is the expected error of the next sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxquant.quantization.observers import counting

OCTAVES, BINS = 8, 256
SAMPLE = 2**15  # about so many elements of a batch are counted
FEWEST = 32  # elements that a sample has at least: the norm of fewer is part of what they mean
APART = 3  # octaves between the outlier samples and those of the smallest norm; with fewer, all samples count alike
ENOUGH = 10**-3.5  # of a sample's power: an error below it does no harm
WORTH = 3.0  # dB: the noise of a sample has to be halved, on average


def empty() -> Tensor:
    """Return empty counts of positive and of negative values for each octave: float64 of shape (2, OCTAVES, BINS)."""
    return torch.zeros(2, OCTAVES, BINS, dtype=torch.float64, device="cpu")


def count(counts: Tensor, value: Tensor, low: Tensor, high: Tensor, reach: float) -> None:
    """Add the items of a batch, which dimension 0 counts; of a large one every so many elements count for those beside them.

    `low` and `high` are the range of each item, float32.
    """
    items = value.detach().flatten(1).float()
    octaves = [_octave(largest, reach) for largest in torch.maximum(-low, high).tolist()]
    apart = max(1, items.numel() // SAMPLE) | 1  # odd: it meets every column of an image whose width is a power of two
    counted = -(-items.shape[1] // apart)
    there = sorted(set(octaves))
    for octave in there:
        own = None if len(there) == 1 else [item for item, of in enumerate(octaves) if of == octave]
        found = counting.signed(items, own, apart, 2 * BINS, reach * 2.0**-octave).double() * (items.shape[1] / counted)
        counts[0, octave] += found[BINS:]
        counts[1, octave] += found[:BINS].flip(0)


def _octave(largest: float, reach: float) -> int:
    """Return how many times the reach has to be halved to a magnitude."""
    ratio = reach / max(largest, reach * 2.0**-OCTAVES)
    return min(max(math.frexp(ratio)[1] - 1, 0), OCTAVES - 1)


def doubled(counts: Tensor) -> None:
    """Move the counts of every octave to the next one, after the reach was doubled."""
    last = counts[:, -1].view(2, -1, 2).sum(2)
    counts[:, 1:] = counts[:, :-1].clone()
    counts[:, 0] = 0
    counts[:, -1, : BINS // 2] += last


def merged(states: Sequence[Mapping[str, Tensor]], name: str, reach: Tensor) -> Tensor:
    """Return the counts of several histograms, over the largest of their reaches."""
    found = empty().to(reach.device)
    middles = torch.arange(BINS, device=reach.device, dtype=torch.float64) + 0.5
    for state in states:
        if not float(state["reach"]) > 0:
            continue
        ratio = float(reach.double() / state["reach"].double())
        lower = int(torch.frexp(torch.tensor(ratio, dtype=torch.float64, device="cpu")).exponent) - 1
        for octave in range(OCTAVES):
            to = min(octave + lower, OCTAVES - 1)
            bins = (middles * (2.0 ** (to - octave) / ratio)).long().clamp_max(BINS - 1)
            found[:, to].index_add_(1, bins, state[name][:, octave])
    return found


class Items:
    """The norms of the samples that a histogram has counted.

    apart  octaves between the samples with the largest and the smallest norm, from which on they differ
    worth  dB by which the average noise of a sample has to fall for another grid to be taken
    """

    def __init__(self, counts: Tensor, reach: float, apart: int = APART, worth: float = WORTH) -> None:
        there = torch.nonzero(counts.sum((0, 2))).flatten()
        self.counts = counts[:, there]
        tops = reach * torch.exp2(-there.double())
        self.magnitudes = (torch.arange(BINS, device=counts.device, dtype=torch.float64) + 0.5) * (tops / BINS).unsqueeze(1)
        self.power = (self.counts * self.magnitudes.square()).sum((0, 2))
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
        for sign, limit, further in ((0, high, beyond[1]), (1, low, beyond[0])):
            for factor in (1.0, further):
                noise += self._noise(self.counts[sign], factor, steps, limit)
        live = self.power > 0
        share = self.counts.sum((0, 2))[live]
        decibels = 10 * torch.log10(noise[live] / (2 * self.power[live]).unsqueeze(1) + ENOUGH)
        mean = (decibels * (share / share.sum()).unsqueeze(1)).sum(0)
        best = int(mean.argmin())
        return best if float(mean[usual] - mean[best]) >= self.worth else usual

    def _noise(self, counts: Tensor, factor: float, steps: Tensor, limit: Tensor) -> Tensor:
        """Return the squared error of each octave on each grid, of shape (octaves, grids)."""
        values = (self.magnitudes * factor).unsqueeze(2)
        inside = torch.minimum(values.square(), steps.square() / 12)
        return (torch.where(values > limit, (values - limit).square(), inside) * counts.unsqueeze(2)).sum(1)

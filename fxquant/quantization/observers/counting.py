"""The statistics that observers compute of a whole tensor: the minimum and the maximum of its items, and histograms.

This module computes them in PyTorch, on every device. A backend may offer kernels that read the tensor once, without copies (`OFFERS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fxquant.support.offers import Offers


class Counting(Protocol):
    """The kernels that a backend may offer; each returns the results of the function of that name in this module."""

    def takes(self, value: Tensor) -> bool:
        """Whether the kernels support this tensor."""

    def ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `ends`."""

    def magnitudes(self, value: Tensor, places: Tensor | None, bins: int, reach: float) -> tuple[Tensor, Tensor]:
        """Compute the counts of `magnitudes`, of all and of negative values. `places`, int64, are the indices of a sample, if any."""

    def signed(self, rows: Tensor, chosen: Sequence[int], apart: int, bins: int, top: float) -> Tensor:
        """Compute `signed`."""


OFFERS = Offers[Counting]()


def ends(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of each row, of shape (rows,); NaN where a row holds one."""
    offered = OFFERS.first(rows)
    if offered is not None:
        return offered.ends(rows)
    low, high = torch.aminmax(rows, dim=1)
    return low, high


def magnitudes(value: Tensor, count: int, bins: int, reach: float, negative: bool) -> tuple[Tensor, Tensor | None, float]:
    """Count the magnitudes in each bin of [0, reach].

    Return the counts of all values and of the negative ones alone, each of shape (bins,), and how many elements of the tensor one counted
    element represents. Of a tensor of twice `count` elements or more, `count` are counted (see `sampled`). Where `negative` is false, the
    tensor holds no negative values, and their counts are None.
    """
    share = 1.0 if value.numel() < 2 * count else value.numel() / count
    offered = OFFERS.first(value)
    if offered is not None:
        found, below = offered.magnitudes(value, None if share == 1.0 else places(value.numel(), count), bins, reach)
        return found, below if negative else None, share
    values = sampled(value, count).float()
    found = torch.histc(values.abs(), bins, 0.0, reach)
    return found, torch.histc(-values[values < 0], bins, 0.0, reach) if negative and bool((values < 0).any()) else None, share


def signed(rows: Tensor, chosen: Sequence[int] | None, apart: int, bins: int, top: float) -> Tensor:
    """Count every `apart`-th element of the chosen rows in the bins of [-top, top]; the result has shape (bins,). None: of all rows."""
    offered = OFFERS.first(rows)
    if offered is not None:
        return offered.signed(rows, range(len(rows)) if chosen is None else chosen, apart, bins, top)
    few = rows[:, ::apart]
    return torch.histc(few if chosen is None else few[list(chosen)], bins, -top, top)


def sampled(value: Tensor, count: int) -> Tensor:
    """Return `count` of a tensor's elements, one-dimensional; all of them if there are fewer than twice as many.

    The tensor, read in the order of its dimensions, is cut into `count` sections of equal length, and one element is
    taken at a random index of each. So every element is equally likely, whatever period the values have. The indices
    depend on the two sizes alone, and neither on the memory layout nor on any generator of random numbers. So the
    same values give the same sample on every thread and rank.
    """
    if value.numel() < 2 * count:
        return value.flatten()
    return torch.take(value, places(value.numel(), count).to(value.device))


@lru_cache(maxsize=16)
def places(size: int, count: int) -> Tensor:
    """Return the indices of the elements that `sampled` takes, int64 of shape (count,)."""
    stretches = torch.arange(count, dtype=torch.float64, device="cpu") + _within(count)
    return (stretches * (size / count)).long().clamp_max_(size - 1)


@lru_cache(maxsize=4)
def _within(count: int) -> Tensor:
    """Return where in its section each element is taken, in [0, 1), float64 of shape (count,)."""
    return torch.rand(count, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))

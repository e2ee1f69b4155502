"""What observers look at a whole tensor for: the ends of its items, and how many of its elements lie in each bin.

In PyTorch, here, on every device; and in one pass each, without copies, where a backend offers it for this processor (`OFFERS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fxquant.support.offers import Offers


class Counting(Protocol):
    """The passes that a backend may have; each has the results of the function of that name here."""

    def takes(self, value: Tensor) -> bool:
        """Whether they are for this tensor."""

    def ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `ends`."""

    def magnitudes(self, value: Tensor, places: Tensor | None, bins: int, reach: float) -> tuple[Tensor, Tensor]:
        """See `magnitudes`: the counts of all, and of negative values. `places` are those of a sample."""

    def signed(self, rows: Tensor, chosen: Sequence[int], apart: int, bins: int, top: float) -> Tensor:
        """See `signed`."""


OFFERS = Offers[Counting]()


def ends(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each row; NaN where a row holds one."""
    offered = OFFERS.first(rows)
    if offered is not None:
        return offered.ends(rows)
    low, high = torch.aminmax(rows, dim=1)
    return low, high


def magnitudes(value: Tensor, count: int, bins: int, reach: float, negative: bool) -> tuple[Tensor, Tensor | None, float]:
    """How many magnitudes lie in each bin of [0, reach], the same of negative values alone, and what of the tensor one stands for.

    Of twice `count` elements or more so many are counted (see `sampled`). Without `negative` there are no negative values.
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
    """How many elements of the chosen rows, of which every so many count, lie in each bin of [-top, top]; None: of all rows."""
    offered = OFFERS.first(rows)
    if offered is not None:
        return offered.signed(rows, range(len(rows)) if chosen is None else chosen, apart, bins, top)
    few = rows[:, ::apart]
    return torch.histc(few if chosen is None else few[list(chosen)], bins, -top, top)


def sampled(value: Tensor, count: int) -> Tensor:
    """So many of a tensor's elements, one-dimensional; all of them if there are fewer than twice as many.

    The tensor, read in the order of its dimensions, is cut into `count` stretches of one length, and one element is
    taken at a random place of each: every element is as likely as any other, whatever lies how many elements apart.
    The places follow from the two numbers alone: neither the layout in memory nor the generators of random numbers
    take part, so the same values give the same sample on every thread and rank.
    """
    if value.numel() < 2 * count:
        return value.flatten()
    return torch.take(value, places(value.numel(), count).to(value.device))


@lru_cache(maxsize=16)
def places(size: int, count: int) -> Tensor:
    """The places of the elements that are taken, int64."""
    stretches = torch.arange(count, dtype=torch.float64, device="cpu") + _within(count)
    return (stretches * (size / count)).long().clamp_max_(size - 1)


@lru_cache(maxsize=4)
def _within(count: int) -> Tensor:
    """Where in its stretch each element is taken, in [0, 1), float64."""
    return torch.rand(count, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))

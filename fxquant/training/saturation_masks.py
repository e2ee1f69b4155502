"""Which elements of a tensor have a gradient, kept for the way back: as bytes that are 1, or as the places of the few that have none."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fxquant.support.offers import Offers

FEW = 32  # times fewer places than elements, of 4 bytes each


class Marks(Protocol):
    """What a backend may have; each has the results of the function here."""

    def takes(self, inside: Tensor) -> bool:
        """Whether it is for this tensor."""

    def places(self, marks: Tensor, count: int) -> Tensor:
        """See `kept`."""

    def marks(self, places: Tensor, size: int) -> Tensor:
        """See `opened`."""


OFFERS = Offers[Marks]()


def kept(inside: Tensor, without: int) -> Tensor | None:
    """Marks, of which so many are 0, as they are kept: None if there are none, int32 places in the order of memory if they are few."""
    if not without:
        return None
    if without * FEW > inside.numel() or inside.numel() >= 2**31:
        return inside
    flat = inside.as_strided((inside.numel(),), (1,))
    offered = OFFERS.first(flat)
    return torch.nonzero(flat == 0).flatten().int() if offered is None else offered.places(flat, without)


def opened(kept: Tensor | None, like: Tensor) -> Tensor | None:
    """The marks that were kept, as bytes that lie as another tensor does."""
    if kept is None or kept.dtype != torch.int32:
        return kept
    offered = OFFERS.first(kept)
    if offered is None:
        flat = torch.ones(like.numel(), dtype=torch.uint8, device=kept.device)
        flat[kept.long()] = 0
    else:
        flat = offered.marks(kept, like.numel())
    return flat.as_strided(like.shape, like.stride())

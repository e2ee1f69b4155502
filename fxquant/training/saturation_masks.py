"""Saturation masks saved for backward: bytes that are 1 where an element has a gradient, or the indices of the few that have none."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fxquant.support.offers import Offers

FEW = 32  # times fewer places than elements, of 4 bytes each


class Marks(Protocol):
    """The kernels that a backend may offer; each has the results of the function here."""

    def takes(self, inside: Tensor) -> bool:
        """Return whether the kernels are for this tensor."""

    def places(self, marks: Tensor, count: int) -> Tensor:
        """Return the int32 indices of the `count` bytes that are 0, as `kept` does."""

    def marks(self, places: Tensor, size: int) -> Tensor:
        """Return `size` bytes that are 0 at these indices and 1 elsewhere, as `opened` does."""


OFFERS = Offers[Marks]()


def kept(inside: Tensor, without: int) -> Tensor | None:
    """Return a mask, of which `without` bytes are 0, as it is saved: None if none are, int32 indices in memory order if few are."""
    if not without:
        return None
    if without * FEW > inside.numel() or inside.numel() >= 2**31:
        return inside
    flat = inside.as_strided((inside.numel(),), (1,))
    offered = OFFERS.first(flat)
    return torch.nonzero(flat == 0).flatten().int() if offered is None else offered.places(flat, without)


def opened(kept: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a saved mask as bytes with the shape and strides of another tensor."""
    if kept is None or kept.dtype != torch.int32:
        return kept
    offered = OFFERS.first(kept)
    if offered is None:
        flat = torch.ones(like.numel(), dtype=torch.uint8, device=kept.device)
        flat[kept.long()] = 0
    else:
        flat = offered.marks(kept, like.numel())
    return flat.as_strided(like.shape, like.stride())

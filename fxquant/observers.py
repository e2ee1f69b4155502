"""Observers: they watch a tensor's values and say which scale covers them.

An observer streams: it holds a few numbers however many batches pass. Writing another is a class with
`observe` and `scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxquant.numerics import IntType, scale_from_range


class Observer(nn.Module):
    """What every observer offers. `observed` is False until the first batch."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def observed(self) -> bool:
        return bool(self.count > 0)

    def observe(self, value: Tensor) -> None:
        """Take in one batch of real values. Raises ValueError, and changes nothing, if any is NaN or infinite."""
        raise NotImplementedError

    def scale(self, dtype: IntType) -> Tensor:
        """The float32 scale for what was observed."""
        raise NotImplementedError


class MinMaxObserver(Observer):
    """Covers every value seen: the scale comes from the smallest and the largest."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def observe(self, value: Tensor) -> None:
        low, high = finite_range(value)
        first = self.count == 0
        self.low.copy_(torch.where(first, low, torch.minimum(self.low, low)))
        self.high.copy_(torch.where(first, high, torch.maximum(self.high, high)))
        self.count += 1

    def scale(self, dtype: IntType) -> Tensor:
        return scale_from_range(self.low, self.high, dtype)


class MovingAverageMinMaxObserver(MinMaxObserver):
    """Covers the average of the batches' ranges.

    The first 1/averaging_constant batches count equally; later ones enter with weight `averaging_constant`.
    """

    def __init__(self, averaging_constant: float = 0.01) -> None:
        super().__init__()
        self.averaging_constant = averaging_constant

    def observe(self, value: Tensor) -> None:
        low, high = finite_range(value)
        self.count += 1
        weight = torch.clamp_min(1 / self.count, self.averaging_constant)
        self.low += (low - self.low) * weight
        self.high += (high - self.high) * weight

    def extra_repr(self) -> str:
        return f"averaging_constant={self.averaging_constant}"


def finite_range(value: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest value, float32. Raises ValueError if any is NaN or infinite, or if there is none."""
    if value.numel() == 0:
        raise ValueError("the tensor is empty")
    low, high = torch.aminmax(value.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        kind = "NaN" if bool(torch.isnan(low)) else "infinite values"
        raise ValueError(f"the tensor holds {kind}")
    return low.float(), high.float()

"""What quantization costs, as a function of channel factors: errors in mean square, each weighed by what it does further on.

    layer     Σ_oi min(taps·(δ_o·f_i)²/12, S_oi) · p_i · g_o,   δ_o = max_i |w_oi|/f_i / divisor
    tensor    Σ_c min((Δ/f_c)²/12, p_c) · g_c,                  Δ = max_c m_c·f_c / divisor

m and p are the largest magnitude and the mean square of a channel of the float model, S the sum of squares of the weights that meet it,
and g what an error of mean square one in a channel adds to the errors of what is computed from it: for every layer that reads it,
Σ_o S_oc·g_o. Where a layer gives something that has no factors, its errors count as a share of each channel's signal,
g_o = 1 / (channels · Σ_i S_oi·p_i). Errors of rounding are taken as uniform, and never larger than what is rounded; that scales are powers
of two is left out, which is no reason for a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerNoise:
    """A layer's weight. Tensors are float64, and labels int64.

    read          (out, in): the labels of the channels that each weight meets
    given         (out,): those of the channels of its result
    squares       (out, in): Σ w² over a kernel's taps
    largest       (out, in): max |w| over them
    share         (out, in): what an error of mean square one of a weight costs, p_i · g_o
    taps          how many there are
    divisor       half the number of steps of the weight's dtype
    per_channel   whether every output has a scale of its own
    """

    read: Tensor
    given: Tensor
    squares: Tensor
    largest: Tensor
    share: Tensor
    taps: int
    divisor: float
    per_channel: bool

    def steps(self, factors: Tensor) -> Tensor:
        """The scale of every output's weights, in numbers of the float model, (out,)."""
        steps = (self.largest / factors[self.read]).amax(1) / self.divisor
        if self.per_channel:
            return steps
        given = factors[self.given]
        return (steps * given).amax() / given

    def least_error(self) -> float:
        """A bound of the error from below, whatever the factors: the steps are no smaller than those of every weight by itself."""
        rounding = (self.largest / self.divisor).square_().mul_(self.taps / 12)
        return float(torch.minimum(rounding, self.squares).mul_(self.share).sum())

    def error(self, factors: Tensor) -> float:
        """What rounding the weight costs."""
        rounding = (self.steps(factors).unsqueeze(1) * factors[self.read]).square_().mul_(self.taps / 12)
        return float(torch.minimum(rounding, self.squares).mul_(self.share).sum())

    def balance(self, factors: Tensor, rising: Tensor, falling: Tensor) -> None:
        """Add, by label, what of the error grows with f² of a channel, and what with 1/f², as long as the scale stays."""
        parts = (self.steps(factors).unsqueeze(1) * factors[self.read]).square_().mul_(self.taps / 12).mul_(self.share)
        rising.index_add_(0, self.read.flatten(), parts.flatten())
        if not self.per_channel:
            falling.index_add_(0, self.given, parts.sum(1))


@dataclass(frozen=True)
class TensorNoise:
    """The tensors of one grid. Tensors are float64, and labels int64.

    labels        (n,): those of its channels, each once
    largest       (n,): the largest magnitude
    power         (n,): the mean square
    gain          (n,): what an error of mean square one costs
    divisor       half the number of steps of the grid's dtype
    """

    labels: Tensor
    largest: Tensor
    power: Tensor
    gain: Tensor
    divisor: float

    def steps(self, factors: Tensor) -> Tensor:
        """The scale, in numbers of the float model, for each channel."""
        own = factors[self.labels]
        return (self.largest * own).amax() / self.divisor / own

    def ahead(self, times: float) -> TensorNoise:
        """The same where every channel may reach so many times as far, and none beyond the largest."""
        return replace(self, largest=torch.minimum(self.largest * times, self.largest.max()))

    def least_error(self) -> float:
        """The same if every channel had the whole grid for itself."""
        return float((torch.minimum((self.largest / self.divisor).square() / 12, self.power) * self.gain).sum())

    def error(self, factors: Tensor) -> float:
        """What rounding the tensor costs."""
        return float((torch.minimum(self.steps(factors).square() / 12, self.power) * self.gain).sum())

    def balance(self, factors: Tensor, rising: Tensor, falling: Tensor) -> None:
        """Add, by label, what of the error grows with 1/f² of a channel, as long as the scale stays."""
        falling.index_add_(0, self.labels, self.steps(factors).square() / 12 * self.gain)

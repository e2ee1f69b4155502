"""The cost of quantization as a function of channel factors: mean squared errors, each weighted by its effect on later layers.

    layer     Σ_oi min(taps·(δ_o·f_i)²/12, S_oi) · p_i · g_o,   δ_o = max_i |w_oi|/f_i / divisor
    tensor    Σ_c min((Δ/f_c)²/12, p_c) · g_c,                  Δ = max_c m_c·f_c / divisor

m and p are the largest magnitude and the mean square of a channel of the float model. S is the sum of squares of the weights that multiply
it. g is what an error of mean square one in a channel adds to the errors of later results: for every layer that reads it, Σ_o S_oc·g_o.
Where a layer returns a tensor that has no factors, its errors count as a share of each channel's signal, g_o = 1 / (channels · Σ_i
S_oi·p_i). Rounding errors are taken as uniform, and never larger than the rounded value. The model ignores that scales are powers of two,
since this does not favour a choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IN_CACHE = 2**15  # float64 numbers of each of a few tensors


@dataclass(frozen=True)
class LayerNoise:
    """A layer's weight. Tensors are float64, and labels int64.

    read          (out, in): the labels of the channels that each weight meets; those of all outputs of a group are the same
    groups        how many groups there are
    given         (out,): those of the channels of its result
    squares       (out, in): Σ w² over a kernel's taps
    largest       (out, in): max |w| over them
    share         (out, in): what an error of mean square one of a weight costs, p_i · g_o
    taps          how many there are
    divisor       half the number of steps of the weight's dtype
    per_channel   whether every output has a scale of its own
    """

    read: Tensor
    groups: int
    given: Tensor
    squares: Tensor
    largest: Tensor
    share: Tensor
    taps: int
    divisor: float
    per_channel: bool

    @property
    def labels(self) -> Tensor:
        """The labels that each group meets, (groups, in)."""
        return self.read[:: len(self.read) // self.groups]

    def least_error(self) -> float:
        """Compute a lower bound of the error over all factors: each step is at least the step of every weight by itself."""
        costs = torch.empty_like(self.share)
        for largest, squares, share, cost in self._blocks(self.largest, self.squares, self.share, costs):
            rounding = (largest / self.divisor).square_().mul_(self.taps / 12)
            torch.mul(torch.minimum(rounding, squares), share, out=cost)
        return float(costs.sum())

    def error(self, factors: Tensor, rising: Tensor | None = None, falling: Tensor | None = None) -> float:
        """Compute the cost of rounding the weight.

        `rising` accumulates, by label, the part of the error that grows with f² of a channel; `falling` the part that grows with 1/f². Both
        hold as long as the scale stays.
        """
        read = factors[self.labels].unsqueeze(1)
        steps = self._steps(factors, read).unsqueeze(1)
        costs = torch.empty_like(self.share)
        parts = None if rising is None else torch.empty_like(self.share)
        blocks = zip(
            self._blocks(self.squares, self.share, costs, *(() if parts is None else (parts,))),
            self._blocks(steps, by_group=read),
            strict=True,
        )
        for (squares, share, cost, *part), (step, met) in blocks:
            rounding = (step * met).square_().mul_(self.taps / 12)
            torch.mul(torch.minimum(rounding, squares), share, out=cost)
            if part:
                torch.mul(rounding, share, out=part[0])
        if parts is not None and rising is not None and falling is not None:
            rising.index_add_(0, self.read.flatten(), parts.flatten())
            if not self.per_channel:
                falling.index_add_(0, self.given, parts.sum(1))
        return float(costs.sum())

    def _steps(self, factors: Tensor, read: Tensor) -> Tensor:
        """Return the scale of every output's weights, in numbers of the float model, (out,)."""
        found = torch.empty(len(self.read), dtype=torch.float64, device="cpu")
        for (largest, step), (_, met) in zip(
            self._blocks(self.largest, found.unsqueeze(1)), self._blocks(self.largest, by_group=read), strict=True
        ):
            torch.amax(largest / met, 2, keepdim=True, out=step)
        steps = found / self.divisor
        if self.per_channel:
            return steps
        given = factors[self.given]
        return (steps * given).amax() / given

    def _blocks(self, *tensors: Tensor, by_group: Tensor | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Tensors of a row for each output, (groups, outputs of a group, …), in pieces that a processor's cache holds.

        `by_group` has one row for each group, and is given beside them.
        """
        shaped = [tensor.view(self.groups, -1, tensor.shape[1]) for tensor in tensors]
        dim = 1 if self.groups == 1 else 0
        size = max(1, IN_CACHE // max(self.read[0].numel() * (len(self.read) // self.groups if dim == 0 else 1), 1))
        for start in range(0, shaped[0].shape[dim], size):
            pieces = [tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)) for tensor in shaped]
            if by_group is not None:
                pieces.append(by_group if dim == 1 else by_group.narrow(0, start, len(pieces[0])))
            yield tuple(pieces)


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
        """Return the scale, in numbers of the float model, for each channel."""
        own = factors[self.labels]
        return (self.largest * own).amax() / self.divisor / own

    def ahead(self, times: float) -> TensorNoise:
        """Return the noise if every channel may reach so many times as far, but none beyond the largest."""
        return replace(self, largest=torch.minimum(self.largest * times, self.largest.max()))

    def least_error(self) -> float:
        """Compute a lower bound of the error: every channel has the whole grid for itself."""
        return float((torch.minimum((self.largest / self.divisor).square() / 12, self.power) * self.gain).sum())

    def error(self, factors: Tensor, rising: Tensor | None = None, falling: Tensor | None = None) -> float:
        """Compute the cost of rounding the tensor.

        `falling` accumulates, by label, the part of the error that grows with 1/f² of a channel, as long as the scale stays.
        """
        rounding = self.steps(factors).square() / 12
        if falling is not None:
            falling.index_add_(0, self.labels, rounding * self.gain)
        return float((torch.minimum(rounding, self.power) * self.gain).sum())

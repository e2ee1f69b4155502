"""The gain of a layer's results: how much larger they are in integers than in float, as far as samples tell that from noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxquant.prepared.operators import QuantizedOperator
from fxquant.tuning.real import by_channel, real_result
from fxquant.tuning.units import bound_arguments
from fxquant.tuning.walk import Values


def gain_of(node: fx.Node, operator: QuantizedOperator, values: Sequence[Values], channels: int, rank: int) -> Tensor | None:
    """Return by how much results are too large, of shape (C,), or (1,) for one scale; None where channels are not known."""
    product, power, noise, places = (torch.zeros(channels, dtype=torch.float64, device="cpu") for _ in range(4))
    for each in values:
        result = real_result(operator, bound_arguments(node, operator, each))
        found, wanted = (by_channel(value.double().cpu(), channels, rank) for value in (result, each[node]))
        if found is None or wanted is None:
            return None
        product += (found * wanted).sum(1)
        power += wanted.square().sum(1)
        noise += (found - wanted).square().sum(1)
        places += wanted.shape[1]
    if not operator.weight_quantizer.per_channel:
        product, power, noise, places = (value.sum(0, keepdim=True) for value in (product, power, noise, places))
    beyond = product / power.clamp_min(1e-30) - 1
    explained = (1 - noise / power.clamp_min(1e-30) / places / beyond.square().clamp_min(1e-30)).clamp(0, 1)  # of what is beyond 1
    gain = torch.where(power > 0, 1 + explained * beyond, torch.ones_like(power))
    return gain.float().to(next(operator.weight_quantizer.buffers()).device)

"""The shape of a batch norm's result that is known without running it is what running it on tensors without values gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.frontend import fake
from fxquant.frontend.values import Value
from fxquant.ir.graph import fact

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class Norms(nn.Module):
    """Batch norms of a new tensor, and of tensors of unusual strides, one of those of one channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.one, self.plain = NORMS[dim](6), NORMS[dim](1), NORMS[dim](6, affine=False)

    def forward(self, x: Tensor) -> Any:
        turned = x.flip(0).transpose(0, 1).contiguous().transpose(0, 1)
        return self.norm(x), self.plain(x), self.norm(turned), self.one(x[:, :1]), self.one(x[:, :1].clone())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_it_is_what_running_the_norm_gives(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, original = [], fake.known_result

    def compared(function: Any, args: Any, kwargs: Any) -> Value | None:
        known = original(function, args, kwargs)
        if known is not None:
            given: Value = args[0].value.abstract
            for side, result in ((given.a, known.a), (given.b, known.b)):
                real = function(torch.empty_strided(side.shape, side.stride()).zero_())
                assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)
                found.append(real)
        return known

    x = torch.randn(4, 6, *[3] * (dim - 2))
    monkeypatch.setattr(fake, "known_result", compared)
    short = fxq.trace(Norms(dim).eval(), x)
    assert len(found) >= 4
    monkeypatch.setattr(fake, "known_result", lambda *_: None)
    whole = fxq.trace(Norms(dim).eval(), x)
    assert [(node.name, fact(node)) for node in short.graph.nodes] == [(node.name, fact(node)) for node in whole.graph.nodes]


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(5), nn.BatchNorm1d(6), nn.Linear(5, 2), nn.LayerNorm((6, 4))])
def test_a_layer_of_another_size_is_refused_as_before(layer: nn.Module) -> None:
    with pytest.raises((fxq.errors.TraceError, RuntimeError, ValueError)):
        fxq.trace(nn.Sequential(layer).eval(), torch.randn(2, 6, 4, 4))

"""What is known of a layer's result without running it is what running it on tensors without values gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.frontend import handler, shapes
from fxquant.frontend.values import TracedTensor, Value
from fxquant.graph import fact

NORMS = {2: nn.BatchNorm1d(6), 3: nn.BatchNorm1d(6), 4: nn.BatchNorm2d(6), 5: nn.BatchNorm3d(6)}


class Layers(nn.Module):
    """Every layer of which the result is known, on a tensor as it is, transposed, and with the strides of one of size 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = NORMS[dim]
        kinds = sorted(shapes._ELEMENTWISE, key=lambda kind: kind.__name__)
        self.layers = nn.ModuleList([kind() for kind in kinds] + [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])

    def forward(self, x: Tensor) -> Any:
        results = []
        for tensor in (self.norm(x), x.transpose(0, 1), x[:, :1], x[:, 1:3].expand(*x[:, 1:3].shape)):
            results += [layer(tensor.clone(memory_format=torch.preserve_format)) for layer in self.layers]
        return results


@pytest.mark.parametrize("dim", NORMS)
def test_it_is_what_running_the_layer_gives(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known, original = list[Value](), handler.result_like_input

    def taken(*given: Any) -> Value | None:
        found = original(*given)
        known.extend(() if found is None else (found,))
        return found

    x = torch.randn(4, 6, *[3] * (dim - 2))
    monkeypatch.setattr(handler, "result_like_input", taken)
    short = fxq.trace(Layers(dim).eval(), x)
    assert len(known) >= 20
    monkeypatch.setattr(handler, "result_like_input", lambda *_: None)
    whole = fxq.trace(Layers(dim).eval(), x)
    assert [(node.name, fact(node)) for node in short.graph.nodes] == [(node.name, fact(node)) for node in whole.graph.nodes]


@pytest.mark.parametrize("dim", NORMS)
def test_strides_are_those_of_the_result(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor of one channel has strides that a new one would not have."""
    found, original = [], handler.result_like_input

    def compared(function: Any, args: Any, kwargs: Any) -> Value | None:
        known = original(function, args, kwargs)
        if known is not None:
            assert isinstance(args[0], TracedTensor)
            for side in (known.a, known.b):
                found.append((side.shape, side.stride()))
                assert function(torch.empty_strided(side.shape, side.stride()).zero_()).stride() == side.stride()
        return known

    monkeypatch.setattr(handler, "result_like_input", compared)
    fxq.trace(Layers(dim).eval(), torch.randn(4, 6, *[3] * (dim - 2)))
    assert found


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(5), nn.BatchNorm1d(6)])
def test_a_batch_norm_of_other_channels_or_dimensions_is_refused_as_before(layer: nn.Module) -> None:
    with pytest.raises((fxq.TraceError, RuntimeError, ValueError)):
        fxq.trace(nn.Sequential(layer).eval(), torch.randn(2, 6, 4, 4))

"""What is known of a layer's result without running it is what running it on tensors without values gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.frontend import evaluation, shapes
from fxquant.frontend.values import Value
from fxquant.ir.graph import fact

NORMS = {2: nn.BatchNorm1d(6), 3: nn.BatchNorm1d(6), 4: nn.BatchNorm2d(6), 5: nn.BatchNorm3d(6)}


class Layers(nn.Module):
    """Every layer of which the result is known, and some of them on tensors of unusual strides, one of those of size 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = NORMS[dim]
        self.rows = nn.ModuleList([nn.Linear(dim + 4, 5), nn.Linear(dim + 4, 1, bias=False), nn.LayerNorm(dim + 4, bias=False)])
        self.images = nn.LayerNorm((6, *[dim + 4] * (dim - 2)))
        kinds = sorted(shapes._ELEMENTWISE, key=lambda kind: kind.__name__)
        self.layers = nn.ModuleList([kind() for kind in kinds] + [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])

    def forward(self, x: Tensor) -> Any:
        results = []
        for tensor, layers in ((self.norm(x), self.layers), (x.transpose(0, 1), self.layers[:4]), (x[:, :1], self.layers[-4:])):
            results += [layer(tensor.clone(memory_format=torch.preserve_format)) for layer in layers]
        wide = F.interpolate(x, size=[x.dim() + 4] * (x.dim() - 2)) if x.dim() > 2 else torch.cat((x, x), 1)[:, :6]
        return (
            results + [row(wide) for row in self.rows] + [row(wide.unsqueeze(1).transpose(0, 1)) for row in self.rows] + [self.images(wide)]
        )


@pytest.mark.parametrize("dim", [2, 4])
def test_it_is_what_running_the_layer_gives(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known, original = list[Value](), shapes.known_result

    def taken(*given: Any) -> Value | None:
        found = original(*given)
        known.extend(() if found is None else (found,))
        return found

    x = torch.randn(4, 6, *[3] * (dim - 2))
    monkeypatch.setattr(evaluation, "known_result", taken)
    short = fxq.trace(Layers(dim).eval(), x)
    assert len(known) >= 20
    monkeypatch.setattr(evaluation, "known_result", lambda *_: None)
    whole = fxq.trace(Layers(dim).eval(), x)
    assert [(node.name, fact(node)) for node in short.graph.nodes] == [(node.name, fact(node)) for node in whole.graph.nodes]


@pytest.mark.parametrize("dim", [3, 5])
def test_strides_are_those_of_the_result(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor of one channel has strides that a new one would not have."""
    found, original = [], shapes.known_result

    def compared(evaluator: Any, function: Any, args: Any, kwargs: Any) -> Value | None:
        known = original(evaluator, function, args, kwargs)
        if known is not None:
            given: Value = args[0].value.abstract
            for side, result in ((given.a, known.a), (given.b, known.b)):
                real = function(torch.empty_strided(side.shape, side.stride()).zero_())
                assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)
                found.append(real)
        return known

    monkeypatch.setattr(evaluation, "known_result", compared)
    fxq.trace(Layers(dim).eval(), torch.randn(4, 6, *[3] * (dim - 2)))
    assert found


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(5), nn.BatchNorm1d(6), nn.Linear(5, 2), nn.LayerNorm((6, 4))])
def test_a_layer_of_another_size_is_refused_as_before(layer: nn.Module) -> None:
    with pytest.raises((fxq.TraceError, RuntimeError, ValueError)):
        fxq.trace(nn.Sequential(layer).eval(), torch.randn(2, 6, 4, 4))

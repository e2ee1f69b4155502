"""Stubs of models written for eager mode say where the integer part begins and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxquant as fxq
from tests.shared.written import written

ao = pytest.importorskip("torch.ao.quantization")
quantized = pytest.importorskip("torch.ao.nn.quantized")


class QuantStub(nn.Module):
    """As Horizon's: on a fixed scale unless told otherwise."""

    def __init__(self, scale: float | None = 1 / 128) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


QuantStub.__module__ = "horizon_plugin_pytorch.quantization.stubs"


class Net(nn.Module):
    def __init__(self, stub: nn.Module | None, end: nn.Module) -> None:
        super().__init__()
        self.before, self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.stub, self.end, self.floats = stub, end, quantized.FloatFunctional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = x if self.stub is None else self.stub(x)
        y = self.bn(self.conv(x))
        return torch.relu(self.end(self.floats.add(y, self.conv(x)))).mean((2, 3))


STUBS: dict[str, Any] = {"torch": ao.QuantStub, "horizon": QuantStub, "horizon, observed": lambda: QuantStub(None), "none": lambda: None}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", STUBS)
def test_stubs_mark_the_boundary(kind: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = Net(STUBS[kind](), ao.DeQuantStub()).eval()
    loaded = fxq.load(fxq.save(fxq.trace(model, (x,)), tmp_path / "traced.fxq"))
    prepared = fxq.calibrate(fxq.prepare(loaded, (x,)), [x], show_progress=False)
    integer = fxq.convert(prepared)
    known = {layer.name: layer for layer in fxq.inspect.layers(prepared)}
    floats = {name for name, layer in known.items() if not layer.integer and not layer.boundary}
    assert floats == {"relu", "mean", *(["before"] if kind != "none" else [])}
    assert {known[name].reason for name in floats} == {"it lies outside of QuantStub and DeQuantStub"}
    assert not any("stub" in name for name in known) or kind == "horizon"
    if kind == "horizon":
        assert known["quant_stub"].grid.scale == 1 / 128
        assert known["quant_stub"].reason == "on a scale of 0.0078125"  # and not 16 bits wide
    assert fxq.verify(prepared, integer, [x], show_progress=False)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x], show_progress=False)


def test_a_class_of_that_name_elsewhere_is_what_it_computes() -> None:

    x = torch.randn(2, 3, 8, 8)
    prepared = fxq.prepare(Net(None, written(lambda m, x: x * 2)).eval(), (x,))
    assert all(layer.integer or layer.boundary for layer in fxq.inspect.layers(prepared))

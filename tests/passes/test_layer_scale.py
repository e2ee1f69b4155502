"""Factors of channels behind a layer, as the scales of a transformer's branches: they are in its weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from tests.shared import contract
from tests.shared.contract import compiled


class Branches(nn.Module):
    """A branch of a convolution and one of linear layers, each with a factor for each channel; products that are no such thing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6, bias=False)
        self.last = nn.Linear(6, 6)
        self.normed, self.norm, self.both = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
        self.of_conv = nn.Parameter(torch.linspace(-0.7, 1.3, 6).reshape(6, 1, 1))
        self.of_linear = nn.Parameter(torch.linspace(0.2, 1.5, 6))
        self.of_columns = nn.Parameter(torch.linspace(0.2, 1.5, 6))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        x = x + self.conv(x) * self.of_conv
        x = x.permute(0, 2, 3, 1)
        x = x + self.of_linear.abs() * self.down(self.up(x).relu())
        x = x.permute(0, 3, 1, 2)
        x = x + self.last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.of_conv
        both = self.both(x)
        return self.norm(self.normed(x)) * self.of_conv, both * self.of_conv + both, self.stem(x[:, :3]) * self.of_columns


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, 3, 6, 6, generator=generator) for count in (8, 4)]


def model() -> Branches:
    torch.manual_seed(0)
    return Branches().eval()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("bayes-e", "int8"), ("nash-e", "int16"), ("x86", "uint8")])
def test_layers_with_factors_hold_the_contract(target: str, dtype: str, tmp_path: Path) -> None:
    given = model()
    prepared, integer = compiled(given, batches(), target, fxq.QConfig(fxq.ActivationConfig(dtype)))
    products = [layer.name for layer in fxq.inspect.layers(prepared) if layer.operator == "mul"]
    assert len(products) == 3, "behind a batch norm, of a layer with two users, and of columns"
    assert {"conv", "down"} <= {layer.name for layer in fxq.inspect.layers(prepared) if len(layer.fused) == 2}, (
        "the factors and the addition"
    )
    assert prepared.state_dict().keys() >= given.state_dict().keys()
    contract.assert_validate_is_integer(prepared, integer, batches()[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batches()[1],)])
    contract.assert_train_is_validate(prepared, batches()[0])


def test_in_float_it_is_the_model_and_layers_are_compared_with_their_products() -> None:
    given = model()
    prepared, _ = compiled(given, batches())
    fxq.set_state(prepared, fxq.State.FLOAT)
    for wanted, found in zip(given(batches()[0]), prepared(batches()[0]), strict=True):
        torch.testing.assert_close(found, wanted)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    found = fxq.compare(given, prepared, batches(), advice=False, show_progress=False)
    assert found["conv"].reference == "add"
    assert found["conv"].sqnr > 30
    assert found["down"].sqnr > 30
    (moved,) = [layer.name for layer in fxq.inspect.layers(prepared) if layer.operator == "permute" and layer.fused]
    assert found[moved].sqnr > 30
    assert "last" in found.unmatched, "behind a permutation the factors have been multiplied in already"


def test_both_are_trained_and_kept_in_files(tmp_path: Path) -> None:
    prepared, _ = compiled(model(), batches())
    fxq.set_state(prepared, fxq.State.TRAIN)
    sum(output.square().sum() for output in prepared(batches()[0])).backward()
    for name in ("of_conv", "of_linear", "conv.weight", "conv.bias", "down.weight"):
        assert float(prepared.get_parameter(name).grad.abs().min()) > 0, name
    fxq.set_state(prepared, fxq.State.VALIDATE)
    fxq.save(prepared, tmp_path / "model.fxq")
    assert all(map(torch.equal, fxq.load(tmp_path / "model.fxq")(batches()[0]), prepared(batches()[0])))
    with torch.no_grad():
        prepared.of_conv.mul_(0)
        assert torch.equal(fxq.convert(prepared)(batches()[0])[0], prepared(batches()[0])[0])

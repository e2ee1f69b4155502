"""A QuantStub is an operator for the rules, and the `input=` of a rule says on which grid an operator reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat.horizon import DeQuantStub, QuantStub
from tests.shared.networks import members, to_train

A, Q, M, W = fxq.ActivationConfig, fxq.QConfig, fxq.QConfigMapping, fxq.WeightConfig
BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@members(lambda scale=None: dict(quant=QuantStub(scale=scale), dequant=DeQuantStub(), conv=nn.Conv2d(3, 8, 3, padding=1)), seed=0)
def Stubbed(self, x: Tensor) -> Tensor:
    return self.dequant(torch.relu(self.conv(self.quant(x))))


def prepared_of(model: nn.Module, qconfig: Any, target: str = "bayes-e") -> Any:
    return fxq.calibrate(fxq.prepare(model.eval(), BATCHES[0], target, qconfig), BATCHES)


def input_of(prepared: Any) -> tuple[str, float]:
    """Dtype and scale of the model's input."""
    first = fxq.inspect.layers(prepared)[0]
    scale = fxq.qparams(prepared)[first.name]
    assert isinstance(scale, float)
    return first.dtype, scale


WIDE = Q(A("int16"))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("scale", [None, 1 / 64])
@pytest.mark.parametrize(
    ("rule", "dtype", "fixed"),
    [
        (None, "int8", None),
        (WIDE, "int16", None),
        (M().set_module_name("quant", WIDE), "int16", None),
        (M().set_object_type(QuantStub, WIDE), "int16", None),
        (M().set_module_name_regex("qua", WIDE), "int16", None),
        (M().set_module_name("conv", WIDE), "int8", None),
        (M().set_module_name("quant", Q(A("int16", scale=1 / 4096))), "int16", 1 / 4096),
        (M().set_module_name("quant", Q(A("int8", threshold=4.0))), "int8", 4.0 / 128),
    ],
)
def test_a_stub_is_an_operator_for_the_rules(scale: float | None, rule: Any, dtype: str, fixed: float | None) -> None:
    prepared = prepared_of(Stubbed(scale), rule)
    result = input_of(prepared)
    assert result[0] == ("int16" if rule == M().set_module_name("conv", WIDE) and scale is None else dtype)  # the first reader's
    if fixed is not None or scale is not None:
        assert result[1] == (scale if fixed is None else fixed)
    assert fxq.verify(prepared, fxq.convert(prepared), BATCHES)


def test_the_qconfig_on_a_stub_is_its_own() -> None:
    model = Stubbed()
    model.quant.qconfig = WIDE
    prepared = prepared_of(model, None)
    assert input_of(prepared)[0] == "int16"
    assert [layer.dtype for layer in fxq.inspect.layers(prepared) if layer.macs] == ["int8"]
    narrow = prepared_of(Stubbed(), None)
    errors = [float((one(BATCHES[0]) - Stubbed().eval()(BATCHES[0])).detach().square().mean()) for one in (prepared, narrow)]
    assert errors[0] < 0.7 * errors[1]  # the input's rounding is gone, that of the convolution's output is left


@members(lambda: dict(conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8), other=nn.Conv2d(8, 8, 1), head=nn.Linear(8, 5)), seed=0)
def Chain(self, x: Tensor) -> Tensor:
    x = torch.relu(self.bn(self.conv(x)))
    x = self.other(x) + x
    return self.head((x @ x).mean((2, 3)))


def test_operators_read_the_dtype_that_their_rule_asks_for(tmp_path: Path) -> None:
    narrow = Q(A("int16"), W("int8"), A("int8"))
    rules = M(WIDE).set_object_type(nn.Conv2d, narrow).set_object_type(torch.matmul, narrow)
    prepared = prepared_of(Chain(), rules, "nash-e")
    layers = {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}
    assert {name for name, dtype in layers.items() if dtype == "int8"} == {"x_quantize", "conv_requantize", "other_requantize"}
    assert (layers["conv"], layers["other"], layers["matmul"], layers["head"]) == ("int16",) * 4
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, BATCHES)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), BATCHES[:1])
    to_train(prepared)(BATCHES[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


def test_a_given_scale_of_an_input_requantizes_what_is_on_another() -> None:
    prepared = prepared_of(Chain(), M().set_module_name("other", Q(A("int8"), input=A("int8", scale=1 / 16))), "nash-e")
    assert fxq.qparams(prepared)["conv_requantize"] == 1 / 16
    assert fxq.verify(prepared, fxq.convert(prepared), BATCHES)

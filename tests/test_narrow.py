"""int4 activations and weights: stored and computed as int8, with 16 and 15 values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.bpu import FIXED
from fxquant.graph import qparams, resolve
from fxquant.numerics import INT4, INT8
from fxquant.primitives.requantize import requantize_fixed
from fxquant.rescaling import Ratio, fixed_requantization
from tests import contract, oracle

W4A4 = fxq.QConfig(fxq.ActivationConfig("int4"), fxq.WeightConfig("int4"))
TARGETS = ("bayes-e", "bernoulli", "nash-e", "qnnpack")


class Net(nn.Module):
    """A residual, a table, pooling, a product with a number, a concatenation: every kind of requantization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(x + self.bn(self.conv(x)))
        z = torch.tanh(F.max_pool2d(y, 2))
        w = F.avg_pool2d(y, 2) * 1.5 + z
        return self.head(torch.cat([w, z], 1).amax((2, 3)))


def batches() -> list[Tensor]:
    return [torch.randn(4, 3, 8, 8) for _ in range(3)]


def integers_of(integer: fx.GraphModule, *inputs: Tensor) -> dict[str, Tensor]:
    """The value of every quantized tensor."""
    nodes = {node.name: node for node in integer.graph.nodes}
    return {name: value for name, value in contract.graph_values(integer, *inputs).items() if qparams(nodes[name]) is not None}


@pytest.mark.parametrize("target", TARGETS)
def test_the_contract_holds(target: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    data = batches()
    prepared, integer = contract.compiled(Net(), data, target, W4A4)
    contract.assert_alive(integer, data[0])
    contract.assert_validate_is_integer(prepared, integer, data[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batch,) for batch in data])
    contract.assert_train_is_validate(prepared, data[0])
    contract.assert_gradients_reach_every_parameter(prepared, data[1])


@pytest.mark.parametrize("target", TARGETS)
def test_every_value_and_every_weight_has_four_bits(target: str) -> None:
    torch.manual_seed(2)
    _, integer = contract.compiled(Net(), batches(), target, W4A4)
    found = integers_of(integer, 3 * batches()[0])
    narrow = {node.name for node in integer.graph.nodes if (known := qparams(node)) is not None and known.dtype == "int4"}
    assert len(narrow) >= 10
    assert all(value.dtype == torch.int8 for value in found.values())
    assert all(int(value.min()) >= -8 and int(value.max()) <= 7 for name, value in found.items() if name in narrow)
    assert {int(value.max()) for name, value in found.items() if name in narrow} >= {7}
    weights = [value for name, value in integer.named_buffers() if name.endswith(".weight")]
    assert len(weights) == 3
    assert all(weight.dtype == torch.int8 and int(weight.abs().max()) == 7 for weight in weights if target != "bernoulli")
    assert all(int(weight.abs().max()) <= 7 for weight in weights)


def test_a_table_of_an_int4_tensor_has_16_entries() -> None:
    _, integer = contract.compiled(nn.Sequential(nn.Sigmoid()), [torch.randn(4, 9)], qconfig=W4A4)
    (table,) = [value for name, value in integer.named_buffers() if name.endswith("table")]
    (scale,) = [qparams(node).scale for node in integer.graph.nodes if node.name == "input_1_quantize"]
    (output,) = [qparams(node).scale for node in integer.graph.nodes if node.name == "_0"]
    assert table.tolist() == oracle.table(lambda x: 1 / (1 + math.exp(-x)), scale, output, range(-8, 8), -8, 7)
    assert len(set(table.tolist())) > 4


def test_dtypes_mix(tmp_path: Path) -> None:
    """int8 input, int4 inside, int8 logits; an addition of both; a group that shares its scale."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = F.max_pool2d(self.a(x), 2).flatten(2) + F.max_pool2d(self.b(x), 2).flatten(2)
            return self.head(y.mean(2))

    wide = fxq.QConfig()
    mapping = fxq.QConfigMapping(fxq.QConfig(fxq.ActivationConfig("int4"), fxq.WeightConfig("int4"), input=fxq.ActivationConfig("int8")))
    mapping = mapping.set_module_name("b", wide).set_module_name("head", wide)
    batch = torch.randn(4, 2, 6, 6)
    prepared, integer = contract.compiled(Mixed(), [batch], qconfig=mapping)
    dtypes = {node.name: known.dtype for node in integer.graph.nodes if (known := qparams(node)) is not None}
    assert {dtypes[name] for name in ("x_quantize", "b", "head")} == {"int8"}
    assert {dtypes[name] for name in ("a", "max_pool2d", "flatten", "add", "mean")} == {"int4"}
    contract.assert_validate_is_integer(prepared, integer, batch)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batch,)])
    contract.assert_train_is_validate(prepared, batch)


def test_what_a_residual_is_added_to_is_never_int4() -> None:
    torch.manual_seed(2)
    prepared = contract.compiled(Net(), batches(), qconfig=W4A4).prepared
    assert prepared.quantized.conv.intermediate.dtype == INT8
    assert prepared.quantized.conv.output.dtype == INT4


@pytest.mark.parametrize(("multiplier", "fused"), [(15, False), (16, True), (300, True)])
def test_an_int4_residual_is_added_in_the_accumulator_from_a_multiplier_of_16(multiplier: int, fused: bool) -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1, bias=False)
            nn.init.constant_(self.conv.weight, 7 / 16)

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            return self.conv(x) + r

    scales = {"x_quantize": 1 / 8, "r_quantize": multiplier / 8 / 16, "conv": 1.0}
    inputs = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4) * 4
    prepared = fxq.prepare(Added(), inputs, qconfig=W4A4)
    fxq.calibrate(prepared, [inputs], show_progress=False)
    fxq.set_qparams(prepared, scales)
    integer = fxq.convert(prepared)
    assert (resolve(integer, "integer.conv.weight") == 7).all()
    assert any(name.endswith("residual_multiplier") for name, _ in integer.named_buffers()) is fused
    contract.assert_validate_is_integer(prepared, integer, *inputs)


def test_requantization_to_int4_is_the_oracles() -> None:
    torch.manual_seed(0)
    for _ in range(60):
        m = float(torch.rand(()) * 2.0 ** float(torch.randint(-14, 1, ())))
        ratio = Ratio((torch.tensor(m),))
        fixed = fixed_requantization(ratio, FIXED.widths["int4"], INT4)
        expected = oracle.fixed_parameters(ratio.exact()[0], oracle.INT8_WIDTHS, 7)
        assert (int(fixed.shift), int(fixed.multiplier), int(fixed.right_shift)) == expected
        accumulators = torch.randint(-int(12 / m) - 2, int(12 / m) + 2, (50,), dtype=torch.int32)
        found = requantize_fixed(accumulators, fixed.shift, fixed.multiplier, fixed.right_shift, 16, "half_up", -8, 7, torch.int8)
        slow = [oracle.requantize_fixed(a, *expected, 16, "half_up", -8, 7) for a in accumulators.tolist()]
        assert found.tolist() == slow

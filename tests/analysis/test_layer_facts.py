"""The facts of layers: computed by hand for known layers, the same from every form of a model, and true of the tensors themselves."""

import functools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends
from fxquant.ir.integer import Constant, operation
from fxquant.search.bit_widths import Budget
from fxquant.target import Roofline
from tests.shared.contract import NOT_LOWERED, compiled, graph_values
from tests.shared.networks import members, written

pytestmark = pytest.mark.quick


@members(lambda: dict(
    plain=nn.Conv2d(3, 8, 3, stride=2, padding=1), grouped=nn.Conv2d(8, 12, (3, 1), groups=4, bias=False), norm=nn.BatchNorm2d(12),
    up=nn.ConvTranspose2d(12, 6, 2, stride=2, groups=3), head=nn.Linear(6, 5), matrix=nn.Parameter(torch.randn(5, 7)),
    alone=nn.BatchNorm2d(6),
))  # fmt: skip
def Known(self, x: Tensor) -> Any:
    """Every layer that forms sums of products, an addition that is fused, a table, and float operators at the end."""
    x = F.relu(self.norm(self.grouped(F.silu(self.plain(x)))))
    x = self.alone(torch.maximum(self.up(x), self.up(x).neg()))
    rows = self.head(x.flatten(2).transpose(1, 2))
    return torch.matmul(rows, self.matrix), torch.bmm(rows, rows.transpose(1, 2)), rows.logcumsumexp(2)


def example(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 10, 9)


def by_name(model: Any) -> dict[str, fxq.results.Layer]:
    return {layer.name: layer for layer in fxq.inspect.layers(model)}


# 10 × 9 pictures: plain gives 5 × 5 of 8 channels, grouped 3 × 5 of 12, up 6 × 10 of 6, and 60 rows of 6 features.
MACS = {
    "plain": 8 * 5 * 5 * (3 * 3 * 3), "grouped": 12 * 3 * 5 * (2 * 3 * 1), "up": 12 * 3 * 5 * (2 * 2 * 2),
    "up_1": 12 * 3 * 5 * (2 * 2 * 2), "head": 60 * 6 * 5, "matmul": 60 * 5 * 7, "bmm": 60 * 5 * 60,
}  # fmt: skip
ELEMENTS = {
    "plain": 8 * 25, "silu": 8 * 25, "grouped": 12 * 15, "up": 6 * 60, "alone": 6 * 60, "head": 300, "bmm": 3600, "logcumsumexp": 300,
}  # fmt: skip
WEIGHTS = {"plain": 8 * 27, "grouped": 12 * 6, "up": 12 * 8, "head": 30, "matmul": 35, "alone": 6, "bmm": 0, "silu": 0, "logcumsumexp": 0}
BIASES = {"plain": 8, "grouped": 12, "up": 6, "head": 5, "alone": 6}  # a batch norm brings a bias


def qconfig(dtype: str) -> fxq.QConfig:
    return fxq.QConfig(fxq.ActivationConfig(dtype), fxq.WeightConfig(dtype))


@pytest.mark.parametrize(("dtype", "itemsize", "bias"), [("int4", 1, 4), ("int8", 1, 4), ("int16", 2, 8)])
def test_the_facts_of_a_known_network(dtype: str, itemsize: int, bias: int) -> None:
    layers = by_name(fxq.prepare(Known().eval(), example(), "nash-e", qconfig(dtype)))
    assert {name: layer.macs for name, layer in layers.items() if layer.macs} == MACS
    assert {name: layers[name].activation_bytes for name in ELEMENTS} == {
        name: count * (4 if name == "logcumsumexp" else itemsize) for name, count in ELEMENTS.items()
    }
    assert {name: layers[name].weight_bytes for name in WEIGHTS} == {
        name: count * itemsize + BIASES.get(name, 0) * bias for name, count in WEIGHTS.items()
    }
    assert (layers["grouped"].operator, layers["grouped"].module, layers["grouped"].dtype) == ("conv2d", "grouped", dtype)
    assert layers["grouped"].fused == ("norm", "relu")
    assert layers["grouped"].shape == ("B", 12, 3, 5)
    assert "self.grouped(" in layers["grouped"].source
    assert (layers["grouped"].device, layers["logcumsumexp"].device) == ("nash-e", "host")
    assert "logcumsumexp" in layers["logcumsumexp"].reason
    assert [name for name, layer in layers.items() if layer.boundary] == [
        "x_quantize",
        "head_dequantize",
        "matmul_dequantize",
        "bmm_dequantize",
    ]


@pytest.mark.parametrize("dtype", ["int4", "int8", "int16"])
def test_prepared_and_integer_have_the_same_facts(dtype: str) -> None:
    prepared, integer = compiled(Known().eval(), [example()], "nash-e", qconfig(dtype))
    one, other = by_name(prepared), by_name(integer)
    assert list(one) == list(other)
    differing = {"reason", "notes", "accumulator_bits", "intermediates"}
    same = [field.name for field in fields(fxq.results.Layer) if field.name not in differing]
    for name, layer in one.items():
        assert {key: getattr(layer, key) for key in same} == {key: getattr(other[name], key) for key in same}
    assert one["plain"].reason
    assert not one["plain"].notes
    assert f"accumulator of {other['plain'].accumulator_bits} bits" in other["plain"].notes


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_bytes_are_those_of_the_tensors(dtype: str) -> None:
    integer = compiled(Known().eval(), [example(1)], "nash-e", qconfig(dtype)).integer
    values, nodes = graph_values(integer, example(1)), {node.name: node for node in integer.graph.nodes}

    def held(constant: Constant) -> int:
        return integer.get_buffer(str(nodes[constant.node].target)).nbytes

    for layer in fxq.inspect.layers(integer):
        assert layer.activation_bytes == values[layer.name].nbytes, layer.name
        assert layer.shape[1:] == tuple(values[layer.name].shape[1:])
        lowered = operation(nodes[layer.name])
        if lowered is not None:
            stored = sum(held(constant) for role, constant in lowered.constants.items() if role in ("weight", "bias"))
            assert layer.weight_bytes == stored, layer.name


def test_a_float_model_costs_what_its_layers_do() -> None:
    traced = by_name(fxq.trace(Known().eval(), example()))
    assert {name: layer.macs for name, layer in traced.items() if layer.macs} == MACS
    assert traced["plain"].operator == "Conv2d"
    assert traced["plain"].weight_bytes == (8 * 27 + 8) * 4
    assert traced["plain"].activation_bytes == 8 * 25 * 4
    assert {layer.device for layer in traced.values()} == {"host"}
    assert not any(layer.reason or layer.integer or layer.grid for layer in traced.values())
    for stage in ("canonical.rewrite", "specs.annotate", "boundary.insert"):
        layers = by_name(fxq.prepare(Known().eval(), example(), until=stage))
        assert {name: layer.macs for name, layer in layers.items() if layer.macs} == MACS, stage
        assert all(layer.reason for layer in layers.values()) == (stage != "canonical.rewrite")


def test_a_convolution_whose_weight_is_computed_is_compared_and_costs_what_it_does() -> None:
    """The call is another operator's: a sum of products of two tensors."""
    model = written(lambda m, x: F.conv2d(x, torch.sign(m.c.weight)), c=nn.Conv2d(3, 4, 3)).eval()
    assert {layer.macs for layer in fxq.inspect.layers(fxq.trace(model, example())) if layer.name == "conv2d"} == {4 * 8 * 7 * 27}
    prepared, _ = compiled(model, [example()], "bayes-e")
    assert "conv2d" in fxq.compare(model, prepared, [example()])


def test_scales_from_unknown_to_known() -> None:
    config = fxq.QConfigMapping().set_module_name("1", fxq.QConfig(fxq.ActivationConfig("int32")))
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)), torch.randn(2, 3, 4, 4)
    prepared = fxq.prepare(model, x, qconfig=config)
    before = by_name(prepared)
    assert before["_0"].grid.scale != before["_0"].grid.scale  # NaN
    assert before["_1"].grid.scale == ()
    fxq.calibrate(prepared, [x])
    assert by_name(prepared)["_0"].grid.scale == fxq.qparams(prepared)["_0"]
    assert len(by_name(fxq.convert(prepared))["_1"].grid.scale) == 5


def test_a_batch_that_is_fixed_and_half_a_batch() -> None:
    model = written(lambda m, x: m.conv(x.reshape(x.shape[0] // 2, 2, 4, 3)), conv=nn.Conv2d(2, 3, 1))

    x = torch.randn(6, 1, 4, 3)
    fixed = by_name(fxq.prepare(model, x, options=fxq.Options(dynamic_shapes={})))["conv"]
    free = by_name(fxq.prepare(model, x))["conv"]
    assert (fixed.shape, fixed.macs) == ((3, 3, 4, 3), 3 * 3 * 12 * 2)
    assert (free.shape, free.macs) == (("B/2", 3, 4, 3), 3 * 12 * 2 // 2)


def test_what_leaves_nothing_after_is_no_layer_of_the_integer_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5), nn.Conv2d(4, 5, 1)).train()
    prepared, integer = compiled(model, [torch.randn(2, 3, 4, 4)])
    missing = by_name(prepared).keys() - by_name(integer).keys()
    assert {by_name(prepared)[name].operator for name in missing} <= set(NOT_LOWERED)
    assert by_name(integer).keys() <= by_name(prepared).keys()


def test_a_model_that_was_saved_has_the_same_layers(tmp_path: Path) -> None:
    for form in compiled(Known().eval(), [example()], "nash-e"):
        assert fxq.inspect.layers(fxq.load(fxq.save(form, tmp_path / "model.fxq"))) == fxq.inspect.layers(form)


def test_tensors_inside_of_a_layer() -> None:
    model = written(lambda m, x: torch.cat((m.left(x), 4 * m.right(x)), 1).tanh(), left=nn.Conv2d(3, 4, 1), right=nn.Conv2d(3, 4, 1))
    integer = compiled(model, [torch.randn(2, 3, 4, 4)], "nash-e").integer
    layer = by_name(integer)["cat"]
    assert {inner.grid.scale for inner in layer.intermediates} == {layer.grid.scale}
    assert {inner.name for inner in layer.intermediates} < {node.name for node in integer.graph.nodes}


# ---- what a model would cost -----------------------------------------------------------------------------------------------
@members(lambda: dict(conv=nn.Conv2d(3, 8, 3, padding=1), head=nn.Linear(8, 5)))
def Mixed(self, x: Tensor) -> Tensor:
    """A convolution, a product of activations, a linear layer, and an operator that stays in float."""
    x = self.conv(x).flatten(2)
    scores = self.head((x @ x.transpose(1, 2)).mean(1))
    return torch.fft.rfft(scores).abs()


@functools.cache
def integer_of(dtype: str = "int8") -> fx.GraphModule:
    activations = fxq.QConfig(fxq.ActivationConfig(dtype))
    return fxq.quantize(Mixed().eval(), [torch.randn(4, 3, 6, 6)], target="nash-e", qconfig=activations).integer


def test_products_and_bytes_are_those_of_the_layers() -> None:
    estimate = fxq.estimate(integer_of())
    rows = {row.layer: row for row in estimate}
    assert rows["conv"].macs == 8 * 36 * 27
    assert rows["conv"].bytes == 8 * 27 + 4 * 8 + 3 * 36 + 8 * 36  # weight, bias, operand, result
    assert rows["matmul"].macs == 8 * 8 * 36
    assert rows["matmul"].bytes == 2 * 8 * 36 + 8 * 8  # both operands are tensors of their own
    assert rows["x_quantize"].bytes == (4 + 1) * 3 * 36
    assert (estimate.macs, estimate.bytes) == (sum(row.macs for row in estimate), sum(row.bytes for row in estimate))


def test_an_operator_takes_the_longer_of_its_times() -> None:
    integer = integer_of()
    slow = fxq.estimate(integer, roofline=fxq.extend.Roofline(1e6, 1e12))
    rows = {row.layer: row for row in slow}
    assert rows["conv"].bound == "compute"
    assert rows["conv"].microseconds == pytest.approx(rows["conv"].macs)  # one product a microsecond; float sums, a few roundings
    narrow = {row.layer: row for row in fxq.estimate(integer, roofline=fxq.extend.Roofline(1e12, 1e6))}
    assert narrow["conv"].bound == "memory"
    assert narrow["conv"].microseconds == pytest.approx(narrow["conv"].bytes)
    assert slow.seconds == pytest.approx(sum(row.microseconds for row in slow if row.bound != "host") / 1e6)
    assert set(slow.on_host) == {row.layer for row in slow if row.bound == "host"} != set()
    assert all(name in str(slow) for name in slow.on_host)


def test_sixteen_bits_take_their_time() -> None:
    roofline = fxq.extend.Roofline(1e6, 1e12)
    narrow, wide = ({row.layer: row for row in fxq.estimate(integer_of(dtype), roofline=roofline)} for dtype in ("int8", "int16"))
    assert wide["matmul"].microseconds == 4 * narrow["matmul"].microseconds  # both factors are twice as wide
    assert wide["head"].microseconds == 2 * narrow["head"].microseconds  # one of them is


def test_every_march_has_rates_that_say_where_they_are_from() -> None:
    integer = integer_of()
    for target in backends.TARGETS.values():
        if target.roofline is not None:
            estimate = fxq.estimate(integer, target)
            assert "TOPS" in estimate.roofline.source
            assert ("factor of 2" in estimate.summary) == estimate.roofline.assumed
    assert {target.name for target in backends.TARGETS.values() if target.roofline is None} == {"x86", "qnnpack"}
    rates = backends.get("bernoulli2").roofline  # 5 TOPS, of which a multiply-accumulate is two; 32 bits at 3200 MT/s
    assert (rates.macs_per_second, rates.bytes_per_second) == (2.5e12, 12.8e9)


def test_a_march_is_one_row(tmp_path: Path) -> None:
    """A row that is in no table besides has limits and rates, and files for the compiler that it names."""
    row = replace(backends.get("nash-e"), name="nash-x", roofline=Roofline(1e12, 1e10, "X: 2 TOPS"), aliases=("x9",))
    model, x = written(lambda m, x: m.pool(m.layer(x)), layer=nn.Conv2d(3, 4, 1), pool=nn.MaxPool2d(2, dilation=2)), torch.randn(2, 3, 8, 8)
    assert [result.limit for result in fxq.check(model, x, row)] == ["its dilation is 2; nash-x allows at most 1"]
    integer = compiled(model, [x], row).integer
    assert fxq.estimate(integer).roofline.source == "X: 2 TOPS"
    assert any("nash-x" in file.read_text(encoding="utf-8") for file in fxq.board.export_horizon(integer, tmp_path).parent.rglob("*.yaml"))


def test_a_latency_is_estimated_by_the_targets_rates() -> None:
    nash = backends.get("nash-e")
    budget = Budget(latency=1e-6).on(nash)
    assert (budget.speed.macs_per_second, budget.speed.bytes_per_second) == (nash.roofline.macs_per_second, nash.roofline.bytes_per_second)
    assert Budget(weight_bits=5).on(nash).speed is None
    with pytest.raises(fxq.errors.ConfigurationError, match="a latency on x86"):
        Budget(latency=1e-6).on(backends.get("x86"))

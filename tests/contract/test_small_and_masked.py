"""Values that integers cannot hold: masks that are far larger than the scores they are added to, and numbers far below a step."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives.quantization import quantize
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, held, members, sqnr

LENGTH, WIDTH = 8, 16
LOWEST = torch.finfo(torch.float32).min
VALUES = (-100.0, -1e4, -1e9, LOWEST, -math.inf)


@members(lambda scores, value: dict(
    **{name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"}, mask=torch.triu(torch.full((LENGTH, LENGTH), value), 1), scores=scores,
))  # fmt: skip
def Attention(self, x: Tensor, *arguments: Tensor) -> Tensor:
    """One head; `scores` of the products and a mask, its own or a given one, that hides what comes later."""
    scores = self.scores(self.q(x) @ self.k(x).transpose(1, 2), arguments[0] if arguments else self.mask)
    return self.o(torch.softmax(scores, -1) @ self.v(x))


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda s, m: s + m,
    "added to the scaled": lambda s, m: s / 2.0 + m,
    "on the left": lambda s, m: m + s,
    "scaled afterwards": lambda s, m: (s + m) * 0.5,
    "reshaped between": lambda s, m: (s.view(-1, 1, LENGTH, LENGTH) + m[None, None]).view(-1, LENGTH, LENGTH),
    "two of them": lambda s, m: s + m + m,
    "expanded": lambda s, m: s + m[None].expand(s.shape[0], -1, LENGTH),
    "subtracted": lambda s, m: s - (-m),
    "computed from ones": lambda s, m: s + (1.0 - (m == 0).float()) * -1e9,
    "filled": lambda s, m: s.masked_fill(m < 0, -math.inf) / 2.0,
    "chosen": lambda s, m: torch.where(m < 0, torch.full_like(s, LOWEST), s) * 0.5,
    "chosen of multiples": lambda s, m: torch.where(m == 0, s, -9e15 * torch.ones_like(s)),
    "less the largest": lambda s, m: ((s + m) - (s + m).amax(-1).unsqueeze(-1)) * 2.0,
    "limited": lambda s, m: torch.maximum(s + m, torch.tensor(LOWEST)),
}


def batches() -> list[Tensor]:
    return [torch.randn(4, LENGTH, WIDTH) for _ in range(2)]


def quality(model: nn.Module, data: list[tuple[Tensor, ...]], target: str) -> tuple[float, str]:
    result = fxq.quantize(model.eval(), data, target=target)
    with torch.no_grad():
        return sqnr(model(*data[0]), result.integer(*data[0])), fxq.explain(result.prepared)


@functools.cache
def unmasked(target: str) -> float:
    torch.manual_seed(0)
    return quality(Attention(lambda s, m: s + 0 * 0, 0.0), [(x,) for x in batches()], target)[0]


@pytest.mark.sweep(7)
@pytest.mark.parametrize("target", contract.TARGETS)
@pytest.mark.parametrize("name", SCORES)
def test_a_mask_acts_in_the_softmax_and_costs_no_accuracy(name: str, target: str) -> None:
    data = [(x,) for x in batches()]
    for value in (-100.0, -math.inf) if name != "added" else VALUES:
        torch.manual_seed(0)
        masked, explained = quality(Attention(SCORES[name], value), data, target)
        assert masked > unmasked(target) - 5, (value, masked)  # there are fewer scores to average over
        assert "none is left in float" in explained
        assert "masked_softmax: exp" in explained


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["added", "scaled afterwards", "reshaped between", "two of them", "filled", "computed from ones"])
def test_a_mask_may_be_an_input_and_infinite(name: str, tmp_path: Path) -> None:
    mask = torch.triu(torch.full((LENGTH, LENGTH), -math.inf), 1).expand(4, LENGTH, LENGTH)
    if name == "reshaped between":
        mask = mask[0]
    model = Attention(SCORES[name], 0.0).eval()
    data = [(x, mask) for x in batches()]
    prepared, integer = held(model, data[:1], target="nash-e")
    assert sqnr(model(*data[0]), integer(*data[0])) > 25
    assert "masked_softmax: exp" in fxq.explain(prepared)
    fxq.save(prepared, tmp_path / "prepared.fxq")
    assert torch.equal(fxq.load(tmp_path / "prepared.fxq")(*data[0]), prepared(*data[0]))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), data).mismatches == 0


def test_a_mask_whose_batch_is_that_of_an_activation(tmp_path: Path) -> None:
    def masked(model: Any, x: Tensor) -> Tensor:
        query, key = model.query(x), model.key(x)
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(query.shape[0], -1, -1)
        mask = torch.where(seen, torch.zeros(()), torch.finfo(torch.float32).min)
        return torch.softmax(query @ key.transpose(1, 2) + mask, -1)

    data, model = batches(), Network(masked, query=nn.Linear(WIDTH, WIDTH), key=nn.Linear(WIDTH, WIDTH))
    prepared, integer = held(model, data[:1], tmp_path / "model.onnx", integer_tail=True)
    assert "masked_softmax: exp" in fxq.explain(prepared)
    assert sqnr(model(data[0]), integer(data[0])) > 20


@members(lambda joined: dict(**{name: nn.Linear(WIDTH, WIDTH) for name in "qkv"}, positions=nn.Embedding(LENGTH, LENGTH), joined=joined))
def Biased(self, x: Tensor, seen: Tensor) -> Tensor:
    """Scores, a bias of positions and a mask that hides whole rows of samples, brought together in one of several orders."""
    bias = self.positions(torch.arange(LENGTH)).expand(x.shape[0], -1, -1)
    both = seen.unsqueeze(1) & seen.unsqueeze(2)
    return torch.softmax(self.joined(self.q(x) @ self.k(x).transpose(1, 2), bias, both), -1) @ self.v(x)


JOINED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one by one": lambda s, b, m: s + b + torch.where(m, 0.0, -1e10),
    "added first": lambda s, b, m: s + (b + torch.where(m, 0.0, -1e10).transpose(1, 2)),
    "multiples subtracted": lambda s, b, m: s + b - 1e6 * (1.0 - m.to(s.dtype) * torch.ones(LENGTH, LENGTH).tril()),
    "a logarithm": lambda s, b, m: s + b + torch.log((m | torch.eye(LENGTH, dtype=torch.bool)).float()),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", JOINED)
def test_a_bias_beside_a_mask_is_no_mask_and_a_hidden_row_has_equal_shares(name: str) -> None:
    data = [(x, torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3], [2], [LENGTH]])) for x in batches()]
    result, explained = quality(Biased(JOINED[name]), data, "bayes-e")
    assert result > 25
    assert "none is left in float" in explained


def test_a_softmax_that_stays_in_float_leaves_its_mask_there() -> None:
    model, data = Attention(SCORES["added"], -1e9).eval(), [(x,) for x in batches()]
    for target, qconfig in (("x86", None), ("bayes-e", fxq.QConfigMapping().set_module_name("softmax", None))):
        result = compiled(model, data, target, qconfig)
        assert sqnr(model(*data[0]), result.integer(*data[0])) > 25
        contract.assert_validate_is_integer(result.prepared, result.integer, *data[0])


@members(lambda: dict(
    **{name: nn.Linear(WIDTH, WIDTH) for name in "qkv"}, distances=nn.Parameter(torch.randn(2, 2 * LENGTH - 1)),
    index=torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + LENGTH - 1,
))  # fmt: skip
def Heads(self, x: Tensor, padding: Tensor) -> Tensor:
    """Several heads with a bias for every distance, and rows that a mask hides whole."""
    q, k, v = (layer(x).view(x.shape[0], LENGTH, 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + self.distances[:, self.index]
    scores = scores + (1.0 - padding[:, None, None, :].float()) * LOWEST
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.nightly
def test_a_row_of_which_nothing_is_kept_becomes_zeros_and_a_bias_is_none(tmp_path: Path) -> None:
    torch.manual_seed(1)
    padding = torch.ones(4, LENGTH, dtype=torch.int64)
    padding[0, 5:], padding[1, 2:] = 0, 0
    data = [(x, padding) for x in batches()]
    model = Heads().eval()
    _, integer = held(model, data, tmp_path / "model.onnx", train=False)
    assert sqnr(model(*data[0]), integer(*data[0])) > 28
    keep = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    x = torch.randn(4, 3, 4)
    hidden = compiled(Network(lambda m, x, keep: F.scaled_dot_product_attention(x, x, x, keep)), [(x, keep)]).integer
    assert not hidden(x, keep)[:, 1].any()
    assert hidden(x, keep)[:, 0].any()


def test_a_bias_that_is_computed_stays_integer_and_so_does_an_addition_that_something_else_reads() -> None:
    def scored(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = model.a(x) * 2 + model.mask
        return torch.softmax(model.a(x) * 2 + model.b(x), -1), torch.softmax(scores, -1) + scores

    layers = {"a": nn.Linear(WIDTH, 4), "b": nn.Linear(WIDTH, 4), "mask": nn.Parameter(torch.randn(4))}
    prepared = compiled(Network(scored, **layers), batches()).prepared
    floats = [spec.because for node in prepared.graph.nodes if (spec := annotation(node)) is not None and spec.dtype is None]
    assert not any("mask" in because for because in floats)


def test_an_infinite_constant_elsewhere_keeps_its_operator_in_float() -> None:
    low = torch.tensor([-math.inf, 0.0, 0.0, math.inf])
    prepared, _ = held(Network(lambda m, x: m.layer(x) + m.low, layer=nn.Linear(WIDTH, 4), low=low), batches()[:1], train=False)
    assert "its constant holds values that are not finite" in fxq.explain(prepared)


# ---- below a step -------------------------------------------------------------------------------------------------------
def normed(form: Callable[[Tensor], Tensor]) -> nn.Module:
    return Network(lambda m, x: form(m.layer(x)), layer=nn.Linear(WIDTH, WIDTH, bias=False))


def power(y: Tensor) -> Tensor:
    return y.pow(2).mean(-1, keepdim=True)


SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "the reciprocal root": lambda y: y * torch.rsqrt(power(y) + 1e-6),
    "divided by the root": lambda y: y / torch.sqrt(power(y) + 1e-6),
    "divided by a power": lambda y: y / (1e-6 + power(y)) ** 0.5,
    "divided by a sum": lambda y: y / (y.abs().sum(-1, keepdim=True) + 1e-6),
    "divided by a limited sum": lambda y: y / y.abs().sum(-1, keepdim=True).clamp(min=1e-6),
    "one divided": lambda y: 1 / (y.square() + 1e-3),
    "a reciprocal": lambda y: torch.reciprocal(1e-3 + y.abs()),
    "a negative power": lambda y: (y.square() + 1e-2) ** -1.5,
    "the logarithm of a square": lambda y: torch.log10(y.square() + 1e-4),
    "a logarithm": lambda y: torch.log(torch.relu(y) + 1e-6),
    "another logarithm": lambda y: torch.log2(torch.relu(y) + 1e-6),
    "a layer norm": lambda y: (y - y.mean(-1, keepdim=True)) / torch.sqrt(power(y - y.mean(-1, keepdim=True)) + 1e-5),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("target", contract.TARGETS)
@pytest.mark.parametrize("name", SMALL)
def test_nothing_becomes_infinite_that_is_finite_in_float(name: str, target: str) -> None:
    """Rows from 1 down to a thousandth of a step: the squares of most are 0 as integers, and ε alone is left."""
    x = torch.randn(64, WIDTH) * torch.logspace(-5, 0, 64).unsqueeze(1)
    model = normed(SMALL[name])
    prepared, integer = compiled(model, [x], target)
    assert bool(torch.isfinite(model(x)).all())
    assert bool(torch.isfinite(integer(x)).all())
    contract.assert_validate_is_integer(prepared, integer, x)
    ordinary = torch.randn(64, WIDTH)
    if name == "a reciprocal":
        return  # the smallest of ordinary numbers decide the largest of its values, and are below a step
    assert sqnr(model(ordinary).detach(), compiled(model, [ordinary], target).integer(ordinary)) > 14


@pytest.mark.parametrize("target", ["bernoulli2"])  # on x86 it is one table
def test_without_16_bits_what_leads_to_a_pole_alone_stays_in_float(target: str) -> None:
    model, x = normed(SMALL["one divided"]), torch.randn(64, WIDTH)
    prepared, integer = compiled(model, [x], target)
    explained = fxq.explain(prepared)
    assert "a divisor, a logarithm or a root reads its result, which must not be rounded to 0: the target has no 16-bit dtype" in explained
    assert "near its pole it needs %square in more than 8 bits" in explained
    assert sqnr(model(x).detach(), integer(x)) > 14
    contract.assert_validate_is_integer(prepared, integer, x)
    for layered in (lambda y: torch.log(torch.relu(y) + 1e-6), lambda y: torch.sqrt(y.square() + 1)):  # a layer's own values; no pole at 0
        assert "none is left in float" in fxq.explain(compiled(normed(layered), [x], target).prepared)


def test_a_rule_keeps_what_leads_to_a_pole_narrow() -> None:
    x = torch.randn(64, WIDTH)
    rule = fxq.QConfigMapping().set_object_type(torch.square, fxq.QConfig(fxq.ActivationConfig("int8")))
    dtypes = []
    for qconfig in (None, rule):
        prepared = compiled(normed(lambda y: 1 / (torch.square(y) + 1e-3)), [x], "bayes-e", qconfig).prepared
        dtypes.append({layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)})
    assert (dtypes[0]["square"], dtypes[1]["square"]) == ("int16", "int8")
    assert dtypes[0]["truediv"] == "int8"  # the result is as the qconfig says


def test_a_number_in_front_of_a_table_is_part_of_it(tmp_path: Path) -> None:
    def shifted(_: Any, x: Tensor) -> list[Tensor]:
        return [torch.log(x + 1e-6), torch.sigmoid(2 - x), torch.sqrt(0.5 + x), torch.exp(torch.sub(x, 3, alpha=0.5)), (x - 1).pow(2.0)]

    x, model = torch.rand(64, 9) * 4, Network(shifted)
    prepared, integer = held(model, [x], tmp_path / "model.onnx")
    assert {o.operator.name for o in quantized_operators(prepared).values()} == {"quantize", "shifted"}
    assert "holds add" in fxq.explain(prepared)
    assert sum(node.name.endswith("_table") for node in integer.graph.nodes) == 5
    step = fxq.qparams(prepared)["x_quantize"]
    exact = model((x / step).round().clamp(-128, 127) * step)
    for name, actual, expected in zip(list(fxq.qparams(prepared))[1:], integer(x), exact, strict=True):
        scale = fxq.qparams(prepared)[name]
        limits = expected.clamp(-128 * scale, 127 * scale)
        assert float((actual - limits).abs().max()) <= 0.501 * scale, name
    fxq.save(prepared, tmp_path / "model.fxq")
    assert torch.equal(fxq.load(tmp_path / "model.fxq")(x)[0], prepared(x)[0])
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "qdq.onnx", style="qdq"), [(x,)])
    assert not report.mismatches


@pytest.mark.sweep
@pytest.mark.parametrize("magnitude", [1.0, 1e-5, 1e-7])
@pytest.mark.parametrize(("target", "bits", "least"), [("nash-e", 16, 80.0), ("nash-e", 8, 32.0), ("bayes-e", 8, 32.0)])
def test_small_weights_and_activations_keep_their_bits(target: str, bits: int, least: float, magnitude: float) -> None:
    """The decibels of an ordinary network: nothing but the scales is small."""
    dtype = f"int{bits}"
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype), fxq.WeightConfig(dtype))
    layer = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    with torch.no_grad():
        layer[0].weight *= magnitude
    for model, x in ((layer, torch.randn(64, 32)), (nn.Sequential(layer[2]), torch.randn(64, 32) * magnitude * 10)):
        integer = compiled(model, [x], target, qconfig).integer
        assert sqnr(model(x).detach(), integer(x)) > least


def test_a_dead_channel_does_not_keep_a_layer_from_adding_its_residual() -> None:
    layer = nn.Conv2d(4, 4, 1)
    with torch.no_grad():
        layer.weight[1], layer.bias[1] = 1e-20, 0
    integer = compiled(Network(lambda m, x: m.layer(x) + x, layer=layer), [torch.randn(2, 4, 6, 6)], "nash-e").integer
    assert "added in the accumulator" in fxq.explain(integer)


class Windows(nn.Module):
    """Attention in two windows of four positions each, by what image models, and text models with a position bias, add to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.relative, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(8, 4), nn.Parameter(torch.randn(2, 16))
        self.register_buffer("places", torch.arange(16).view(4, 4).flip(0))
        mask = torch.zeros(2, 4, 4)
        mask[1, :2, 2:] = mask[1, 2:, :2] = -100.0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.joint(x.view(-1, 4, WIDTH)).view(-1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        bias = self.bias[:, self.places]
        shifted = bias.unsqueeze(0) + self.mask.unsqueeze(0).expand(x.shape[0], -1, -1, -1).reshape(-1, 1, 4, 4)
        chosen = torch.where(keep.view(-1, 1, 1, 4), bias, LOWEST)
        masks = (shifted, chosen, self.relative(query) + chosen, self.relative(query) + bias)
        attended = [F.scaled_dot_product_attention(query, key, value, mask) for mask in masks]
        explicit = torch.softmax(query @ key.transpose(-2, -1) * 0.3 + bias, -1) @ value
        return torch.stack([*attended, explicit], 1)


@pytest.mark.nightly
def test_windows_and_position_biases_leave_nothing_in_float(tmp_path: Path) -> None:
    model = Windows().eval()
    keep = torch.ones(4, 2, 4, dtype=torch.bool)
    keep[1::2, 1, 2:] = False
    inputs = (torch.randn(4, LENGTH, WIDTH), keep)
    _, integer = held(model, [inputs, (inputs[0][:2], keep[:2])], tmp_path / "model.onnx", train=False)
    assert not [node for node in integer.graph.nodes if node.target is quantize and node.args[0].op != "placeholder"]
    assert sqnr(model(*inputs), integer(*inputs)) > 25


def test_a_norm_keeps_samples_that_are_smaller_than_any_in_calibration() -> None:
    """Their inverse deviation is larger than any that was seen: on a grid that ends there they would come out smaller than they are."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    _, integer = compiled(model, [torch.randn(4, LENGTH, WIDTH)], qconfig=fxq.QConfig(fxq.ActivationConfig("int16")))
    small = 0.6 * torch.randn(4, LENGTH, WIDTH)
    with torch.no_grad():
        assert sqnr(model(small), integer(small)) > 30
    prepared, _ = compiled(model, [small])
    parts = [operator.output for operator in quantized_operators(prepared).values()]
    assert {quantizer.headroom for quantizer in parts if quantizer.dtype.name == "int16"} == {2.0}
    assert {quantizer.headroom for quantizer in parts if quantizer.dtype.name == "int8"} == {1.0}


OF_ITSELF: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "an input": lambda x, layer: x - x.amax(-1, keepdim=True),
    "an input, by the first of two results": lambda x, layer: x.relu() - x.relu().max(-1, keepdim=True)[0],
    "after a layer": lambda x, layer: layer(x) - layer(x).max(-1, keepdim=True)[0],
}


@pytest.mark.parametrize("name", OF_ITSELF)
def test_what_is_subtracted_of_scores_themselves_is_no_mask(name: str) -> None:
    model = Network(lambda m, x: OF_ITSELF[name](x, m.layer).softmax(-1), layer=nn.Linear(WIDTH, WIDTH))
    assert "none is left in float" in fxq.explain(held(model, [torch.randn(4, WIDTH)], train=False, integer_tail=True).prepared)

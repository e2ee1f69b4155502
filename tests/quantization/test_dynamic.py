"""Dynamic quantization: the arithmetic against the oracle, the contract in every form, what is refused and what is reported."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant import primitives
from fxquant.accuracy.choices import Choices
from fxquant.analysis.recording import runner_of
from fxquant.search.tune import with_observer
from tests.shared import contract, oracle
from tests.shared.networks import members, written

DYNAMIC = fxq.QConfig(dynamic=True)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def live(model: nn.Module) -> nn.Module:
    """A model in eval mode with parameters of its own."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5)
    return model.eval()


def converted(model: nn.Module, example: Any, qconfig: Any = DYNAMIC, target: str = "x86", **options: Any) -> Any:
    """The prepared and the integer model, of which nothing was calibrated."""
    prepared = fxq.prepare(model, example if isinstance(example, tuple) else (example,), target, qconfig)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return prepared, fxq.convert(prepared, **options)


# ---- the arithmetic --------------------------------------------------------------------------------------------------------
X = drawn(3, 5)
OPERANDS = {
    "both signs": X, "positive": X.abs() + 1, "negative": -X.abs() - 1, "zeros": torch.zeros(2, 5),
    "ties": torch.tensor([[-127.0, 128.0, 0.5, 1.5, -2.5]]), "subnormal": X * 1e-42,
    "tiny beside large": torch.tensor([[1e-36, -1e-30, 1e30, 3e-38, 0.0]]),
    "the whole range": torch.tensor([[3e38, -3e38, 1.0, 2.0**126, -0.0]]), "NaN": torch.tensor([[torch.nan, 1.0, -2.0, 0.25, torch.nan]]),
    "infinite": torch.tensor([[torch.inf, 1.0, -torch.inf, 0.25, 3.0]]), "one value": torch.full((2, 5), 7.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("channels", ["per channel", "per tensor"])
def test_a_layer_is_the_oracle_s(name: str, channels: str) -> None:
    generator, operand = torch.Generator().manual_seed(1), OPERANDS[name]
    weight = torch.randint(-127, 128, (4, 5), generator=generator).to(torch.int8)
    scale = torch.rand((4,) if channels == "per channel" else (), generator=generator) * 1e-3 + 1e-4
    bias = torch.randn(4, generator=generator) if channels == "per channel" else None
    result = primitives.dynamic_linear(operand, weight, scale, bias)
    scales = [Fraction(value) for value in scale.expand(4).tolist()]
    added = None if bias is None else [Fraction(value) for value in bias.tolist()]
    wanted = oracle.dynamic_linear(operand.tolist(), weight.tolist(), scales, added)
    assert [[Fraction(value) for value in row] for row in result.tolist()] == wanted


@pytest.mark.parametrize("terms", [517, 519, 3000])
def test_long_sums_are_exact(terms: int) -> None:
    operand, weight = torch.full((2, terms), 255.0), torch.full((1, terms), 127, dtype=torch.int8)
    operand[1] = torch.arange(terms) % 256
    assert oracle.half_even(Fraction(255 * terms * 127)) < 2**31
    result = primitives.dynamic_linear(operand, weight, torch.tensor(1.0), None)
    whole = (operand.long() @ weight.t().long()).flatten().tolist()
    assert [Fraction(value) for value in result.flatten().tolist()] == [oracle.float32(total) for total in whole]


# ---- the contract ----------------------------------------------------------------------------------------------------------
def product_model() -> Any:
    """Two layers, and a product with a parameter."""
    return written(
        lambda m, x: m.second(m.first(x)) @ m.matrix,
        first=nn.Linear(6, 9),
        second=nn.Linear(9, 7, bias=False),
        matrix=nn.Parameter(torch.zeros(7, 3)),
    )


@members(lambda kind, **options: dict(
    layer=kind(5, 4, batch_first=True, **options),
    head=nn.Linear(options.get("proj_size", 4) * (2 if options.get("bidirectional") else 1), 3),
))  # fmt: skip
def Sequence(self, x: Tensor) -> Tensor:
    """A recurrent layer and a layer after the mean of its states."""
    return self.head(self.layer(x)[0].mean(1))


def cells(kind: type) -> Any:
    """Two steps of a cell."""
    return written(lambda m, x: m.cell(x[:, 1], m.cell(x[:, 0])), cell=kind(5, 4))


@members(lambda: dict(attention=nn.MultiheadAttention(6, 2, batch_first=True), mask=torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)))
def Attention(self, x: Tensor) -> Tensor:
    """Attention that sees what is before it."""
    return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


MODELS: dict[str, tuple[Any, Tensor, int]] = {  # with how many dynamic layers
    "product": (product_model, drawn(4, 6), 3),
    "lstm": (lambda: Sequence(nn.LSTM, num_layers=2, bidirectional=True), drawn(2, 3, 5), 9),
    "projected": (lambda: Sequence(nn.LSTM, proj_size=2), drawn(2, 3, 5), 5),
    "gru": (lambda: Sequence(nn.GRU), drawn(2, 3, 5), 3),
    "rnn": (lambda: Sequence(nn.RNN, nonlinearity="relu"), drawn(2, 3, 5), 3),
    "lstm cell": (lambda: cells(nn.LSTMCell), drawn(2, 2, 5), 3),
    "gru cell": (lambda: cells(nn.GRUCell), drawn(2, 2, 5), 3),
    "attention": (Attention, drawn(2, 4, 6), 4),
}


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", MODELS)
def test_every_form_in_pytorch_has_the_same_bits(name: str) -> None:
    config, example, count = MODELS[name]
    model = live(config())
    prepared, integer = converted(model, example)
    assert sum(layer.dynamic for layer in fxq.inspect.layers(integer)) == count
    contract.assert_validate_is_integer(prepared, integer, example)
    contract.assert_validate_is_integer(prepared, integer, drawn(*(3, *example.shape[1:]), seed=5) * 4)
    contract.assert_train_is_validate(prepared, example)
    contract.assert_gradients_reach_every_parameter(prepared, example)
    with torch.no_grad():
        wanted, actual = model(example), integer(example)
    for one, other in zip(*((value if isinstance(value, tuple) else (value,)) for value in (actual, wanted)), strict=True):
        assert 1 - float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0)) < 1e-3


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
def test_a_file_has_the_same_bits(target: str, tmp_path: Path) -> None:
    model = live(product_model())
    _, integer = converted(model, drawn(4, 6), target=target)
    batches = [(drawn(4, 6, seed=7) * size,) for size in (1.0, 0.0, 1e-42, 1e35)]
    contract.assert_integer_is_onnx(integer, tmp_path / "exact.onnx", [*batches, (drawn(2, 6, seed=8),)])
    fxq.export_onnx(integer, tmp_path / "fast.onnx", style="fast")
    assert fxq.verify(integer, tmp_path / "fast.onnx", batches)


def test_a_file_of_a_recurrence_is_fed_layer_by_layer(tmp_path: Path) -> None:
    model = live(Sequence(nn.RNN))
    _, integer = converted(model, drawn(2, 3, 5))
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "rnn.onnx"), [drawn(3, 3, 5, seed=9)])
    assert report
    assert {"layer_linear", "layer_linear_1_step_1", "layer_linear_1_step_2", "head"} <= report.names


@pytest.mark.parametrize("steps", [0, 5])
def test_kernels_have_the_bits_of_the_primitive(steps: int) -> None:
    model = live(Sequence(nn.LSTM) if steps else nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 4, bias=False)))
    example = drawn(2, steps, 5) if steps else X
    _, integer = converted(model, example)
    _, plain = converted(model, example, kernels="reference")
    others = (drawn(7, 5), X.repeat(1, 2)[:, ::2], X[:0])
    for operand in (example * 3, drawn(3, steps, 5, seed=2)) if steps else (*OPERANDS.values(), *others):
        for _ in range(3):  # primitives, kernels, kernels again
            assert contract.same_bytes(integer(operand), plain(operand))
        chosen = [choice.implementation for choice in runner_of(integer).choices(integer).values() if choice.kernel == "dynamic layer"]
        assert len(set(chosen)) == 1 or not len(operand), "a layer inside of a loop has the kernel of those outside"
        assert len(chosen) == (3 if steps else 2)


def test_learned_scales_and_saved_files(tmp_path: Path) -> None:
    learned = fxq.QConfig(weight=fxq.WeightConfig("int4", training="learned"), dynamic=True)
    prepared = fxq.prepare(live(product_model()), (drawn(4, 6),), "x86", learned)
    fxq.set_state(prepared, fxq.State.TRAIN)
    contract.assert_gradients_reach_every_parameter(prepared.train(), drawn(4, 6))
    again = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    assert contract.all_equal(again(drawn(4, 6)), prepared(drawn(4, 6)))
    integer = fxq.convert(prepared)
    assert contract.all_equal(fxq.load(fxq.save(integer, tmp_path / "integer.fxq"))(drawn(4, 6)), integer(drawn(4, 6)))
    rules = fxq.QConfigMapping(default=None).set_object_type(nn.Linear, learned)
    assert fxq.load_qconfig(fxq.save_qconfig(rules, tmp_path / "rules.json")) == rules


# ---- beside other operators ------------------------------------------------------------------------------------------------
def test_beside_layers_that_are_calibrated() -> None:
    rules = fxq.QConfigMapping().set_module_name("dynamic", DYNAMIC)
    layers = {"conv": nn.Conv1d(3, 6, 1), "dynamic": nn.Linear(6, 5), "static": nn.Linear(5, 4)}
    model = live(written(lambda m, x: m.static(torch.relu(m.dynamic(m.conv(x).mean(2)))), **layers))
    result = fxq.quantize(model, [drawn(8, 3, 4)], target="x86", qconfig=rules)
    by_layer = {layer.name: layer for layer in fxq.inspect.layers(result.integer)}
    assert [by_layer[name].dynamic for name in ("conv", "dynamic", "static")] == [False, True, False]
    assert (by_layer["dynamic"].integer, by_layer["dynamic"].device, by_layer["dynamic"].weight_bytes) == (False, "x86", 6 * 5 + 5 * 4)
    assert fxq.verify(result.prepared, result.integer, [drawn(4, 3, 4, seed=2)])
    assert "1 is dynamic" in fxq.explain(result.integer)


def test_searches_leave_dynamic_layers_as_they_are() -> None:
    model = live(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)))
    rules = fxq.QConfigMapping().set_module_name("2", DYNAMIC)
    assert with_observer(rules, fxq.observers.MinMaxObserver).names["2"] == DYNAMIC
    prepared = fxq.calibrate(fxq.prepare(model, (drawn(4, 6),), "x86", rules), [drawn(4, 6)])
    choices = Choices(prepared, (4, 8))
    assert "_2.weight" not in choices
    assert [product.width for product in choices.products if product.layer == "_2"] == [(8, 8)]
    again = fxq.prepare(model, (drawn(4, 6),), "x86", choices.mapping(rules, {"_0.weight": "int4"}))
    assert [layer.name for layer in fxq.inspect.layers(again) if layer.dynamic] == ["_2"]


def test_the_batch_has_one_grid() -> None:
    _, integer = converted(live(product_model()), drawn(4, 6))
    x = drawn(4, 6)
    loud = torch.cat((x[:1], x[1:] * 50))
    assert not torch.equal(integer(x)[0], integer(loud)[0])


# ---- what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "bernoulli2"])
@pytest.mark.parametrize("where", ["everywhere", "one layer", "an attribute"])
def test_a_march_has_none(target: str, where: str) -> None:
    model, rules = product_model(), fxq.QConfigMapping()
    if where == "an attribute":
        model.second.qconfig = DYNAMIC
    else:
        rules = rules.set_global(DYNAMIC) if where == "everywhere" else rules.set_module_name("first", DYNAMIC)
    with pytest.raises(fxq.errors.ConfigurationError, match=f"{target} has no dynamic quantization") as caught:
        fxq.prepare(model, (drawn(4, 6),), target, rules)
    assert "calibrate" in caught.value.remedy


@pytest.mark.parametrize(
    "options", [{"output": fxq.ActivationConfig("int8")}, {"input": fxq.ActivationConfig()}, {"weight": fxq.WeightConfig("int16")}]
)
def test_what_a_dynamic_qconfig_has_no_use_for(options: dict[str, Any]) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match="a dynamic QConfig"):
        fxq.QConfig(**options, dynamic=True)


def test_a_sum_that_is_too_long_weights_that_are_no_numbers_and_scales_that_cannot_be_set() -> None:
    told = fxq.explain(fxq.prepare(nn.Linear(66312, 1), (torch.zeros(1, 66312),), "x86", DYNAMIC))
    assert "at most 66311 fit" in told
    assert "dynamic" not in told.split()[1]
    model = live(product_model())
    with torch.no_grad():
        model.first.weight[0, 0] = torch.nan  # type: ignore[union-attr, operator, index]
    with pytest.raises(fxq.errors.NotFinite, match="%first"):
        fxq.prepare(model, (drawn(4, 6),), "x86", DYNAMIC)
    prepared = fxq.prepare(live(product_model()), (drawn(4, 6),), "x86", DYNAMIC)
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be set"):
        fxq.set_qparams(prepared, {"first": 0.5})

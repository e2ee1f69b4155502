"""Composites: operators that are written as calls of others, with grids that are demanded and tied; recurrent layers."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir import loops
from fxquant.ir.graph import annotation, part
from fxquant.ir.integer import qparams
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, members, sqnr, to_train

WIDE_TARGETS = ("bayes", "bayes-e", "nash-e", "nash-m")  # with int16 activations
NARROW_TARGETS = ("bernoulli2", "x86", "qnnpack")


class Head(nn.Module):
    """A linear layer, a layer norm with a clamp after it, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 6)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(3 * self.last(F.relu(self.norm(self.first(x)))), -1)


def rows(count: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, 12, generator=torch.Generator().manual_seed(seed))


def head() -> Head:
    torch.manual_seed(0)
    return Head().eval()


def roles(graph: fx.GraphModule) -> list[str]:
    return [str(part(node)) for node in graph.graph.nodes if part(node) is not None]


# ---- the contract -------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", WIDE_TARGETS)
def test_inner_tensors_are_wide_and_the_result_is_what_was_asked_for(target: str) -> None:
    _, integer = compiled(head(), [rows()], target)
    dtypes = {str(part(node)): grid.dtype for node in integer.graph.nodes if (grid := qparams(node)) and part(node)}
    by_items = target.startswith("nash")
    norm = ("mean", "sub", "mul", "shifted", *(("of_one_magnitude", "add", "rsqrt") if by_items else ()))
    extents = ("amax", "amin") if by_items else ()
    assert dtypes == {
        **{f"layer_norm: {name}": "int16" for name in norm}, **{f"layer_norm: {name}": "int8" for name in extents},
        "layer_norm: scale_channels": "int8", "softmax: amax": "int8", "softmax: sub": "int16", "softmax: exp": "int16",
        "softmax: sum": "int16", "softmax: reciprocal": "int16", "softmax: mul": "int8",
    }  # fmt: skip
    (exponential,) = [qparams(node) for node in integer.graph.nodes if node.name == "softmax_exp"]
    assert exponential.scale == pytest.approx(math.exp(6) / 32767 if target in ("bayes", "bayes-e") else 2.0**-15)


# ---- what they are made of ------------------------------------------------------------------------------------------------
def norms(shape: tuple[int, ...], affine: tuple[bool, bool]) -> nn.Module:
    norm = nn.LayerNorm(shape, elementwise_affine=affine[0], bias=affine[1])
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return norm


SPELLED: dict[str, nn.Module] = {
    "softmax": nn.Softmax(-1),
    "softmax of rows": nn.Softmax(1),
    "log_softmax": nn.LogSoftmax(-1),
    **{
        f"layer_norm of {shape} with {affine}": norms(shape, affine)
        for shape, affine in itertools.product(((12,), (5, 12)), ((True, True), (True, False), (False, False)))
    },
}


@pytest.mark.parametrize("name", SPELLED)
def test_the_parts_together_are_the_float_function(name: str) -> None:
    model = SPELLED[name].eval()
    expanded = fxq.prepare(nn.Sequential(model), rows(4), "bayes-e", until="composite.expand")
    assert len(roles(expanded)) > 3
    for scale in (0.01, 1.0, 30.0):
        torch.testing.assert_close(expanded(scale * rows(4, seed=3)), model(scale * rows(4, seed=3)), atol=1e-5, rtol=1e-4)


def test_training_moves_inner_scales_but_not_a_given_one() -> None:
    prepared, _ = compiled(head(), [rows()], "bayes-e")
    before = fxq.qparams(prepared)
    to_train(prepared)
    prepared(4 * rows(seed=2)).square().sum().backward()
    after = fxq.qparams(prepared)
    assert after["softmax_exp"] == before["softmax_exp"] == pytest.approx(math.exp(6) / 32767)
    assert after["softmax_sub"] != before["softmax_sub"]


# ---- what stays whole -------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", NARROW_TARGETS)
def test_without_int16_they_stay_whole_and_in_float(target: str, tmp_path: Path) -> None:
    prepared, integer = compiled(head(), [rows()], target)
    assert roles(prepared) == []
    assert f"softmax: sub: {target} computes with" in fxq.explain(prepared)
    assert "and it needs int16" in fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, rows())
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [rows()])


def whole(model: nn.Module, example: Any, name: str, qconfig: Any = None) -> str:
    """Why the node of this name stays in float; the graph holds no operator of its composite."""
    prepared = fxq.prepare(model, example, "bayes-e", qconfig, options=fxq.Options(integer_tail=True))
    (node,) = [node for node in prepared.graph.nodes if node.name == name]
    spec = annotation(node)
    assert spec.dtype is None
    assert not [other for other in prepared.graph.nodes if other.name.startswith(f"{name}_") and part(other) is not None]
    return spec.because


MASKED: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "added": ("holds an attention mask", lambda m, x: (x + m.mask).reshape(-1, 5, 12)),
    "filled": ("%masked_fill is computed in float", lambda m, x: x.masked_fill(m.mask < 0, -torch.inf)),
}


@pytest.mark.parametrize("name", MASKED)
def test_the_logarithm_of_a_masked_softmax_stays_whole(name: str) -> None:
    """A softmax has no values for elements that a mask hides."""
    because, masked = MASKED[name]
    mask = torch.triu(torch.full((5, 12), -1e9), 1)
    model = Network(lambda m, x: torch.log_softmax(masked(m, m.layer(x)), -1), layer=nn.Linear(12, 12), mask=mask)
    assert because in whole(model, rows(), "log_softmax")


def test_the_operands_of_a_similarity_are_repeated_beside_its_dimension() -> None:
    """By a dimension more, and beside the dimension."""
    other, x = torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.rand(8, 3, 4) + 0.5
    model = Network(lambda _, x: [F.cosine_similarity(x, other, -1), F.cosine_similarity(x, x[:, :, :1], 1)])
    prepared, integer = compiled(model, [x])
    for actual, expected in zip(integer(x), model(x), strict=True):
        assert float((actual - expected).abs().max()) < 0.03
    fxq.set_state(prepared, fxq.State.FLOAT)
    torch.testing.assert_close(prepared(x), model(x), atol=1e-5, rtol=0)


def test_a_rule_keeps_it_whole_and_one_for_its_result_is_about_the_result_alone() -> None:
    keep = fxq.QConfigMapping().set_object_type(nn.LayerNorm, None)
    assert whole(head(), rows(), "norm", keep) == "the qconfig keeps it in float"
    fixed = fxq.QConfigMapping().set_object_type(torch.softmax, fxq.QConfig(fxq.ActivationConfig("int16", scale=2.0**-15)))
    prepared, _ = compiled(head(), [rows()], "bayes-e", fixed)
    scales = fxq.qparams(prepared)
    assert scales["softmax"] == 2.0**-15
    assert scales["softmax_sum"] != 2.0**-15


def test_a_32_bit_tensor_is_no_operand_and_no_result() -> None:
    wide = fxq.QConfig(fxq.ActivationConfig("int32"))
    assert "no 32-bit output" in whole(head(), rows(), "softmax", fxq.QConfigMapping().set_object_type(torch.softmax, wide))
    assert "32-bit output of %first" in whole(head(), rows(), "norm", fxq.QConfigMapping().set_module_name("first", wide))


# ---- ties, and outputs that are nests ----------------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
def test_a_recurrence_has_one_grid_for_its_state(target: str, tmp_path: Path) -> None:
    layers = {"rnn": nn.RNN(12, 8, batch_first=True), "out": nn.Linear(8, 4)}
    model, example = Network(lambda m, x: [m.out((both := m.rnn(x))[0]), both[1]], **layers).eval(), rows()[:, :3]
    prepared, integer = compiled(model, [example], target)
    contract.assert_contract(prepared, tmp_path / "model.onnx", example, integer=integer)
    operators = quantized_operators(prepared)
    states = [operator for name, operator in operators.items() if operator.operator.name == "tanh"]
    assert len(states) == 2
    assert len({id(state.output) for state in states}) == 1
    assert "on the scale that it shares" in fxq.explain(prepared)
    assert "none is left in float" in fxq.explain(prepared)
    for actual, expected in zip(integer(example), model(example), strict=True):
        assert (actual - expected).abs().max() < 0.05
    shapes = [tuple(integer.get_buffer(str(node.target)).shape) for node in integer.graph.nodes if node.op == "get_attr"]
    assert (shapes.count((8, 12)), shapes.count((8, 8))) == (1, 1), "each weight is one constant, read at every step"


@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_a_shared_grid_trains(training: str) -> None:
    """Each step moves the scale that the one before has used."""
    config = fxq.QConfig(fxq.ActivationConfig("int8", training=training))
    prepared = compiled(Network(lambda m, x: m.rnn(x), rnn=nn.RNN(12, 8, batch_first=True)), [rows()[:, :3]], "nash-e", config).prepared
    to_train(prepared)
    steps, last = prepared(2 * rows(seed=4)[:, :3])
    (steps.square().mean() + last.square().mean()).backward()
    assert all(parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()) for parameter in prepared.parameters())


# ---- a last part that only moves values ---------------------------------------------------------------------------------------
MOVED_AT_THE_END: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.log((x.unsqueeze(-1) * torch.tensor([0.5, -2.0])).flatten(-2).abs() + 0.5),
    lambda x: 1 / (torch.nn.functional.group_norm(x, 2).square().mean(1) + 0.1),
    lambda x: torch.log(x.abs().prod(1) + 0.3),
)


def test_what_leads_to_a_pole_is_wide_where_it_is_made_and_where_it_is_moved(tmp_path: Path) -> None:
    model, x = Network(lambda _, x: [function(x) for function in MOVED_AT_THE_END]), torch.randn(4, 4, 6)
    prepared, integer = compiled(model, [x], "bayes-e")
    dtypes = {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}
    assert dtypes["flatten"] == dtypes["mul"] == "int16"
    contract.assert_validate_is_integer(prepared, integer, x)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(x,)])
    for wanted, actual in zip(model(x), integer(x), strict=True):
        assert sqnr(wanted, actual) > 30


STEPS = 12


@members(lambda function, **layers: dict(function=function, layers=nn.ModuleDict(layers)))
def Whole(self, x: Tensor) -> Any:
    """A function of a module's layers."""
    return self.function(self.layers, x)


def sequences(count: int = 8, steps: int = STEPS, seed: int = 0) -> Tensor:
    return torch.randn(count, steps, 6, generator=torch.Generator().manual_seed(seed))


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def looped(layers: Any, x: Tensor) -> Tensor:
    hidden, cell, shown = torch.zeros(x.shape[0], 5), x.new_zeros(x.shape[0], 5), []
    for step in range(x.shape[1]):
        hidden, cell = layers["cell"](x[:, step], (hidden, cell))
        shown.append(hidden)
    return torch.stack(shown, 1)


def handed_on(layers: Any, x: Tensor) -> Tensor:
    steps, state = layers["encoder"](x)
    return layers["decoder"](steps, state)[0]  # type: ignore[no-any-return]


def turned(layers: Any, x: Tensor) -> Any:
    return layers["rnn"](x.transpose(0, 1), torch.zeros(1, x.shape[0], 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(nn.LSTM(6, 5, batch_first=True)),
    "lstm in two layers and directions": lambda: nn.Sequential(nn.LSTM(6, 5, 2, bidirectional=True, dropout=0.3, batch_first=True)),
    "lstm with projections": lambda: nn.Sequential(nn.LSTM(6, 5, 2, proj_size=3, batch_first=True)),
    "lstm without biases": lambda: nn.Sequential(nn.LSTM(6, 5, bias=False, batch_first=True)),
    "gru": lambda: nn.Sequential(nn.GRU(6, 5, 2, bidirectional=True, batch_first=True)),
    "gru without biases": lambda: nn.Sequential(nn.GRU(6, 5, bias=False, batch_first=True)),
    "rnn": lambda: nn.Sequential(nn.RNN(6, 5, batch_first=True)),
    "rnn with relu": lambda: nn.Sequential(nn.RNN(6, 5, nonlinearity="relu", batch_first=True)),
    "steps first": lambda: Whole(turned, rnn=nn.GRU(6, 5)),
    "a loop over cells": lambda: Whole(looped, cell=nn.LSTMCell(6, 5)),
    "a state handed on": lambda: Whole(handed_on, encoder=nn.LSTM(6, 5, batch_first=True), decoder=nn.LSTM(5, 5, batch_first=True)),
    "a cell without a state": lambda: Whole(lambda layers, x: layers["cell"](x[:, 0]), cell=nn.GRUCell(6, 5)),
    "one sequence": lambda: Whole(lambda layers, x: layers["gru"](x.flatten(0, 1)[:4].reshape(4, 6)), gru=nn.GRU(6, 5, 2)),
}


# ---- what they are made of --------------------------------------------------------------------------------------------------
@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_recurrent_layer_is_its_parts(name: str) -> None:
    example = sequences(steps=3)
    expanded = fxq.prepare(model(name), example, "bayes-e", until="composite.expand")
    assert any(part(node) is not None for node in expanded.graph.nodes)
    assert not [node for node in expanded.graph.nodes if node.op == "call_module"]
    for scale in (0.1, 3.0):
        actual, expected = (contract.flat(form(scale * sequences(steps=3, seed=1))) for form in (expanded, model(name)))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bernoulli2", "bayes-e", "nash-e", "x86"])
def test_they_hold_the_contract_and_are_near_the_float_model(target: str, tmp_path: Path) -> None:
    both = Whole(lambda layers, x: (handed_on(layers, x), turned(layers, x)[1]), **{
        "encoder": nn.LSTM(6, 5, batch_first=True), "decoder": nn.LSTM(5, 5, batch_first=True), "rnn": nn.GRU(6, 5),
    }).eval()  # fmt: skip
    example = sequences(64, 4)
    prepared, integer = compiled(both, [example], target)
    assert "none is left in float" in fxq.explain(prepared)
    for actual, expected in zip(contract.flat(integer(example)), contract.flat(both(example)), strict=True):
        assert 10 * torch.log10(expected.square().mean() / (actual - expected).square().mean()) > 25
    if target == "bernoulli2":  # the table of operators is held to the contract on the others
        contract.assert_validate_is_integer(prepared, integer, example)
        contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(example,), (example[:1],)])


def test_what_is_remembered_is_wide_and_what_is_shown_is_as_asked_for() -> None:
    by_name = {}
    for target in ("bayes-e", "bernoulli2", "x86"):
        for name in ("lstm", "steps first"):
            _, integer = compiled(model(name), [sequences(steps=3)], target)
            (nodes,) = loops.bodies(integer.graph).values()
            grids = [grid for node in nodes if (grid := qparams(node)) is not None]
            by_name[target, name] = {grid.dtype for grid in grids}
    assert by_name["bayes-e", "lstm"] == by_name["bayes-e", "steps first"] == {"int16", "int8"}
    assert by_name["bernoulli2", "lstm"] == by_name["bernoulli2", "steps first"] == {"int8"}
    assert by_name["x86", "lstm"] == by_name["x86", "steps first"] == {"int16", "uint8"}


# ---- what stays in float ------------------------------------------------------------------------------------------------------
def left(net: nn.Module, example: Tensor) -> str:
    prepared, integer = compiled(net.eval(), [example])
    contract.assert_validate_is_integer(prepared, integer, example)
    assert not [node for node in prepared.graph.nodes if part(node) is not None]
    return fxq.explain(prepared)


def test_as_many_steps_as_the_batch_is_large_and_a_first_state_that_is_a_parameter_stay_in_float_and_say_so() -> None:
    first = nn.Parameter(torch.randn(1, 5))
    learned = Network(lambda m, x: m.cell(x[0, :1], m.first), cell=nn.RNNCell(6, 5), first=first)
    assert "its initial state is a parameter" in left(learned, sequences(steps=2))
    for layer in (nn.LSTM(6, 5), nn.LSTM(6, 5, 2, dropout=0.1), nn.RNN(6, 5)):
        assert "the number of its steps, B, depends on the batch size" in left(nn.Sequential(layer), sequences(steps=2))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
def test_a_product_has_no_scale_beyond_what_gates_tell_apart(kind: Callable[..., nn.RNNBase], target: str) -> None:
    layer = kind(6, 5, batch_first=True)
    with torch.no_grad():
        layer.weight_ih_l0[0] = 400
    reached = 8 + float(layer.weight_hh_l0.abs().sum(1).max() + layer.bias_hh_l0.abs().max())
    net, x = Whole(lambda layers, x: layers["rnn"](x)[0], rnn=layer).eval(), sequences()
    prepared = compiled(net, [x], target).prepared
    scale = fxq.qparams(prepared)["layers_rnn_linear"]
    assert isinstance(scale, float)
    assert scale * (2**15 if target == "bayes-e" else 2**7) < 2 * reached < float((x @ layer.weight_ih_l0.T).abs().max()) / 10


def test_a_product_is_covered_whole_where_the_state_may_be_large() -> None:
    layer = nn.LSTM(6, 5, batch_first=True)
    with torch.no_grad():
        layer.weight_ih_l0[0] = 400
    net = Whole(lambda layers, x: layers["rnn"](x, (x[:, 0, :5].unsqueeze(0), x[:, 1, :5].unsqueeze(0)))[0], rnn=layer).eval()
    scale = fxq.qparams(compiled(net, [sequences()]).prepared)["layers_rnn_linear"]
    assert isinstance(scale, float)
    assert scale * 2**15 > 1000

"""Recurrent layers and cells: what they are made of, how long ones are told, and what stays in float."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.graph import part, step_of
from fxquant.ir.integer import qparams
from tests.shared import contract
from tests.shared.contract import compiled

STEPS = 12


class Whole(nn.Module):
    """A function of a module's layers."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Any:
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
def test_the_parts_together_are_the_float_function(name: str) -> None:
    example = sequences(steps=3)
    expanded = fxq.prepare(model(name), example, "bayes-e", until="composite.expand")
    assert any(part(node) is not None for node in expanded.graph.nodes)
    assert not [node for node in expanded.graph.nodes if node.op == "call_module"]
    for scale in (0.1, 3.0):
        found, expected = (contract.flat(form(scale * sequences(steps=3, seed=1))) for form in (expanded, model(name)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bernoulli2", "bayes-e", "nash-e", "x86"])
def test_they_hold_the_contract_and_are_near_the_float_model(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    both = Whole(lambda layers, x: (handed_on(layers, x), turned(layers, x)[1]), **{
        "encoder": nn.LSTM(6, 5, batch_first=True), "decoder": nn.LSTM(5, 5, batch_first=True), "rnn": nn.GRU(6, 5),
    }).eval()  # fmt: skip
    example = sequences(64, 4)
    prepared, integer = compiled(both, [example], target)
    assert "none is left in float" in fxq.explain(prepared)
    for found, expected in zip(contract.flat(integer(example)), contract.flat(both(example)), strict=True):
        assert 10 * torch.log10(expected.square().mean() / (found - expected).square().mean()) > 25
    if target == "bernoulli2":  # the table of operators is held to the contract on the others
        contract.assert_validate_is_integer(prepared, integer, example)
        contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(example,), (example[:1],)])


def test_what_is_remembered_is_wide_and_what_is_shown_is_as_asked_for() -> None:
    found = {}
    for target in ("bayes-e", "bernoulli2", "x86"):
        for name in ("lstm", "steps first"):
            _, integer = compiled(model(name), [sequences(steps=3)], target)
            grids = [known for node in integer.graph.nodes if step_of(node) == 2 and (known := qparams(node)) is not None]
            found[target, name] = {known.dtype for known in grids}
    assert found["bayes-e", "lstm"] == found["bayes-e", "steps first"] == {"int16", "int8"}
    assert found["bernoulli2", "lstm"] == found["bernoulli2", "steps first"] == {"int8"}
    assert found["x86", "lstm"] == found["x86", "steps first"] == {"int16", "uint8"}


# ---- what stays in float ------------------------------------------------------------------------------------------------------


def left(net: nn.Module, example: Tensor) -> str:
    prepared, integer = compiled(net.eval(), [example])
    contract.assert_validate_is_integer(prepared, integer, example)
    assert not [node for node in prepared.graph.nodes if part(node) is not None]
    return fxq.explain(prepared)


def test_as_many_steps_as_the_batch_is_large_stay_in_float_and_say_so() -> None:
    for layer in (nn.LSTM(6, 5), nn.LSTM(6, 5, 2, dropout=0.1), nn.RNN(6, 5)):
        assert "the number of its steps, B, depends on the batch size" in left(nn.Sequential(layer), sequences(steps=2))


def test_a_first_state_that_is_a_parameter_stays_in_float_and_says_so() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.first = nn.RNNCell(6, 5), nn.Parameter(torch.randn(1, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x[0, :1], self.first)  # type: ignore[no-any-return]

    assert "its initial state is a parameter" in left(Learned(), sequences(steps=2))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
def test_a_product_has_no_scale_beyond_what_gates_tell_apart(kind: Callable[..., nn.RNNBase], target: str) -> None:
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    layer = nn.LSTM(6, 5, batch_first=True)
    with torch.no_grad():
        layer.weight_ih_l0[0] = 400
    net = Whole(lambda layers, x: layers["rnn"](x, (x[:, 0, :5].unsqueeze(0), x[:, 1, :5].unsqueeze(0)))[0], rnn=layer).eval()
    scale = fxq.qparams(compiled(net, [sequences()]).prepared)["layers_rnn_linear"]
    assert isinstance(scale, float)
    assert scale * 2**15 > 1000

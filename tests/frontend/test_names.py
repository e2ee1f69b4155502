"""Names the user has chosen, where Python or a GraphModule means something else by them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq

OWN = ["graph", "code", "meta", "recompile", "print_readable", "_graph", "_code"]
PYTHON = ["if", "None", "self", "torch", "inf", "getattr", "a b"]


class Named(nn.Module):
    """An integer layer, a float one and a parameter under names of the caller's choice, each also below another module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleDict({"inner": nn.Linear(8, 8)}))
        self.add_module("other", nn.Module())
        self.other.add_module(name, nn.Linear(8, 8))
        self.other.add_module("norm", nn.Module())
        self.other.norm.register_parameter(name, nn.Parameter(torch.randn(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other._modules[self.name](F.relu(self._modules[self.name]["inner"](x)))
        return F.rms_norm(x, (8,), self.other._modules["norm"]._parameters[self.name])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OWN + PYTHON)
def test_a_module_of_any_name_is_compiled_trained_copied_saved_and_exported(name, tmp_path):
    model, x = Named(name).eval(), torch.randn(4, 8)
    prepared = fxq.prepare(model, x)
    assert model.state_dict().keys() <= prepared.state_dict().keys()
    assert dict(model.named_parameters()).keys() <= dict(prepared.named_parameters()).keys()
    with torch.no_grad():
        fxq.set_state(prepared, fxq.State.FLOAT)
        assert torch.equal(prepared(x), model(x))
    fxq.calibrate(prepared, [x], show_progress=False)
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, [x])
    wanted = integer(x)
    assert torch.equal(copy.deepcopy(integer)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(integer))(x), wanted)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    if " " not in name:  # a name that a file does not hold
        assert torch.equal(fxq.load(fxq.save(integer, tmp_path / "model.fxq"))(x), wanted)


@pytest.mark.parametrize("name", ["graph", "if"])
def test_float_operators_that_read_such_a_parameter_are_exported(name, tmp_path):
    result = fxq.quantize(Named(name), [torch.randn(4, 8)], show_progress=False)
    report = result.verify(result.export(tmp_path / "model.onnx"), [torch.randn(3, 8)])
    assert report or report.first.name == "output 0"  # what float operators compute is not the same to the bit everywhere


def test_what_a_graph_module_has_itself_is_not_replaced():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph, self.meta, self.code = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.meta(self.graph(x)) * self.code

    prepared = fxq.prepare(Model(), torch.randn(2, 8))
    assert isinstance(prepared.graph, torch.fx.Graph)
    assert prepared.meta["stage"] == "PREPARED"
    assert isinstance(prepared.code, str)
    assert {"graph.weight", "meta.weight", "code"} <= prepared.state_dict().keys()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["torch", "inf", "getattr", "input", "_fxquant_registered"])
def test_an_argument_of_any_name(name, tmp_path):
    source = f"def forward(me, {name}):\n    return me.layer({name}).clamp(-1, 1)[:, 1:]"
    scope: dict[str, object] = {}
    exec(source, scope)
    Model = type("Model", (nn.Module,), {"forward": scope["forward"]})
    model, x = Model(), torch.randn(4, 8)
    model.layer = nn.Linear(8, 8)
    prepared = fxq.calibrate(fxq.prepare(model, {name: x}), [{name: x}], show_progress=False)
    integer = fxq.convert(prepared)
    assert torch.equal(integer(**{name: x}), integer(x))
    assert fxq.verify(prepared, integer, [{name: x}])
    assert torch.equal(fxq.load(fxq.save(integer, tmp_path / "model.fxq"))(**{name: x}), integer(x))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x])


def test_arguments_whose_names_are_not_python_names():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(me, x, **others):
            return me.layer(x) + others["class"] + others["a b"]

    x = torch.randn(2, 8)
    inputs = {"x": x, "class": x + 1, "a b": x + 2}
    result = fxq.quantize(Model(), [inputs], show_progress=False)
    assert torch.equal(result.integer(x, **{"a b": x + 2, "class": x + 1}), result.integer(**inputs))


def test_an_argument_called_self():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(me, self):
            return me.layer(self)

    x = torch.randn(2, 8)
    result = fxq.quantize(Model(), [x], show_progress=False)
    assert torch.equal(result.prepared(x), result.integer(x))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("constant", [torch.arange(8) > 3, torch.arange(8) - 4], ids=["bool", "int64"])
@pytest.mark.parametrize("operator", [torch.mul, torch.add, torch.sub])
def test_a_constant_that_is_no_float(constant, operator, tmp_path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            return operator(y, constant) if operator is not torch.sub else y - constant.long()

    x = torch.randn(4, 8)
    result = fxq.quantize(Model(), [x], show_progress=False)
    assert fxq.verify(result.prepared, result.integer, [x])
    assert result.verify(result.export(tmp_path / "model.onnx"), [x])
    assert "none is left in float" in fxq.explain(result.integer)

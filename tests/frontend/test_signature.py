"""A graph has the call signature of its float model, and returns the same containers: names of arguments, classes of outputs."""

import copy
import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.errors import ConfigurationError
from fxquant.frontend import assumptions, trace, tracer
from tests.shared.networks import members, written

Pair = namedtuple("Pair", "a b")
A, B, C = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)


class Mask(Called):
    def forward(self, x, mask=None, *, scale=2.0):
        y = self.layer(x) * scale
        return y if mask is None else y + mask


class Dict(Called):
    def forward(self, inputs):
        return self.layer(inputs["a"]) + inputs["b"]


class Nested(Called):
    def forward(self, images, flags=(True, False), extra=None):
        first, second = images
        y = self.layer(first) - second["deep"][0]
        return y if extra is None else y + extra if flags[0] else y


class Variadic(Called):
    def forward(self, x, *others, **named):
        return self.layer(x) + others[0] + others[1] + named["last"]


class Tuple(Called):
    def forward(self, pair):
        return self.layer(pair.a) + pair.b


# Each: a model, the example inputs, and calls (positional, by name) that mean the same.
CASES: dict[str, Any] = {
    "plain": (Mask(), (A,), [((A,), {}), ((), {"x": A}), ((A, None), {}), ((A,), {"mask": None, "scale": 2.0})]),
    "explicit None": (Mask(), (A, None), [((A, None), {}), ((A,), {}), ((A,), {"mask": None})]),
    "mask": (Mask(), (A, B), [((A, B), {}), ((A,), {"mask": B}), ((), {"mask": B, "x": A})]),
    "number": (Mask(), {"x": A, "scale": 3.0}, [((A,), {"scale": 3.0}), ((A, None), {"scale": 3.0})]),
    "dict": (Dict(), ({"a": A, "b": B},), [(({"b": B, "a": A},), {}), ((), {"inputs": OrderedDict(a=A, b=B)}), ((A, B), {})]),
    "nested": (
        Nested(),
        ([A, {"deep": (B, 1)}], (True, False), C),
        [
            (([A, {"deep": (B, 1)}], (True, False), C), {}),
            (((A, {"deep": [B, 1]}),), {"extra": C}),
            ((A, B, C), {}),
            ((), {"images_0": A, "images_1": B, "extra": C}),
        ],
    ),
    "variadic": (Variadic(), (A, B, C), None),
    "named tuple": (Tuple(), (Pair(A, B),), [((Pair(A, B),), {}), ((A, B), {})]),
}


def stages(model, example, tmp_path):
    traced = trace(model, example)
    yield traced
    prepared = fxq.prepare(model, example)
    fxq.calibrate(prepared, [tuple(leaf for leaf in torch.utils._pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor))])
    yield prepared
    integer = fxq.convert(prepared)
    yield integer
    for index, built in enumerate((traced, prepared, integer)):
        yield fxq.load(fxq.save(built, tmp_path / f"{index}.fxq"))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [name for name, (*_, calls) in CASES.items() if calls])
def test_calls_are_those_of_the_float_model(name, tmp_path):
    model, example, calls = CASES[name]
    model.eval()
    for built in stages(model, example, tmp_path):
        results = [built(*args, **kwargs) for args, kwargs in calls]
        assert all(torch.equal(result, results[0]) for result in results)
        if built.meta.get("stage") is None:
            args, kwargs = calls[0]
            assert torch.equal(results[0], model(*args, **kwargs))


def test_variadic_arguments(tmp_path):
    model = Variadic().eval()
    example = {"x": A, "last": C}
    with pytest.raises(Exception, match="index out of range"):
        trace(model, example)

    class Positional(Called):
        def forward(self, *inputs, **named):
            return self.layer(inputs[0]) + inputs[1] * named.get("factor", 2)

    for built in stages(Positional().eval(), (A, B), tmp_path):
        assert built(A, B).shape == (3, 8)
        with pytest.raises(ConfigurationError):
            built(A)
        with pytest.raises(ConfigurationError):
            built(A, B, C)
        with pytest.raises(ConfigurationError):
            built(A, B, factor=3)


WRONG = {
    "another number": ("number", (A,), {"scale": 2.0}, "argument scale does not fit the graph: it is 2.0"),
    "a number left out": ("number", (A,), {}, "missing a required.* argument: 'scale'"),
    "a mask where none was": ("explicit None", (A, B), {}, "argument mask does not fit the graph: it is a tensor of shape"),
    "no mask where one was": ("mask", (A,), {}, "missing a required argument: 'mask'"),
    "None for a tensor": ("mask", (A, None), {}, "argument mask does not fit the graph: it is None"),
    "an unknown name": ("plain", (A,), {"other": B}, "unexpected keyword argument 'other'"),
    "too many": ("plain", (A, B, C), {}, "too many positional arguments"),
    "another key": ("dict", ({"a": A, "c": B},), {}, r"argument inputs does not fit the graph: it is a dict with the keys a, c"),
    "a longer list": ("nested", ([A, {"deep": (B, 1)}, A], (True, False), C), {}, "argument images does not fit .* it is a list of 3"),
    "a flag turned": ("nested", ([A, {"deep": (B, 1)}], (False, False), C), {}, r"argument flags\[0\] does not fit the graph: it is False"),
    "another number inside": ("nested", ([A, {"deep": (B, 2)}],), {"extra": C}, r"argument images\[1\]\['deep'\]\[1\] does not fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_means_something_else_is_refused(name):
    case, args, kwargs, message = WRONG[name]
    model, example, _ = CASES[case]
    built = trace(model, example, check=False)
    with pytest.raises(ConfigurationError, match=message):
        built(*args, **kwargs)


def test_what_is_neither_tensor_nor_number_is_left_out(tmp_path):
    class Settings:
        width = 2

    class Model(Called):
        def forward(self, x, settings):
            return self.layer(x) * settings.width

    settings = Settings()
    traced = trace(Model().eval(), (A, settings))
    assert torch.equal(traced(A), traced(x=A))
    with pytest.raises(ConfigurationError, match="argument settings does not fit the graph: it is a Settings"):
        traced(A, settings)


def test_a_forward_pre_hook_of_the_user_runs_on_a_prepared_model():
    prepared = fxq.prepare(Mask(), (A,))
    prepared.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert torch.equal(prepared(A), prepared(B))


@pytest.mark.parametrize("damaged", [["x", 1, False, "y"], ["a b", 1, False, "x"], ["x", 5, False, "x"], ["x", 1, 0, "x"]], ids=str)
def test_a_file_whose_signature_is_damaged_is_refused(damaged, tmp_path):
    integer = fxq.quantize(Mask(), [A]).integer
    integer.meta["fxquant.signature"] = {"parameters": [[*damaged[:3], ["tensor", damaged[3]]]]}
    with pytest.raises(fxq.errors.ExportError, match="how its inputs are given"):
        fxq.load(fxq.save(integer, tmp_path / "model.fxq"))


# ---- names that the user has chosen, where Python or a GraphModule means something else by them ----------------------
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
    fxq.calibrate(prepared, [x])
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
    result = fxq.quantize(Named(name), [torch.randn(4, 8)])
    report = result.verify(result.export(tmp_path / "model.onnx"), [torch.randn(3, 8)])
    assert report or report.first.name == "output 0"  # what float operators compute is not the same to the bit everywhere


def test_what_a_graph_module_has_itself_is_not_replaced():
    members = {"graph": nn.Linear(8, 8), "meta": nn.Linear(8, 8), "code": nn.Parameter(torch.ones(8))}
    prepared = fxq.prepare(written(lambda m, x: m.meta(m.graph(x)) * m.code, **members), torch.randn(2, 8))
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
    prepared = fxq.calibrate(fxq.prepare(model, {name: x}), [{name: x}])
    integer = fxq.convert(prepared)
    assert torch.equal(integer(**{name: x}), integer(x))
    assert fxq.verify(prepared, integer, [{name: x}])
    assert torch.equal(fxq.load(fxq.save(integer, tmp_path / "model.fxq"))(**{name: x}), integer(x))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x])


def test_arguments_whose_names_are_not_python_names_or_self():
    model = written(lambda me, x, **others: me.layer(x) + others["class"] + others["a b"], layer=nn.Linear(8, 8))
    x = torch.randn(2, 8)
    inputs = {"x": x, "class": x + 1, "a b": x + 2}
    result = fxq.quantize(model, [inputs])
    assert torch.equal(result.integer(x, **{"a b": x + 2, "class": x + 1}), result.integer(**inputs))
    x = torch.randn(2, 8)
    result = fxq.quantize(written(lambda me, self: me.layer(self), layer=nn.Linear(8, 8)), [x])
    assert torch.equal(result.prepared(x), result.integer(x))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("constant", [torch.arange(8) > 3, torch.arange(8) - 4], ids=["bool", "int64"])
@pytest.mark.parametrize("operator", [torch.mul, torch.add, torch.sub])
def test_a_constant_that_is_no_float(constant, operator, tmp_path):
    value = constant.long() if operator is torch.sub else constant
    x = torch.randn(4, 8)
    result = fxq.quantize(written(lambda m, x: operator(m.layer(x), value), layer=nn.Linear(8, 8)), [x])
    assert fxq.verify(result.prepared, result.integer, [x])
    assert result.verify(result.export(tmp_path / "model.onnx"), [x])
    assert "none is left in float" in fxq.explain(result.integer)


class Outcome(OrderedDict):
    """As `ModelOutput` of transformers is: a dict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


pytree.register_pytree_node(
    Outcome,
    lambda outcome: (list(outcome.values()), list(outcome)),
    lambda values, names: Outcome(zip(names, values, strict=True)),
    flatten_with_keys_fn=lambda outcome: ([(pytree.MappingKey(key), value) for key, value in outcome.items()], list(outcome)),
)


@dataclasses.dataclass
class Halves:
    left: Any
    right: Any


@dataclasses.dataclass
class Unknown:
    value: Any
    count: int = 3


class Cache:
    def __init__(self, value: torch.Tensor) -> None:
        self.layers, self.kind, self.length = [Unknown(value)], Cache, 3


torch.export.register_dataclass(Halves)


@members(lambda wrap: dict(linear=nn.Linear(4, 4), wrap=wrap))
def Net(self, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return self.wrap(y, torch.relu(y))


RESULTS = {
    "mapping": lambda y, z: Outcome(last=y, hidden=(y, z)),
    "dataclass": lambda y, z: Halves(y, [z, {"again": z}]),
    "inside": lambda y, z: (Outcome(last=Halves(y, z)), z),
    "unknown dataclass": lambda y, z: Unknown((y, z)),
    "cache": lambda y, z: Outcome(last=y, cache=Cache(z)),
}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Cache):
        return [layer.value for layer in value.layers]
    if isinstance(value, Unknown):
        return leaves(value.value)
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in pytree.tree_leaves(value) for leaf in leaves(item)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", RESULTS)
def test_every_form_returns_what_the_model_does(case: str, tmp_path: Path) -> None:
    model, x = Net(RESULTS[case]).eval(), torch.randn(3, 4)
    expected = model(x)
    prepared = fxq.calibrate(fxq.prepare(model, (x,)), [x])
    integer = fxq.convert(prepared)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert all(torch.equal(a, b) for a, b in zip(leaves(fxq.trace(model, (x,))(x)), leaves(expected), strict=True))
    for form in (prepared, integer, loaded):
        assert type(form(x)) is type(expected)
        assert all(torch.equal(a, b) for a, b in zip(leaves(form(x)), leaves(integer(x)), strict=True))
    assert all(torch.allclose(a, b, atol=0.1) for a, b in zip(leaves(integer(x)), leaves(expected), strict=True))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert fxq.verify(integer, path, [x])


def test_an_object_of_another_library_is_told_of() -> None:
    traced = fxq.trace(Net(RESULTS["cache"]).eval(), (torch.randn(3, 4),))
    told = "forward returned a Cache, whose tensors are returned as a dict of its attributes, without 'kind', 'length'"
    assert any(told in a for a in assumptions(traced))
    assert list(traced(torch.randn(2, 4))["cache"]) == ["layers"]


def test_a_class_that_nobody_registered_again_is_a_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    path = fxq.save(fxq.trace(Net(RESULTS["mapping"]).eval(), (x,)), tmp_path / "model.fxq")
    monkeypatch.delitem(pytree.SUPPORTED_NODES, Outcome)
    assert type(fxq.load(path)(x)) is dict


def test_a_dataclass_keeps_its_numbers_and_is_a_dict_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    traced = fxq.trace(Net(RESULTS["unknown dataclass"]).eval(), (x,))
    assert isinstance(traced(x), Unknown)
    assert traced(x).count == 3
    path = fxq.save(traced, tmp_path / "model.fxq")
    monkeypatch.delitem(tracer._DATACLASSES, f"{Unknown.__module__}.{Unknown.__qualname__}")
    loaded = fxq.load(path)(x)
    assert type(loaded) is dict
    assert loaded["count"] == 3

"""Models that are accepted: a float module, a traced one, one with quantization stubs. An error names the type of any other object."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.frontend import trace
from tests.shared.networks import members, written


@members(lambda: dict(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU(), head=nn.Conv2d(4, 2, 1)))
def Net(self, x):
    return self.head(self.relu(self.conv(x)))


X = torch.randn(2, 3, 6, 6)

ENTRIES = {
    "prepare": lambda model: fxq.prepare(model, X),
    "quantize": lambda model: fxq.quantize(model, [X]),
    "check": lambda model: fxq.check(model, X),
    "trace": lambda model: fxq.trace(model, X),
}


@pytest.fixture(scope="module")
def compiled():
    return fxq.quantize(Net(), [X], target="nash-e")


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name != "check"])  # a prepared model is checked as it stands
def test_a_model_that_is_prepared_already(entry, compiled):
    with pytest.raises(ConfigurationError) as caught:
        ENTRIES[entry](compiled.prepared)
    assert str(caught.value) == (
        "the model is not a float model, but a prepared model\n"
        "  because  it was compiled for nash-e already, and quantizing it twice would mix two arithmetics\n"
        "  remedy   pass the float nn.Module it was made from, also for another target; continue this one with fxq.calibrate, "
        "fxq.set_state and fxq.convert"
    )


def test_such_models_inside_of_others_in_copies_in_files_and_stopped_half_way(compiled, tmp_path):
    with pytest.raises(ConfigurationError, match="the submodule 0 is not a float model, but a prepared model"):
        fxq.prepare(nn.Sequential(compiled.prepared, nn.ReLU()), X)
    with pytest.raises(ConfigurationError, match="but a prepared model"):
        fxq.prepare(copy.deepcopy(compiled.prepared), X)
    with pytest.raises(ConfigurationError, match="but an integer model"):
        fxq.prepare(fxq.load(fxq.save(compiled.integer, tmp_path / "model.fxq")), X)
    with pytest.raises(ConfigurationError, match="but a graph that was stopped at stage CANONICAL"):
        fxq.prepare(fxq.prepare(Net(), X, until="activation.fuse"), X)


def test_a_traced_model_may_be_prepared(tmp_path):
    model = Net()
    traced = trace(model, X)
    wanted = fxq.text(fxq.prepare(model, X))
    assert fxq.text(fxq.prepare(traced, X)) == wanted
    assert fxq.prepare(fxq.load(fxq.save(traced, tmp_path / "model.fxq")), X).meta["stage"] == "PREPARED"


# ---- torch.ao --------------------------------------------------------------------------------------------------------
@members(lambda ao: dict(
    quant=ao.quantization.QuantStub(), dequant=ao.quantization.DeQuantStub(), net=Net(), add=ao.nn.quantized.FloatFunctional(),
))  # fmt: skip
def Stubs(self, x):
    """Written for PyTorch's eager mode."""
    y = self.net(self.quant(x))
    return self.dequant(self.add.add(y, y))


@pytest.fixture(scope="module")
def ao():
    ao = pytest.importorskip("torch.ao")
    pytest.importorskip("torch.ao.quantization")
    pytest.importorskip("torch.ao.nn.quantized")
    return ao


@pytest.mark.parametrize("kind", ["prepare", "prepare_qat", "convert"])
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_model_that_torch_ao_has_changed(ao, kind, entry, monkeypatch):
    engine = next(e for e in torch.backends.quantized.supported_engines if e != "none")
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    model = Stubs(ao).train(kind == "prepare_qat")
    model.qconfig = ao.quantization.get_default_qat_qconfig() if kind == "prepare_qat" else ao.quantization.default_qconfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = getattr(ao.quantization, "prepare_qat" if kind == "prepare_qat" else "prepare")(model)
        if kind == "convert":
            built(X)
            built = ao.quantization.convert(built.eval())
    with pytest.raises(ConfigurationError, match="has prepared or converted it") as caught:
        entry(built)
    assert "pass the original float nn.Module" in str(caught.value)


def test_a_model_that_is_only_written_for_torch_ao(ao):
    result = fxq.quantize(Stubs(ao), [X])
    assert fxq.verify(result.prepared, result.integer, [X])
    fused = nn.Sequential(ao.nn.intrinsic.ConvReLU2d(nn.Conv2d(3, 4, 3), nn.ReLU()))
    assert fxq.prepare(fused, X).meta["stage"] == "PREPARED"


# ---- torch.compile and torch.jit -------------------------------------------------------------------------------------
def test_a_compiled_model_is_the_model_it_was_made_from_and_submodules_may_be_compiled():
    model = Net().eval()
    wanted = fxq.quantize(model, [X])
    result = fxq.quantize(torch.compile(model, backend="eager"), [X])
    assert torch.equal(result.integer(X), wanted.integer(X))
    assert list(result.prepared.state_dict()) == list(wanted.prepared.state_dict())
    model.conv = torch.compile(model.conv, backend="eager")
    model.head.compile(backend="eager")
    result = fxq.quantize(model, [X])
    assert torch.equal(result.integer(X), wanted.integer(X))
    assert "conv._orig_mod.weight" in model.state_dict()
    assert model.state_dict().keys() <= result.prepared.state_dict().keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused_as_such():
    for scripted in (torch.jit.script(Net()), torch.jit.trace(Net(), X)):
        for entry in ENTRIES.values():
            with pytest.raises(ConfigurationError, match=r"the model is a torch\.jit\.ScriptModule"):
                entry(scripted)
    model = Net()
    model.relu = torch.jit.script(nn.Sequential(nn.ReLU()))
    with pytest.raises(FxQuantError) as caught:
        fxq.prepare(model, X)
    lines = str(caught.value).splitlines()
    assert lines[0] == "a module that forward calls is a torch.jit.ScriptModule"
    assert lines[1].endswith("in forward:  return self.head(self.relu(self.conv(x)))")


# ---- stubs say where the integer part begins and ends ----------------------------------------------------------------
@members(lambda scale=1 / 128: dict(scale=scale))
def QuantStub(self, x: torch.Tensor) -> torch.Tensor:
    """As Horizon's: on a fixed scale unless told otherwise."""
    return x


QuantStub.__module__ = "horizon_plugin_pytorch.quantization.stubs"


def marked(stub: nn.Module | None, end: nn.Module, ao: Any) -> nn.Module:
    """A layer before the stub, and layers, a sum and a mean after it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.before(x)
        x = x if stub is None else m.stub(x)
        return torch.relu(m.end(m.floats.add(m.bn(m.conv(x)), m.conv(x)))).mean((2, 3))

    layers = {"before": nn.Conv2d(3, 3, 1), "conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4)}
    return written(forward, **layers, stub=stub, end=end, floats=ao.nn.quantized.FloatFunctional()).eval()


STUBS: dict[str, Any] = {
    "torch": lambda ao: ao.quantization.QuantStub(),
    "horizon": lambda ao: QuantStub(),
    "horizon, observed": lambda ao: QuantStub(None),
    "none": lambda ao: None,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", STUBS)
def test_stubs_mark_the_boundary(kind: str, ao: Any, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = marked(STUBS[kind](ao), ao.quantization.DeQuantStub(), ao)
    loaded = fxq.load(fxq.save(fxq.trace(model, (x,)), tmp_path / "traced.fxq"))
    prepared = fxq.calibrate(fxq.prepare(loaded, (x,)), [x])
    integer = fxq.convert(prepared)
    layers = {layer.name: layer for layer in fxq.inspect.layers(prepared)}
    floats = {name for name, layer in layers.items() if not layer.integer and not layer.boundary}
    assert floats == {"relu", "mean", *(["before"] if kind != "none" else [])}
    assert {layers[name].reason for name in floats} == {"it lies outside of QuantStub and DeQuantStub"}
    assert not any("stub" in name for name in layers) or kind == "horizon"
    if kind == "horizon":
        assert layers["quant_stub"].grid.scale == 1 / 128
        assert layers["quant_stub"].reason == "on a scale of 0.0078125"  # and not 16 bits wide
    assert fxq.verify(prepared, integer, [x])
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x])


def test_a_class_of_that_name_elsewhere_is_what_it_computes(ao: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared = fxq.prepare(marked(None, written(lambda m, x: x * 2), ao), (x,))
    assert all(layer.integer or layer.boundary for layer in fxq.inspect.layers(prepared))

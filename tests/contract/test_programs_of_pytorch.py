"""PyTorch's own ways to copy, store and compile a model: each gives the same bits, or an error that says what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat import horizon
from fxquant.compat.deferred import Deferred
from fxquant.ir.graph import spelling
from tests.shared.contract import compiled
from tests.shared.written import written


class Tokens(nn.Module):
    """A convolution, a batch norm, and a parameter that is expanded to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.head(torch.cat([self.token.expand(x.shape[0], -1, -1), rows], 1))


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def stages() -> dict[str, fx.GraphModule]:
    made = fxq.quantize(Tokens().eval(), [X], "x86", show_progress=False)
    return {
        "traced": fxq.trace(made.float, X), "fresh": fxq.prepare(Tokens().eval(), X, "x86"), "prepared": made.prepared,
        "training": fxq.set_state(copy.deepcopy(made.prepared), "train") or made.prepared, "integer": made.integer,
    }  # fmt: skip


PROGRAMS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.jit.script": torch.jit.script,
    "torch.jit.script, inside": lambda model: torch.jit.script(nn.Sequential(model, nn.Identity())),
    "torch.jit.trace": lambda model: torch.jit.trace(model, X),
    "torch.jit.trace, inside": lambda model: torch.jit.trace(nn.Sequential(model, nn.Identity()), X),
    "torch.export": lambda model: torch.export.export(model, (X,)).module(),
}


@pytest.mark.sweep(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("stage", ["traced", "fresh", "prepared", "training", "integer"])
def test_a_program_of_pytorch_has_the_bits_of_its_model_or_is_refused(stage: str, name: str) -> None:
    model = stages()[stage]
    if stage == "integer" or (stage == "traced" and "script" not in name):
        assert torch.equal(PROGRAMS[name](model)(X), model(X))
        return
    said = rf"{name.split(',')[0]} cannot make a program of [\s\S]*because[\s\S]*remedy[\s\S]*export_torchscript"
    with pytest.raises(fxq.errors.ExportError, match=said):
        PROGRAMS[name](model)


def saved(model: Any) -> Any:
    archive = io.BytesIO()
    torch.save(model, archive)
    archive.seek(0)
    return torch.load(archive, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("stage", ["traced", "prepared", "integer"])
def test_a_copy_has_the_bits_of_its_model(stage: str, name: str) -> None:
    model = stages()[stage]
    again = COPIES[name](model)
    assert torch.equal(again(X), model(X))
    assert list(again.state_dict()) == list(model.state_dict())


QCONFIG = {"": horizon.default_calib_8bit_fake_quant_qconfig}


def _attributes(model: nn.Module) -> nn.Module:
    model.qconfig = horizon.default_calib_8bit_fake_quant_qconfig  # type: ignore[assignment]
    return model


PREPARES: dict[str, Callable[[], Any]] = {
    "prepare_qat_fx": lambda: horizon.prepare_qat_fx(Tokens().eval(), QCONFIG, example_inputs=X),
    "prepare_qat_fx, by its first batch": lambda: horizon.prepare_qat_fx(Tokens().eval(), QCONFIG),
    "prepare_qat": lambda: horizon.prepare_qat(_attributes(Tokens().eval()), example_inputs=X),
    "prepare_qat, in place": lambda: horizon.prepare_qat(_attributes(Tokens().eval()), inplace=True),
    "prepare": lambda: horizon.prepare(_attributes(Tokens().eval()), (X,)),
}


@pytest.fixture
def march() -> None:
    horizon.set_march("bayes-e")


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("march")
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("prepare", PREPARES)
def test_a_copy_of_a_horizon_model_goes_on_where_it_was(prepare: str, name: str) -> None:
    first = PREPARES[prepare]()
    horizon.set_fake_quantize(first, horizon.FakeQuantState.CALIBRATION)  # of a model that is not prepared yet: once it is
    second = COPIES[name](first)
    assert isinstance(second, Deferred) == isinstance(first, Deferred)
    for model in (first, second):
        model(X)
        horizon.set_fake_quantize(model, horizon.FakeQuantState.VALIDATION)
    third = COPIES[name](second)
    assert torch.equal(first(X), second(X))
    assert torch.equal(first(X), third(X))
    for model in (second, third):
        assert model.state_dict()._metadata[""] == first.state_dict()._metadata[""], "the shapes of its inputs"


@pytest.mark.usefixtures("march")
def test_a_copy_of_a_model_that_waits_for_its_first_batch_loads_what_it_was_given() -> None:
    calibrated = PREPARES["prepare_qat_fx"]()
    horizon.set_fake_quantize(calibrated, horizon.FakeQuantState.CALIBRATION)
    calibrated(X)
    horizon.set_fake_quantize(calibrated, horizon.FakeQuantState.VALIDATION)
    waiting = PREPARES["prepare_qat_fx, by its first batch"]()
    waiting.load_state_dict(dict(calibrated.state_dict()))  # a dict without the shapes of the inputs
    horizon.set_fake_quantize(waiting, horizon.FakeQuantState.VALIDATION)
    assert torch.equal(saved(waiting)(X), calibrated(X))


# ---- models are pickled whatever functions they call -----------------------------------------------------------------------


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2), "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2), "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 3),
    "max_pool3d": lambda x: F.max_pool3d(x, 2), "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x), "pad": lambda x: F.pad(x, (1, 1)), "getitem": lambda x: x[:, 1:],
}  # fmt: skip


def pooled(name: str) -> Any:
    """A convolution, and a function of its output."""
    return written(lambda m, x: FUNCTIONS[m.name](m.conv(x)), conv=nn.Conv2d(3, 8, 3), name=name)


def restored(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    found: nn.Module = torch.load(stream, weights_only=False)
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_model_is_pickled_in_every_form(name: str) -> None:
    torch.manual_seed(0)
    model, x = pooled(name).eval(), torch.randn(2, 3, 16, 16)
    traced = fxq.prepare(model, x, until="canonical.rewrite")
    prepared, integer = compiled(model, [x])
    for form in (traced, prepared, integer):
        for copied in (pickle.loads(pickle.dumps(form)), restored(form)):
            assert torch.equal(copied(x), form(x))
            pairs = zip(form.graph.nodes, copied.graph.nodes, strict=True)
            assert all((a.name, a.target, spelling(a)) == (b.name, b.target, spelling(b)) for a, b in pairs)
    copied = pickle.loads(pickle.dumps(prepared))
    gradients: list[Any] = []
    for form in (prepared, copied):
        fxq.set_state(form, "train")
        form(x).square().sum().backward()
        gradients.append(form.get_parameter("conv.weight").grad)
    assert torch.equal(*gradients)
    assert torch.equal(fxq.convert(copied)(x), fxq.convert(prepared)(x))

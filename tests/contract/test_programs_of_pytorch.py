"""PyTorch's own ways to copy, store, compile and export a model: each gives the same bits, or an error that says what to do."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.backends.aten import programs
from fxquant.compat import horizon
from fxquant.compat.deferred import Deferred
from fxquant.ir.graph import spelling
from tests.shared.contract import all_equal, compiled
from tests.shared.networks import Network, members, stored, written
from tests.shared.programs import program


@members(lambda: dict(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), token=nn.Parameter(torch.randn(1, 1, 8)), head=nn.Linear(8, 4)))
def Tokens(self, x: Tensor) -> Tensor:
    """A convolution, a batch norm, and a parameter that is expanded to the batch."""
    rows = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
    return self.head(torch.cat([self.token.expand(x.shape[0], -1, -1), rows], 1))


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def stages() -> dict[str, fx.GraphModule]:
    result = fxq.quantize(Tokens().eval(), [X], "x86")
    return {
        "traced": fxq.trace(result.float, X), "fresh": fxq.prepare(Tokens().eval(), X, "x86"), "prepared": result.prepared,
        "training": fxq.set_state(copy.deepcopy(result.prepared), "train") or result.prepared, "integer": result.integer,
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
    said = rf"{name.split(',')[0]} cannot make a program of [\s\S]*because[\s\S]*remedy[\s\S]*export_pt2"
    with pytest.raises(fxq.errors.ExportError, match=said):
        PROGRAMS[name](model)


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": stored, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy
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
    assert torch.equal(stored(waiting)(X), calibrated(X))


# ---- models are pickled whatever functions they call -----------------------------------------------------------------------
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2), "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2), "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 3),
    "max_pool3d": lambda x: F.max_pool3d(x, 2), "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x), "pad": lambda x: F.pad(x, (1, 1)), "getitem": lambda x: x[:, 1:],
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_model_is_pickled_in_every_form(name: str) -> None:
    model, x = written(lambda m, x: FUNCTIONS[name](m.conv(x)), conv=nn.Conv2d(3, 8, 3)).eval(), torch.randn(2, 3, 16, 16)
    traced = fxq.prepare(model, x, until="canonical.rewrite")
    prepared, integer = compiled(model, [x])
    for form in (traced, prepared, integer):
        for copied in (pickle.loads(pickle.dumps(form)), stored(form)):
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


ALONE = program("programs_alone")


@members(lambda: dict(embed=nn.Embedding(20, 8), query=nn.Linear(8, 8), head=nn.Linear(8, 6)))
def Mixed(self, tokens: Tensor) -> dict[str, Any]:
    """Integers, attention, a float operator, int64 results, a number beside them."""
    x = self.embed(tokens)
    scores = self.head(torch.softmax(self.query(x) @ x.transpose(1, 2), -1) @ x)
    return {"best": scores.topk(2, -1), "size": tokens.shape[0], "far": torch.fft.rfft(scores).abs(), "last": scores[-2:].sum(0)}


@pytest.mark.nightly
def test_programs_run_without_fxquant_at_every_batch_size(tmp_path: Path) -> None:
    tokens = torch.randint(0, 20, (7, 5))
    integer = compiled(Mixed().eval(), [tokens[:4]], "bayes-e").integer
    assert fxq.export.export_pt2(integer, tmp_path / "pt2") == tmp_path / "pt2"
    wanted = {size: [v for v in pytree.tree_leaves(integer(tokens[:size])) if isinstance(v, Tensor)] for size in (2, 4, 7)}
    torch.save((tokens, wanted), tmp_path / "wanted.pt")
    names = [str(tmp_path / name) for name in ("wanted.pt", "pt2")]
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE, *names], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "equal\n", result.stderr


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bernoulli", "x86"])
def test_they_are_the_integer_models_bits(target: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
    image = torch.randn(5, 3, 6, 6)
    integer = compiled(model.eval(), [image], target).integer
    program = torch.export.load(fxq.export.export_pt2(integer, tmp_path / "program.pt2")).module()
    for size in (5, 1):
        assert all_equal(program(image[:size]), integer(image[:size]))


def test_a_program_of_other_bits_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integer = compiled(nn.Linear(4, 3), [torch.randn(2, 4)], "bayes-e").integer
    place = tmp_path / "kept.pt2"
    place.write_text("what was there")
    original = programs.Program.forward
    calls: list[int] = []

    def forward(self: nn.Module, *inputs: Tensor) -> Any:
        calls.append(0)
        return original(self, *inputs) + (1e-3 if len(calls) == 1 else 0)  # while it is written, and not afterwards

    monkeypatch.setattr(programs.Program, "forward", forward)
    with pytest.raises(fxq.errors.ExportError, match="not equal to the integer model"):
        fxq.export.export_pt2(integer, place)
    assert place.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.pt2"]


@fxq.wrap
def found(scores: Tensor) -> list[list[int]]:
    return [torch.nonzero(row).flatten().tolist() for row in scores]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("write", [fxq.export.export_pt2, fxq.export_onnx])
def test_what_stays_python_and_cannot_be_written_is_an_error_and_no_print(
    write: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finds = Network(lambda s, x: (y := s.conv(x), found(y.mean((2, 3)))), conv=nn.Conv2d(3, 4, 1))
    integer = fxq.quantize(finds.eval(), [torch.randn(4, 3, 4, 4)]).integer
    capfd.readouterr()
    with pytest.raises(fxq.errors.ExportError, match="found"):
        write(integer, tmp_path / "model")
    printed = capfd.readouterr()
    assert not printed.out
    assert not printed.err
    assert not list(tmp_path.iterdir())

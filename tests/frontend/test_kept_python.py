"""Python that stays Python: wrapped functions, leaf modules, attributes and methods of a model, branches that only train."""

import copy
import functools
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx.segments import _called
from fxquant.frontend.opaque import WRAPPED
from tests.shared.contract import compiled
from tests.shared.networks import members, to_validate, written


@fxq.wrap
def ranked(scores: Tensor) -> Tensor:
    """With numpy, of a fixed size."""
    return torch.from_numpy(np.sort(scores.detach().numpy(), 1).copy())


@fxq.wrap
def above(scores: Tensor, limit: float) -> tuple[list[Tensor], dict[str, int]]:
    """Of as many numbers as there are above a limit, image by image."""
    return [row[row > limit] for row in scores], {"count": int((scores > limit).sum())}


@fxq.wrap
def joined(actual: tuple[list[Tensor], dict[str, int]]) -> Tensor:
    return torch.cat(actual[0])


def signed(x: Tensor, other: Tensor) -> Tensor:
    return x + other if float(x.sum()) > 0 else x - other


fxq.wrap("signed")


@fxq.wrap(fake=lambda x, places: x.new_empty(x.shape[0], 2))
def picked(x: Tensor, places: list[int]) -> Tensor:
    assert float(x.detach().abs().max()) > 1e-3, "no activations"  # neither zeros nor fake tensors can be looked at
    return x[:, places]


@members(lambda: dict(weight=nn.Parameter(torch.full((4,), 2.0))))
def Rescale(self, x: Tensor) -> Tensor:
    return x * self.weight if float(x.max()) > 0 else x


class Kept(nn.Module):
    """Every way of keeping Python, after and between layers."""

    gain = 3

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.rescale = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), Rescale()

    @fxq.wrap
    def choose(self, x: Tensor) -> Tensor:
        return x * self.gain if float(x.max()) > 0 else x + self.rescale.weight

    def forward(self, x: Tensor) -> tuple[object, ...]:
        y = self.head(ranked(self.conv(x).relu().mean((2, 3))))
        y = self.rescale(self.choose(signed(y, y)))
        result = above(y, limit=0.1)
        return result, joined(result), picked(y, [0, 2])


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def kept(image: Tensor) -> fxq.results.Result:
    torch.manual_seed(0)
    return fxq.quantize(Kept().eval(), [image, image[:2]], options=fxq.Options(leaf=Rescale))


def test_what_is_kept_is_one_call_and_runs_at_every_stage(kept: fxq.results.Result, image: Tensor) -> None:
    names = [layer.name for layer in fxq.inspect.layers(kept.integer) if "kept" in layer.reason]
    assert names == ["ranked", "signed", "choose", "rescale", "above", "joined", "picked"]
    assert fxq.verify(kept.prepared, kept.integer, [image, image[:1]])
    traced = fxq.trace(kept.float, image, options=fxq.Options(leaf="rescale"))
    (rows, counts), together, two = kept.float(image)
    for model, exact in (
        (traced, True),
        (copy.deepcopy(traced), True),
        (kept.integer, False),
        (pickle.loads(pickle.dumps(kept.integer)), False),
    ):
        (output, n), all_found, pair = model(image)
        assert len(output) == 5
        assert n["count"] == sum(map(len, output)) == len(all_found)
        assert pair.shape == (5, 2)
        if exact:
            assert all(map(torch.equal, output, rows))
            assert n == counts
            assert torch.equal(all_found, together)
            assert torch.equal(pair, two)


def test_gradients_pass_through_and_parameters_of_leaves_train(kept: fxq.results.Result, image: Tensor) -> None:
    x = torch.randn(8, 6)
    model = written(lambda m, x: m.rescale(signed(m.layer(x), x[:, :4])), layer=nn.Linear(6, 4), rescale=Rescale())
    prepared = fxq.calibrate(fxq.prepare(model, x, options=fxq.Options(leaf="rescale")), [x])
    fxq.set_state(prepared, "train")
    prepared(x).sum().backward()
    assert prepared.layer.weight.grad.abs().sum() > 0
    assert prepared.rescale.weight.grad.abs().sum() > 0


def test_a_file_names_wrapped_functions_and_imports_nothing(image: Tensor, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 8)
    result = fxq.quantize(written(lambda m, x: above(ranked(m.layer(x)), 0.0), layer=nn.Linear(8, 4)), [x])
    path = fxq.save(result.integer, tmp_path / "ranked.fxq")
    assert all(map(torch.equal, fxq.load(path)(x)[0], result.integer(x)[0]))
    monkeypatch.delitem(WRAPPED, f"{__name__}:ranked")
    with pytest.raises(fxq.errors.ExportError, match="ranked, which nothing in this process has wrapped"):
        fxq.load(path)


@pytest.mark.nightly
def test_segments_have_files_but_for_what_is_python(image: Tensor, tmp_path) -> None:
    model = written(lambda m, x: above(m.head(ranked(m.conv(x).mean((2, 3)))), 0.1), conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4)).eval()
    integer = compiled(model, [image]).integer
    with pytest.raises(fxq.errors.ExportError, match="outside of forward"):
        fxq.export_onnx(integer, tmp_path / "whole.onnx", style="exact")
    fxq.export.export_segments(integer, tmp_path / "parts")
    functions = {"ranked": ranked, "above": functools.partial(above, limit=0.1)}
    (result,) = fxq.export.run_segments(tmp_path / "parts", image, python=functions)
    assert all(map(torch.equal, result[0], integer(image)[0]))
    with pytest.raises(fxq.errors.ConfigurationError, match="'ranked' cannot be run"):
        fxq.export.run_segments(tmp_path / "parts", image)
    with pytest.raises(fxq.errors.ConfigurationError, match=r"segments pass tensors alone, here .*limit"):
        fxq.export.run_segments(tmp_path / "parts", image, python=functions | {"above": above})


def test_a_function_of_a_segment_returns_all_of_its_outputs() -> None:
    entry = {"inputs": ["x"], "outputs": ["a", "b"], "python": ["f"]}
    assert _called(entry, {"a": lambda x: (x, x + 1)}, [torch.zeros(2)])["b"].tolist() == [1, 1]
    with pytest.raises(fxq.errors.ConfigurationError, match="has 2 outputs, a, b, and it returned Tensor"):
        _called(entry, {"a": lambda x: x}, [torch.zeros(2)])


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result = above(x, 0.0)
        return x if result[1]["count"] > 3 else -x


def test_what_nothing_is_known_of_cannot_be_computed_with(image: Tensor) -> None:
    with pytest.raises(fxq.errors.TraceError, match="kept as Python is used by Python"):
        fxq.prepare(Branching(), torch.randn(4, 3))

    @fxq.wrap
    def strict(x: Tensor) -> Tensor:
        raise RuntimeError("not these numbers")

    with pytest.raises(fxq.errors.TraceError, match=r"(?s)the result of strict cannot be determined.*not these numbers.*fake="):
        fxq.prepare(written(lambda m, x: strict(x)), torch.randn(4, 3))
    with pytest.raises(fxq.errors.ConfigurationError, match="function 'nothing' to wrap was not found"):
        fxq.wrap("nothing")
    with pytest.raises(fxq.errors.ConfigurationError, match="did you mean 'rescale'"):
        fxq.prepare(Kept(), image, options=fxq.Options(leaf="rescaled"))
    with pytest.raises(fxq.errors.TraceError, match=r"(?s)^leaf= raised KeyError for the module .*test_kept_python.py.*because +'none'"):
        fxq.prepare(Kept(), image, options=fxq.Options(leaf=lambda module, path: {}["none"]))


# ---- what is preserved -----------------------------------------------------------------------------------------------
class Head(nn.Module):
    kind = "linear"

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.strides, self.anchors, self.key = nn.Linear(8, 4), [8, 16], torch.rand(3, 2), lambda x: x

    @property
    def levels(self) -> int:
        return len(self.strides)

    def decode(self, y: Tensor) -> Tensor:
        return y * self.strides[1] + self.anchors.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def preserving() -> nn.Module:
    return written(
        lambda m, x: m.head(m.conv(x).relu().mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3),
        head=Head(),
        other=nn.Sequential(nn.Linear(8, 2), nn.ReLU()),
        names=["a", "b"],
    )


def test_what_is_preserved_is_at_every_stage_and_values_in_files(image: Tensor, tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    model = preserving().eval()
    preserve = ["names", "head.strides", "head.anchors", "head.levels", "head.kind", "head.decode", "head.key", "other"]
    result = fxq.quantize(model, [image], options=fxq.Options(preserve=preserve))
    for actual in (
        fxq.trace(model, image, options=fxq.Options(preserve=preserve)),
        result.prepared,
        result.integer,
        copy.deepcopy(result.integer),
    ):
        y, ones = actual(image), torch.ones(1, 8)
        assert torch.equal(actual.head.decode(y), y * 16 + model.head.anchors.sum())
        assert actual.head.key(5) == 5
        caplog.clear()
        loaded = fxq.load(fxq.save(actual, tmp_path / "model.fxq"))
        (warned,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert warned == "not in the file, which holds no code: head.decode, head.key; set these on the loaded model"
        for one in (actual, loaded):
            assert (one.names, one.head.strides, one.head.levels, one.head.kind) == (["a", "b"], [8, 16], 2, "linear")
            assert torch.equal(one.head.anchors, model.head.anchors)
            assert torch.equal(one.other(ones), model.other(ones))
            assert torch.equal(one(image), y)
        assert not hasattr(loaded.head, "decode")


@pytest.mark.parametrize(
    ("name", "because"), [("naems", "did you mean 'names'"), ("head.stride", "'head.strides'"), ("hed.x", "no attribute `hed`")]
)
def test_a_name_that_there_is_not_is_an_error(name: str, because: str, image: Tensor) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=because):
        fxq.prepare(preserving(), image, options=fxq.Options(preserve=[name]))


# ---- branches that only train ----------------------------------------------------------------------------------------
class WithBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        parts = {"conv": nn.Conv2d(8, 6, 1), "norm": nn.BatchNorm2d(6), "drop": nn.Dropout(0.5)}
        self.aux = written(lambda m, x: m.drop(m.norm(m.conv(x)).relu()).mean((2, 3)), **parts)
        self.register_buffer("prior", torch.rand(6))

    def forward(self, x: Tensor) -> object:
        features = F.dropout(F.relu(self.norm(self.conv(x))), 0.1, self.training)
        y = self.head(features.mean((2, 3)))
        return {"main": y, "aux": self.aux(features) + self.prior} if self.training else y.softmax(1)


def test_a_training_branch_trains_and_is_gone_from_the_integer_model(image: Tensor, tmp_path) -> None:
    model = WithBranch().eval()
    prepared = fxq.calibrate(fxq.prepare(model, image, "nash-e", options=fxq.Options(training_branch=True)), [image])
    without = fxq.calibrate(fxq.prepare(model, image, "nash-e"), [image])
    assert torch.equal(prepared(image), without(image))
    fxq.set_state(prepared, "train")
    assert isinstance(prepared(image), Tensor)
    twin = copy.deepcopy(prepared)
    for one in (prepared, twin):
        one.train()
        result = one(image)
        assert {name: tuple(value.shape) for name, value in result.items()} == {"main": (5, 4), "aux": (5, 6)}
        result["aux"].sum().backward()
        assert one.aux.conv.weight.grad.abs().sum() > 0
        assert one.conv.weight.grad.abs().sum() > 0
        assert one.aux.norm.num_batches_tracked == 1
    assert set(model.state_dict()) <= set(prepared.state_dict())
    before = twin.conv.weight.detach().clone()
    torch.optim.SGD(prepared.parameters(), 0.1).step()
    assert torch.equal(twin.conv.weight, before)
    assert not torch.equal(prepared.conv.weight, before)
    to_validate(prepared)
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, [image])
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [image])
    assert not any("aux" in name or "training" in name for name in (*integer.state_dict(), *(node.name for node in integer.graph.nodes)))
    with pytest.raises(fxq.errors.ExportError, match="training branch"):
        fxq.save(prepared, tmp_path / "model.fxq")


class Stochastic(WithBranch):
    def forward(self, x: Tensor) -> object:
        features = self.conv(x)
        return self.head((features * 2 if self.training else features).mean((2, 3)))


class Same(WithBranch):
    def forward(self, x: Tensor) -> object:
        return self.head(self.conv(x).mean((2, 3)))


def test_a_branch_that_changes_the_rest_is_refused_and_one_that_is_none_is_nothing(image: Tensor) -> None:
    with pytest.raises(fxq.errors.TraceError, match="same layers in another way in train mode"):
        fxq.prepare(Stochastic(), image, options=fxq.Options(training_branch=True))
    prepared = fxq.prepare(Same(), image, options=fxq.Options(training_branch=True))
    assert isinstance(prepared.train()(image), Tensor)


def test_a_prepared_model_with_a_branch_is_kept_as_its_error_says(tmp_path: Path) -> None:
    model, batch = WithBranch().eval(), torch.randn(4, 3, 5, 5)
    prepared, again = (fxq.prepare(model, batch, options=fxq.Options(training_branch=True)) for _ in range(2))
    fxq.calibrate(prepared, [batch])
    with pytest.raises(fxq.errors.ExportError, match=r"keep prepared\.state_dict\(\)"):
        fxq.save(prepared, tmp_path / "prepared.fxq")
    torch.save(prepared.state_dict(), tmp_path / "prepared.pt")
    again.load_state_dict(torch.load(tmp_path / "prepared.pt"))
    fxq.set_state(again, "validate")
    assert fxq.verify(prepared, again, [batch])
    fxq.save(fxq.convert(prepared), tmp_path / "integer.fxq")


@fxq.wrap
def writes_into_a_dict(by_name: dict[str, Any], x: Tensor) -> dict[str, Any]:
    by_name["twice"] = x * 2
    by_name.setdefault("calls", []).append(1)
    return by_name


@fxq.wrap
def writes_into_a_list(rows: list[Any], x: Tensor) -> list[Any]:
    rows.append(x + 1)
    rows[0] = rows[0] * 2
    return rows


@fxq.wrap
def writes_into_a_nest(by_name: dict[str, Any]) -> Tensor:
    by_name["a"][0] = by_name["a"][0] + 1
    by_name["a"].append(by_name["b"]["c"])
    by_name["b"].update(c=by_name["b"]["c"] * 2)
    return by_name["a"][0] + by_name["a"][-1] + by_name["b"]["c"]


class Writes(nn.Module):
    """A module that writes into the dict that it is called with."""

    def forward(self, by_name: dict[str, Any]) -> Any:
        by_name["x"] = by_name["x"] + 1
        return by_name["x"]


WRITING: dict[str, Callable[[Tensor], Any]] = {
    "a dict": lambda y: (lambda result: result["x"] + result["twice"])(writes_into_a_dict({"x": y}, y)),
    "a dict by keyword": lambda y: writes_into_a_dict(by_name={"x": y}, x=y)["twice"],
    "a list": lambda y: (lambda result: result[0] + result[1])(writes_into_a_list([y], y)),
    "a list of numbers": lambda y: writes_into_a_list([1.0, 2.0], y)[2],
    "a nest": lambda y: writes_into_a_nest({"a": [y], "b": {"c": y}}),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [*WRITING, "a module"])
def test_what_is_kept_as_python_may_write_into_what_it_is_given(name: str) -> None:
    @members(lambda: dict(linear=nn.Linear(4, 4), writes=Writes()))
    def Net(self, x: Tensor) -> Any:
        y = self.linear(x)
        return self.writes({"x": y}) if name == "a module" else WRITING[name](y)

    batch = torch.randn(4, 4)
    prepared = fxq.calibrate(fxq.prepare(Net().eval(), batch, options=fxq.Options(leaf=Writes)), [batch])
    expected = prepared(batch)
    for kernels in ("auto", "reference"):
        integer = fxq.convert(prepared, kernels=kernels)
        assert all(torch.equal(integer(batch), expected) for _ in range(3))  # the first call sees sizes, later ones run kernels
        assert fxq.verify(prepared, integer, [batch])


class Detector(nn.Module):
    """Written as users write them: attributes and methods of many kinds beside the layers."""

    threshold = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.class_names, self.num_classes, self.anchors, self.lock = ["cat", "dog"], 2, torch.tensor([1.0, 2.0]), threading.Lock()
        self.by_name, self.helpers, self.quantized = {"graph": lambda x: x}, [nn.Linear(8, 8)], False
        self.meta_info, self.graph_kind, self.layer, self.head = "info", "none", nn.Linear(8, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.head(F.relu(self.layer(x)))

    def predict(self, x):
        return [self.class_names[index] for index in self(x).argmax(1)]

    def postprocess(self, y, *, scale=1.0):
        return self._scaled(y, scale) + self.anchors

    def _scaled(self, y, scale):
        return y * scale * self.size

    @property
    def size(self):
        return self.head.weight.shape[0]

    @property
    def broken(self):
        return self.not_there

    @classmethod
    def build(cls):
        return cls()

    @staticmethod
    def twice(x):
        return 2 * x

    def convert(self):
        return "mine"

    def recompile(self):
        return "mine"

    @property
    def code(self):
        return "mine"


X = torch.randn(6, 8)


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    return fxq.quantize(Detector().eval(), [X])


@pytest.mark.parametrize("stage", ["prepared", "integer"])
@pytest.mark.parametrize("built", [lambda model: model, copy.deepcopy, lambda model: copy.deepcopy(copy.copy(model))])
def test_attributes_and_methods_are_there(result, stage, built):
    model = built(getattr(result, stage))
    assert model.class_names == ["cat", "dog"]
    assert (model.num_classes, model.threshold, model.twice(3), model.convert()) == (2, 0.5, 6, "mine")
    assert isinstance(model.build(), Detector)
    assert model.lock is result.float.lock
    assert model.predict(X) == [model.class_names[index] for index in model(X).argmax(1)]
    if stage == "prepared":
        y = model(X)
        assert torch.equal(model.postprocess(y, scale=3.0), y * 3.0 * 2 + model.anchors)


def test_nothing_of_the_graph_is_hidden_and_what_is_missing_is_said_as_python_says_it(result):
    assert isinstance(result.prepared.graph, torch.fx.Graph)
    assert result.prepared.code != "mine"
    assert result.prepared.recompile() != "mine"
    assert "quantized" in dict(result.prepared.named_children())
    assert torch.equal(result.prepared(X), result.integer(X))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = result.integer.nothing
    with pytest.raises(AttributeError, match="not_there"):
        _ = result.integer.broken
    assert not hasattr(result.integer, "helpers")  # modules belong to forward


def test_the_models_are_the_callers_own(result):
    result.prepared.class_names.append("bird")
    assert result.float.class_names == ["cat", "dog"]
    assert result.integer.class_names[:2] == ["cat", "dog"]
    result.prepared.class_names.pop()


def test_files_and_pickles_hold_what_they_can(result, tmp_path):
    loaded = fxq.load(fxq.save(result.prepared, tmp_path / "model.fxq"))
    assert fxq.verify(loaded, result.integer, [X])
    assert not hasattr(loaded, "class_names")
    again = pickle.loads(pickle.dumps(result.integer))
    assert again.class_names == ["cat", "dog"]
    assert again.predict(X) == result.integer.predict(X)
    assert not hasattr(again, "lock")


def test_methods_of_containers_of_pytorch_are_not_carried():
    prepared = fxq.prepare(nn.Sequential(nn.Linear(8, 8)), X)
    assert not hasattr(prepared, "append")


# ---- dropout that acts at inference ------------------------------------------------------------------------------------
@members(lambda drop: dict(layer=nn.Linear(8, 16), head=nn.Linear(16, 4), drop=drop))
def Monte(self, x):
    return self.head(self.drop(F.relu(self.layer(x))))


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: F.dropout(x),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.alpha_dropout(x, 0.5, True),
    ],
)
def test_dropout_that_acts_in_eval_mode_stays_random(drop):
    result = fxq.quantize(Monte(drop).eval(), [X])
    assert "it drops at random in eval mode as well (training=True), so no two runs are equal" in fxq.explain(result.integer)
    for model in (result.float, result.prepared, result.integer):
        assert not torch.equal(model(X), model(X))
    torch.manual_seed(0)
    one = result.prepared(X)
    torch.manual_seed(0)
    assert torch.equal(result.integer(X), one)


@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.0, training=True), lambda x: F.dropout(x, 0.5, training=False)])
def test_dropout_that_does_nothing_in_eval_mode_is_an_operator(drop):
    result = fxq.quantize(Monte(drop).eval(), [X])
    assert fxq.verify(result.prepared, result.integer, [X])
    assert "none is left in float" in fxq.explain(result.integer)


def test_a_dropout_that_alone_is_in_train_mode_is_told_of():
    model = Monte(nn.Dropout(0.5)).eval()
    model.drop.train()
    note = "drop is in train mode, and the model is not: it was traced in eval mode"
    assert note in fxq.explain(fxq.prepare(model, X))
    assert model.drop.training
    assert note not in fxq.explain(fxq.prepare(model.train(), X))

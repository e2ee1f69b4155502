"""What a float model holds besides its computation is there on the models made from it."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq


class Detector(nn.Module):
    """Written as users write them: attributes and methods of many kinds beside the layers."""

    threshold = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.class_names = ["cat", "dog"]
        self.num_classes = 2
        self.anchors = torch.tensor([1.0, 2.0])
        self.lock = threading.Lock()
        self.by_name = {"graph": lambda x: x}
        self.helpers = [nn.Linear(8, 8)]
        self.quantized = False
        self.meta_info, self.graph_kind = "info", "none"
        self.layer, self.head = nn.Linear(8, 4), nn.Linear(4, 2)
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
    return fxq.quantize(Detector().eval(), [X], show_progress=False)


@pytest.mark.parametrize("stage", ["prepared", "integer"])
@pytest.mark.parametrize("made", [lambda model: model, copy.deepcopy, lambda model: copy.deepcopy(copy.copy(model))])
def test_attributes_and_methods_are_there(result, stage, made):
    model = made(getattr(result, stage))
    assert model.class_names == ["cat", "dog"]
    assert (model.num_classes, model.threshold, model.twice(3), model.convert()) == (2, 0.5, 6, "mine")
    assert isinstance(model.build(), Detector)
    assert model.lock is result.float.lock
    assert model.predict(X) == [model.class_names[index] for index in model(X).argmax(1)]
    if stage == "prepared":
        y = model(X)
        assert torch.equal(model.postprocess(y, scale=3.0), y * 3.0 * 2 + model.anchors)


def test_nothing_of_the_graph_is_hidden(result):
    assert isinstance(result.prepared.graph, torch.fx.Graph)
    assert result.prepared.code != "mine"
    assert result.prepared.recompile() != "mine"
    assert "quantized" in dict(result.prepared.named_children())
    assert torch.equal(result.prepared(X), result.integer(X))


def test_what_is_missing_is_said_as_python_says_it(result):
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


class Monte(nn.Module):
    def __init__(self, drop) -> None:
        super().__init__()
        self.layer, self.head, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), drop

    def forward(self, x):
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
    result = fxq.quantize(Monte(drop).eval(), [X], show_progress=False)
    assert "it drops at random in eval mode as well (training=True), so no two runs are equal" in fxq.explain(result.integer)
    for model in (result.float, result.prepared, result.integer):
        assert not torch.equal(model(X), model(X))
    torch.manual_seed(0)
    one = result.prepared(X)
    torch.manual_seed(0)
    assert torch.equal(result.integer(X), one)


@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.0, training=True), lambda x: F.dropout(x, 0.5, training=False)])
def test_dropout_that_does_nothing_in_eval_mode_is_an_operator(drop):
    result = fxq.quantize(Monte(drop).eval(), [X], show_progress=False)
    assert fxq.verify(result.prepared, result.integer, [X])
    assert "none is left in float" in fxq.explain(result.integer)


def test_a_dropout_that_alone_is_in_train_mode_is_told_of():
    model = Monte(nn.Dropout(0.5)).eval()
    model.drop.train()
    note = "drop is in train mode, and the model is not: it was traced in eval mode"
    assert note in fxq.explain(fxq.prepare(model, X))
    assert model.drop.training
    assert note not in fxq.explain(fxq.prepare(model.train(), X))

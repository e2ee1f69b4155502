"""A parameter that trains in the float model, and not in a prepared one, is a warning with its line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Edited(nn.Linear):
    """A linear layer whose forward edits its weight before it computes."""

    def __init__(self, edit: Callable[[nn.Linear], Any]) -> None:
        super().__init__(6, 4)
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        self.edit(self)
        return super().forward(x)


def copied(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.renorm(layer.weight, 2, 0, 0.25))


def clamped(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)


def decayed(layer: nn.Linear) -> None:
    if layer.training:
        with torch.no_grad():
            layer.weight.mul_(0.5)


class Cached(nn.Module):
    """Keeps in eval mode what it gathers from a parameter, as LeViT and EfficientFormer do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.bias = kind, nn.Linear(6, 4), nn.Parameter(torch.randn(5))
        self.register_buffer("index", torch.tensor([0, 3, 1, 4]))

    @torch.no_grad()
    def train(self, mode: bool = True) -> Cached:
        super().train(mode)
        gathered: Any = self.bias[self.index]  # type: ignore[index]
        if self.kind == "buffer":
            self.register_buffer("kept", gathered, persistent=False)
        else:
            self.kept = {"cpu": gathered} if self.kind == "dict" else gathered
        return self

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = self.kept["cpu"] if self.kind == "dict" else self.kept  # type: ignore[index]
        return self.layer(x) + (self.bias[self.index] if self.training else kept)  # type: ignore[index, no-any-return]


class Merged(nn.Linear):
    """A low rank that is merged into the weight in eval mode, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(4, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + F.linear(F.linear(x, self.down), self.up)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.auxiliary = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return (y, self.auxiliary(y)) if self.training else y


LOST = "parameters that train in the float model and have no gradient here"
MOVED = "forward moves tensors in train mode that training here does not move"


def warnings(model: nn.Module, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = fxq.calibrate(fxq.prepare(model.eval(), X, options=fxq.Options(**settings)), [X], show_progress=False)
    fxq.set_state(prepared, "train")
    result = prepared.train()(X)
    sum(each.square().mean() for each in (result if isinstance(result, tuple) else (result,))).backward()
    without = [name for name, parameter in prepared.named_parameters() if parameter.grad is None]
    told = [line.split()[0] for line in caplog.text.partition(LOST)[2].splitlines()[1:] if line.startswith("  ")]
    assert sorted(without) == sorted(told)  # the warning is true
    return caplog.text


@pytest.mark.parametrize("kind", ["attribute", "buffer", "dict"])
def test_a_parameter_whose_gathered_values_are_kept_in_eval_mode(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    text = warnings(Cached(kind), caplog)
    assert f"{LOST}: 1; compute with the parameter itself in eval mode too" in text
    assert "bias (test_lost_training.py:" in text
    assert "self.bias[self.index] if self.training else kept" in text


def test_parameters_that_are_merged_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = Merged().eval()
    before = model.weight.detach().clone()
    text = warnings(model, caplog)
    assert torch.equal(model.weight, before)
    assert f"{LOST}: 2" in text
    assert "up (test_lost_training.py:" in text
    assert "F.linear(F.linear(x, self.down), self.up)" in text


@pytest.mark.parametrize("edit", [copied, clamped])
def test_a_parameter_that_forward_edits(edit: Callable[[nn.Linear], Any], caplog: pytest.LogCaptureFixture) -> None:
    text = warnings(Edited(edit), caplog)
    assert f"{LOST}: 1" in text
    assert f"{MOVED}: 1; move them in your training loop" in text
    assert text.count("weight (test_lost_training.py:") == 2


@pytest.mark.parametrize("edit", [lambda layer: layer.weight.data.clamp_(-0.1, 0.1), decayed])
def test_a_parameter_that_forward_moves_trains_and_is_told(edit: Callable[[nn.Linear], Any], caplog: pytest.LogCaptureFixture) -> None:
    text = warnings(Edited(edit), caplog)
    assert f"{MOVED}: 1" in text
    assert "weight (test_lost_training.py:" in text
    assert "layer.weight" in text


def test_a_head_of_train_mode_trains_with_a_training_branch(caplog: pytest.LogCaptureFixture) -> None:
    assert f"{LOST}: 2" in warnings(Head(), caplog)
    caplog.clear()
    assert LOST not in warnings(Head(), caplog, training_branch=True)


def test_what_does_not_train_in_the_float_model_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    with caplog.at_level(logging.WARNING, "fxquant"), torch.no_grad():
        fxq.prepare(model.eval(), X)
    assert not caplog.text

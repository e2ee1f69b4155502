"""State that forward moves between calls: each buffer that training does not move is named when the model is prepared."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

import fxquant as fxq
from tests.shared.written import to_train


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Counter(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x)


class Average(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


class Recurrent(Layer):
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Any:
        self.hidden = torch.tanh(self.linear(x[:1]) + self.hidden)
        return x + self.hidden


class Cache(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.cache[1].copy_(x.mean(0))
        return self.linear(x) + self.cache.mean(0)


class Hidden(Layer):
    """Its state is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x) + self.state
        self.state = y.detach().mean(0)
        return y


class Replaced(Layer):
    """A buffer that is assigned by another function than forward, through `data`, which no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean.data.mul_(0.5)
        return self.linear(x) * self.mean


def instance_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2, affine=True, track_running_stats=True))


MOVING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "a counter": (Counter, (4, 4), {"calls"}),
    "a moving average": (Average, (4, 4), {"mean"}),
    "a recurrent state": (Recurrent, (4, 4), {"hidden"}),
    "a cache, written through a view": (Cache, (4, 4), {"cache"}),
    "a plain attribute": (Hidden, (4, 4), {"state"}),
    "a change of its data": (Replaced, (4, 4), {"mean"}),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.ReLU()), (4, 4), {"0.weight_u", "0.weight_v"}),
    "parametrized spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
        (4, 4),
        {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"},
    ),
    "instance norm": (instance_norm, (2, 1, 4, 4), {"1.running_mean", "1.running_var"}),
}


@pytest.mark.parametrize("name", MOVING)
def test_what_forward_moves_is_named_when_the_model_is_prepared(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, shape, expected = MOVING[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = fxq.prepare(model, torch.randn(shape))
    said = next(record.getMessage() for record in caplog.records if "forward moves" in record.getMessage())
    assert {line.split(" (")[0].strip() for line in said.splitlines()[1:]} == expected
    assert all(f"model's Python: {each} is " in fxq.explain(prepared) for each in expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())  # the caller's own did not move
    if type(model).__module__ == __name__:
        assert "test_moved_state.py" in said or name in ("a plain attribute", "a change of its data")


class Constants(Layer):
    """Buffers that nothing moves, a tensor that is computed anew at each call, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4))
        self.norm, self.seen = nn.BatchNorm1d(4), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        self.seen = x.mean()
        return self.norm(self.linear(x * self.scale))


@pytest.mark.parametrize("leaf", [None, Average])
def test_nothing_is_said_of_what_stands_still_or_moves(leaf: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Constants() if leaf is None else nn.Sequential(nn.Linear(4, 4), Average())
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = fxq.prepare(model, torch.randn(4, 4), options=fxq.Options(leaf=leaf))
    assert "forward moves" not in caplog.text
    if leaf is not None:  # kept whole, it moves as in the float model
        prepared.train()
        prepared(torch.ones(2, 4))
        assert bool(prepared.get_submodule("1").mean.any())


def test_a_model_that_wants_labels_in_train_mode_is_told_of() -> None:
    class Wants(Average):
        def forward(self, x: Tensor, labels: Any = None) -> Any:
            if self.training:
                return F.cross_entropy(super().forward(x), labels)
            return super().forward(x)

    prepared = fxq.prepare(Wants(), torch.randn(4, 4))
    assert (
        "whether forward moves buffers or draws random numbers in train mode is not known: called on the example inputs it raises"
        in fxq.explain(prepared)
    )


class FrozenNorm(nn.Module):
    """As detectors write it: a function of batch norm that never trains."""

    def __init__(self, training: bool | None) -> None:
        super().__init__()
        self.conv, self.norm, self.wanted = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), training

    def forward(self, x: Tensor) -> Tensor:
        bn = self.norm
        training = self.training if self.wanted is None else self.wanted
        return F.batch_norm(self.conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, training, 0.1, bn.eps)


@pytest.mark.parametrize("training", [False, None])
def test_a_function_of_batch_norm_that_never_trains_stands_still(training: bool | None) -> None:
    x = torch.randn(4, 1, 4, 4)
    prepared = to_train(fxq.calibrate(fxq.prepare(FrozenNorm(training), x), [x], show_progress=False))
    prepared(x + 1)
    assert bool(prepared.get_buffer("norm.running_mean").any()) == (training is None)

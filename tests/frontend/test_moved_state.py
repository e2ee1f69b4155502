"""State that forward moves between calls: each buffer that training does not move is named when training begins."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

import fxquant as fxq
from tests.shared.networks import to_train, written


def counter(m: Any, x: Tensor) -> Any:
    m.calls += 1
    return m.linear(x)


def average(m: Any, x: Tensor) -> Any:
    if m.training:
        with torch.no_grad():
            m.mean.lerp_(x.mean(0), 0.1)
    return m.linear(x - m.mean)


def recurrent(m: Any, x: Tensor) -> Any:
    m.hidden = torch.tanh(m.linear(x[:1]) + m.hidden)
    return x + m.hidden


def cached(m: Any, x: Tensor) -> Any:
    if m.training:
        m.cache[1].copy_(x.mean(0))
    return m.linear(x) + m.cache.mean(0)


def hidden(m: Any, x: Tensor) -> Any:
    y = m.linear(x) + m.state
    m.state = y.detach().mean(0)
    return y


def replaced(m: Any, x: Tensor) -> Any:
    """Through `data`, which no version counts."""
    if m.training:
        m.mean.data.mul_(0.5)
    return m.linear(x) * m.mean


def layer(forward: Callable[..., Any], **buffers: Tensor) -> nn.Module:
    return written(forward, linear=nn.Linear(4, 4), **buffers)


def with_attribute() -> nn.Module:
    """Return a model whose state is a plain attribute."""
    model = layer(hidden)
    model.state = torch.zeros(4)
    return model


MOVING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "a counter": (lambda: layer(counter, calls=torch.zeros(())), (4, 4), {"calls"}),
    "a moving average": (lambda: layer(average, mean=torch.zeros(4)), (4, 4), {"mean"}),
    "a recurrent state": (lambda: layer(recurrent, hidden=torch.zeros(1, 4)), (4, 4), {"hidden"}),
    "a cache, written through a view": (lambda: layer(cached, cache=torch.zeros(3, 4)), (4, 4), {"cache"}),
    "a plain attribute": (with_attribute, (4, 4), {"state"}),
    "a change of its data": (lambda: layer(replaced, mean=torch.ones(4)), (4, 4), {"mean"}),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.ReLU()), (4, 4), {"0.weight_u", "0.weight_v"}),
    "parametrized spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
        (4, 4),
        {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"},
    ),
}


@pytest.mark.parametrize("name", MOVING)
def test_what_forward_moves_is_named_when_training_begins(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, shape, expected = MOVING[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    prepared = fxq.prepare(model, torch.randn(shape))
    assert "forward moves" not in caplog.text, "many quantize and never train"
    fxq.set_state(prepared, "train")
    fxq.set_state(prepared, "train")
    (said,) = (record.getMessage() for record in caplog.records if "forward moves" in record.getMessage())
    assert {line.split(" (")[0].strip() for line in said.splitlines()[1:]} == expected
    assert all(f"model's Python: {each} is " in fxq.explain(prepared) for each in expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())  # the caller's own did not move
    if type(model).__module__ == __name__:
        assert "test_moved_state.py" in said or name in ("a plain attribute", "a change of its data")


def test_nothing_is_said_of_what_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    """Buffers that nothing moves, a tensor that is computed anew at each call, and a batch norm."""

    def forward(m: Any, x: Tensor) -> Any:
        m.seen = x.mean()
        return m.norm(m.linear(x * m.scale))

    class Counting(nn.BatchNorm1d):  # as timm's
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum).relu()

    model = written(forward, linear=nn.Linear(4, 4), norm=nn.Sequential(nn.BatchNorm1d(4), Counting(4)), scale=torch.rand(4))
    model.seen = torch.zeros(())
    fxq.set_state(fxq.prepare(model, torch.randn(4, 4)), "train")
    assert "forward moves" not in caplog.text


def test_what_a_leaf_moves_it_moves_as_in_the_float_model(caplog: pytest.LogCaptureFixture) -> None:
    leaf = layer(average, mean=torch.zeros(4))
    prepared = fxq.prepare(nn.Sequential(nn.Linear(4, 4), leaf), torch.randn(4, 4), options=fxq.Options(leaf=type(leaf)))
    fxq.set_state(prepared, "train")
    assert "forward moves" not in caplog.text
    prepared.train()
    prepared(torch.ones(2, 4))
    assert bool(prepared.get_submodule("1").mean.any())


def test_a_model_that_wants_labels_in_train_mode_is_told_of() -> None:
    def forward(m: Any, x: Tensor, labels: Any = None) -> Any:
        return F.cross_entropy(average(m, x), labels) if m.training else average(m, x)

    prepared = fxq.prepare(layer(forward, mean=torch.zeros(4)), torch.randn(4, 4))
    told = "whether forward moves buffers or draws random numbers in train mode is not known: called on the example inputs it raises"
    assert told in fxq.explain(prepared)


def frozen_norm(wanted: bool | None) -> nn.Module:
    """As detectors write it: a function of batch norm that never trains."""

    def forward(m: Any, x: Tensor) -> Tensor:
        bn, training = m.norm, m.training if wanted is None else wanted
        return F.batch_norm(m.conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, training, 0.1, bn.eps)

    return written(forward, conv=nn.Conv2d(1, 2, 1), norm=nn.BatchNorm2d(2))


@pytest.mark.parametrize("training", [False, None])
def test_a_function_of_batch_norm_that_never_trains_stands_still(training: bool | None) -> None:
    x = torch.randn(4, 1, 4, 4)
    prepared = to_train(fxq.calibrate(fxq.prepare(frozen_norm(training), x), [x]))
    prepared(x + 1)
    assert bool(prepared.get_buffer("norm.running_mean").any()) == (training is None)

"""Random operators of train mode are random in state TRAIN alone; one that cannot be is a warning with its line."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.networks import members, to_train

pytestmark = pytest.mark.nightly

Form = Callable[[nn.Module, Tensor], Any]
X = torch.randn(32, 6, 8, generator=torch.Generator().manual_seed(0))


def stochastic(x: Tensor, p: float) -> Tensor:
    return x * x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - p).div_(1 - p)


@members(lambda p: dict(p=p))
def StochasticDepth(self, x: Tensor) -> Tensor:
    """Drops samples, as in timm and torchvision."""
    return stochastic(x, self.p) if self.training and self.p > 0 else x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class DropBlock(nn.Module):
    """Drops neighbours together."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (1 - F.max_pool1d((torch.rand_like(x) < 0.2).float(), 3, 1, 1))


class DropTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.randperm(x.shape[1])[:3]] if self.training else x


@members(lambda form, *parts: dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), form=form, parts=nn.ModuleList(parts), p=0.4), seed=1)
def Net(self, x: Tensor) -> Any:
    return self.form(self, x)


def attention(net: nn.Module, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(net.a(x), net.b(x), x, dropout_p=net.p if net.training else 0.0)


def inline(net: nn.Module, x: Tensor) -> Tensor:
    y = net.a(x)
    if net.training:
        y = y * torch.rand_like(y)  # multiplied
    return net.b(y)


RANDOM: dict[str, nn.Module] = {
    "dropout": Net(lambda net, x: net.b(net.parts[0](net.a(x))), nn.Dropout(0.5)),
    "dropout, a function": Net(lambda net, x: net.b(F.dropout(net.a(x), net.p, net.training))),
    "stochastic depth": Net(lambda net, x: x + net.parts[0](net.a(x)), StochasticDepth(0.5)),
    "stochastic depth before a relu": Net(lambda net, x: net.b(F.relu(x + net.parts[0](net.a(x)))), StochasticDepth(0.5)),
    "one stochastic depth, called twice": Net(
        lambda net, x: (lambda y: y + net.parts[0](net.b(y)))(x + net.parts[0](net.a(x))), StochasticDepth(0.5)
    ),
    "stochastic depth of a table": Net(lambda net, x: x + net.parts[0](torch.sigmoid(net.a(x))), StochasticDepth(0.5)),
    "noise": Net(lambda net, x: net.b(net.parts[0](net.a(x))), Noise()),
    "noise before a sum": Net(lambda net, x: x + net.parts[0](net.a(x)), Noise()),
    "dropped neighbours": Net(lambda net, x: net.b(net.parts[0](net.a(x))), DropBlock()),
    "rrelu": Net(lambda net, x: net.b(net.parts[0](net.a(x))), nn.RReLU()),
    "attention layer": Net(lambda net, x: net.parts[0](x, x, x)[0], nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)),
    "attention function": Net(attention),
    "recurrent layer": Net(lambda net, x: net.parts[0](x)[0], nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)),
    "encoder layer": Net(lambda net, x: net.parts[0](x), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)),
}
LOST: dict[str, tuple[nn.Module, str]] = {
    "tokens": (Net(lambda net, x: net.b(net.parts[0](net.a(x))).mean(1), DropTokens()), "torch.randperm"),
    "in a forward with layers": (Net(inline), "# multiplied"),
    "rrelu, a function": (Net(lambda net, x: net.b(F.rrelu(net.a(x), training=net.training))), "F.rrelu"),
    "Python's numbers": (Net(lambda net, x: net.a(x) * random.random() if net.training else net.a(x)), "Python's random or numpy.random"),
}


def training(model: nn.Module, **settings: Any) -> torch.fx.GraphModule:
    """The prepared model in TRAIN, with scales that do not move."""
    prepared = fxq.calibrate(fxq.prepare(copy.deepcopy(model).eval(), X, **settings), [X])
    fxq.freeze(prepared)
    return to_train(prepared)


def spread(model: nn.Module) -> Tensor:
    """The standard deviation of each element over calls."""
    torch.manual_seed(2)
    return torch.stack([model(X).detach() for _ in range(40)]).std(0)


@pytest.mark.parametrize("target", ["bayes-e", "nash-e"])
@pytest.mark.parametrize("name", RANDOM)
def test_what_is_random_in_train_mode_is_random_in_train_alone(name: str, target: str, caplog: pytest.LogCaptureFixture) -> None:
    model = RANDOM[name]
    prepared = training(model, target=target)
    assert "random" not in caplog.text
    expected = spread(copy.deepcopy(model).train()).mean()
    assert 0.8 < spread(prepared).mean() / expected < 1.25
    assert not spread(prepared.eval()).any()
    fxq.set_state(prepared, "validate")
    assert not spread(prepared.train()).any()
    for part in prepared.children():
        part.eval()  # and what is in eval mode itself
    fxq.set_state(prepared, "train")
    integer = fxq.convert(prepared.eval())
    assert fxq.verify(prepared, integer, [X])


def test_samples_are_dropped_whole_and_have_no_gradient() -> None:
    model = Net(lambda net, x: x + net.parts[0](net.a(x)), StochasticDepth(0.5))
    prepared, x = training(model), X.clone().requires_grad_()
    y = prepared(x)
    y.sum().backward()
    assert x.grad is not None
    dropped = ((x.grad - 1).abs() < 1e-4).flatten(1).all(1)  # the gradient of the sum itself
    assert 4 < dropped.sum() < 28
    fxq.set_state(prepared, "validate")
    scale = (prepared(X) - X).abs().max()
    assert (y - X)[dropped].abs().max() < 0.1 * scale < (y - X)[~dropped].abs().max()


@pytest.mark.parametrize("part", [nn.Dropout(0.1), StochasticDepth(0.1)], ids=["dropout", "stochastic depth"])
def test_a_schedule_changes_the_probability(part: nn.Module) -> None:
    model = Net(lambda net, x: x + net.parts[0](net.a(x)), part)
    prepared = training(model)
    before = spread(prepared).mean()
    for each in (model, prepared):
        next(module for name, module in each.named_modules() if name == "parts.0").p = 0.5  # type: ignore[assignment]
    assert 0.9 < spread(prepared).mean() / spread(model.train()).mean() < 1.1
    assert spread(prepared).mean() > 1.3 * before
    prepared.get_submodule("parts.0").eval()
    assert not spread(prepared).any()


@pytest.mark.parametrize("name", LOST)
def test_what_is_not_random_in_train_is_a_warning_with_its_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, line = LOST[name]
    state = random.getstate()
    prepared = training(model)
    assert random.getstate() == state
    assert caplog.text.count("forward is random in train mode where training here is not: 1; draw in a module of its own") == 1
    assert line in caplog.text
    assert not spread(prepared).any()


@pytest.mark.parametrize("name", ["dropout", "attention layer", "encoder layer"])
def test_a_dropout_in_float_is_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(RANDOM[name])
    model.parts[0].qconfig = None  # type: ignore[assignment]
    training(model)
    assert "(module parts.0" in caplog.text
    assert len(set(lines := [line for line in caplog.text.splitlines() if "(module parts.0" in line])) == len(lines)


def test_a_file_says_that_it_goes_without_noise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = training(RANDOM["stochastic depth"])
    loaded = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    assert "the loaded model trains without the noise of StochasticDepth (%a)" in caplog.text
    assert not spread(loaded.train()).any()
    assert torch.equal(loaded.eval()(X), prepared.eval()(X))
    assert not torch.equal(copy.deepcopy(prepared).train()(X), prepared.train()(X))

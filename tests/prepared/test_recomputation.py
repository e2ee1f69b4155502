"""Activation checkpointing around a prepared model, and torch.func's transforms of one: equal gradients, or an error of ours."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fxquant as fxq
from tests.shared.networks import to_train

LEARNED = fxq.QConfig(fxq.ActivationConfig(training="learned"), fxq.WeightConfig(training="learned"))
BATCHES = [
    x * scale for x, scale in zip(torch.randn(4, 4, 3, 6, 6, generator=torch.Generator().manual_seed(0)), (0.5, 1.0, 2.0, 1.5), strict=True)
]
SETTINGS: dict[str, tuple[str, str, Any]] = {
    "shifts": ("bayes-e", "live", None),
    "float multipliers": ("x86", "live", None),
    "frozen batch norm": ("nash-e", "frozen", None),
    "learned scales": ("nash-e", "live", LEARNED),
}


def prepared(setting: str) -> fx.GraphModule:
    torch.manual_seed(0)
    target, mode, qconfig = SETTINGS[setting]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.25), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.SiLU()
    )
    x = BATCHES[0]
    again = fxq.calibrate(fxq.prepare(model, x, target, qconfig, options=fxq.Options(batch_norm=mode)), [x])
    return to_train(again)


def again(model: Any, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


def step(model: nn.Module, call: Callable[..., Any]) -> dict[str, Tensor | None]:
    """The gradients of one step of three micro-batches, whose passes are all taken before the first is computed again."""
    torch.manual_seed(0)
    losses = [call(model, x.clone().requires_grad_()).square().mean() for x in BATCHES[1:]]
    for loss in reversed(losses):  # one by one, so that gradients are summed in one order in every way
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("call", [again, lambda model, x: checkpoint(model, x, use_reentrant=True)])
def test_gradients_and_statistics_are_those_without_checkpointing(setting: str, call: Callable[..., Any]) -> None:
    one = prepared(setting)
    other = copy.deepcopy(one)
    for _ in range(2):
        expected, actual = step(one, lambda model, x: model(x)), step(other, call)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)  # type: ignore[arg-type]
        for model in (one, other):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad  # type: ignore[operator]
            model.zero_grad()
    mine, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(mine[name].nan_to_num(), theirs[name].nan_to_num()) for name in mine)


def test_a_pass_that_repeats_none_is_refused_unless_nothing_moves() -> None:
    model = prepared("float multipliers")

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            model(3 * BATCHES[2])
            return gradient

    before = copy.deepcopy(model.state_dict())
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(fxq.errors.ConfigurationError, match="called inside of backward, on inputs that it was not called on before"):
        Inside.apply(x).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if not value.isnan().any())
    fxq.freeze(model)
    Inside.apply(x).sum().backward()


def transforms(model: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    parameters, buffers = {name: each.detach() for name, each in model.named_parameters()}, dict(model.named_buffers())

    def call(parameters: Any, x: Tensor) -> Any:
        return functional_call(model, (parameters, buffers), (x,))

    def loss(parameters: Any, x: Tensor) -> Any:
        return call(parameters, x).square().mean()

    return {
        "grad": lambda: grad(loss)(parameters, x),
        "jvp": lambda: jvp(lambda a: call(parameters, a), (x,), (x,)),
        "vmap": lambda: vmap(lambda a: call(parameters, a[None])[0], randomness="different")(x),
        "ensemble": lambda: vmap(call, (0, None))({k: torch.stack([v, v]) for k, v in parameters.items()}, x),
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize("setting", ["float multipliers", "learned scales"])
@pytest.mark.parametrize("name", ["grad", "jvp", "vmap", "ensemble"])
def test_a_transform_works_once_everything_is_frozen_or_is_refused(setting: str, name: str) -> None:
    model, x = prepared(setting), BATCHES[0]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fxq.errors.ConfigurationError, match=r"torch\.func cannot transform this pass[\s\S]*fxq\.freeze"):
        transforms(model, x)[name]()
    assert all(torch.equal(value.nan_to_num(), before[key].nan_to_num()) for key, value in model.state_dict().items())
    fxq.freeze(model)
    model.get_submodule("3").eval()
    model(x)
    if name != "ensemble":
        transforms(model, x)[name]()
        return
    with pytest.raises(fxq.errors.ConfigurationError, match="take vmap over inputs, not over parameters"):
        transforms(model, x)[name]()

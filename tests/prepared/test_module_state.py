"""The state of a prepared model decides what VALIDATE computes, and no call, copy, average or checkpoint makes another of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

import fxquant as fxq
from fxquant.quantization.learning import Remembered
from tests.shared.written import to_train, to_validate, written

TARGETS = {"uint8": "x86", "int8": "bayes-e", "int4": "nash-e"}
METHODS = [  # of activations, and of weights
    ("int8", "statistics", "learned"),
    ("int8", "frozen", "learned"),
    ("int8", "pact", "statistics"),
    ("uint8", "lsq+", "tqt"),
    ("uint8", "pact", "learned"),
    ("int4", "learned", "learned"),
    ("int4", "tqt", "tqt"),
]
BATCHES = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def net() -> Any:
    """A residual, a fused batch norm, a channel whose weights are 0, and a constant that is added."""
    model = written(
        lambda m, x: m.last(torch.relu(x + m.bn(m.conv(x))) + m.shift),
        conv=nn.Conv2d(3, 3, 3, padding=1),
        bn=nn.BatchNorm2d(3),
        last=nn.Conv2d(3, 2, 1),
        shift=nn.Parameter(torch.randn(3, 1, 1)),
    )
    with torch.no_grad():
        model.last.weight[1] = 0
    return model


@functools.cache
def _calibrated(dtype: str, activations: str, weights: str, rounded: bool) -> fx.GraphModule:
    model = _prepared(dtype, activations, weights)
    return fxq.calibrate(model, BATCHES, options=fxq.Options(round_weights=rounded, correct_bias=rounded), show_progress=False)


def _prepared(dtype: str, activations: str, weights: str) -> fx.GraphModule:
    torch.manual_seed(7)
    qconfig = fxq.QConfig(
        fxq.ActivationConfig(dtype, training=activations), fxq.WeightConfig("int4" if dtype == "int4" else "int8", training=weights)
    )
    return fxq.prepare(net(), BATCHES[0], TARGETS[dtype], qconfig)


def step(model: fx.GraphModule, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    (model(batch) - 1).square().mean().backward()
    optimizer.step()


def assert_one_meaning(model: fx.GraphModule, fresh: fx.GraphModule) -> None:
    """Two calls agree, the integer graph has their bits, and so has a model that has loaded the state."""
    state = copy.deepcopy(model.state_dict())
    integer = fxq.convert(model.eval())
    fxq.set_state(model, fxq.State.VALIDATE)
    with torch.no_grad():
        found = model(BATCHES[0])
        assert torch.equal(model(BATCHES[0]), found)
    assert fxq.verify(model, integer, BATCHES[:2])
    assert fxq.verify(model, fxq.convert(model), BATCHES[:1])
    for held in (state, model.state_dict()):
        loaded = copy.deepcopy(fresh)
        loaded.load_state_dict(held)
        to_validate(loaded)
        assert torch.equal(fxq.convert(loaded)(BATCHES[0]), integer(BATCHES[0]))
        with torch.no_grad():
            assert torch.equal(loaded(BATCHES[0]), found)


@torch.no_grad()
def _averaged_in_place(model: nn.Module, source: nn.Module) -> None:
    for own, other in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
        own.copy_(own * 0.75 + other * 0.25 if own.is_floating_point() else other)


@torch.no_grad()
def _averaged_by_loading(model: nn.Module, source: nn.Module) -> None:
    theirs = source.state_dict()
    model.load_state_dict({n: v * 0.75 + theirs[n] * 0.25 if v.is_floating_point() else v for n, v in model.state_dict().items()})


@torch.no_grad()
def _copied(model: nn.Module, source: nn.Module) -> None:
    for own, other in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
        own.copy_(other)


COPIES: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "averaged in place": _averaged_in_place,
    "averaged by loading": _averaged_by_loading,
    "copied": _copied,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("dtype", "activations", "weights"), METHODS, ids=["-".join(method) for method in METHODS])
def test_no_copy_changes_what_validate_computes(dtype: str, activations: str, weights: str) -> None:
    """The copies are made before the first batch of training, when learned scales of weights have not started."""
    model = copy.deepcopy(_calibrated(dtype, activations, weights, rounded=dtype != "int8"))
    fresh = _prepared(dtype, activations, weights)
    to_train(model)
    copies = {how: copy.deepcopy(model) for how in COPIES}
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for index in range(3):
        step(model, optimizer, BATCHES[index])
        if index == 2:
            fxq.freeze(model, batch_norm=False)
        for how, copied in copies.items():
            COPIES[how](copied, model)
    for copied in copies.values():
        assert_one_meaning(copied, fresh)
    assert_one_meaning(copy.deepcopy(model), fresh)


@pytest.mark.parametrize("buffers", [False, True])
def test_averaged_models_of_pytorch_average_prepared_ones(buffers: bool) -> None:
    model, fresh = copy.deepcopy(_calibrated("int4", "learned", "learned", rounded=True)), _prepared("int4", "learned", "learned")
    to_train(model)
    averaged = AveragedModel(model, use_buffers=buffers)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in BATCHES:
        step(model, optimizer, batch)
        averaged.update_parameters(model)
    assert_one_meaning(averaged.module, fresh)
    assert not fxq.verify(averaged.module, fxq.convert(model), BATCHES[:1])


def test_a_copy_that_takes_over_the_buffers_of_a_frozen_model_is_frozen() -> None:
    model = copy.deepcopy(_calibrated("int4", "learned", "learned", rounded=False))
    averaged = AveragedModel(model)
    fxq.freeze(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert all(each.quantizer.frozen for each in averaged.module.quantized.children() if hasattr(each, "quantizer"))


def test_a_fact_is_remembered_until_its_buffer_changes() -> None:
    buffer, calls = torch.zeros(2), []
    fact = Remembered(0.0)

    def total() -> float:
        calls.append(1)
        return float(buffer.sum())

    assert (fact.get(total, buffer), fact.get(total, buffer), len(calls)) == (0.0, 0.0, 1)
    buffer.add_(1)
    assert (fact.get(total, buffer), len(calls)) == (2.0, 2)
    buffer = torch.ones(2) * 3
    assert fact.get(total, buffer) == 6.0
    assert fact.get(total, buffer.to("meta")) == 6.0

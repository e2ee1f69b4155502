"""Batch norms behind tensors that cut off what a few outlier items hold."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat import torch_ao
from fxquant.prepared.operators import quantized_operators
from tests.shared.contract import calibrated


class Network(nn.Module):
    """One batch norm beside the sum that has outlier items, two behind it; the last channel of the input makes them outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.wide = nn.Conv2d(4, 8, 1)
        nn.init.constant_(self.wide.weight[:, 3], 100.0)
        self.then = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.then(self.first(x) + self.wide(x)))


def items(count: int, *, outliers: bool) -> Tensor:
    """Noise, whose last channel is silent but in one of 32 items, where `outliers`."""
    x = torch.randn(count, 4, 8, 8)
    x[:, 3] = 0
    if outliers:
        x[::32, 3] = torch.randn(len(x[::32]), 8, 8)
    return x


def trained_statistics(outliers: bool, observer: str | None = None) -> tuple[nn.Module, dict[str, bool], float]:
    """A model whose statistics alone were trained; which of its operators were live; its error on quiet items, in parts of their power."""
    torch.manual_seed(0)
    model = Network()
    batches = [items(32, outliers=outliers) for _ in range(8)]
    with torch.no_grad():
        for _ in range(8):
            for batch in batches:
                model(batch)
    model.eval()
    qconfig = None if observer is None else fxq.QConfig(fxq.ActivationConfig(observer=observer))
    prepared = calibrated(model, batches, "bayes-e", qconfig, choose_ranges=False)  # the outputs would keep the outliers
    fxq.set_state(prepared, fxq.State.TRAIN)
    live = lives(prepared)
    prepared.train()
    with torch.no_grad():
        for _ in range(4):
            for batch in batches:
                prepared(batch)
    prepared.eval()
    fxq.set_state(prepared, fxq.State.VALIDATE)
    quiet = items(64, outliers=False)
    with torch.no_grad():
        wanted = model(quiet)
        return prepared, live, float((prepared(quiet) - wanted).square().mean() / wanted.square().mean())


@pytest.mark.nightly
def test_batch_norms_behind_what_is_cut_off_keep_their_statistics(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared, live, error = trained_statistics(outliers=True)
    norms = {name: buffer for name, buffer in prepared.named_buffers() if name.endswith("num_batches_tracked")}
    moved = {name.split(".")[0]: int(buffer) for name, buffer in norms.items()}
    assert moved["first"] > moved["last"] == moved["then"], moved
    assert not live["last_0"]
    assert live["first_0"]
    assert [record.getMessage().count("%last_0") for record in caplog.records if "running statistics" in record.getMessage()] == [1]
    assert error < 0.05


@pytest.mark.nightly
def test_batch_norms_are_live_where_nothing_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        _, live, _ = trained_statistics(outliers=False)
        _, covering, _ = trained_statistics(outliers=True, observer="minmax")
    assert all(live.values())
    assert all(covering.values())
    assert not [record for record in caplog.records if "running statistics" in record.getMessage()]


@functools.cache
def _loud() -> tuple[nn.Module, dict[str, bool]]:
    return trained_statistics(outliers=True)[:2]


def lives(prepared: nn.Module) -> dict[str, bool]:
    return {name: operator.live_batch_norm for name, operator in quantized_operators(prepared).items()}


@pytest.mark.nightly
def test_training_that_is_resumed_keeps_the_same_statistics(tmp_path: Path) -> None:
    trained, live = copy.deepcopy(_loud()[0]), _loud()[1]
    fxq.set_state(trained, fxq.State.TRAIN)
    for scales_are_frozen in (False, True):
        fxq.freeze(trained, scales=scales_are_frozen, batch_norm=False)
        before, after = (fxq.prepare(Network().eval(), items(32, outliers=True), "bayes-e") for _ in range(2))
        before.load_state_dict(trained.state_dict())
        for prepared in (before, after):
            fxq.set_state(prepared, fxq.State.TRAIN)
        after = copy.deepcopy(after)
        after.load_state_dict(trained.state_dict())
        read = fxq.load(fxq.save(trained, tmp_path / "trained.fxq"))
        for prepared in (before, after, read):
            assert lives(prepared) == live


def test_the_switches_of_torch_ao_keep_them_too() -> None:
    trained, live = _loud()
    prepared = fxq.prepare(Network().eval(), items(32, outliers=True), "bayes-e")
    prepared.load_state_dict(trained.state_dict())
    torch_ao.enable_fake_quant(prepared)
    assert lives(prepared) == live

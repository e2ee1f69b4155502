"""Observers: what they cover, and that they stream."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.numerics import INT8
from fxquant.observers import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer, PercentileObserver


def observed(observer: Observer, *batches: torch.Tensor) -> Observer:
    for batch in batches:
        observer.observe(batch)
    return observer


def test_min_max_covers_everything_seen() -> None:
    observer = observed(MinMaxObserver(), torch.tensor([-3.0, 1.0]), torch.tensor([2.0]))
    assert observer.scale(INT8) == torch.tensor(3.0) / torch.tensor(127.5)


def test_the_first_batches_count_equally_and_later_ones_by_the_constant() -> None:
    observer = observed(MovingAverageMinMaxObserver(averaging_constant=0.25), *(torch.tensor([0.0, v]) for v in (1.0, 3.0, 5.0, 7.0)))
    assert torch.equal(observer.high, torch.tensor(4.0))
    assert torch.equal(observed(observer, torch.tensor([0.0, 8.0])).high, torch.tensor(5.0))


def test_a_histogram_counts_the_same_whatever_the_order_its_reach_grew_in() -> None:
    torch.manual_seed(0)
    values = torch.randn(4096)
    values[0] = 8.0
    at_once = observed(HistogramObserver(bins=256), values)
    in_steps = observed(HistogramObserver(bins=256), torch.full((1,), 2.0), values)
    # The reach starts at 2 and doubles to 8, where the other one starts: equal bins, and one value more.
    assert torch.equal(in_steps.reach, at_once.reach)
    assert in_steps.counts.sum() == at_once.counts.sum() + 1
    assert int((in_steps.counts != at_once.counts).sum()) <= 1


def test_a_histogram_cuts_off_what_costs_less_than_it_saves() -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000)
    values[0] = 40.0
    threshold = float(observed(HistogramObserver(), values).threshold(INT8))
    assert 3.0 < threshold < 40.0

    def error(limit: float) -> float:
        step = limit / INT8.divisor
        return float(((values / step).round().clamp(INT8.low, INT8.high) * step - values).square().mean())

    assert error(threshold) < error(40.0)
    assert error(threshold) <= 1.05 * min(error(40.0 * i / 400) for i in range(20, 401))


def test_a_histogram_covers_a_uniform_tensor_whole() -> None:
    assert float(observed(HistogramObserver(), torch.linspace(-1, 1, 10_000)).threshold(INT8)) > 0.98


def test_a_percentile_leaves_out_its_share() -> None:
    values = torch.arange(1, 10_001).float()
    threshold = float(observed(PercentileObserver(percentile=99.0), values).threshold(INT8))
    assert 9_890 <= threshold <= 9_910


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver, PercentileObserver])
def test_an_observer_holds_as_much_after_many_batches_as_after_one(observer: type[Observer]) -> None:
    def size(batches: int) -> int:
        made = observed(observer(), *(torch.randn(64) * (i + 1) for i in range(batches)))
        return sum(tensor.numel() * tensor.element_size() for tensor in made.state_dict().values())

    assert size(1) == size(64)


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver, PercentileObserver])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_and_changes_nothing(observer: type[Observer], bad: float) -> None:
    made = observed(observer(), torch.randn(16))
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    with pytest.raises(ValueError, match="the tensor holds"):
        made.observe(torch.tensor([1.0, bad]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver, PercentileObserver])
def test_zeros_alone_give_the_smallest_scale(observer: type[Observer]) -> None:
    assert observed(observer(), torch.zeros(8)).scale(INT8) == 2.0**-23


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver, PercentileObserver])
@pytest.mark.parametrize(("training", "moves"), [("statistics", True), ("learned", False), ("frozen", False)])
def test_while_training_batches_move_the_scale_only_where_it_follows_statistics(
    observer: type[Observer], training: str, moves: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    qconfig = fxq.QConfig(output=fxq.ActivationConfig(observer=observer, training=training))
    prepared = fxq.calibrate(fxq.prepare(model, (torch.randn(2, 3, 8, 8),), qconfig=qconfig), [torch.randn(2, 3, 8, 8)])
    before = fxq.qparams(prepared)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    prepared(3 * torch.randn(2, 3, 8, 8))
    assert (fxq.qparams(prepared) != before) is moves

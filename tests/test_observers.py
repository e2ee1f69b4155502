"""Observers: what they cover, and that they stream."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.numerics import INT8
from fxquant.quantization.observers import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer, PercentileObserver


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
    assert int(torch.ne(in_steps.counts, at_once.counts).sum()) <= 1


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


# ---- what a histogram sees of a large tensor ------------------------------------------------------------------------------

SAMPLE = 2**10  # so small that every tensor here is sampled
SHAPES = ((2048, 3), (SAMPLE * 8, 1), (4, 64, 16, 16), (128, 64, 4), (1, 8192), (7, 11, 13, 17), (2, 3, 32, 33), (5, 4099))
ERRORS = 5  # standard deviations of a sample in which every element is as likely as any other


def histogram(values: torch.Tensor, sample: int) -> torch.Tensor:
    """The share of the values in each bin."""
    counts = observed(HistogramObserver(bins=64, sample=sample), values).counts
    return counts / counts.sum()


def assert_sampled_fairly(values: torch.Tensor) -> None:
    whole, seen = histogram(values, 2 * values.numel()), histogram(values, SAMPLE)
    deviation = (whole * (1 - whole) / SAMPLE).sqrt()
    assert bool(((seen - whole).abs() <= ERRORS * deviation + 1 / SAMPLE).all()), (seen - whole).abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sample_sees_every_index_of_every_dimension(shape: tuple[int, ...]) -> None:
    """Values that depend on the index along one dimension alone: one column, one channel or one row has its own magnitude."""
    for dim, size in enumerate(shape):
        along = torch.arange(size).reshape(-1, *[1] * (len(shape) - dim - 1))
        for special in {0, size // 2, size - 1}:
            assert_sampled_fairly(torch.where(along == special, 0.1, 10.0).expand(shape))
        assert_sampled_fairly((along % 7 + 1).float().expand(shape))


@pytest.mark.parametrize("size", [2 * SAMPLE, 2 * SAMPLE + 1, 8 * SAMPLE, 12 * SAMPLE, 16 * SAMPLE - 1, 10_007])
def test_a_sample_sees_every_element_of_a_period(size: int) -> None:
    """Where a fixed distance between samples divides the period, or is a multiple of it, one element of it would be seen alone."""
    position = torch.arange(size)
    for period in (2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 64, 100, size // SAMPLE, size // SAMPLE + 1):
        for special in {0, 1, period - 1}:
            assert_sampled_fairly(torch.where(position % period == special, 8.0, 1.0))


@pytest.mark.parametrize("observer", [HistogramObserver, PercentileObserver])
def test_the_same_values_give_the_same_scale_in_every_layout(observer: type[HistogramObserver]) -> None:
    torch.manual_seed(1)
    image = torch.randn(8, 6, 24, 25)
    image[:, 2] *= 4
    wide = torch.randn(8, 6, 24, 50)
    wide[..., ::2] = image
    before = torch.get_rng_state()
    forms = (image, image.contiguous(memory_format=torch.channels_last), wide[..., ::2], image.transpose(1, 2).contiguous().transpose(1, 2))
    found = [observed(observer(sample=SAMPLE), form) for form in forms]
    assert len({form.stride() for form in forms}) == len(forms)
    assert all(torch.equal(other.counts, found[0].counts) and other.scale(INT8) == found[0].scale(INT8) for other in found)
    assert torch.equal(torch.get_rng_state(), before)  # the random numbers of the user's are left alone
    torch.manual_seed(2)
    assert torch.equal(observed(observer(sample=SAMPLE), image).counts, found[0].counts)  # and take no part


@pytest.mark.parametrize("observer", [HistogramObserver, PercentileObserver])
@pytest.mark.parametrize("rows", [2**18 - 1, 2**18, 2**19])
def test_the_scale_does_not_depend_on_how_many_rows_a_batch_has(observer: type[HistogramObserver], rows: int) -> None:
    """Three columns of which one is a thousand times smaller: seen alone, it would give a scale a thousand times too small."""
    points = torch.rand(rows, 3) * torch.tensor([0.01, 10.0, 10.0])
    assert 0.95 * 10 / 127.5 < float(observed(observer(), points).scale(INT8)) <= 10 / 127.5

"""Items of a batch that are far louder than the others: what the default observer makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.numerics.grids import UINT8
from fxquant.quantization.observers import HistogramObserver, histogram
from fxquant.quantization.observers.histogram import BINS, OCTAVES
from tests.shared.contract import Compiled, compiled

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs


class Pooled(HistogramObserver):
    """The default without a say of the items."""

    each = False


def images(count: int, loud: int, seed: int) -> Tensor:
    """Items of which some are 24 times as loud."""
    drawn = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    drawn[:loud] *= 24
    return drawn[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def quantized(network: nn.Module, batches: list[Tensor], target: str, observer: type[HistogramObserver]) -> Compiled:
    return compiled(network, batches, target, fxq.QConfig(fxq.ActivationConfig(observer=observer)))


def decibels(wanted: Tensor, found: Tensor) -> float:
    """The signal to noise ratio of an item, on average."""
    power, noise = wanted.flatten(1).square().sum(1), (found - wanted).flatten(1).square().sum(1)
    return float((10 * torch.log10(power / noise)).mean())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86", "bernoulli"])
def test_a_few_loud_items_do_not_take_the_precision_of_the_others(network: nn.Module, target: str) -> None:
    batches = list(torch.split(images(48, 4, 0), 16))
    default, pooled = (quantized(network, batches, target, observer) for observer in (HistogramObserver, Pooled))
    quiet = images(32, 0, 1)
    with torch.no_grad():
        wanted = network(quiet)
        gained = decibels(wanted, default.integer(quiet)) - decibels(wanted, pooled.integer(quiet))
    assert gained > 3  # as much as it claims to gain for each tensor
    last = "_4"  # the output, whose error is the user's own
    assert fxq.qparams(default.prepared)[last] == fxq.qparams(pooled.prepared)[last]


@pytest.mark.parametrize("loud", [0, 24], ids=["none", "half"])
def test_items_that_are_alike_or_no_exception_change_nothing(network: nn.Module, loud: int) -> None:
    batches = list(torch.split(images(48, loud, 2), 16))
    default, pooled = (quantized(network, batches, "bayes-e", observer).prepared for observer in (HistogramObserver, Pooled))
    assert fxq.qparams(default) == fxq.qparams(pooled)


def test_both_ends_of_an_affine_range_are_cut_off_together() -> None:
    values = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    values[:3] *= 9  # so little louder that one end alone would gain nothing: the step is half of the other's at least
    found = {}
    for observer in (HistogramObserver(), Pooled()):
        observer.take(values, values.min(), values.max(), items=torch.aminmax(values.flatten(1), dim=1))
        found[type(observer)] = [float(end) for end in observer.interval(UINT8)]
    quiet = float(values[3:].abs().max())
    assert all(abs(end) > 3 * quiet for end in found[Pooled])
    assert all(0.5 * quiet < abs(end) < 1.5 * quiet for end in found[HistogramObserver])


def test_an_item_has_the_octave_of_its_largest_magnitude_whatever_the_order() -> None:
    values = torch.linspace(-1, 1, 64).repeat(4, 1) * torch.tensor([[8.0], [4.0], [0.9], [2.0**-20]])
    at_once, in_steps = HistogramObserver(), HistogramObserver()
    for observer, batches in ((at_once, [values]), (in_steps, [values[2:3], values[1:2], values[3:], values[:1]])):
        for batch in batches:
            observer.take(batch, batch.min(), batch.max(), items=torch.aminmax(batch.flatten(1), dim=1))
    assert at_once.items.sum((0, 2)).tolist() == [64, 64, 0, 64, 0, 0, 0, 64]
    assert float(in_steps.items.sum()) == 256
    assert in_steps.items.sum((0, 2)).tolist() == [64, 64, 0, 0, 64, 0, 0, 64]  # below a reach of 0.9 · 2^4
    merged = HistogramObserver()
    parts = [HistogramObserver(), HistogramObserver()]
    for part, batch in zip(parts, (values[:2], values[2:]), strict=True):
        part.take(batch, batch.min(), batch.max(), items=torch.aminmax(batch.flatten(1), dim=1))
    merged.merge([dict(part.named_buffers()) for part in parts])
    assert merged.items.sum((0, 2)).tolist() == [64, 64, 0, 64, 0, 0, 0, 64]


def test_a_reach_that_doubles_keeps_every_count_over_its_range() -> None:
    counts = torch.rand(2, OCTAVES, BINS, dtype=torch.float64)
    before = counts.clone()
    histogram.doubled(counts)
    assert torch.equal(counts[:, 1:-1], before[:, :-2])
    assert not counts[:, 0].any()
    joined = before[:, -1].view(2, -1, 2).sum(2)
    assert torch.equal(counts[:, -1, : BINS // 2], before[:, -2, : BINS // 2] + joined)
    assert torch.equal(counts[:, -1, BINS // 2 :], before[:, -2, BINS // 2 :])


def test_half_of_the_reach_is_the_next_octave_exactly() -> None:
    for reach in torch.rand(2000, generator=torch.Generator().manual_seed(0)).tolist():
        assert [histogram._octave(reach * 2.0**-octave, reach) for octave in range(OCTAVES)] == list(range(OCTAVES))
        assert histogram._octave(reach * 0.51, reach) == 0
        assert histogram._octave(reach * 2.0**-40, reach) == OCTAVES - 1

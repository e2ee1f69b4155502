"""Items of a batch with a far larger norm than the others: scales of the default observer, and the batch norms after."""

import copy
import functools
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat import torch_ao
from fxquant.numerics.grids import UINT8
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import HistogramObserver, histogram
from fxquant.quantization.observers.histogram import BINS, OCTAVES
from tests.shared.contract import Compiled, calibrated, compiled
from tests.shared.networks import to_validate

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs


class Pooled(HistogramObserver):
    """The default without a say of the items."""

    each = False


def images(count: int, loud: int, seed: int) -> Tensor:
    """Return items of which some are 24 times as large."""
    drawn = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    drawn[:loud] *= 24
    return drawn[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def quantized(network: nn.Module, batches: list[Tensor], target: str, observer: type[HistogramObserver]) -> Compiled:
    return compiled(network, batches, target, fxq.QConfig(fxq.ActivationConfig(observer=observer)), choose_ranges=False, correct_bias=False)


def decibels(wanted: Tensor, actual: Tensor) -> float:
    """The signal to noise ratio of an item, on average."""
    power, noise = wanted.flatten(1).square().sum(1), (actual - wanted).flatten(1).square().sum(1)
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
    values[:3] *= 9  # so little larger that one end alone would gain nothing: the step is half of the other's at least
    by_name = {}
    for observer in (HistogramObserver(), Pooled()):
        observer.take(values, values.min(), values.max(), items=torch.aminmax(values.flatten(1), dim=1))
        by_name[type(observer)] = [float(end) for end in observer.interval(UINT8)]
    quiet = float(values[3:].abs().max())
    assert all(abs(end) > 3 * quiet for end in by_name[Pooled])
    assert all(0.5 * quiet < abs(end) < 1.5 * quiet for end in by_name[HistogramObserver])


def test_an_item_has_the_octave_of_its_largest_magnitude_whatever_the_order() -> None:
    values = torch.linspace(-1, 1, 64).repeat(4, 1) * torch.tensor([[8.0], [4.0], [0.9], [2.0**-20]])
    at_once, in_steps = HistogramObserver(), HistogramObserver()
    for observer, batches in ((at_once, [values]), (in_steps, [values[2:3], values[1:2], values[3:], values[:1]])):
        for batch in batches:
            observer.take(batch, batch.min(), batch.max(), items=torch.aminmax(batch.flatten(1), dim=1))
    assert at_once.items.sum((0, 2)).tolist() == [64, 64, 0, 64, 0, 0, 0, 64]
    assert float(in_steps.items.sum()) == 256
    assert in_steps.items.sum((0, 2)).tolist() == [64, 64, 0, 0, 64, 0, 0, 64]  # below a reach of 0.9 · 2^4


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


# ---- batch norms after tensors whose ranges clip a few outlier items -------------------------------------------------
class OutlierNetwork(nn.Module):
    """One batch norm beside the sum that has outlier noise, two after it; the last channel of the input makes them outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()), nn.Conv2d(4, 8, 1)
        nn.init.constant_(self.wide.weight[:, 3], 100.0)
        self.then = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.then(self.first(x) + self.wide(x)))


def noise(count: int, *, outliers: bool) -> Tensor:
    """Noise, whose last channel is silent but in one of 32 noise, where `outliers`."""
    x = torch.randn(count, 4, 8, 8)
    x[:, 3] = 0
    if outliers:
        x[::32, 3] = torch.randn(len(x[::32]), 8, 8)
    return x


def trained_statistics(outliers: bool, observer: str | None = None) -> tuple[nn.Module, dict[str, bool], float]:
    """A model whose statistics alone were trained; which of its operators were live; its error on quiet noise, in parts of their power."""
    torch.manual_seed(0)
    model = OutlierNetwork()
    batches = [noise(32, outliers=outliers) for _ in range(8)]
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
    to_validate(prepared)
    quiet = noise(64, outliers=False)
    with torch.no_grad():
        wanted = model(quiet)
        return prepared, live, float((prepared(quiet) - wanted).square().mean() / wanted.square().mean())


@pytest.mark.nightly
def test_batch_norms_after_what_is_cut_off_keep_their_statistics(caplog: pytest.LogCaptureFixture) -> None:
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
        before, after = (fxq.prepare(OutlierNetwork().eval(), noise(32, outliers=True), "bayes-e") for _ in range(2))
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
    prepared = fxq.prepare(OutlierNetwork().eval(), noise(32, outliers=True), "bayes-e")
    prepared.load_state_dict(trained.state_dict())
    torch_ao.enable_fake_quant(prepared)
    assert lives(prepared) == live

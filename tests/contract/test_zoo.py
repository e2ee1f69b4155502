"""The zoo of networks is alive, learns, and is exact; the benchmark of exactness sees faults; calibration keeps no batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks import exactness, zoo
from examples.demo import DigitsDataset, accuracy, load_digits_dataset
from fxquant.prepared.operators import quantized_operators

pytestmark = pytest.mark.nightly

NAMES = tuple(zoo.zoo())
# The whole zoo, on every target, is benchmarks.exactness.
COMPILED = (("U-Net", "bayes-e"), ("signal network (1-d)", "bayes-e"), ("signal network (1-d)", "x86"), ("clip network (3-d)", "x86"))
build = cache(lambda name: zoo.zoo()[name]())


@pytest.fixture(scope="module")
def digits() -> DigitsDataset:
    return load_digits_dataset()


def few(digits: DigitsDataset) -> DigitsDataset:
    return digits._replace(train_images=digits.train_images[:128], train_labels=digits.train_labels[:128])


# -------------------------------------------------------------------------------------------------------- digits


# -------------------------------------------------------------------------------------------------- demo network


def test_demo_network_learns_the_digits_in_five_epochs(digits: DigitsDataset) -> None:
    assert accuracy(build("demo network").model, digits.test_images, digits.test_labels) >= 0.97


# ----------------------------------------------------------------------------------------------------------- zoo


@pytest.mark.parametrize("name", NAMES)
def test_zoo_models_are_alive_and_their_entries_fit_together(name: str) -> None:
    entry = build(name)
    zoo.check_alive(entry.model, torch.cat(entry.test_batches))
    assert not any(module.training for module in entry.model.modules())
    assert len(entry.calibration_batches) == len(entry.test_batches) == 4
    assert {batch.shape for batch in entry.calibration_batches} == {batch.shape for batch in entry.test_batches}
    assert not torch.equal(entry.calibration_batches[0], entry.test_batches[0])
    assert entry.example_inputs[0].shape == entry.test_batches[0][:1].shape
    classes = {"demo network": 10, "U-Net": 6, "signal network (1-d)": 10, "clip network (3-d)": 10}
    with torch.no_grad():
        logits = exactness.tensors_of(entry.model(torch.cat(entry.test_batches)))[0]
    assert logits.shape[1] == classes.get(name, 100)
    assert len(logits.argmax(1).unique()) >= 5, "the logits do not depend on the image"


# ---------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(("name", "target"), COMPILED)
def test_zoo_models_are_exact(name: str, target: str) -> None:
    entry = build(name)
    few = entry._replace(calibration_batches=entry.calibration_batches[:2], test_batches=entry.test_batches[:2])
    row = exactness.measure(name, few, target, "int8", dict.fromkeys(exactness.ENGINES, "not measured"))
    assert row.exact, row
    assert row.float_nodes == 0
    assert row.tensors > 15
    assert row.sqnr > 5


# -------------------------------------------------------------------------------------------- calibration's memory


@pytest.mark.parametrize(
    "observer",
    [
        fxq.observers.MovingAverageMinMaxObserver,
        fxq.observers.MinMaxObserver,
        fxq.observers.HistogramObserver,
        fxq.observers.PercentileObserver,
    ],
)
def test_calibration_keeps_no_batch(observer: type[fxq.observers.Observer]) -> None:
    """A generator's batches, and whatever was computed of them, are gone when the next one is asked for."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    prepared = fxq.prepare(model, (torch.randn(1, 3, 8, 8),), qconfig=fxq.QConfig(fxq.ActivationConfig(observer=observer)))
    seen: list[weakref.ref[Tensor]] = []
    for operator in quantized_operators(prepared).values():
        operator.register_forward_hook(lambda _module, _inputs, result: seen.append(weakref.ref(result)))
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(6):
            alive.append(len({id(tensor) for ref in seen if (tensor := ref()) is not None}))
            seen.append(weakref.ref(batch := torch.randn(4, 3, 8, 8)))
            yield batch
            del batch

    fxq.calibrate(prepared, batches(), show_progress=False)
    assert len(seen) > 6 * 5
    assert max(alive) <= 1, alive  # the loop over the batches still has the last one in hand


# ------------------------------------------------------------------------------------------------ residual chain

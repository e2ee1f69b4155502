"""The models and data that other tests stand on: alive, reproducible, and of the architectures they are named after."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from benchmarks import calibration_memory, exactness, zoo
from examples.demo import QUANTIZED_LEARNING_RATE, DigitsDataset, accuracy, build_demo_network, load_digits_dataset, split_by_class, train
from fxquant.errors import ConfigurationError
from fxquant.ir.integer import notes
from fxquant.prepared.operators import quantized_operators
from fxquant.support import seeded
from tests.shared.networks import Network

pytestmark = pytest.mark.nightly

NAMES = tuple(zoo.zoo())
# The whole zoo, on every target, is benchmarks.exactness.
COMPILED = (("U-Net", "bayes-e"), ("signal network (1-d)", "bayes-e"), ("signal network (1-d)", "x86"), ("clip network (3-d)", "x86"))
build = cache(lambda name: zoo.zoo()[name]())


@pytest.fixture(scope="module")
def digits() -> DigitsDataset:
    return load_digits_dataset()


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def few(digits: DigitsDataset) -> DigitsDataset:
    return digits._replace(train_images=digits.train_images[:128], train_labels=digits.train_labels[:128])


# -------------------------------------------------------------------------------------------------------- digits


def test_digits_have_the_promised_shapes_and_range(digits: DigitsDataset) -> None:
    assert [tuple(part.shape) for part in digits] == [(1437, 1, 32, 32), (1437,), (360, 1, 32, 32), (360,)]
    assert [part.dtype for part in digits] == [torch.float32, torch.int64, torch.float32, torch.int64]
    assert digits.train_images.min() == -1
    assert digits.train_images.max() == 1


def test_digits_split_is_stratified_and_disjoint(digits: DigitsDataset) -> None:
    labels = torch.cat([digits.train_labels, digits.test_labels])
    train, test = split_by_class(labels, test_images_per_class=36, seed=3)
    assert torch.cat([train, test]).sort().values.tolist() == list(range(1797))
    assert labels[test].bincount().tolist() == digits.test_labels.bincount().tolist() == [36] * 10


def test_missing_scikit_learn_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError) as caught:
        load_digits_dataset()
    assert str(caught.value) == (
        "the digits cannot be loaded\n"
        "  because  they come with scikit-learn, which is not installed\n"
        '  remedy   pip install "fxquant[demo]"'
    )


# -------------------------------------------------------------------------------------------------- demo network


def test_demo_network_is_small_and_follows_its_seed() -> None:
    one, same, other = build_demo_network(1), build_demo_network(1), build_demo_network(2)
    assert 30_000 <= count_parameters(one) <= 60_000
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_training_is_deterministic_and_leaves_the_global_generator_alone(digits: DigitsDataset) -> None:
    state = torch.get_rng_state()
    networks = [build_demo_network(seed=0), build_demo_network(seed=0)]
    for network in networks:
        train(network, few(digits), epochs=2, seed=0)
        assert not network.training
    one, other = (network.state_dict() for network in networks)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_demo_network_learns_the_digits_in_five_epochs(digits: DigitsDataset) -> None:
    assert accuracy(build("demo network").model, digits.test_images, digits.test_labels) >= 0.97


def test_training_on_from_a_trained_network_keeps_its_accuracy(digits: DigitsDataset) -> None:
    network = build_demo_network(seed=0)
    network.load_state_dict(build("demo network").model.state_dict())
    train(network, few(digits), epochs=1, seed=0, learning_rate=QUANTIZED_LEARNING_RATE)
    assert accuracy(network, digits.test_images, digits.test_labels) >= 0.97


def test_accuracy_evaluates_in_eval_mode_and_restores_the_mode() -> None:
    class Constant(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            assert not self.training
            return torch.tensor([[0.0, 1.0]]).expand(len(images), 2)

    constant = Constant().train()
    assert accuracy(constant, torch.zeros(5, 1), torch.tensor([1, 1, 1, 1, 0]), batch_size=2) == 0.8
    assert constant.training


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


def test_make_alive_uses_cumulative_statistics_and_restores_momentum() -> None:
    norm = nn.BatchNorm2d(3, momentum=0.25)
    norm.running_mean = torch.full((3,), 9.0)
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    zoo.make_alive(nn.Sequential(norm), images, batch_size=4)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
    assert norm.momentum == 0.25
    assert not norm.training


dead = Network(lambda _, x: nn.functional.relu6(torch.relu(x) - 100))


def test_check_alive_names_the_dead_relu() -> None:
    with pytest.raises(ValueError, match=r"activation 1: Activity\(silent=1\.0, std=0\.0, gate=False\)"):
        zoo.check_alive(dead, torch.linspace(-1, 1, 20))


def test_activations_are_counted_however_they_are_spelled() -> None:
    spellings = (nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.ReLU6(inplace=True))
    spellings += (nn.Hardswish(), nn.SiLU(), nn.Sigmoid(), nn.LeakyReLU())
    assert len(zoo.activities(nn.Sequential(*spellings), torch.linspace(-1, 1, 20))) == len(spellings)
    assert len(zoo.activities(dead, torch.linspace(-1, 1, 20))) == 2


def test_a_gate_may_always_be_open_but_never_constant() -> None:
    assert zoo.Activity(silent=0.0, std=0.1, gate=True).is_alive
    assert not zoo.Activity(silent=0.0, std=0.0, gate=True).is_alive
    assert not zoo.Activity(silent=0.05, std=0.1).is_alive


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


@cache
def integer_signal_network() -> fx.GraphModule:
    entry = build("signal network (1-d)")
    prepared = fxq.prepare(entry.model, entry.example_inputs)
    fxq.calibrate(prepared, entry.calibration_batches)
    return fxq.convert(prepared)


def test_exactness_sees_an_accumulator_that_does_not_fit() -> None:
    integer, batches = copy.deepcopy(integer_signal_network()), build("signal network (1-d)").test_batches[:1]
    assert exactness.overflows(integer, batches) == 0
    noted = next(node for node in integer.graph.nodes if notes(node).get("accumulator_bits", 0) > 16)
    notes(noted)["accumulator_bits"] = 8
    assert exactness.overflows(integer, batches) >= 1


def test_exactness_sees_a_fault_that_is_not_located(monkeypatch: pytest.MonkeyPatch) -> None:
    integer, batch = integer_signal_network(), build("signal network (1-d)").test_batches[0]
    assert exactness.faults_not_located(integer, batch) == 0
    monkeypatch.setattr(exactness.fxq, "verify", lambda *_, **__: fxq.results.Report())
    assert exactness.faults_not_located(integer, batch) == 1


def test_exactness_writes_and_reads_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"x86": 25.0, "qnnpack": "RuntimeError: no"}
    row = exactness.Row("a network", "bayes-e", "int8", 0, 0, 0, 0, 0, 20, 24, 0, 30.25, "int8", 0.5, 2.0, theirs)
    kept = tmp_path / "rows.jsonl"
    kept.write_text(json.dumps(asdict(row)) + "\n", encoding="utf-8")
    assert exactness.read(kept) == [row]
    monkeypatch.setattr(exactness, "WRITTEN", tmp_path / "results" / "exactness.md")
    monkeypatch.setattr(exactness, "zoo", lambda: {"a network": None})
    monkeypatch.setattr(sys, "argv", ["exactness", "--targets", "bayes-e", "--keep", str(kept), "--write"])
    with pytest.raises(SystemExit) as done:
        exactness.main()
    assert done.value.code == 0
    written = (tmp_path / "results" / "exactness.md").read_text(encoding="utf-8")
    assert "| a network | bayes-e | int8 | int8 | 0 | 0 | 0 | 0 | 0 | 20 | 24 bits | 0 | 50.0 %, 2 | 30.2 | 25.0 | – |" in written
    assert "torch.ao, qnnpack, on a network: RuntimeError: no" in written


def test_peers_that_cannot_do_a_model_say_why() -> None:
    entry = zoo.ZooEntry(nn.MaxPool3d(2), (torch.zeros(1, 1, 2, 2, 2),), [torch.randn(2, 1, 2, 2, 2)], [torch.randn(2, 1, 2, 2, 2)])
    assert "QNNPACK" in str(exactness.torch_ao_sqnr(entry, "qnnpack"))
    assert isinstance(exactness.torch_ao_sqnr(entry, "x86"), float)
    assert exactness.in_a_process(os.abort) == "its kernels ended the process"


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


def test_the_memory_benchmark_measures_what_is_kept() -> None:
    code = "import sys; from benchmarks import calibration_memory as m; print('torch' in sys.modules)"
    light = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert light.stdout.strip() == "False"  # the children's peaks begin with the parent's
    assert calibration_memory.peak_of_calibration("MinMaxObserver", 0) > 2**26


# ------------------------------------------------------------------------------------------------ residual chain


@pytest.mark.parametrize("nodes", [9, 100, 350])
def test_residual_chain_has_the_nodes_asked_for_and_is_alive(nodes: int) -> None:
    chain = zoo.residual_chain(nodes)
    assert abs(len(fx.symbolic_trace(chain).graph.nodes) - nodes) <= 3
    with seeded(1):
        zoo.check_alive(chain, torch.randn(8, 4, 8, 8))


def test_long_residual_chain_stays_finite() -> None:
    assert zoo.residual_chain(7000)(torch.ones(1, 4, 8, 8)).isfinite().all()

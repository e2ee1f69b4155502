"""Calibration by its first samples after the scales: biases take back what rounding shifts on average."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import fxquant as fxq
from fxquant.accuracy import BY_SAMPLES, STEPS, bias, step
from fxquant.accuracy.measure import FloatOutputs
from fxquant.accuracy.step import LARGEST_KEPT, Run, Step
from fxquant.accuracy.walk import cut
from fxquant.ops import Trait
from fxquant.prepared.operators import quantized_operators
from fxquant.search import tune
from tests.counts.networks import NETWORKS, built
from tests.shared import contract
from tests.shared.networks import Network, copies

FOUR_BITS = fxq.QConfig(weight=fxq.WeightConfig("int4"))


def network() -> nn.Module:
    """With a pooling of four numbers, whose mean is in the middle between two integers in one case of four."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    model = nn.Sequential(*first, nn.Conv2d(12, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)).eval()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def batches(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(8, 3, 16, 16, generator=generator) for _ in range(8)]


@copies
def calibrated(target: str, correct_bias: bool | None = None, qconfig: fxq.QConfig | None = None) -> fx.GraphModule:
    return contract.calibrated(network(), batches(), target, qconfig, correct_bias=correct_bias)


def unchanged(model: nn.Module, inputs: list[Tensor]) -> fx.GraphModule:
    """Calibrated, without what is done by samples."""
    return contract.calibrated(model, inputs, qconfig=FOUR_BITS, round_weights=False, correct_bias=False)


def corrected(prepared: fx.GraphModule) -> list[str]:
    return [name for name, operator in quantized_operators(prepared).items() if operator.weight_quantizer.correction is not None]


def noise(prepared: fx.GraphModule) -> float:
    """Of what nothing was calibrated with."""
    unseen, model = torch.cat(batches(1)), network()
    with torch.no_grad():
        return float((prepared(unseen) - model(unseen)).square().mean())


@pytest.mark.nightly
@pytest.mark.parametrize(("target", "qconfig"), [("bernoulli", None), ("bayes-e", None), ("x86", FOUR_BITS)])
def test_biases_take_back_what_rounding_shifts(target: str, qconfig: fxq.QConfig | None, tmp_path: Path) -> None:
    plain, prepared = calibrated(target, False, qconfig), calibrated(target, None, qconfig)
    assert not corrected(plain)
    assert corrected(prepared)
    assert noise(prepared) < {"bernoulli": 0.9, "bayes-e": 0.99, "x86": 0.9}[target] * noise(plain)
    assert fxq.qparams(prepared) == fxq.qparams(plain)  # scales are what the ranges are
    integer, unseen = fxq.convert(prepared), torch.cat(batches(1))
    for model in (prepared, integer):
        assert fxq.explain(model).count("bias corrected") == len(corrected(prepared))
        assert ("weight rounded by samples" in fxq.explain(model)) == (qconfig is not None)
    contract.assert_validate_is_integer(prepared, integer, unseen)
    contract.assert_train_is_validate(prepared, unseen)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [unseen[:4]], show_progress=False)


def test_by_fewer_samples_only_where_asked_for() -> None:
    few = batches()[:1]
    for asked in (None, True, False):
        prepared = contract.calibrated(network(), few, correct_bias=asked)
        assert bool(corrected(prepared)) == (asked is True)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("side", "count"), [(16, 64), (256, 10), (512, 4)])
def test_of_large_images_fewer_are_looked_at_however_many_are_kept(side: int, count: int) -> None:
    run = Run(fxq.prepare(network(), batches()[0], "bernoulli"), BY_SAMPLES)
    for _ in range(8):
        run.take([torch.rand(8, 3, side, side)])
    few, judging = run.few, run.held_out
    assert run.kept.seen == 64
    assert sum(len(chunk[0]) for chunk in few.chunks) in range(count, 2 * count)
    assert few.judging
    assert judging
    assert run.kept.elements <= LARGEST_KEPT + 8 * 3 * side**2


def test_large_images_are_corrected_by_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 samples not all are kept, and still there are enough."""
    monkeypatch.setattr(step, "LARGEST_KEPT", 40 * 3 * 16 * 16)
    assert corrected(contract.calibrated(network(), batches(), "bernoulli"))


def test_a_vector_without_a_batch_is_tuned(caplog: pytest.LogCaptureFixture) -> None:
    model, square = Network(lambda s, x: s.last(x.mean(0)), last=nn.Linear(6, 4)).eval(), torch.randn(6, 6)
    turned = [square, square.flip(0), square.flip(1), square.T]
    with caplog.at_level(logging.INFO, "fxquant"):
        prepared = contract.calibrated(model, turned, qconfig=FOUR_BITS, correct_bias=True)
    assert "weights of few bits are" in caplog.text
    for learn in (fxq.tuning.adaround, fxq.tuning.reconstruct, fxq.tuning.distill):
        learn(prepared, turned, steps=5, show_progress=False)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), square)


def test_observations_have_no_samples_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    seen = fxq.observers.observations(calibrated("bernoulli"))
    with caplog.at_level(logging.INFO, "fxquant"):
        prepared = fxq.prepare(network(), batches()[0], "bernoulli", observations=seen)
    assert not corrected(prepared)
    assert "biases are not corrected" in caplog.text


def test_what_was_cut_off_does_not_count() -> None:
    """One number in a hundred is far beyond what its operand can hold: a mean would follow it."""
    usual = torch.randn(3, 400) * 0.1 + 0.05
    loud = usual.clone()
    loud[:, ::100] += 1000
    for limits in (None, (-2000.0, 2000.0)):
        means, of_usual = (bias._correction([(result, torch.zeros_like(result))], limits) for result in (loud, usual))
        assert (means - usual.mean(1)).abs().max() < 0.02
        assert torch.allclose(of_usual, usual.double().mean(1))


def test_a_layer_is_corrected_after_its_limits() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU6()).eval()
    inputs = torch.randn(256, 32, generator=generator)
    prepared = unchanged(model, [inputs])
    corrections = bias.corrections(prepared, cut(prepared, [[inputs]], 16), FloatOutputs(prepared, [[inputs]]), False)
    assert corrections
    bias.put_corrections(prepared, corrections)
    learned = torch.cat([chunk for index, chunk in enumerate(inputs.split(16)) if index % 4 != 3])
    with torch.no_grad():
        corrected_shift = (prepared(learned) - model(learned)).mean(0).abs().mean()
        bias.put_corrections(prepared, {name: [0.0] * len(value) for name, value in corrections.items()})
        plain_shift = (prepared(learned) - model(learned)).mean(0).abs().mean()
    assert corrected_shift < 0.2 * plain_shift


def test_the_outputs_judge_all_corrections_together(caplog: pytest.LogCaptureFixture) -> None:
    """Shifts by rounded weights follow the mean of the inputs: corrected by positive ones, negative ones are further off."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(32, 16).eval()
    learned, alike = (torch.rand(32, 32, generator=generator) for _ in range(2))
    prepared = unchanged(model, [learned, -learned])
    samples = cut(prepared, [[learned]], 4)
    with caplog.at_level(logging.DEBUG, "fxquant"):
        assert bias.corrections(prepared, samples, FloatOutputs(prepared, [[-alike]]), False) == {}
        assert not corrected(prepared)
        assert "biases are not corrected" in caplog.text
        corrections = bias.corrections(prepared, samples, FloatOutputs(prepared, [[alike]]), False)
    assert corrected(prepared) == []
    bias.put_corrections(prepared, corrections)
    assert list(corrections) == corrected(prepared) != []
    assert "biases are corrected in 1 of 1 layers, in full: the outputs have" in caplog.text
    assert caplog.text.count("correct_bias: 1 of 1 tuned") == 1  # the table of the layers


def test_corrections_that_only_overshoot_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.rand(64, 32, generator=torch.Generator().manual_seed(0))
    prepared = unchanged(nn.Linear(32, 16).eval(), [inputs])
    samples, judging = cut(prepared, [[inputs]], 8), FloatOutputs(prepared, [[inputs]])
    right = next(iter(bias.corrections(prepared, samples, judging, False).values()))
    whole, (operator,) = bias._correction, [each for each in quantized_operators(prepared).values() if Trait.SUMS in each.operator.traits]
    operator.weight_quantizer.correct(None)

    monkeypatch.setattr(bias, "_correction", lambda *arguments: 2.2 * whole(*arguments))
    errors = iter(range(10, 0, -1))  # ever smaller: the layer keeps it, whatever its samples say
    monkeypatch.setattr(bias, "_mean", lambda values: float(next(errors)))
    halved = next(iter(bias.corrections(prepared, samples, judging, False).values()))
    assert torch.allclose(torch.tensor(halved), 1.1 * torch.tensor(right), rtol=1e-3)


def test_samples_are_taken_from_all_that_are_kept() -> None:
    """Batches beside each other may be of one scene; these batches and about as many others judge the outputs."""
    run = Run(fxq.prepare(network(), batches()[0], "bernoulli"), BY_SAMPLES)
    for index in range(8):
        run.take([torch.full((8, 3, 256, 256), float(index))])
    few, judging = run.few, run.held_out
    numbers = [float(chunk[0].flatten()[0]) for chunk in few.chunks]
    assert {0.0, 4.0} < set(numbers)
    assert max(numbers) >= 6
    assert {id(chunk) for chunk in few.chunks} < {id(chunk) for chunk in judging}
    assert len(judging) == 2 * len(few.chunks)


@pytest.mark.parametrize(
    ("name", "target"), [("", "x86"), *((name, "bayes-e") for name in ("ResNet", "MobileNetV2", "MobileNetV3", "ViT"))]
)
def test_a_calibration_computes_the_network_at_most_eight_times(name: str, target: str) -> None:
    """Counted in products, over all 64 samples; ranges, roundings and biases share computed operands."""
    model, item = (built(name)[0], NETWORKS[name].item) if name else (network(), (3, 16, 16))
    inputs = list(torch.randn(64, *item, generator=torch.Generator().manual_seed(0)).split(16))
    with FlopCounterMode(display=False) as once, torch.no_grad():
        [model(batch) for batch in inputs]
    prepared = fxq.prepare(model, inputs[0], target)
    with FlopCounterMode(display=False) as counted:
        fxq.calibrate(prepared, inputs, show_progress=False)
    assert 1 <= counted.get_total_flops() / once.get_total_flops() <= 8


def test_calibration_and_searches_take_the_table_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, find = list[str](), Run._change

    def noting(run: Run, step: Step) -> Any:
        taken.append(step.name)
        return find(run, step)

    monkeypatch.setattr(Run, "_change", noting)
    prepared = contract.calibrated(network(), batches(), "bayes-e", FOUR_BITS)
    every = [each.name for each in STEPS if each.find is not None]
    assert taken == every
    chosen = [line.partition(":")[0] for line in prepared.meta["chosen"]]
    assert chosen == [name for name in taken if name != "narrowing"]  # nothing is lost
    assert all(f"calibration: {line}" in fxq.explain(fxq.convert(prepared)) for line in prepared.meta["chosen"])
    taken.clear()
    with monkeypatch.context() as patch:
        patch.setattr(tune, "REMEDIES", {"observers": tune.REMEDIES["observers"]})
        patch.setattr(tune, "OBSERVERS", {name: tune.OBSERVERS[name] for name in ("Histogram", "MinMax")})
        fxq.tune(network(), batches(), "bayes-e", FOUR_BITS, tolerance=0.0, show_progress=False)
    assert taken[: len(every)] == every
    sampled = [each.name for each in BY_SAMPLES if each.find is not None]
    assert taken[len(every) :] == sampled * ((len(taken) - len(every)) // len(sampled)) != []
    assert {each.name for each in STEPS if each.remedies is not None or each.learn is not None} < set(tune.REMEDIES)

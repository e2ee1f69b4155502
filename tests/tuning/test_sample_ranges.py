"""Ranges by the noise of each sample: taken where the outputs are better for it, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.quantization.observers.ranges import Method
from fxquant.tuning import effects, first_samples
from tests.shared import contract

COUNT = 96
CORNER_FACTOR = 24.0


class Classifier(nn.Module):
    """Layers whose values grow with the corner of an image. What they come to is bounded, as in classifiers, or decides the output."""

    def __init__(self, bounded: bool = True) -> None:
        super().__init__()
        self.bounded = bounded
        generator = torch.Generator().manual_seed(0)
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 8)
        for layer in (self.stem, self.body, self.head):
            layer.weight.data.normal_(0, layer.weight[0].numel() ** -0.5, generator=generator)
            layer.bias.data.zero_()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Any:
        x = self.body(self.stem(x).relu())
        return self.head((torch.clamp(x, -0.25, 0.25) if self.bounded else x).mean((2, 3)))


def images(factor: float, seed: int = 0) -> Tensor:
    """Return 96 images (96, 3, 16, 16); in every third one the corner of 2 × 2 pixels is multiplied by `factor`."""
    made = torch.randn(COUNT, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    made[::3, :, :2, :2] *= factor
    return made


def calibrated(batches: list[Tensor], target: str, balance: bool | None, bounded: bool = True) -> fx.GraphModule:
    return contract.calibrated(Classifier(bounded).eval(), batches, target, correct_bias=False, choose_ranges=balance)


def noise(prepared: fx.GraphModule, inputs: Tensor) -> float:
    wanted = Classifier().eval()(inputs)
    return float((prepared(inputs) - wanted).square().sum() / wanted.square().sum())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_two_populations_are_served_alike(target: str, caplog: pytest.LogCaptureFixture) -> None:
    batches = list(images(CORNER_FACTOR).split(16))
    with caplog.at_level("INFO", "fxquant"), torch.no_grad():
        usual, chosen = (calibrated(batches, target, balance) for balance in (False, None))
        assert first_samples.method_of(chosen) is not Method.ERROR
        assert first_samples.method_of(usual) is Method.ERROR
        assert noise(chosen, images(CORNER_FACTOR, seed=1)) < 0.95 * noise(usual, images(CORNER_FACTOR, seed=1))
        contract.assert_validate_is_integer(chosen, fxq.convert(chosen), batches[0])
    assert sum("ranges are chosen by" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_samples_whose_largest_values_decide_keep_them(target: str, caplog: pytest.LogCaptureFixture) -> None:
    """Clipping would be worse, so that every scale is the one of the squared error."""
    batches = list(images(CORNER_FACTOR).split(16))
    with caplog.at_level("INFO", "fxquant"), torch.no_grad():
        usual, chosen = (calibrated(batches, target, balance, bounded=False) for balance in (False, None))
    assert first_samples.method_of(chosen) is Method.ERROR
    assert fxq.qparams(chosen) == fxq.qparams(usual)
    assert any("ranges are chosen by the squared error of all samples" in line for line in caplog.messages)


@pytest.mark.usefixtures("default_outputs")
def test_fewer_samples_choose_nothing_unless_asked() -> None:
    few = list(images(CORNER_FACTOR)[:32].split(16))
    with torch.no_grad():
        usual, unasked, asked = (calibrated(few, "bayes-e", balance) for balance in (False, None, True))
    assert fxq.qparams(unasked) == fxq.qparams(usual)
    assert fxq.qparams(asked) != fxq.qparams(usual)
    last = "head"
    assert fxq.qparams(asked)[last] == fxq.qparams(usual)[last], "an output of the model keeps its range"


@pytest.mark.nightly
def test_a_calibration_that_goes_on_ends_as_one_call() -> None:
    batches = list(images(CORNER_FACTOR).split(16))
    with torch.no_grad():
        once, twice = calibrated(batches, "bayes-e", None), calibrated(batches[:4], "bayes-e", None)
        fxq.calibrate(twice, batches[4:], options=fxq.Options(correct_bias=False), show_progress=False)
    assert first_samples.method_of(once) is not Method.ERROR
    assert fxq.qparams(once) == fxq.qparams(twice)


def test_an_interrupted_choice_leaves_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = list(images(CORNER_FACTOR).split(16))
    with torch.no_grad():
        usual = calibrated(batches, "bayes-e", False)

        def interrupted(self: Any) -> effects.Noise:
            if first_samples.method_of(self.prepared) is not Method.ERROR:
                raise KeyboardInterrupt
            return effects.Noise((1.0,), (1.0,))

        monkeypatch.setattr("fxquant.tuning.first_samples.FloatOutputs.measure", interrupted)
        prepared = fxq.prepare(Classifier().eval(), batches[0], "bayes-e")
        with pytest.raises(KeyboardInterrupt):
            fxq.calibrate(prepared, batches, options=fxq.Options(correct_bias=False), show_progress=False)
    assert fxq.qparams(prepared) == fxq.qparams(usual)


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_one_sample_does_not_choose_for_all_others(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of 96 has values that every method but min-max cuts off, and most of the squared error at the outputs."""
    batch = torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch[17] *= 300
    with torch.no_grad():
        chosen = calibrated(list(batch.split(16)), target, None, bounded=False)
        assert first_samples.method_of(chosen) is Method.ERROR
        monkeypatch.setattr(first_samples, "FEWEST", 0)
        assert first_samples.method_of(calibrated(list(batch.split(16)), target, None, bounded=False)) is Method.MIN_MAX

"""Ranges by the noise of each sample, and ranges that a few large values make too coarse: changed where the outputs are better for it."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.accuracy import measure, ranges
from fxquant.ops.core.composite import QUANTIZE
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import MinMaxObserver
from fxquant.quantization.observers.ranges import Method
from tests.shared import contract
from tests.shared.networks import Network, sqnr

COUNT = 96
CORNER_FACTOR = 24.0


class Classifier(nn.Module):
    """Layers whose values grow with the corner of an image. The result is clamped, as in classifiers, or decides the output."""

    def __init__(self, bounded: bool = True) -> None:
        super().__init__()
        self.bounded = bounded
        generator = torch.Generator().manual_seed(0)
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 8)
        for layer in (self.stem, self.body, self.head):
            layer.weight.data.normal_(0, layer.weight[0].numel() ** -0.5, generator=generator)
            layer.bias.data.zero_()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Any:
        x = self.body(self.stem(x).relu())
        return self.head((torch.clamp(x, -0.25, 0.25) if self.bounded else x).mean((2, 3)))


def images(factor: float, seed: int = 0) -> Tensor:
    """Return 96 images (96, 3, 16, 16); in every third one the corner of 2 × 2 pixels is multiplied by `factor`."""
    values = torch.randn(COUNT, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    values[::3, :, :2, :2] *= factor
    return values


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
        assert ranges.method_of(chosen) is not Method.ERROR
        assert ranges.method_of(usual) is Method.ERROR
        assert noise(chosen, images(CORNER_FACTOR, seed=1)) < 0.95 * noise(usual, images(CORNER_FACTOR, seed=1))
        contract.assert_validate_is_integer(chosen, fxq.convert(chosen), batches[0])
    assert sum("ranges are chosen by" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_samples_whose_largest_values_decide_keep_them(target: str, caplog: pytest.LogCaptureFixture) -> None:
    """Clipping would be worse, so that every scale is the one of the squared error."""
    batches = list(images(CORNER_FACTOR).split(16))
    with caplog.at_level("INFO", "fxquant"), torch.no_grad():
        usual, chosen = (calibrated(batches, target, balance, bounded=False) for balance in (False, None))
    assert ranges.method_of(chosen) is Method.ERROR
    assert fxq.qparams(chosen) == fxq.qparams(usual)
    assert any("ranges are chosen by the squared error of all samples" in line for line in caplog.messages)


@pytest.mark.usefixtures("default_outputs")
def test_fewer_samples_choose_nothing_unless_asked() -> None:
    few = list(images(CORNER_FACTOR)[:15].split(5))
    with torch.no_grad():
        usual, unasked, asked = (calibrated(few, "bayes-e", balance) for balance in (False, None, True))
    assert fxq.qparams(unasked) == fxq.qparams(usual)
    assert fxq.qparams(asked) != fxq.qparams(usual)
    last = "head"
    assert fxq.qparams(asked)[last] == fxq.qparams(usual)[last], "an output of the model keeps its range"


def test_an_interrupted_choice_leaves_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = list(images(CORNER_FACTOR).split(16))
    with torch.no_grad():
        usual = calibrated(batches, "bayes-e", False)

        def interrupted(self: Any) -> measure.Noise:
            if ranges.method_of(self.prepared) is not Method.ERROR:
                raise KeyboardInterrupt
            return measure.Noise((1.0,), (1.0,))

        monkeypatch.setattr("fxquant.accuracy.measure.FloatOutputs.measure", interrupted)
        prepared = fxq.prepare(Classifier().eval(), batches[0], "bayes-e")
        with pytest.raises(KeyboardInterrupt):
            fxq.calibrate(prepared, batches, options=fxq.Options(correct_bias=False), show_progress=False)
        fxq.calibrate(prepared, [], options=fxq.Options(correct_bias=False, choose_ranges=False), show_progress=False)
    assert fxq.qparams(prepared) == fxq.qparams(usual)


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_one_sample_does_not_choose_for_all_others(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of 96 has values that every method but min-max cuts off, and most of the squared error at the outputs."""
    batch = torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch[1] *= 300  # it is among those that judge
    with torch.no_grad():
        chosen = calibrated(list(batch.split(16)), target, None, bounded=False)
        assert ranges.method_of(chosen) is Method.ERROR
        monkeypatch.setattr(ranges, "FEWEST", 0)
        assert ranges.method_of(calibrated(list(batch.split(16)), target, None, bounded=False)) is Method.MIN_MAX


# ---- ranges of inputs ------------------------------------------------------------------------------------------------------
def saturating(bounded: bool) -> nn.Module:
    """Large values do the same from a certain size on, or count in full."""
    generator = torch.Generator().manual_seed(0)
    first, last = nn.Linear(16, 32), nn.Linear(32, 8)
    for layer, size in ((first, 1.0), (last, 0.2)):
        layer.weight.data.normal_(0, size, generator=generator)
        layer.bias.data.zero_()
    return Network(lambda s, x: s.last(torch.tanh(s.first(x)) if bounded else s.first(x)), first=first, last=last).eval()


def powers(seed: int, count: int = 64) -> Tensor:
    """Small values, after one that is 0 or large."""
    generator = torch.Generator().manual_seed(seed)
    spectra = 0.5 * torch.rand(count, 16, generator=generator)
    spectra[:, 0] = torch.where(spectra[:, 0] < 0.25, 0, 200 * spectra[:, 0])
    return spectra


def with_powers(model: nn.Module, target: str = "bayes-e", qconfig: fxq.QConfig | None = None, **options: bool) -> fx.GraphModule:
    return contract.calibrated(model, list(powers(0).split(16)), target, qconfig, **options)


def range_of(prepared: fx.GraphModule) -> float:
    scale = fxq.qparams(prepared)["x_quantize"]
    return scale[0] if isinstance(scale, tuple) else scale


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86", "bernoulli2"])
def test_a_range_is_narrowed_where_large_values_saturate(target: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = saturating(bounded=True), powers(1)
    with caplog.at_level("INFO", "fxquant"), torch.no_grad():
        usual, narrow = with_powers(model, target, choose_ranges=False), with_powers(model, target)
        assert range_of(narrow) <= range_of(usual) / 4
        assert sqnr(model(inputs), narrow(inputs)) > sqnr(model(inputs), usual(inputs)) + 6
    assert sum("the range of input x is multiplied by" in message for message in caplog.messages) == 1
    assert torch.equal(fxq.convert(narrow)(inputs), narrow(inputs))


def magnitudes(x: Tensor) -> Tensor:
    return (x[:, :16].square() + x[:, 16:].square()).sqrt()


@pytest.mark.parametrize(("target", "least"), [("bayes-e", 11), ("x86", 30)])
def test_magnitudes_keep_small_values(target: str, least: float) -> None:
    """Squares of 16 bits are narrowed; where there are none, the root of a sum of squares stays in float."""
    first, last = (nn.Linear(16, size, bias=False) for size in (32, 8))
    first.weight.data[::16] *= 100  # the channels that set the scale do the same at a tenth of their size
    model = Network(lambda s, x: s.last(torch.tanh(magnitudes(s.first(x)))), first=first, last=last).eval()
    batches, inputs = (torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    prepared = contract.calibrated(model, list(batches.split(16)), target)
    with torch.no_grad():
        assert sqnr(model(inputs), prepared(inputs)) > least
        assert torch.equal(fxq.convert(prepared)(inputs), prepared(inputs))


def test_it_stays_where_they_count_and_where_the_user_chose_the_range() -> None:
    prepared, usual = with_powers(saturating(bounded=False)), with_powers(saturating(bounded=False), choose_ranges=False)
    (quantizer,) = (each.output for each in quantized_operators(usual).values() if each.operator is QUANTIZE)
    quantizer.choose_by(ranges.method_of(prepared))
    assert range_of(prepared) == range_of(usual)
    whole = fxq.QConfig(input=fxq.ActivationConfig(observer=MinMaxObserver))
    assert range_of(with_powers(saturating(bounded=True), qconfig=whole)) == pytest.approx(powers(0).max() / 127.5)
    fixed = fxq.QConfig(input=fxq.ActivationConfig(scale=0.5))
    assert range_of(with_powers(saturating(bounded=True), qconfig=fixed)) == 0.5


def test_what_is_lost_all_the_same_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        with_powers(saturating(bounded=False))
    assert any("of input x that are not 0 become 0" in message for message in caplog.messages)


def test_samples_may_lie_along_another_dimension_in_batches_of_any_size() -> None:
    model = Network(lambda s, x: s.body(x.transpose(0, 1)), body=saturating(bounded=True)).eval()
    batches = [powers(0).unsqueeze(0).repeat(3, 1, 1)[:, :size] for size in (24, 24, 16, 9)]
    traced = fxq.prepare(model, batches[0], "bayes-e", options=fxq.Options(dynamic_shapes={"x": {1: "batch"}}))
    usual, narrow = (copy.deepcopy(traced) for _ in range(2))
    fxq.calibrate(usual, batches, options=fxq.Options(choose_ranges=False), show_progress=False)
    fxq.calibrate(narrow, batches, show_progress=False)
    assert range_of(narrow) <= range_of(usual) / 4

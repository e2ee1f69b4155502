"""Ranges that a few large values make too coarse: narrowed where the outputs are better for it, and only there."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.ops.core.composite import QUANTIZE
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import MinMaxObserver
from fxquant.tuning import first_samples
from tests.shared import contract
from tests.shared.networks import Network, sqnr


def network(bounded: bool) -> nn.Module:
    """Large values do the same from a certain size on, or count in full."""
    generator = torch.Generator().manual_seed(0)
    first, last = nn.Linear(16, 32), nn.Linear(32, 8)
    for layer, size in ((first, 1.0), (last, 0.2)):
        layer.weight.data.normal_(0, size, generator=generator)
        layer.bias.data.zero_()
    return Network(lambda s, x: s.last(torch.tanh(s.first(x)) if bounded else s.first(x)), first=first, last=last).eval()


def powers(seed: int, count: int = 64) -> Tensor:
    """Small values, behind one that is 0 or large."""
    generator = torch.Generator().manual_seed(seed)
    made = 0.5 * torch.rand(count, 16, generator=generator)
    made[:, 0] = torch.where(made[:, 0] < 0.25, 0, 200 * made[:, 0])
    return made


def calibrated(model: nn.Module, target: str = "bayes-e", qconfig: fxq.QConfig | None = None, **options: bool) -> fx.GraphModule:
    return contract.calibrated(model, list(powers(0).split(16)), target, qconfig, **options)


def range_of(prepared: fx.GraphModule) -> float:
    found = fxq.qparams(prepared)["x_quantize"]
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86", "bernoulli2"])
def test_a_range_is_narrowed_where_large_values_saturate(target: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = network(bounded=True), powers(1)
    with caplog.at_level("INFO", "fxquant"), torch.no_grad():
        usual, narrow = calibrated(model, target, choose_ranges=False), calibrated(model, target)
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


def test_it_stays_where_they_count() -> None:
    prepared, usual = calibrated(network(bounded=False)), calibrated(network(bounded=False), choose_ranges=False)
    (quantizer,) = (each.output for each in quantized_operators(usual).values() if each.operator is QUANTIZE)
    quantizer.choose_by(first_samples.method_of(prepared))
    assert range_of(prepared) == range_of(usual)


def test_it_stays_where_the_user_chose_the_range() -> None:
    whole = fxq.QConfig(input=fxq.ActivationConfig(observer=MinMaxObserver))
    assert range_of(calibrated(network(bounded=True), qconfig=whole)) == pytest.approx(powers(0).max() / 127.5)
    given = fxq.QConfig(input=fxq.ActivationConfig(scale=0.5))
    assert range_of(calibrated(network(bounded=True), qconfig=given)) == 0.5


def test_two_calibrations_end_as_one() -> None:
    one, two = (fxq.prepare(network(bounded=True), powers(0)[:16], "bayes-e") for _ in range(2))
    batches = list(powers(0).split(16))
    fxq.calibrate(one, batches, show_progress=False)
    for part in (batches[:1], batches[1:]):
        fxq.calibrate(two, part, show_progress=False)
    assert contract.same_state(one, two)


def test_what_is_lost_all_the_same_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        calibrated(network(bounded=False))
    assert any("of input x that are not 0 become 0" in message for message in caplog.messages)


def test_samples_may_lie_along_another_dimension_in_batches_of_any_size() -> None:
    model = Network(lambda s, x: s.body(x.transpose(0, 1)), body=network(bounded=True)).eval()
    batches = [powers(0).unsqueeze(0).repeat(3, 1, 1)[:, :size] for size in (24, 24, 16, 9)]
    traced = fxq.prepare(model, batches[0], "bayes-e", options=fxq.Options(dynamic_shapes={"x": {1: "batch"}}))
    usual, narrow = (copy.deepcopy(traced) for _ in range(2))
    fxq.calibrate(usual, batches, options=fxq.Options(choose_ranges=False), show_progress=False)
    fxq.calibrate(narrow, batches, show_progress=False)
    assert range_of(narrow) <= range_of(usual) / 4

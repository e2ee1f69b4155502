"""Weights that are exactly 0 stay exactly 0, whatever rounds the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.accuracy.moments import flipped, flipped_together
from fxquant.numerics.rounding import AdaptiveRounding

Method = Callable[[fx.GraphModule, list[Tensor]], Any]


def network() -> nn.Sequential:
    """Convolutions with and without groups and a batch norm, and a linear layer; many weights are pruned, one channel whole."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, groups=4), nn.ReLU()]
    model = nn.Sequential(*first, nn.Conv2d(12, 6, 1), nn.Flatten(), nn.Linear(96, 5)).eval()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            size = layer.weight.abs()
            with torch.no_grad():
                layer.weight.mul_(size > size.quantile(0.4))
                layer.weight[1] = 0
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(8, 3, 8, 8, generator=generator) for _ in range(8)]


def calibrated(method: str, bits: str = "int4", target: str = "bayes-e", **options: Any) -> fx.GraphModule:
    weight = fxq.WeightConfig(bits, **options)
    prepared = fxq.prepare(network(), batches()[0], target, fxq.QConfig(weight=weight))
    by_calibration = {"calibrate": None, "all layers": True}
    rounds = by_calibration.get(method, False)
    fxq.calibrate(prepared, batches(), options=fxq.Options(round_weights=rounds, correct_bias=False), show_progress=False)
    if method not in by_calibration:
        METHODS[method](prepared, batches())
    return prepared


METHODS: dict[str, Method] = {
    "round_weights": lambda p, b: fxq.tuning.round_weights(p, b, show_progress=False),
    "adaround": lambda p, b: fxq.tuning.adaround(p, b, steps=40, show_progress=False),
    "distill": lambda p, b: fxq.tuning.distill(p, b, steps=40, show_progress=False),
}


def returned(prepared: fx.GraphModule) -> int:
    """How many weights are 0 in float and another integer."""
    constants = fxq.convert(prepared, kernels="reference").state_dict()
    integers = [value for name, value in constants.items() if name.endswith("weight")]
    weights = [layer.weight for layer in network() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [value.shape for value in integers] == [weight.shape for weight in weights]
    return sum(int(((weight == 0) & (value != 0)).sum()) for weight, value in zip(weights, integers, strict=True))


def roundings(prepared: fx.GraphModule) -> list[AdaptiveRounding]:
    return [module for module in prepared.modules() if isinstance(module, AdaptiveRounding)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", ["calibrate", "all layers", *METHODS])
def test_no_method_moves_a_pruned_weight(method: str) -> None:
    prepared = calibrated(method)
    assert roundings(prepared)
    assert returned(prepared) == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{"target": "x86"}, {"bits": "int8"}, {"per_channel": False}, {"power_of_two": True}], ids=str)
def test_nor_does_any_grid(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.accuracy.measure.is_lower", lambda *_: True)  # whatever the outputs say of roundings of 8 bits
    prepared = calibrated("all layers", **options)
    assert roundings(prepared)
    assert returned(prepared) == 0


def test_a_weight_that_is_pruned_after_calibration_becomes_zero() -> None:
    prepared = calibrated("calibrate")
    weights = [value for value in prepared.parameters() if value.dim() > 1]
    with torch.no_grad():
        for value in weights:
            value.mul_(torch.rand(value.shape, generator=torch.Generator().manual_seed(2)) > 0.5)
    constants = fxq.convert(prepared, kernels="reference").state_dict()
    integers = [value for name, value in constants.items() if name.endswith("weight")]
    assert all(int(integer[weight == 0].count_nonzero()) == 0 for weight, integer in zip(weights, integers, strict=True))


def test_the_rounding_is_chosen_with_the_zeros_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    real = 3 * torch.randn(4, 24, generator=generator)
    real *= torch.rand(4, 24, generator=generator) > 0.5
    rows = torch.rand(200, 24, generator=generator)
    moment, effect = rows.t() @ rows / 200, torch.eye(4)
    alone = flipped(real.unsqueeze(0), moment.unsqueeze(0), -7, 7)[0]
    for found in (alone, flipped_together(torch.round(real).clamp(-7, 7), real, moment, effect, -7, 7)):
        assert not torch.equal(found, torch.round(real).clamp(-7, 7))
        assert int(found[real == 0].count_nonzero()) == 0

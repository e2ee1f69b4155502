"""The noise of outputs: what is not finite, and outputs of 0."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.accuracy.measure import FloatOutputs, Noise, best_of, is_lower, support
from fxquant.reporting.effects import noise
from tests.shared import contract
from tests.shared.networks import members

HALF = Noise((0.5,), (1.0,))
WANTED = torch.tensor([3.0, 4.0, 0.0])


def noise_of(changed: Tensor, wanted: Tensor = WANTED) -> Noise:
    return Noise.of([[wanted]], [[changed]])


def test_noise_is_the_squared_error_over_the_power_of_what_is_finite_in_the_reference_pooled_over_samples() -> None:
    measured = noise_of(torch.tensor([3.0, 4.0, 1.0]))
    assert (measured.pooled, measured.parts) == (1 / 25, (1 / 25,))
    assert noise_of(WANTED).pooled == 0
    wanted = torch.tensor([3.0, math.inf, math.nan, 4.0])
    assert noise_of(torch.tensor([3.0, math.inf, 7.0, 5.0]), wanted).pooled == 1 / 25
    # A sample without a signal does not decide.
    wanted, changed = ([[torch.tensor([value])] for value in values] for values in ((10.0, 0.01), (11.0, 0.02)))
    assert abs(Noise.of(wanted, changed).pooled - 1 / 100) < 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_no_longer_finite_is_the_worst_and_is_never_chosen(value: float) -> None:
    for changed in (torch.tensor([3.0, 4.0, value]), torch.full((3,), value)):
        measured = noise_of(changed)
        assert measured.pooled == math.inf
        assert not is_lower(measured, HALF)
        assert best_of({"usual": HALF, "broken": measured}, "usual") == "usual"


def test_advice_leaves_out_what_is_not_finite_in_either_form_and_outputs_of_zero() -> None:
    wanted = [torch.tensor([3.0, 4.0, 1.0]), torch.zeros(2), torch.tensor([1, 2])]
    assert noise(wanted, [torch.tensor([3.0, 5.0, math.nan]), torch.ones(2), torch.tensor([1, 3])]) == 1 / 25


# ---- outputs and their parts -----------------------------------------------------------------------------------------------
@members(lambda: dict(boxes=nn.Conv2d(3, 4, 1), scores=nn.Conv2d(3, 6, 1)))
def Detector(self, x: Tensor) -> tuple[Tensor, ...]:
    """Boxes in pixels and scores below 1, concatenated and moved, beside another output."""
    result = torch.cat([self.boxes(x) * 100, self.scores(x).sigmoid()], 1)
    return result.flatten(2).permute(0, 2, 1), x.argmax(1), self.boxes(x).relu().flatten(1)


@pytest.mark.parametrize("target", ["x86", "bayes-e"])
def test_parts_of_a_concatenated_output_are_judged_apart(target: str) -> None:
    inputs = torch.randn(4, 3, 8, 8)
    prepared = contract.calibrated(Detector().eval(), [inputs], target)
    outputs = FloatOutputs(prepared, [[inputs], [inputs[:2]]])
    assert outputs.parts is not None
    assert [label.shape for label in outputs.parts.labels] == [(1, 1, 10), (1, 1)]
    assert len(outputs.parts.names) == 3

    def without_scores(chunk: Sequence[Any]) -> list[Tensor]:
        result, *rest = outputs.float_form(chunk)
        return [torch.cat([result[..., :4], torch.zeros_like(result[..., 4:])], -1), *rest]

    assert outputs.noise(without_scores).parts == (0.0, 1.0, 0.0)


def test_a_step_with_which_one_part_loses_is_not_taken() -> None:
    usual, better, mixed = (Noise(errors, (1.0, 1.0)) for errors in ((0.1, 0.001), (0.08, 0.001), (0.001, 0.0011)))
    assert is_lower(better, usual)
    assert mixed.level > better.level
    assert best_of({"usual": usual, "mixed": mixed, "better": better}, "usual") == "better"


@pytest.mark.parametrize("huge", [1, 4, 16])
def test_support_is_the_number_of_samples_that_gain(huge: int) -> None:
    """Sixteen samples in chunks of four."""
    wanted = torch.arange(1.0, 17.0)
    before, after = (
        Noise.of([[part] for part in wanted.split(4)], [[part] for part in (wanted + error).split(4)], [4] * 4)
        for error in (torch.ones(16), (torch.arange(16) >= huge).float())
    )
    assert abs(support(after, before) - huge) < 1e-6
    assert support(before, after) == 0


def test_samples_are_those_of_the_batch_of_the_inputs_and_sensitivity_estimates_by_parts() -> None:
    inputs = torch.randn(4, 3, 8, 8)
    outputs = FloatOutputs(contract.calibrated(Detector().eval(), [inputs], "x86"), [[inputs], [inputs[:2]]])
    measured = outputs.measure()
    assert [part.shape for part in measured.samples] == [(6,)] * 3
    assert all(torch.equal(part[:2], part[4:]) for part in measured.samples)
    inputs = torch.randn(4, 3, 8, 8)
    sensitivity = fxq.search.sensitivity(Detector().eval(), [inputs], "bayes-e", options=fxq.Options(measured=False), show_progress=False)
    assert {"boxes.weight", "scores.weight"} <= {tensor.name for tensor in sensitivity.tensors}

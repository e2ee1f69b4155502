"""The noise of outputs: what is not finite, and outputs of 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxquant.reporting.effects import noise
from fxquant.tuning.effects import Noise, best_of, is_lower

WANTED = torch.tensor([3.0, 4.0, 0.0])


def noise_of(changed: Tensor, wanted: Tensor = WANTED) -> Noise:
    return Noise.of([[wanted]], [[changed]])


def test_noise_is_the_squared_error_over_the_power() -> None:
    measured = noise_of(torch.tensor([3.0, 4.0, 1.0]))
    assert measured.pooled == measured.mean == 1 / 25
    assert measured.outputs == (1 / 25,)
    assert noise_of(WANTED).mean == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_no_longer_finite_is_the_worst_and_is_never_chosen(value: float) -> None:
    for changed in (torch.tensor([3.0, 4.0, value]), torch.full((3,), value)):
        measured = noise_of(changed)
        assert measured.pooled == measured.mean == math.inf
        assert not is_lower(measured.mean, 0.5)
        assert best_of({"usual": 0.5, "broken": measured.mean}, "usual") == "usual"


def test_values_that_are_not_finite_in_the_reference_count_in_nothing() -> None:
    wanted = torch.tensor([3.0, math.inf, math.nan, 4.0])
    assert noise_of(torch.tensor([3.0, math.inf, 7.0, 5.0]), wanted).mean == 1 / 25


def test_advice_leaves_out_what_is_not_finite_in_either_form_and_outputs_of_zero() -> None:
    wanted = [torch.tensor([3.0, 4.0, 1.0]), torch.zeros(2), torch.tensor([1, 2])]
    assert noise(wanted, [torch.tensor([3.0, 5.0, math.nan]), torch.ones(2), torch.tensor([1, 3])]) == 1 / 25

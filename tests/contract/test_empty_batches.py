"""An empty batch gives an empty result in every form, or is refused with the reason, and leaves every statistic as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from tests.shared.contract import compiled


class Wide(nn.Module):
    """Sums that can exceed 2^24, with and without a batch norm and a residual, and a table of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.same = nn.Conv2d(256, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.linear = nn.Linear(2000, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y = torch.relu(self.same(y) + y)
        return self.linear(torch.sigmoid(y).flatten(1).repeat(1, 10))


BATCH = torch.randn(4, 256, 5, 5, generator=torch.Generator().manual_seed(0))
LEARNED = fxq.QConfig(fxq.ActivationConfig(training="learned"), weight=fxq.WeightConfig(training="learned"))
FROZEN = fxq.QConfig(fxq.ActivationConfig(training="frozen"))
WIDE = fxq.QConfig(fxq.ActivationConfig("int16"))
CASES: dict[str, tuple[str, Any]] = {
    "bayes-e": ("bayes-e", None), "nash-e": ("nash-e", None), "x86": ("x86", None), "qnnpack": ("qnnpack", None),
    "learned": ("x86", LEARNED), "frozen": ("bayes-e", FROZEN), "int16": ("nash-e", WIDE),
}  # fmt: skip


def network(case: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    torch.manual_seed(0)
    target, qconfig = CASES[case]
    prepared, integer = compiled(Wide().eval(), [BATCH], target, qconfig)
    return prepared, integer


def finite_state(model: fx.GraphModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if not (value.is_floating_point() and value.isnan().any())}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_an_empty_batch(case: str) -> None:
    prepared, integer = network(case)
    for form in (integer, integer, prepared):
        assert form(BATCH[:0]).shape == (0, 4)
    fxq.set_state(prepared, "float")
    assert prepared(BATCH[:0]).shape == (0, 4)
    fxq.set_state(prepared, "train")
    prepared(BATCH)
    before = finite_state(prepared)
    with pytest.raises(fxq.FxQuantError, match=r"cannot be observed|cannot use the statistics"):
        prepared(BATCH[:0])
    after = prepared.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    fxq.freeze(prepared)
    output = prepared(BATCH[:0])
    assert output.shape == (0, 4)
    output.sum().backward()
    assert all(float(each.grad.abs().sum()) == 0 for each in prepared.parameters() if each.grad is not None)
    fxq.set_state(prepared, "validate")
    assert fxq.verify(prepared, fxq.convert(prepared), [BATCH], show_progress=False)

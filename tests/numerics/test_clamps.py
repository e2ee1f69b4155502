"""Limits of a clamp that cross, or are infinite, NaN or tensors: PyTorch's meaning, in every form of the model and by every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.contract import compiled
from tests.shared.networks import Network


def limited(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A convolution, and what is done with its output."""
    low, high = (nn.Buffer(torch.full((8, 1, 1), value)) for value in (1.0, -0.5))
    return Network(lambda s, x: function(s, s.conv(x)), conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1), low=low, high=high)


CROSSING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda model, x: torch.clamp(x, 1.0, -1.0), "positive": lambda model, x: x.clip(0.5, 0.2),
    "in place, read by a layer": lambda model, x: model.last(x.clamp_(0.9, -0.9)),
    "two clamps": lambda model, x: x.clamp(min=1.0).clamp(max=-1.0), "behind relu": lambda model, x: torch.relu(x).clamp(3.0, 2.0),
    "before relu": lambda model, x: torch.relu(x.clamp(1.0, -1.0)), "tensors": lambda model, x: torch.clamp(x, model.low, model.high),
    "of a mean": lambda model, x: x.mean((2, 3)).clamp(0.3, 0.1), "of a sum": lambda model, x: (x + x).clamp(0.3, 0.1),
    "of a product": lambda model, x: (x * x.sigmoid()).clamp(0.3, 0.1), "of a pooling": lambda model, x: F.avg_pool2d(x, 2).clamp(0.3, 0.1),
    "alone": lambda model, x: x.flip(1).clamp(0.3, -0.1), "integers": lambda model, x: x.argmax(1).clamp(5, 2) + x.argmin(1).clamp(3, 1),
    "equal limits": lambda model, x: x.clamp(0.25, 0.25), "hardtanh": lambda model, x: F.hardtanh(x, -1.0, 0.8),
    "no limits": lambda model, x: x.clamp(-math.inf, math.inf),
}  # fmt: skip


@pytest.mark.sweep(8)
@pytest.mark.parametrize("form", CROSSING)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli", "x86"])
def test_limits_that_cross_leave_the_upper_one(target: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = limited(CROSSING[form]).eval(), torch.randn(2, 3, 8, 8)
    prepared, integer = compiled(model, [x], target)
    wanted = integer(x)  # by its primitives
    assert torch.equal(integer(x), wanted)
    assert torch.equal(integer(x), wanted)
    assert torch.equal(prepared(x), wanted)
    assert (wanted - model(x)).abs().max() <= 0.05 * model(x).abs().max() + 128 * 2.0**-23  # the scale of what is 0 everywhere
    if target == "bayes-e" or form == "function":
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x], show_progress=False)
        assert fxq.export.export_c(integer, tmp_path / "model.c").exists()


@pytest.mark.parametrize("name", ["min", "max"])
def test_a_bound_that_is_nan_leaves_the_clamp_in_float(name: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared, integer = compiled(limited(lambda model, x: x.clamp(**{name: math.nan})).eval(), [x])
    assert f"its bound '{name}' is NaN" in fxq.explain(integer)
    for form in (integer, integer, prepared):
        assert bool(torch.isnan(form(x)).all())


@pytest.mark.parametrize("bounds", [(math.inf, None), (None, -math.inf), (math.inf, 1.0), (-1.0, -math.inf)])
def test_infinite_bounds_on_the_wrong_side(bounds: tuple[float | None, float | None]) -> None:
    model, x = limited(lambda model, x: x.clamp(*bounds)).eval(), torch.randn(2, 3, 8, 8)
    if bounds == (math.inf, 1.0):  # they cross, and leave 1
        assert (compiled(model, [x]).integer(x) - 1.0).abs().max() < 0.01
        return
    with pytest.raises(fxq.errors.CalibrationError, match="infinite values"):
        compiled(model, [x])


def test_training_with_limits_that_cross() -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared, _ = compiled(limited(lambda model, x: model.last(x.clamp(1.0, -1.0))).eval(), [x])
    fxq.set_state(prepared, "train")
    fxq.freeze(prepared)
    output = prepared(x)
    output.sum().backward()
    fxq.set_state(prepared, "validate")
    assert torch.equal(output, prepared(x))
    assert float(prepared.get_parameter("conv.weight").grad.abs().sum()) == 0  # type: ignore[union-attr]
    assert float(prepared.get_parameter("last.bias").grad.abs().sum()) > 0  # type: ignore[union-attr]

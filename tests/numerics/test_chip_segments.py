"""Functions of 16 bits by segments, against what the vendor's simulator gave, and the ranges that a softmax chooses for them."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxquant as fxq
from fxquant.errors import ExportError
from fxquant.numerics import grids
from fxquant.numerics.grids import ACTIVATION_TYPES, Grid, Segments, by_segments, wraps
from fxquant.ops.elementwise.table import SEGMENTS, segments_of
from tests.shared.networks import Network

RECORDED = Path(__file__).parents[1] / "golden" / "silicon" / "segments.npz"
INT16 = ACTIVATION_TYPES["int16"]
KEPT = torch.cat([torch.arange(-32768, 32768, 127), torch.tensor([32767])])
WIDE = fxq.QConfig(fxq.ActivationConfig("int16"))


def recorded() -> list[Any]:
    with np.load(RECORDED) as arrays:
        about = json.loads(bytes(arrays["about"]).decode())
        values = [torch.from_numpy(arrays[str(index)]) for index in range(len(about))]
    return [pytest.param(*each, value, id=f"{index}-{each[0]}") for index, (each, value) in enumerate(zip(about, values, strict=True))]


def form_of(name: str, settings: dict[str, Any]) -> Segments | None:
    if name == "shifted":
        return segments_of(settings["function"], settings["factor"], settings["offset"], tuple(settings["settings"].items()))
    return segments_of(name, 1, 0, tuple(settings.items()))


@pytest.mark.parametrize(("name", "settings", "scale", "step", "expected"), recorded())
def test_segments_give_the_simulators_integers(name: str, settings: dict[str, Any], scale: float, step: float, expected: Tensor) -> None:
    form = form_of(name, settings)
    assert form is not None
    with mock.patch.object(grids, "_evaluate", None if grids.OFFERS.first(KEPT) else grids._evaluate):  # in C, where there is a compiler
        assert torch.equal(by_segments(form, torch.tensor(scale), Grid(INT16, torch.tensor(step)), KEPT), expected)
    with mock.patch.object(grids.OFFERS, "known", []):
        assert torch.equal(by_segments(form, torch.tensor(scale), Grid(INT16, torch.tensor(step)), KEPT), expected)


def test_constants_are_those_that_the_vendors_compiler_wrote() -> None:
    with np.load(RECORDED.with_name("tables.npz")) as arrays:
        about = json.loads(bytes(arrays["about"]).decode())
        expected = [[torch.from_numpy(arrays[part][index]) for part in ("starts", "lines", "entries")] for index in range(len(about))]
    for (name, offset, settings, scale, step), (starts, lines, entries) in zip(about, expected, strict=True):
        form, built = segments_of(name, 1, offset, tuple(settings.items())), list[grids.Lines]()
        assert form is not None
        with (
            mock.patch.object(grids.OFFERS, "known", []),
            mock.patch.object(grids, "_evaluate", lambda integers, own: built.append(own) or integers),  # noqa: B023
        ):
            by_segments(form, torch.tensor(scale), Grid(INT16, torch.tensor(step)), KEPT)
        assert torch.equal(built[0].starts, starts.long())
        assert torch.equal(built[0].lines, lines.long())
        assert torch.equal(built[0].entries, entries.long())


def test_every_function_with_segments_is_recorded() -> None:
    names = {param.values[0] for param in recorded()}
    assert names - {"shifted"} == set(SEGMENTS)


def integer_of(function: Any, x: Tensor, target: str = "bayes-e") -> torch.fx.GraphModule:
    model = Network(lambda self, x: function(x)).eval()
    return fxq.quantize(model, [x[:16], x[16:]], target, WIDE, options=fxq.Options(integer_tail=True)).integer


def test_a_target_without_segments_keeps_the_whole_function() -> None:
    x = 2 * torch.randn(32, 8, 8, 8)
    error = {target: float((integer_of(torch.sigmoid, x, target)(x) - x.sigmoid()).square().mean()) for target in ("bayes-e", "nash-e")}
    assert error["nash-e"] < error["bayes-e"] < 4 * error["nash-e"]


@pytest.mark.parametrize("scores", [64, 197])
def test_a_softmax_keeps_55_decibels_by_segments(scores: int) -> None:
    x = 2 * torch.randn(32, 4, 16, scores)
    expected = x.softmax(-1).double()
    error = expected - integer_of(lambda x: F.softmax(x, -1), x)(x).double()
    assert 10 * math.log10(expected.square().sum() / error.square().sum()) > 55


@pytest.mark.parametrize(
    ("function", "low", "because"),
    [
        (F.hardswish, -8, "has other segments"),
        (lambda x: torch.exp(3 * x - 6), -8, "has other segments"),
        (F.relu6, 8, "a table that is a step off"),
        (lambda x: torch.add(x, x + 1, alpha=0.3), 8, "alpha at 8 bits"),
        (torch.exp, -15, "lowest integer"),
    ],
)
def test_what_the_chip_does_not_have_is_refused(function: Any, low: float, because: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be carried to the chip") as refused:
        fxq.board.export_horizon(integer_of(function, low * torch.rand(32, 8, 8, 8)), tmp_path)
    assert because in refused.value.because


def test_an_exponential_within_its_range_does_not_wrap() -> None:
    form: Any = segments_of("exp", 1, 0, ())
    assert not wraps(form, torch.tensor(6 / 32767), torch.tensor(math.exp(6) / 32767))


def test_a_sum_is_on_steps_that_the_chip_has(tmp_path: Path) -> None:
    linear = torch.nn.Linear(8, 6)
    linear.weight.data *= 2.0**-24
    integer = fxq.quantize(linear.eval(), [torch.randn(16, 8)], "bayes-e").integer
    scales = next(value for name, value in integer.state_dict().items() if name.endswith("dequantize.scale"))
    assert float(scales.min()) >= 2.0**-23
    fxq.board.export_horizon(integer, tmp_path)

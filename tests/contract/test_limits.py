"""Operators that discard or insert values: no scale covers a discarded value, and none is too small for an inserted one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.errors import ExportError
from fxquant.numerics.grids import EVERYTHING, float32
from fxquant.ops import BY_NAME
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, held, sqnr, to_train

TARGETS = ("bayes-e", "nash-e", "bernoulli")  # both arithmetics, and the one whose scales are powers of two
# A uniform int8 grid over a normal tensor's range leaves 38 to 44 dB; a power-of-two grid, and floor, some 10 dB less.
LEAST = {target: 22.0 if target == "bernoulli" else 32.0 for target in TARGETS}


def normal() -> Tensor:
    return torch.randn(4, 3, 16, 16)


def spikes() -> Tensor:
    """One element of a hundred is a thousand times larger."""
    return torch.where(torch.rand(4, 3, 16, 16) < 0.01, torch.randn(4, 3, 16, 16) * 1000, normal())


def around(form: Callable[[Any, Tensor], Any]) -> nn.Module:
    """`form` of a convolution, a pool and the input."""
    return Network(form, conv=nn.Conv2d(3, 8, 3, padding=1), pool=nn.MaxPool2d(2)).eval()


LIMITED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Tensor]]] = {
    "a clamp of the input": (lambda m, x: m.conv(x.clamp(-1, 1)), spikes),
    "relu6 of the input": (lambda m, x: m.conv(F.relu6(x)), spikes),
    "hardtanh after moves": (lambda m, x: m.conv(F.hardtanh(x.flip(3).permute(0, 1, 3, 2).contiguous())), spikes),
    "relu of what is negative": (lambda m, x: m.conv(F.relu(x)), lambda: torch.where(torch.rand(4, 3, 16, 16) < 0.2, -1000.0, normal())),
    "clamp_min and clamp_max": (lambda m, x: m.conv(x.clamp_min(-1.0).clamp_max(2.0)), spikes),
    "a table": (lambda m, x: torch.exp(5 * m.conv(x)).clamp(max=1.0), normal),
    "two readers that limit": (lambda m, x: m.conv(x.clamp(-1, 1)) + m.conv(x.clamp(-2, 0.5)), spikes),
    "one reader of the input that limits, one that does not": (
        lambda m, x: m.conv(F.hardtanh(x)) + F.avg_pool2d(x * 1e-5, 3, 1, 1).sum(1, keepdim=True), spikes),
    "a pool between": (lambda m, x: m.conv(m.pool(x).clamp(-1, 1)), spikes),
    "hardsigmoid": (lambda m, x: m.conv(F.hardsigmoid(x)), spikes),
    "limits beyond the values": (lambda m, x: m.conv(x * 0.01).clamp_min(0.9) + x.clamp(4.0, 5.0).mean(1, keepdim=True), normal),
    "limits beyond the values of a shared input": (lambda m, x: m.conv(x) + x.clamp(min=6.0).mean(1, keepdim=True), normal),
    "joined": (lambda m, x: torch.cat([F.hardtanh(x), m.conv(F.hardtanh(x))], 1), spikes),
}  # fmt: skip


def quality(form: Callable[[Any, Tensor], Any], data: Callable[[], Tensor], target: str) -> float:
    model, batches = around(form), [data(), data()]
    return sqnr(model(batches[0]), compiled(model, batches, target).integer(batches[0]))


@pytest.mark.sweep(10)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LIMITED)
def test_no_scale_is_spent_on_what_is_thrown_away(name: str, target: str) -> None:
    assert quality(*LIMITED[name], target) > LEAST[target]


PADDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "larger": lambda m, x: F.pad(m.conv(x), (1, 1, 1, 1), value=5.0),
    "much larger, negative": lambda m, x: F.pad(x, (1, 0, 2, 1), value=-50.0),
    "twice": lambda m, x: F.pad(F.pad(m.conv(x), (1, 1), value=5.0), (0, 0, 1, 1), value=-7.0),
    "after a pool": lambda m, x: F.pad(m.pool(x), (2, 2, 2, 2), value=30.0),
    "cropped as well": lambda m, x: F.pad(x, (2, -1, 0, 0), value=20.0),
    "limited again": lambda m, x: m.conv(F.hardtanh(F.pad(x, (1, 1, 1, 1), value=1e4))),
    "wins in a pool": lambda m, x: F.max_pool2d(F.pad(m.conv(x), (1, 1, 1, 1), value=5.0), 3),
    "alone in a window": lambda m, x: F.max_pool2d(F.pad(m.conv(x), (4, 4, 4, 4), value=-5.0), 2),
    "the smallest of channels": lambda m, x: F.pad(m.conv(x), (1, 1, 1, 1), value=-5.0).amax(1),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PADDED)
def test_a_padding_constant_lies_on_the_scale(name: str, target: str) -> None:
    assert quality(PADDED[name], normal, target) > LEAST[target] - 4  # the constant takes a share of the range


@pytest.mark.parametrize("value", [-1e9, -5.0, float("-inf")])
def test_a_padding_that_never_wins_a_pool_costs_nothing(value: float) -> None:
    """TensorFlow's "same" pooling: what is put around the tensor is there to lose."""
    x = normal()
    model = around(lambda m, x: F.max_pool2d(F.pad(m.conv(x), (0, 1, 0, 1), value=value), 3, 2))
    padded = compiled(model, [x])
    assert sqnr(model(x), padded.integer(x)) > 38
    assert [o.operator.name for o in quantized_operators(padded.prepared).values() if o.owns_output] == ["quantize", "conv2d"]


EVERY = {**{name: form for name, (form, _) in LIMITED.items()}, **PADDED}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", contract.TARGETS)
def test_all_forms_are_equal(target: str, tmp_path: Path) -> None:
    x = spikes()[:, :, :8, :8]
    model = around(lambda m, x: [form(m, x) for form in EVERY.values()])
    contract.assert_all_is_integer(held(model, [x], tmp_path / "model.onnx", target, integer_tail=True).prepared)


def test_training_follows_what_calibration_observed() -> None:
    """In TRAIN the scale follows the range of the values that survive, so a batch like calibration's leaves it unchanged."""
    batches = [spikes() for _ in range(3)]
    prepared = compiled(around(lambda m, x: m.conv(x.clamp(-1, 1))), batches).prepared
    before = fxq.qparams(prepared)["x_quantize"]
    to_train(prepared)
    for batch in batches:
        prepared(batch * 100)
    assert fxq.qparams(prepared)["x_quantize"] == before == pytest.approx(1 / 127.5, rel=0.02)


def test_explain_says_what_a_scale_covers_and_a_saved_model_keeps_it(tmp_path: Path) -> None:
    x = spikes()
    prepared = fxq.prepare(around(lambda m, x: m.conv(F.relu6(x))), (x,))
    assert "only its values from 0 to 6 make a difference" in fxq.explain(prepared)
    fxq.save(prepared, tmp_path / "model.fxq")
    loaded = fxq.load(tmp_path / "model.fxq")
    for model in (prepared, loaded):
        fxq.calibrate(model, [x])
    assert fxq.qparams(loaded) == fxq.qparams(prepared)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.silu, F.gelu, F.mish, F.selu, F.elu, torch.erf])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_no_scale_covers_where_a_function_saturates(function: Callable[[Tensor], Tensor], dtype: str) -> None:
    record = BY_NAME[function.__name__]
    assert record.keeps is not None
    settings = {name: default for name, default in record.parameters.items() if name != "input"}
    bits = int(dtype.removeprefix("int"))
    low, high = record.keeps(settings, EVERYTHING, bits)
    points, step = torch.linspace(-60, 60, 4801, dtype=torch.float64), 2.0**-bits
    limited_points = points.clamp(low, high)
    assert float((function(points) - function(limited_points)).abs().max()) <= step / 4
    inside = points.clamp(low + 1 if low > -math.inf else low, high - 1 if high < math.inf else high)  # and no narrower interval is enough
    assert float((function(points) - function(inside)).abs().max()) > step / 4
    x = -100 * normal().abs()
    prepared = compiled(around(lambda m, x: function(x)), [x], qconfig=fxq.QConfig(fxq.ActivationConfig(dtype))).prepared
    assert fxq.qparams(prepared)["x_quantize"] <= float32(-low / (2 ** (bits - 1) - 1))


def test_a_tensor_with_another_reader_is_covered_whole_and_so_are_values_that_are_averaged_before_a_limit() -> None:
    x = 100 * normal()
    prepared = compiled(around(lambda m, x: (torch.sigmoid(x), m.conv(x))), [x]).prepared
    assert fxq.qparams(prepared)["x_quantize"] > 50 / 127
    x = spikes()
    prepared = compiled(around(lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear").clamp(-1, 1)), [x]).prepared
    assert fxq.qparams(prepared)["x_quantize"] > 1  # of thousands


def test_an_input_on_two_scales_cannot_be_given_as_integers(tmp_path: Path) -> None:
    integer = compiled(around(LIMITED["two readers that limit"][0]), [spikes()]).integer
    with pytest.raises(ExportError, match="is quantized on 2 scales"):
        fxq.export_onnx(integer, tmp_path / "model.onnx", io="integer")

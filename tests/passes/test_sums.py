"""Layers whose results only dequantizations read return their sums, by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq

IMAGES = (4, 3, 8, 8)


class Outputs(nn.Module):
    """Sums with and without a residual, limited, read by operators as well, squashed, of a layer that is called twice, and moved."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.limited, self.read, self.squashed, self.twice, self.moved = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))
        self.behind = nn.Linear(6, 2)
        self.boxes, self.scores = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        read, squashed = self.read(x), torch.sigmoid(self.squashed(x))
        return {
            "image": x + self.image(x),
            "limited": F.relu6(self.limited(x)),
            "read": read,
            "squashed": squashed,
            "behind": self.behind(torch.cat([read, squashed], 1).mean((2, 3))),
            "twice": self.twice(self.twice(x)),
            "moved": self.moved(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1),
            "float": torch.fft.fft(self.moved(x)).real,
            "parts": torch.cat([self.boxes(x), self.scores(x)], 1),
        }


SUMS = {"image", "behind", "twice_1", "moved", "moved_1", "boxes", "scores"}


def batches() -> list[Tensor]:
    torch.manual_seed(6)
    return [torch.randn(IMAGES) for _ in range(3)]


def dtypes(prepared: nn.Module) -> dict[str, str]:
    return {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}


def calibrated(model: nn.Module, target: str, qconfig: fxq.QConfig | None = None) -> torch.fx.GraphModule:
    return fxq.calibrate(fxq.prepare(model, batches()[0], target, qconfig), batches())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli", "nash-e", "x86", "qnnpack"])
def test_what_only_a_dequantization_reads_is_a_sum(target: str, tmp_path: Path) -> None:
    model, x = Outputs().eval(), batches()[0]
    wide, narrow = calibrated(model, target), calibrated(model, target, fxq.QConfig(fxq.ActivationConfig("int8")))
    assert {name for name, dtype in dtypes(wide).items() if dtype == "int32"} == SUMS
    assert "int32" not in dtypes(narrow).values()
    integer = fxq.convert(wide)
    assert fxq.verify(wide, integer, [x])
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "wide.onnx"), [x])
    exact, now, before = model(x), wide(x), narrow(x)
    for name in ("image", "moved", "parts"):
        assert (now[name] - exact[name]).norm() < 0.8 * (before[name] - exact[name]).norm()


def test_explain_says_why_a_layer_returns_its_sum() -> None:
    lines = str(fxq.explain(calibrated(Outputs().eval(), "bayes-e"))).splitlines()
    told = {line.split()[0]: line for line in lines if line.startswith("%")}
    assert "int32" in told["%image"]
    assert "its sum, with a scale for each channel: only a dequantization reads it" in told["%image"]
    assert "it only passes on the 32-bit sum of %moved" in told["%permute"]
    assert "its sum" not in told["%read"]


@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_sums_train_and_are_loaded(training: str, tmp_path: Path) -> None:
    model, x = Outputs().eval(), batches()[0]
    prepared = fxq.load(fxq.save(calibrated(model, "bayes-e", fxq.QConfig(fxq.ActivationConfig(training=training))), tmp_path / "model"))
    fxq.set_state(prepared, fxq.State.TRAIN)
    optimizer = torch.optim.SGD(prepared.train().parameters(), 0.01)
    sum(value.square().mean() for value in prepared(x).values()).backward()
    optimizer.step()
    fxq.set_state(prepared.eval(), fxq.State.VALIDATE)
    assert dtypes(prepared)["image"] == "int32"
    assert fxq.verify(prepared, fxq.convert(prepared), [x])


class Larger(nn.Module):
    """A map of more elements than the input, which is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.up(F.relu(self.down(x))), 2)


@pytest.mark.parametrize(
    ("target", "dtype", "because"),
    [
        ("bayes-e", "int16", "16 bits wide: only a dequantization reads it, and it has more elements than the inputs"),
        ("bernoulli2", "int8", "its sum is not returned: it has more elements than the inputs"),
        ("x86", "int32", "its sum, with a scale for each channel"),
    ],
)
def test_a_large_map_has_fewer_bits_on_a_chip(target: str, dtype: str, because: str) -> None:
    prepared = calibrated(Larger().eval(), target)
    assert dtypes(prepared)["up"] == dtype
    assert dtypes(prepared)["pixel_shuffle"] == ("float32" if dtype == "int32" else dtype)
    assert because in str(fxq.explain(prepared))
    assert fxq.verify(prepared, fxq.convert(prepared), batches()[:1])


def test_a_sum_that_breaks_a_limit_is_not_returned() -> None:
    prepared = calibrated(nn.Conv2d(3, 3, 3, padding=2, dilation=2).eval(), "bayes-e")
    (line,) = [line for line in str(fxq.explain(prepared)).splitlines() if "its sum is not returned: its bits of the result" in line]
    assert "int8" in line


@pytest.mark.parametrize(
    "config", [fxq.ActivationConfig("int8"), fxq.ActivationConfig(scale=0.01), fxq.ActivationConfig(threshold=1.0)], ids=str
)
def test_a_grid_that_a_rule_gives_is_kept(config: fxq.ActivationConfig) -> None:
    rules = fxq.QConfigMapping().set_module_name("image", fxq.QConfig(config))
    prepared = fxq.prepare(Outputs().eval(), batches()[0], qconfig=rules)
    assert {name for name, dtype in dtypes(prepared).items() if dtype == "int32"} == SUMS - {"image"}


def test_a_rule_about_the_weight_leaves_the_dtype_of_the_output_open() -> None:
    rules = fxq.QConfigMapping().set_module_name("image", fxq.QConfig(weight=fxq.WeightConfig("int4")))
    assert dtypes(fxq.prepare(Outputs().eval(), batches()[0], qconfig=rules))["image"] == "int32"


@pytest.mark.parametrize("target", ["bernoulli2", "bayes-e"])
def test_a_sum_has_the_biases_of_the_target(target: str) -> None:
    """Those of bernoulli2 give up their last bits, also before the scale of an output is known."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8).eval()
    model.bias.data *= 100
    inputs = [torch.rand(4, 16) for _ in range(3)]
    prepared = fxq.calibrate(fxq.prepare(model, inputs[0], target), inputs)
    assert set(dtypes(prepared).values()) >= {"int32"}
    assert fxq.verify(prepared, fxq.convert(prepared), inputs)

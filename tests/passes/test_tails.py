"""Functions that saturate, between last layers and outputs, are float functions of the layers' sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq

ITEM = (3, 16, 16)
OPTIONS = fxq.Options(integer_tail=False)


class Heads(nn.Module):
    """Scores of two maps behind each other, probabilities after a batch norm, a scaled tanh, and functions that stay integer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.heads = nn.ModuleList(nn.Conv2d(8, 3, 1) for _ in range(2))
        self.classes, self.norm, self.angle, self.shown = nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).relu()
        x = x * torch.sigmoid(self.gate(x))  # inside the network
        maps = zip(self.heads, (x, nn.functional.max_pool2d(x, 2)), strict=True)
        means = x.mean((2, 3))
        return {
            "scores": torch.sigmoid(torch.cat([head(each).flatten(2) for head, each in maps], 2)),
            "classes": self.norm(self.classes(x)).mean((2, 3)).softmax(1),  # a mean comes between
            "map": self.norm(self.classes(x)).softmax(1).permute(0, 2, 3, 1),
            "angle": torch.tanh(self.angle(means)) * 3 - 1,
            "means": torch.sigmoid(means),  # no layer
            "gelu": nn.functional.gelu(self.shown(means)),  # no limit above
        }


IN_FLOAT = {"scores": "sigmoid_1", "map": "softmax_1", "angle": "sub"}
FUNCTIONS = {"sigmoid", "softmax", "tanh", "mul", "sub", "gelu"}


def model() -> Heads:
    torch.manual_seed(1)
    made = Heads().eval()
    for layer in (*made.heads, made.classes, made.angle):
        layer.weight.data *= 8  # large scores, whose step of 8 bits is large, too
    return made


def batches() -> list[Tensor]:
    torch.manual_seed(6)
    return [torch.randn(4, *ITEM) for _ in range(3)]


def calibrated(target: str, qconfig: fxq.QConfig | fxq.QConfigMapping | None = None, **options: bool) -> torch.fx.GraphModule:
    prepared = fxq.prepare(model(), batches()[0], target, qconfig, options=fxq.Options(**{"integer_tail": False, **options}))
    return fxq.calibrate(prepared, batches(), show_progress=False)


def in_float(prepared: torch.fx.GraphModule) -> set[str]:
    return {layer.name for layer in fxq.inspect.layers(prepared) if layer.operator in FUNCTIONS and not layer.integer}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "x86"])
def test_functions_of_last_layers_are_in_float(target: str, tmp_path: Path) -> None:
    prepared = calibrated(target)
    assert in_float(prepared) - {"softmax"} == {*IN_FLOAT.values(), "tanh", "mul_1"}  # x86 has no integers for the other softmax
    assert {layer.name for layer in fxq.inspect.layers(prepared) if layer.dtype == "int32"} >= {"heads_0", "heads_1", "classes_1", "angle"}
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, batches())
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), batches())
    assert report
    assert all(difference.largest < 1e-5 for difference in report.floats.values())


def test_outputs_are_more_accurate_so() -> None:
    exact, x = model()(batches()[0]), batches()[0]
    now, integers = calibrated("bayes-e"), calibrated("bayes-e", integer_tail=True)
    assert not in_float(integers)
    for name in IN_FLOAT:
        noise, before = ((prepared(x)[name] - exact[name]).norm() for prepared in (now, integers))
        assert noise < 0.9 * before, name


def test_explain_and_check_say_that_nothing_is_left_to_do() -> None:
    lines = {line.split()[0]: line for line in str(fxq.explain(calibrated("bayes-e"))).splitlines() if line.startswith("%")}
    assert "only outputs read it, so it is a float function of a last layer's sum" in lines["%softmax_1"]
    assert all(
        finding.kind == "host"
        for finding in fxq.check(model(), batches()[0], "bayes-e", options=OPTIONS)
        if finding.node in IN_FLOAT.values()
    )


def test_a_rule_about_the_result_keeps_a_function_integer() -> None:
    rules = fxq.QConfigMapping().set_object_type(torch.tanh, fxq.QConfig(fxq.ActivationConfig("int8")))
    assert in_float(calibrated("bayes-e", rules)) == {"sigmoid_1", "softmax_1"}
    assert not in_float(calibrated("bayes-e", fxq.QConfig(fxq.ActivationConfig("int8"))))


@pytest.mark.parametrize(("target", "integer"), [("bayes-e", True), ("x86", False)])
def test_a_large_map_stays_integer_on_a_chip(target: str, integer: bool) -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Sigmoid()).eval()
    prepared = fxq.prepare(network, torch.randn(1, 3, 192, 192), target, options=OPTIONS)
    assert [layer.integer for layer in fxq.inspect.layers(prepared) if layer.operator == "sigmoid"] == [integer]

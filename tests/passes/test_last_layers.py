"""Last layers return their sums by default, and functions that saturate after them are float functions of these sums."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.networks import Network, descend, dtypes, members, to_train

IMAGES = (4, 3, 8, 8)


@members(lambda: dict(
    **{name: nn.Conv2d(3, 3, 3, padding=1) for name in ("image", "limited", "read", "squashed", "twice", "moved")}, after=nn.Linear(6, 2),
    boxes=nn.Conv2d(3, 2, 1), scores=nn.Conv2d(3, 1, 1),
))  # fmt: skip
def Outputs(self, x: Tensor) -> dict[str, Tensor]:
    """Sums with and without a residual, limited, read by operators as well, squashed, of a layer that is called twice, and moved."""
    read, squashed = self.read(x), torch.sigmoid(self.squashed(x))
    return {
        "image": x + self.image(x), "limited": F.relu6(self.limited(x)), "read": read, "squashed": squashed,
        "after": self.after(torch.cat([read, squashed], 1).mean((2, 3))), "twice": self.twice(self.twice(x)),
        "moved": self.moved(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1), "float": torch.fft.fft(self.moved(x)).real,
        "parts": torch.cat([self.boxes(x), self.scores(x)], 1),
    }  # fmt: skip


SUMS = {"image", "after", "twice_1", "moved", "moved_1", "boxes", "scores"}


def batches() -> list[Tensor]:
    torch.manual_seed(6)
    return [torch.randn(IMAGES) for _ in range(3)]


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


@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_sums_train_and_are_loaded(training: str, tmp_path: Path) -> None:
    model, x = Outputs().eval(), batches()[0]
    prepared = fxq.load(fxq.save(calibrated(model, "bayes-e", fxq.QConfig(fxq.ActivationConfig(training=training))), tmp_path / "model"))
    descend(to_train(prepared), [x], 0.01, lambda output: sum(value.square().mean() for value in output.values()))
    fxq.set_state(prepared.eval(), fxq.State.VALIDATE)
    assert dtypes(prepared)["image"] == "int32"
    assert fxq.verify(prepared, fxq.convert(prepared), [x])


@pytest.mark.parametrize(
    ("target", "dtype", "because"),
    [
        ("bayes-e", "int16", "16 bits wide: only a dequantization reads it, and it has more elements than the inputs"),
        ("bernoulli2", "int8", "its sum is not returned: it has more elements than the inputs"),
        ("x86", "int32", "its sum, with a scale for each channel"),
    ],
)
def test_a_large_map_has_fewer_bits_on_a_chip(target: str, dtype: str, because: str) -> None:
    layers = {"down": nn.Conv2d(3, 8, 3, padding=1), "up": nn.Conv2d(8, 12, 1)}
    model = Network(lambda m, x: F.pixel_shuffle(m.up(m.down(x).relu()), 2), **layers)  # a map of more elements than the input
    prepared = calibrated(model.eval(), target)
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


# ---- functions that saturate, between last layers and outputs, are float functions of the layers' sums ---------------
ITEM = (3, 16, 16)
OPTIONS = fxq.Options(integer_tail=False)


@members(lambda: dict(
    stem=nn.Conv2d(3, 8, 3, 2, 1), gate=nn.Conv2d(8, 8, 1), heads=nn.ModuleList(nn.Conv2d(8, 3, 1) for _ in range(2)),
    classes=nn.Conv2d(8, 5, 1), norm=nn.BatchNorm2d(5), angle=nn.Linear(8, 2), shown=nn.Linear(8, 3),
))  # fmt: skip
def Heads(self, x: Tensor) -> dict[str, Tensor]:
    """Scores of two maps after each other, probabilities after a batch norm, a scaled tanh, and functions that stay integer."""
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


def heads() -> nn.Module:
    torch.manual_seed(1)
    built = Heads().eval()
    for layer in (*built.heads, built.classes, built.angle):
        layer.weight.data *= 8  # large scores, whose step of 8 bits is large, too
    return built


def images() -> list[Tensor]:
    torch.manual_seed(6)
    return [torch.randn(4, *ITEM) for _ in range(3)]


def prepared_heads(target: str, qconfig: fxq.QConfig | fxq.QConfigMapping | None = None, **options: bool) -> torch.fx.GraphModule:
    prepared = fxq.prepare(heads(), images()[0], target, qconfig, options=fxq.Options(**{"integer_tail": False, **options}))
    return fxq.calibrate(prepared, images())


def in_float(prepared: torch.fx.GraphModule) -> set[str]:
    return {layer.name for layer in fxq.inspect.layers(prepared) if layer.operator in FUNCTIONS and not layer.integer}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "x86"])
def test_functions_of_last_layers_are_in_float(target: str, tmp_path: Path) -> None:
    prepared = prepared_heads(target)
    assert in_float(prepared) - {"softmax"} == {*IN_FLOAT.values(), "tanh", "mul_1"}  # x86 has no integers for the other softmax
    assert {layer.name for layer in fxq.inspect.layers(prepared) if layer.dtype == "int32"} >= {"heads_0", "heads_1", "classes_1", "angle"}
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, images())
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), images())
    assert report
    assert all(difference.largest < 1e-5 for difference in report.floats.values())


def test_outputs_are_more_accurate_so() -> None:
    exact, x = heads()(images()[0]), images()[0]
    now, integers = prepared_heads("bayes-e"), prepared_heads("bayes-e", integer_tail=True)
    assert not in_float(integers)
    for name in IN_FLOAT:
        noise, before = ((prepared(x)[name] - exact[name]).norm() for prepared in (now, integers))
        assert noise < 0.9 * before, name


def test_explain_and_check_say_that_nothing_is_left_to_do() -> None:
    lines = {line.split()[0]: line for line in str(fxq.explain(prepared_heads("bayes-e"))).splitlines() if line.startswith("%")}
    assert "only outputs read it, so it is a float function of a last layer's sum" in lines["%softmax_1"]
    assert all(
        finding.kind == "host"
        for finding in fxq.check(heads(), images()[0], "bayes-e", options=OPTIONS)
        if finding.node in IN_FLOAT.values()
    )


def test_a_rule_about_the_result_keeps_a_function_integer() -> None:
    rules = fxq.QConfigMapping().set_object_type(torch.tanh, fxq.QConfig(fxq.ActivationConfig("int8")))
    assert in_float(prepared_heads("bayes-e", rules)) == {"sigmoid_1", "softmax_1"}
    assert not in_float(prepared_heads("bayes-e", fxq.QConfig(fxq.ActivationConfig("int8"))))


@pytest.mark.parametrize(("target", "integer"), [("bayes-e", True), ("x86", False)])
def test_a_large_map_stays_integer_on_a_chip(target: str, integer: bool) -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Sigmoid()).eval()
    prepared = fxq.prepare(network, torch.randn(1, 3, 192, 192), target, options=OPTIONS)
    assert [layer.integer for layer in fxq.inspect.layers(prepared) if layer.operator == "sigmoid"] == [integer]

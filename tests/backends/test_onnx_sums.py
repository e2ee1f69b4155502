"""Style "fast" of targets that requantize by shifts: convolutions as sums of products of bytes, with the integer model's bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import fast
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import OnnxModel
from fxquant.ir.integer import qparams
from fxquant.primitives import accumulate
from tests.backends.test_onnx_styles import Net, conv, residual, verified
from tests.shared.contract import VNNI, assert_alive, compiled, graph_values, needs_vnni

pytestmark = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24), reason="this onnxruntime has no ConvInteger of int8"
)
FIXED = ("bayes-e", "bayes", "bernoulli2", "bernoulli")

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many layers are sums of bytes
    "plain": (lambda: Net(lambda n, x: n["b"](F.relu(n["a"](x))), a=conv(3, 8), b=conv(8, 8)), 1),
    "clamped": (lambda: Net(lambda n, x: F.relu6(3 * n["b"](F.relu6(n["a"](x)))), a=conv(3, 8), b=conv(8, 8)), 1),
    "no bias, stride, dilation": (
        lambda: Net(lambda n, x: n["b"](n["a"](x)), a=conv(3, 8), b=nn.Conv2d(8, 6, (3, 4), (2, 1), (2, 0), 2, bias=False)),
        1,
    ),
    "residual": (lambda: Net(lambda n, x: n["c"](residual(n["b"], n["a"](x))), a=conv(3, 8), b=conv(8, 8), c=conv(8, 4)), 2),
    "in groups, and short": (
        lambda: Net(lambda n, x: n["c"](n["b"](n["a"](x))), a=conv(3, 32), b=conv(32, 32, groups=2), c=nn.Conv2d(32, 4, 1)),
        0,
    ),
    "beyond 24 bits": (lambda: Net(lambda n, x: F.relu(n["b"](n["a"](x))), a=conv(3, 256), b=nn.Conv2d(256, 4, 3)), 1),
    "beyond 24 bits, linear": (lambda: Net(lambda n, x: n["b"](n["a"](x.flatten(1))), a=nn.Linear(192, 1200), b=nn.Linear(1200, 4)), 2),
    "an accumulator that is returned": (lambda: Net(lambda n, x: n["b"](n["a"](x)), a=conv(3, 8), b=conv(8, 8)), 1),
    "linear": (lambda: Net(lambda n, x: n["b"](F.relu(n["a"](x.flatten(1)))), a=nn.Linear(192, 64), b=nn.Linear(64, 5, bias=False)), 2),
    "rows, read twice": (
        lambda: Net(
            lambda n, x: n["b"](F.gelu(n["a"](x.flatten(2)))) + n["c"](F.gelu(n["a"](x.flatten(2)))),
            a=nn.Linear(64, 64),
            b=nn.Linear(64, 9),
            c=nn.Linear(64, 9),
        ),
        4,
    ),
    "one dimension": (lambda: Net(lambda n, x: n["b"](n["a"](x.flatten(2))), a=nn.Conv1d(3, 16, 3), b=nn.Conv1d(16, 8, 5, padding=2)), 1),
    "three dimensions": (
        lambda: Net(lambda n, x: n["b"](F.relu(n["a"](x[:, None]))), a=nn.Conv3d(1, 4, 3, padding=1), b=nn.Conv3d(4, 4, 3)),
        1,
    ),
}


WHOLE_OUTPUT = fxq.QConfigMapping().set_module_name("layers.b", fxq.QConfig(fxq.ActivationConfig("int32")))


def batch(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def integer_of(name: str, target: str = "bayes-e", qconfig: Any = None) -> fx.GraphModule:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    if name.startswith("beyond 24 bits"):
        with torch.no_grad():
            model.layers["b"].weight.copy_(model.layers["b"].weight.sign() * 0.1)
    integer = compiled(model, [batch()], target, qconfig).integer
    assert_alive(integer, batch())
    return integer


def kinds(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


@pytest.mark.parametrize("target", FIXED)
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_bytes_give_the_integer_models_bits(name: str, target: str, tmp_path: Path) -> None:
    integer = integer_of(name, target, WHOLE_OUTPUT if name == "an accumulator that is returned" else None)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    report = verified(integer, path)
    assert report, str(report)
    assert {node.name for node in integer.graph.nodes if qparams(node) is not None} <= report.names
    count = MODELS[name][1]
    convolutions, linears = (kinds(path).count(kind) for kind in ("ConvInteger", "MatMulInteger"))
    metadata = fxq.onnx_metadata(path)
    refused = len(metadata["kernels"]["refused"])
    assert convolutions + linears + refused == count
    assert len(metadata["kernels"]["integer"]) == count - refused
    assert refused == 0 or not VNNI
    assert metadata["relies_on_vnni"] is bool(convolutions)
    assert metadata["session_options_without_vnni"] == PRECISE


@pytest.mark.parametrize(
    ("name", "wide"), [("beyond 24 bits", accumulate.convolution_wide), ("beyond 24 bits, linear", accumulate.linear_wide)]
)
def test_what_is_beyond_24_bits_is_added_in_32(name: str, wide: Callable[..., Tensor]) -> None:
    assert any(node.target is wide for node in integer_of(name).graph.nodes)


@pytest.mark.parametrize("opset", [17, 19, 21])
@pytest.mark.parametrize("name", ["residual", "rows, read twice"])
def test_sums_of_bytes_at_every_opset(name: str, opset: int, tmp_path: Path) -> None:
    integer = integer_of(name)
    report = verified(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast", opset=opset))
    assert report, str(report)


def test_a_file_of_sums_takes_and_returns_integers(tmp_path: Path) -> None:
    integer = integer_of("residual")
    model = OnnxModel(fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast", io="integer"))
    values = graph_values(integer, batch())
    (taken,), (returned,) = model.metadata["inputs"], model.metadata["outputs"]
    assert (taken["dtype"], returned["dtype"]) == ("int8", "int8")
    found = model.runner("onnxruntime", [])({taken["name"]: values["x_quantize"]})[returned["name"]]
    assert torch.equal(found, values[returned["tensor"]])


@pytest.mark.parametrize(("activation", "weight", "count"), [("int16", "int8", 0), ("int8", "int4", 1), ("int4", "int4", 1)])
def test_only_bytes_are_summed(activation: str, weight: str, count: int, tmp_path: Path) -> None:
    integer = integer_of("plain", qconfig=fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig(weight)))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    refused = len(fxq.onnx_metadata(path)["kernels"]["refused"])
    assert kinds(path).count("ConvInteger") + refused == count
    assert refused == 0 or not VNNI
    report = verified(integer, path)
    assert report, str(report)


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli"])
def test_no_half_step_becomes_a_part_of_a_bias(target: str, tmp_path: Path) -> None:
    """A runtime that adds a constant to the bias of a convolution would round every partial sum."""
    integer = integer_of("plain", target, fxq.QConfig(fxq.ActivationConfig("int8"), fxq.WeightConfig("int4")))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="exact")
    report = fxq.verify(integer, path, [3 * batch(64, seed) for seed in range(2)], show_progress=False)
    assert report, str(report)


def test_a_sum_that_saturates_is_written_as_in_style_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    integer = integer_of("residual")
    honest = fast._run

    def saturating(model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Any, *runtime: str) -> dict[str, Tensor]:
        found = honest(model, feeds, settings, *runtime)
        return {name: value.clamp(-(2**15), 2**15 - 1) for name, value in found.items()} if model.graph.name == "kernel" else found

    monkeypatch.setattr(fast, "_run", saturating)
    with caplog.at_level(logging.WARNING, "fxquant"):
        path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert "2 of 2 layers" in caplog.text
    metadata = fxq.onnx_metadata(path)
    assert (metadata["relies_on_vnni"], len(metadata["kernels"]["refused"]), kinds(path).count("ConvInteger")) == (False, 2, 0)
    report = verified(integer, path)
    assert report, str(report)


def test_a_sum_that_the_runtime_does_not_have_is_written_as_in_style_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    integer = integer_of("residual")
    honest = fast._run

    def lacking(model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Any, *runtime: str) -> dict[str, Tensor]:
        if model.graph.name == "kernel":
            raise fxq.ExportError("the model cannot be run", because="there is no ConvInteger", remedy="none")
        return honest(model, feeds, settings, *runtime)

    monkeypatch.setattr(fast, "_run", lacking)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert (len(fxq.onnx_metadata(path)["kernels"]["refused"]), kinds(path).count("ConvInteger")) == (2, 0)
    report = verified(integer, path)
    assert report, str(report)


@needs_vnni
def test_the_file_is_told_to_rely_on_the_processor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        fxq.export_onnx(integer_of("plain"), tmp_path / "model.onnx", style="fast")
    assert "without VNNI" in caplog.text


def test_auto_stays_exact_where_numbers_would_rely_on_the_processor(tmp_path: Path) -> None:
    path = fxq.export_onnx(integer_of("plain"), tmp_path / "model.onnx")
    assert fxq.onnx_metadata(path)["style"] == "exact"


def test_a_wrong_sum_is_found_in_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fast, "_sum_is_exact", lambda *_: True)
    honest = fast._run

    def wrong(model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Any, *runtime: str) -> dict[str, Tensor]:
        return {name: value + 1 for name, value in honest(model, feeds, settings, *runtime).items()}

    monkeypatch.setattr(fast, "_run", wrong)
    with pytest.raises(fxq.ExportError, match="does not give the integer model's numbers"):
        fxq.export_onnx(integer_of("plain"), tmp_path / "model.onnx", style="fast")
    assert list(tmp_path.iterdir()) == []

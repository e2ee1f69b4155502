"""The styles of exported files: "fast" gives the integer model's bits by uint8 kernels, "qdq" is measured; and what every file says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import fast, fast_kernels, fast_tables, model_files
from fxquant.backends.onnx.emitter import Emitter
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, RUNTIMES, OnnxModel, Runner
from fxquant.ir.integer import is_inner, operation, qparams
from fxquant.ops import BY_NAME, OPERATORS
from fxquant.primitives import elementwise
from fxquant.reporting.inspection import read
from tests.ops.test_operators import BY_OPERATOR, RECURRENT, WIDE_INSIDE, Pack, Sample, covering, inputs_of
from tests.shared.contract import VNNI, assert_alive, compiled, graph_values, needs_vnni

REAL_TARGETS = ("nash-e", "nash-m", "x86", "qnnpack")
OPSETS = (11, 13, 17, 21)


class Net(nn.Module):
    """Layers by name, and a forward that uses them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layers, x)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def residual(layer: nn.Module, y: Tensor) -> Tensor:
    return F.relu(layer(y) + y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Net(lambda n, x: F.relu(n["a"](x)), a=conv(3, 8, stride=2)),
    "depthwise": lambda: Net(lambda n, x: F.relu6(n["b"](n["a"](x))), a=conv(3, 8, 1), b=conv(8, 8, groups=8)),
    "grouped": lambda: Net(lambda n, x: n["b"](F.relu(n["a"](x))), a=conv(3, 8), b=conv(8, 12, groups=4, dilation=2, bias=False)),
    "linear": lambda: Net(lambda n, x: n["b"](F.relu(n["a"](x.flatten(1)))), a=nn.Linear(192, 16), b=nn.Linear(16, 5, bias=False)),
    "rows": lambda: Net(lambda n, x: n["a"](x.flatten(2)), a=nn.Linear(64, 9)),
    "residual": lambda: Net(lambda n, x: residual(n["b"], F.relu(n["a"](x))), a=conv(3, 8), b=conv(8, 8)),
    "addition": lambda: Net(lambda n, x: F.relu(n["a"](x).sigmoid() - 2 * x[:, :1]), a=conv(3, 8)),
    "concatenation": lambda: Net(lambda n, x: torch.cat([F.relu(n["a"](x)), n["a"](x), x], 1)[:, 2:14], a=conv(3, 8)),
    "pooling": lambda: Net(
        lambda n, x: F.adaptive_avg_pool2d(F.avg_pool2d(F.max_pool2d(n["a"](x), 3, 2, 1), 3, 1, 1, count_include_pad=False), 1),
        a=conv(3, 8),
    ),
    "resizing": lambda: Net(
        lambda n, x: F.interpolate(n["a"](x), scale_factor=2) + F.interpolate(n["a"](x), size=[16, 16], mode="bilinear"), a=conv(3, 4)
    ),
    "silu": lambda: Net(lambda n, x: F.silu(n["b"](F.silu(n["a"](x)))), a=conv(3, 8), b=conv(8, 8)),
    "transposed": lambda: Net(lambda n, x: n["b"](F.relu(n["a"](x))), a=conv(3, 8), b=nn.ConvTranspose2d(8, 6, 3, 2, 1, 1)),
    "transposed in groups": lambda: Net(lambda n, x: n["b"](n["a"](x)), a=conv(3, 8), b=nn.ConvTranspose2d(8, 6, 2, 2, groups=2)),
    "products": lambda: Net(lambda n, x: n["a"](x).flatten(2) @ n["b"](x).flatten(2).transpose(1, 2), a=conv(3, 8), b=conv(3, 6)),
    "margins": lambda: Net(
        lambda n, x: n["b"](F.relu(n["a"](x))),
        a=nn.Conv2d(3, 8, (2, 3), padding="same"),
        b=nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=2),
    ),
    "padding": lambda: Net(lambda n, x: n["a"](F.pad(F.pad(x, (1, 2, 0, 1), value=0.5), (1, 1, 1, 1), "reflect")), a=nn.Conv2d(3, 8, 3)),
}
KERNELS = {  # that style "fast" makes of each
    "convolution": {"QLinearConv": 1}, "depthwise": {"QLinearConv": 2}, "grouped": {"QLinearConv": 2}, "linear": {"MatMulInteger": 2},
    "rows": {"MatMulInteger": 1}, "residual": {"QLinearConv": 1}, "addition": {"QLinearConv": 1}, "concatenation": {"QLinearConv": 2},
    "pooling": {"QLinearConv": 1}, "resizing": {"QLinearConv": 2}, "silu": {"QLinearConv": 2}, "transposed": {"QLinearConv": 1},
    "transposed in groups": {"QLinearConv": 1}, "products": {"QLinearConv": 2, "QLinearMatMul": 1}, "padding": {"QLinearConv": 1},
    "margins": {"QLinearConv": 2},
}  # fmt: skip


def batch(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def integer_of(name: str, target: str = "nash-e", qconfig: Any = None) -> fx.GraphModule:
    torch.manual_seed(0)
    integer = compiled(MODELS[name]().eval(), [batch()], target, qconfig).integer
    assert_alive(integer, batch())
    return integer


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


def verified(integer: fx.GraphModule, path: Path) -> fxq.Report:
    """On two batch sizes; much of the second saturates."""
    return fxq.verify(integer, path, [batch(3, seed=3), 40 * batch(1, seed=2)], show_progress=False)


# ---- fast -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fast_files_give_the_integer_models_bits(name: str, tmp_path: Path) -> None:
    integer = integer_of(name)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    report = verified(integer, path)
    assert report, str(report)
    assert {node.name for node in integer.graph.nodes if qparams(node) is not None} <= report.names  # every quantized tensor
    found = operators(path)
    kernels = fxq.onnx_metadata(path)["kernels"]
    assert len(kernels["integer"]) + len(kernels["refused"]) == sum(KERNELS[name].values())
    if VNNI:
        assert kernels["refused"] == []
        counts = {kernel: found.count(kernel) for kernel in ("QLinearConv", "QLinearMatMul", "MatMulInteger")}
        assert {kernel: count for kernel, count in counts.items() if count} == KERNELS[name]


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {  # and the operators of the file that compute each
    "sigmoid": (torch.sigmoid, ["Sigmoid"]),
    "silu": (F.silu, ["Sigmoid", "Mul"]),
    "gelu": (F.gelu, ["Gelu"]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), ["Gelu"]),
    "hardswish": (F.hardswish, ["HardSwish"]),
    "hardsigmoid": (F.hardsigmoid, ["HardSigmoid"]),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), ["LeakyRelu"]),
    "elu": (lambda x: F.elu(x, 0.7), ["Elu"]),
    "tanh of a sum": (lambda x: torch.tanh(x * 2 + 0.5), ["Tanh"]),
    "softplus": (lambda x: F.softplus(x, 2.0), ["Softplus"]),
}


@pytest.mark.parametrize("target", ["nash-e", "x86"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_table_is_computed_where_no_rounding_can_change_an_entry(name: str, target: str, tmp_path: Path) -> None:
    function, computing = FUNCTIONS[name]
    torch.manual_seed(0)
    model = Net(lambda n, x: n["b"](function(n["a"](x))), a=conv(3, 8), b=conv(8, 4)).eval()
    prepared = fxq.prepare(model, (batch(),), target=target)
    fxq.calibrate(prepared, [batch()], show_progress=False)
    fxq.set_qparams(prepared, {name: scale for name, scale in zip(list(fxq.qparams(prepared))[1:3], (0.0217, 0.0181), strict=True)})
    integer = fxq.convert(prepared)
    assert_alive(integer, batch())
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    report = verified(integer, path)
    assert report, str(report)
    assert len(fxq.onnx_metadata(path)["kernels"]["computed"]) == 1
    assert set(computing) <= set(operators(path))
    assert not {"Gather", "GatherElements"} & set(operators(path))


def test_a_table_with_an_entry_beside_a_tie_is_looked_up(tmp_path: Path) -> None:
    model = Net(lambda n, x: F.leaky_relu(n["a"](x), 0.25), a=conv(3, 8)).eval()
    prepared = fxq.prepare(model, (batch(),), target="nash-e")
    fxq.calibrate(prepared, [batch()], show_progress=False)
    convolution, result = (name for name in fxq.qparams(prepared) if name != "x_quantize")
    for scale, computed in ((1 / 32, 0), (0.0301, 1)):  # a quarter of a step below 0 and a half are ties on the same grid
        fxq.set_qparams(prepared, {convolution: 1 / 32, result: scale})
        integer = fxq.convert(prepared)
        path = fxq.export_onnx(integer, tmp_path / f"{computed}.onnx", style="fast")
        report = verified(integer, path)
        assert report, str(report)
        assert len(fxq.onnx_metadata(path)["kernels"]["computed"]) == computed
        assert operators(path).count("GatherElements") == 1 - computed


def test_a_function_that_is_left_to_the_exporter_is_looked_up(tmp_path: Path) -> None:
    integer = compiled(Net(lambda n, x: n["a"](x).round(decimals=1), a=conv(3, 8)).eval(), [batch()], "nash-e").integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert fxq.onnx_metadata(path)["kernels"]["computed"] == []
    assert verified(integer, path)


def test_a_table_that_is_not_of_its_function_is_looked_up() -> None:
    integer = integer_of("silu")
    node = next(node for node in integer.graph.nodes if node.target is elementwise.lookup)
    assert fast_tables.computes(integer, node, 21)
    assert not fast_tables.computes(integer, node, 17)
    table = integer.get_submodule(node.args[1].target.rpartition(".")[0]).table
    table[100] += 1
    assert not fast_tables.computes(integer, node, 21)


@needs_vnni
def test_a_computed_table_that_differs_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    integer = integer_of("silu")
    monkeypatch.setattr(fast_tables, "compute", lambda e, node, stored, zero: e.node("Identity", stored))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    kernels = fxq.onnx_metadata(path)["kernels"]
    assert (kernels["computed"], len(kernels["refused"])) == ([], 2)
    assert verified(integer, path)


@pytest.mark.parametrize("target", REAL_TARGETS)
@pytest.mark.parametrize("opset", [17, 19, 21])
def test_fast_files_on_every_target_and_opset(target: str, opset: int, tmp_path: Path) -> None:
    integer = integer_of("residual", target)
    report = verified(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast", opset=opset))
    assert report, str(report)


def test_products_far_beyond_what_is_stored_saturate_in_every_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    prepared = fxq.calibrate(fxq.prepare(model, x, "nash-e"), [x], show_progress=False)
    fxq.set_qparams(prepared, {"_2": 1e-14})
    integer = fxq.convert(prepared)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert fxq.verify(integer, path, [x], show_progress=False).mismatches == 0


def test_what_is_no_number_is_zero_in_fast_files_as_well(tmp_path: Path) -> None:
    integer = integer_of("convolution")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    odd = batch(1)
    odd[0, :, 0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
    for level in (onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        (found,) = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, {"x": odd.numpy()})
        assert torch.equal(torch.from_numpy(found), integer(odd))


@pytest.mark.parametrize(("activation", "weight"), [("int16", "int8"), ("int16", "int16"), ("int8", "int16")])
def test_wider_integers_are_as_in_style_exact(activation: str, weight: str, tmp_path: Path) -> None:
    config = fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig(weight))
    integer = integer_of("silu", qconfig=config)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert "QLinearConv" not in operators(path)
    report = verified(integer, path)
    assert report, str(report)


@pytest.mark.parametrize("name", ["silu", "pooling", "residual", "concatenation"])
@pytest.mark.parametrize(("activation", "weight"), [("int4", "int4"), ("int8", "int4")])
def test_narrower_integers_are_stored_as_int8_are(activation: str, weight: str, name: str, tmp_path: Path) -> None:
    integer = integer_of(name, qconfig=fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig(weight)))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert fxq.onnx_metadata(path)["tensors"]["x_quantize"]["dtype"] == activation
    assert len(fxq.onnx_metadata(path)["kernels"]["integer"]) >= 1
    report = verified(integer, path)
    assert report, str(report)
    for opset in (17, 21):
        near = measured(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=opset))
        assert worst(near) <= 2, str(near)


def test_a_mixture_of_widths_crosses_between_the_storages(tmp_path: Path) -> None:
    wide = fxq.QConfig(fxq.ActivationConfig("int16"))
    integer = integer_of("silu", qconfig=fxq.QConfigMapping().set_module_name("layers.a", wide))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    storages = {entry["storage"] for entry in fxq.onnx_metadata(path)["tensors"].values() if entry["kind"] == "quantized"}
    assert {"uint8", "int16"} <= storages
    report = verified(integer, path)
    assert report, str(report)


@pytest.mark.parametrize("name", ["silu", "linear", "products"])
def test_the_session_options_for_processors_without_vnni_change_no_bit(name: str, tmp_path: Path) -> None:
    integer = integer_of(name)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    options = onnxruntime.SessionOptions()
    for key, value in fxq.onnx_metadata(path)["session_options_without_vnni"].items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: batch().numpy()})
    assert torch.equal(torch.from_numpy(found), integer(batch()))


@needs_vnni
def test_a_kernel_that_is_not_exact_here_is_written_as_in_style_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    integer = integer_of("silu")
    honest = fast._kernel_is_exact
    monkeypatch.setattr(fast, "_kernel_is_exact", lambda integer, node, *rest: node.name != "layers_b" and honest(integer, node, *rest))
    with caplog.at_level(logging.WARNING, "fxquant"):
        path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert fxq.onnx_metadata(path)["kernels"] == {"integer": ["layers_a"], "computed": ["silu", "silu_1"], "refused": ["layers_b"]}
    assert fxq.onnx_metadata(path)["session_options"] == PRECISE
    assert "1 of 2 operators, which are written as in style 'exact': layers_b" in caplog.text
    assert operators(path).count("QLinearConv") == 1
    report = verified(integer, path)
    assert report, str(report)


@needs_vnni
def test_a_kernel_that_saturates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    integer = integer_of("silu")
    node = next(node for node in integer.graph.nodes if node.name == "layers_b")
    assert fast._kernel_is_exact(integer, node, 21, {})
    honest = fast._run

    def saturating(model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Any, *runtime: str) -> dict[str, Tensor]:
        return {name: value.clamp(max=254) for name, value in honest(model, feeds, settings, *runtime).items()}

    monkeypatch.setattr(fast, "_run", saturating)
    assert not fast._kernel_is_exact(integer, node, 21, {})


def test_a_file_that_is_wrong_as_a_whole_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(writer: fast_kernels.FastWriter, node: fx.Node, *arguments: Any) -> str:
        return writer.emitter.node("Identity", writer.shifted(node.args[0]))

    monkeypatch.setitem(fast_kernels.FORMS, elementwise.lookup, wrong)
    with pytest.raises(fxq.ExportError, match="does not give the integer model's numbers"):
        fxq.export_onnx(integer_of("silu"), tmp_path / "model.onnx", style="fast")
    assert list(tmp_path.iterdir()) == []


def test_a_fast_file_that_takes_integers_takes_the_same_ones(tmp_path: Path) -> None:
    integer = integer_of("silu")
    model = OnnxModel(fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast", io="integer"))
    values = graph_values(integer, batch())
    (taken,), (returned,) = model.metadata["inputs"], model.metadata["outputs"]
    assert (taken["dtype"], returned["dtype"]) == ("int8", "int8")
    found = model.runner("onnxruntime", [])({taken["name"]: values["x_quantize"]})[returned["name"]]
    assert torch.equal(found, values["silu_1"])


POOLS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "behind a convolution": (lambda n, x: F.max_pool2d(F.relu(n["a"](x)), 3, 2, 1), 1),
    "behind a convolution that is not clamped": (lambda n, x: F.max_pool2d(n["a"](x), (2, 3), (1, 2), (0, 1), dilation=(2, 1)), 1),
    "behind an addition": (lambda n, x: F.max_pool2d(n["a"](x) + n["b"](x), 2), 1),
    "one behind another, with padding": (lambda n, x: F.max_pool2d(F.max_pool2d(n["a"](x), 3, 1, 1), 5, 1, 2), 2),
    "behind zeros": (lambda n, x: F.max_pool2d(F.pad(n["a"](x), (1, 1, 1, 1)), 3), 0),
    "of the input": (lambda n, x: n["a"](F.max_pool2d(x, 3, 2, 1)), 0),
}


@needs_vnni
@pytest.mark.parametrize("target", ["nash-e/requantize", "x86"])
@pytest.mark.parametrize("name", POOLS)
def test_maxima_are_of_bytes_where_a_convolution_leaves_the_pixels_together(name: str, target: str, tmp_path: Path) -> None:
    forward, bytewise = POOLS[name]
    torch.manual_seed(0)
    integer = fxq.quantize(Net(forward, a=conv(3, 8), b=conv(3, 8)).eval(), [batch()], target, show_progress=False).integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    types = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.output)}
    pools = [types[node.output[0]] for node in graph.node if node.op_type == "MaxPool"]
    assert pools.count(onnx.TensorProto.UINT8) == bytewise
    assert pools.count(onnx.TensorProto.FLOAT) == len(pools) - bytewise
    report = verified(integer, path)
    assert report, str(report)


@needs_vnni
def test_float_operators_among_fast_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(lambda n, x: n["b"](torch.logaddexp(n["a"](x), 0.5 * n["a"](x))), a=conv(3, 8), b=conv(8, 4)).eval()
    integer = compiled(model, [batch()], "nash-e").integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    report = fxq.verify(integer, path, [batch(), batch(1)], show_progress=False)
    assert report, str(report)
    assert operators(path).count("QLinearConv") == 3


def test_the_evaluators_operators_are_corrected_where_a_product_rounds_to_a_tie() -> None:
    """Accumulators near ties, by zero inputs and any bias, a channel each: float32(acc) · m is a tie that the exact product is not."""
    generator = np.random.default_rng(0)
    sums = generator.integers(2**24, 2**30, 4000).astype(np.int32)
    multipliers = ((generator.integers(-120, 120, 4000) + 0.5) / sums).astype(np.float32)
    sums = np.where(multipliers < 0, -sums, sums).astype(np.int32)
    multipliers = np.abs(multipliers)
    e = Emitter({}, 21)
    zero = torch.tensor(128, dtype=torch.uint8)
    weight = torch.zeros(4000, 1, 1, 1, dtype=torch.int8)
    scale, weight_zero = torch.from_numpy(multipliers), torch.zeros(4000, dtype=torch.int8)
    constants = [e.constant(1.0), e.constant(zero), e.constant(weight), e.constant(scale), e.constant(weight_zero), e.constant(1.0)]
    e.types["x"] = torch.uint8
    result = e.node("QLinearConv", "x", *constants, e.constant(zero), e.constant(torch.from_numpy(sums)))
    graph = helper.make_graph(
        e.nodes,
        "ties",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 1, 1, 1])],
        [helper.make_tensor_value_info(result, TensorProto.UINT8, None)],
        e.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    wanted = np.clip(np.rint(sums.astype(np.float32) * multipliers).astype(np.int64) + 128, 0, 255)
    for _, level, threads in RUNTIMES:
        found = Runner(model, level, threads)({"x": torch.full((1, 1, 1, 1), 128, dtype=torch.uint8)})[result].flatten()
        assert np.array_equal(found.numpy(), wanted), level


# ---- qdq --------------------------------------------------------------------------------------------------------------


def measured(integer: fx.GraphModule, path: Path, inputs: Any = None) -> fxq.DeviationReport:
    report = fxq.verify(integer, path, [batch(3, seed=3) if inputs is None else inputs], show_progress=False)
    assert isinstance(report, fxq.DeviationReport)
    assert not report
    assert set(report.outputs) == set(MEASURED_RUNTIMES)
    return report


def worst(report: fxq.DeviationReport) -> float:
    return max(output.largest for outputs in report.outputs.values() for output in outputs)


def least_sqnr(report: fxq.DeviationReport) -> float:
    return min(output.sqnr for outputs in report.outputs.values() for output in outputs)


@needs_vnni
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", MODELS)
def test_qdq_files_run_and_are_near(name: str, opset: int, tmp_path: Path) -> None:
    integer = integer_of(name, "bayes-e")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=opset)
    model = onnx.load(str(path))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    weights = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1]
    assert bool(weights) == (opset >= 13)  # below, there is no DequantizeLinear with an axis
    report = measured(integer, path)
    assert worst(report) <= 3, str(report)
    # Below opset 13 the weights are floats, which onnxruntime's optimiser quantizes once more, in its own way.
    assert least_sqnr(report) > (35 if opset >= 13 else 30), str(report)
    assert report.outputs["onnxruntime"][0].elements > 0


def test_a_word_among_the_arguments_may_be_the_name_of_a_value(tmp_path: Path) -> None:
    net = Net(lambda n, x: (((x * 3).long() ^ ((x + x.flip(3)) * 2).long()).float(), n["a"](x)), a=conv(3, 3)).eval()
    integer = compiled(net, [batch()], "nash-e").integer
    words = {value for node in integer.graph.nodes for value in node.args if isinstance(value, str)}
    assert words & {node.name for node in integer.graph.nodes}
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    assert fxq.verify(integer, path, [batch()], show_progress=False)


NEW_FORMS = ("tril", "triu")  # written by PyTorch's exporter, from opset 18 on
# Their records have no form of ONNX, and PyTorch's exporters write none.
WITHOUT_A_FORM = {f"adaptive_max_indices{rank}d" for rank in (1, 2, 3)}


def written_as_qdq(samples: list[Sample], opset: int, directory: Path) -> None:
    """The samples in one model, whose file is within a step of the integer model."""
    inputs = tuple(value for sample in samples for value in inputs_of(sample, 4))
    integer = compiled(Pack(samples).eval(), [inputs], "nash-e", covering()).integer
    report = measured(integer, fxq.export_onnx(integer, directory / "model.onnx", style="qdq", opset=opset), inputs)
    assert worst(report) <= 1, str(report)


def is_wide(sample: Sample) -> bool:
    """Whether something in it has int16, which QuantizeLinear knows from opset 21 on."""
    return sample.bound in (*WIDE_INSIDE, RECURRENT) or sample.operator == "affine_grid"


def packs(samples: list[Sample], size: int = 8) -> list[list[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


EVERY = list(BY_OPERATOR.values())
QDQ = [
    *((pack, 21) for pack in packs([sample for sample in EVERY if sample.operator not in WITHOUT_A_FORM])),
    *((pack, 11) for pack in packs([s for s in EVERY if s.operator not in (*WITHOUT_A_FORM, *NEW_FORMS) and not is_wide(s)])),
]


@needs_vnni
@pytest.mark.parametrize(("samples", "opset"), QDQ, ids=[f"{pack[0].operator} to {pack[-1].operator}-{opset}" for pack, opset in QDQ])
def test_every_operator_has_a_qdq_form(samples: list[Sample], opset: int, tmp_path: Path) -> None:
    written_as_qdq(samples, opset, tmp_path)


@pytest.mark.parametrize("operator", sorted(WITHOUT_A_FORM))
def test_what_has_no_qdq_form_is_refused(operator: str, tmp_path: Path) -> None:
    with pytest.raises(fxq.ExportError):
        written_as_qdq([BY_OPERATOR[operator]], 21, tmp_path)


def without_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an operator's record say nothing of ONNX, as that of a new operator."""
    record = BY_NAME[name]
    for table, key in ((OPERATORS, record.function), (BY_NAME, name)):
        monkeypatch.setitem(table, key, replace(record, onnx=None))


@needs_vnni
@pytest.mark.parametrize(
    ("operator", "model", "written"),
    [
        ("sin", lambda n, x: torch.sin(0.5 - n["a"](x)), "Sin"),  # the number in front of it belongs to its table
        ("add", lambda n, x: F.relu(n["a"](x).sin() + 2 * x[:, :1]), "Relu"),  # two operands, and a fused clamp
        ("prelu", lambda n, x: n["b"](n["a"](x)), None),  # its one parameter has another role in the arithmetic
        ("linear", lambda n, x: n["c"](n["a"](x)), "Gemm"),  # a weight and a bias
    ],
)
def test_an_operator_without_a_form_is_written_by_its_float_function(
    operator: str, model: Any, written: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Net(model, a=conv(3, 8), b=nn.PReLU(8), c=nn.Sequential(nn.Flatten(), nn.Linear(512, 5)))
    integer = compiled(net.eval(), [batch()], "nash-e").integer
    without_form(operator, monkeypatch)
    path = tmp_path / "model.onnx"
    if written is None:
        with pytest.raises(fxq.ExportError, match="cannot be written in style 'qdq'") as caught:
            fxq.export_onnx(integer, path, style="qdq")
        assert "test_onnx_styles.py" in str(caught.value)  # the user's line
        assert list(tmp_path.iterdir()) == []
        return
    report = measured(integer, fxq.export_onnx(integer, path, style="qdq"))
    assert written in operators(path)
    assert worst(report) <= 1, str(report)


def test_int16_is_rounded_by_float_operators_before_opset_21(tmp_path: Path) -> None:
    config = fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int16"))
    integer = integer_of("silu", qconfig=config)
    with pytest.raises(fxq.ConfigurationError, match="export with opset=21"):
        fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=20, io="integer")
    for opset in (11, 20, 21):
        path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=opset)
        assert least_sqnr(measured(integer, path)) > 80, str(measured(integer, path))
        assert ("QuantizeLinear" in operators(path)) == (opset == 21)


@needs_vnni
def test_a_sum_of_32_bits_stays_a_float(tmp_path: Path) -> None:
    wide = fxq.QConfig(fxq.ActivationConfig("int32"))
    integer = integer_of("linear", qconfig=fxq.QConfigMapping().set_module_name("layers.b", wide))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq")
    report = measured(integer, path)
    (output,) = report.outputs["onnxruntime"]
    assert output.scale is None
    assert output.sqnr > 40
    with pytest.raises(fxq.ExportError, match="its 32-bit output is a float"):
        fxq.export_onnx(integer, path, style="qdq", io="integer")


def test_weights_are_the_integer_graphs_own(tmp_path: Path) -> None:
    integer = integer_of("grouped")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=13)
    model = onnx.load(str(path))
    stored = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in model.graph.initializer}
    convolution = next(node for node in integer.graph.nodes if node.name == "layers_b")
    constant = operation(convolution).constants["weight"]
    weight = dict(integer.named_buffers())[f"integer.{convolution.name}.weight"]
    chain = next(
        n for n in model.graph.node if n.op_type == "DequantizeLinear" and torch.equal(stored.get(n.input[0], torch.ones(1)), weight)
    )
    assert [attribute.i for attribute in chain.attribute if attribute.name == "axis"] == [0]
    assert torch.equal(stored[chain.input[1]], torch.tensor(constant.scale))
    assert not stored[chain.input[2]].any()


def test_large_biases_do_not_overflow(tmp_path: Path) -> None:
    """onnxruntime quantizes a float bias behind an int16 weight to int32, in steps that may be too small for that."""
    config = fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int16"))
    torch.manual_seed(0)
    model = MODELS["linear"]().eval()
    nn.init.constant_(model.layers["a"].bias, 50.0)
    integer = compiled(model, [batch()], "nash-e", config).integer
    report = measured(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=21))
    assert least_sqnr(report) > 60, str(report)


def test_qdq_files_can_take_and_return_integers(tmp_path: Path) -> None:
    integer = integer_of("convolution")
    model = OnnxModel(fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", io="integer"))
    values = graph_values(integer, batch())
    found = model.runner("onnxruntime", [])({"x": values["x_quantize"]})[model.output_names[0]]
    assert found.dtype == torch.int8
    assert int((found.int() - values["relu" if "relu" in values else "layers_a"].int()).abs().max()) <= 1


def test_the_report_counts_in_steps(tmp_path: Path) -> None:
    integer = integer_of("convolution")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq")
    model = onnx.load(str(path))
    scale = fxq.onnx_metadata(path)["tensors"]["layers_a"]["scale"]
    last = next(node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.output[0] == model.graph.output[0].name)
    shifted = helper.make_node("Add", ["moved", "two_steps"], list(last.output))
    last.output[0] = "moved"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2 * scale), "two_steps"))
    model.graph.node.append(shifted)
    onnx.save(model, str(path))
    (output,) = measured(integer, path).outputs["onnxruntime, no optimisation"]
    assert output.share > 0.99
    assert output.largest in (2, 3)
    assert "2 steps at most" in str(output) or "3 steps at most" in str(output)


def test_a_saved_model_exports_as_before(tmp_path: Path) -> None:
    integer = integer_of("residual")
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    for style in ("exact", "fast", "qdq"):
        one, other = (fxq.export_onnx(m, tmp_path / f"{i}.onnx", style=style) for i, m in enumerate((integer, loaded)))
        assert one.read_bytes() == other.read_bytes()


# ---- external data ----------------------------------------------------------------------------------------------------


@needs_vnni
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_weights_beside_the_file(style: str, tmp_path: Path) -> None:
    integer = integer_of("linear")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, external_data=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx.data").stat().st_size >= 192 * 16
    plain = fxq.export_onnx(integer, tmp_path / "plain.onnx", style=style)
    assert plain.stat().st_size - path.stat().st_size > 2000
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    whole = onnxruntime.InferenceSession(str(plain), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": batch().numpy()})[0], whole.run(None, {"x": batch().numpy()})[0])
    if style == "qdq":
        assert worst(measured(integer, path)) <= 3
    else:
        report = verified(integer, path)
        assert report, str(report)
        assert len(report.pairs) == 5


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_files_with_weights_beside_them_can_be_inspected(style: str, tmp_path: Path) -> None:
    integer = integer_of("concatenation")
    one, two = (read(fxq.export_onnx(integer, tmp_path / f"{beside}.onnx", style=style, external_data=beside)) for beside in (True, False))
    described = [node for node in integer.graph.nodes if qparams(node) is not None]  # float operators have no inner tensors
    assert [row.name for row in one.rows] == [node.name for node in described if style != "qdq" or not is_inner(node)]
    assert {name: value.tolist() for name, value in one.tensors.items()} == {name: value.tolist() for name, value in two.tensors.items()}


def test_a_model_that_is_too_large_for_one_file_gets_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integer = integer_of("linear")
    monkeypatch.setattr(model_files, "LARGEST_FILE", 3000)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").exists()
    assert verified(integer, path)
    with pytest.raises(fxq.ExportError, match="cannot be one file"):
        fxq.export_onnx(integer, tmp_path / "one.onnx", external_data=False)
    assert not list(tmp_path.glob("one.onnx*"))
    monkeypatch.undo()
    fxq.export_onnx(integer, tmp_path / "one.onnx", external_data=False)
    assert not (tmp_path / "one.onnx.data").exists()


def test_weights_beside_the_file_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the model is written is where the program runs
    for name in ("linear", "silu"):
        integer = integer_of(name)
        assert verified(integer, fxq.export_onnx(integer, "model.onnx", external_data=True))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integer = integer_of("linear")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", external_data=True)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}

    def fails(*_: Any, **__: Any) -> None:
        raise onnx.checker.ValidationError("no")

    monkeypatch.setattr(onnx.checker, "check_model", fails)
    with pytest.raises(fxq.ExportError, match="would not be valid"):
        fxq.export_onnx(integer_of("silu"), path, external_data=True)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


# ---- metadata ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_what_a_file_says_about_itself(style: str, tmp_path: Path) -> None:
    integer = integer_of("silu")
    found = fxq.onnx_metadata(fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, input_names=["image"], output_names=["y"]))
    assert (found["version"], found["style"], found["io"], found["target"]) == (fxq.__version__, style, "float", "nash-e")
    assert found["inputs"] == [{"name": "image", "dtype": "float", "shape": ["batch", 3, 8, 8], "tensor": "x_quantize"}]
    assert found["outputs"] == [{"name": "y", "dtype": "float", "shape": ["batch", 8, 8, 8], "tensor": "silu_1"}]
    known = {node.name: qparams(node) for node in integer.graph.nodes if qparams(node) is not None}
    storage, zero_point = ("uint8", 128) if style == "fast" else ("int8", 0)
    for name, expected in known.items():
        entry = {"kind": "quantized", "scale": expected.scale, "dtype": "int8", "storage": storage, "zero_point": zero_point}
        assert found["tensors"][name] == entry


def test_metadata_of_another_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "foreign.onnx"
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    onnx.save(helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "foreign", [value], [result])), str(path))
    with pytest.raises(fxq.ExportError, match="was not written by fxquant"):
        fxq.onnx_metadata(path)
    with pytest.raises(fxq.ExportError, match="cannot be read as ONNX"):
        fxq.onnx_metadata(tmp_path / "missing.onnx")


@needs_vnni
def test_float_operators_mean_the_same_in_an_old_opset_or_are_refused(tmp_path: Path) -> None:
    """Softmax flattened its operand before opset 13; sums at computed places, and the transform, are in none of them."""
    path = tmp_path / "model.onnx"
    integer = compiled(Net(lambda n, x: n["a"](x).softmax(1), a=conv(3, 4)).eval(), [batch()], "bernoulli2").integer
    assert least_sqnr(measured(integer, fxq.export_onnx(integer, path, style="qdq", opset=11))) > 40
    net = Net(lambda n, x: torch.fft.rfft(n["a"](x)).real, a=conv(3, 4))
    with pytest.raises(fxq.ExportError, match="cannot be exported with opset=11"):
        fxq.export_onnx(compiled(net.eval(), [batch()], "nash-e").integer, path, style="qdq", opset=11)


def test_an_opset_is_refused_by_the_style(tmp_path: Path) -> None:
    integer = integer_of("convolution")
    for style, opset in (("exact", 16), ("fast", 13), ("qdq", 10), ("qdq", 0)):
        with pytest.raises(fxq.ConfigurationError, match=f"opset={opset} is unknown"):
            fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, opset=opset)

"""Style "fast" gives the integer model's bits by kernels of bytes; what a runtime computes otherwise is written as in style "exact"."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import export, fast_kernels, fast_parts
from fxquant.backends.onnx.fast_parts import exact_divisor, multiply
from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.backends.onnx.writer import Emitter, value_info
from fxquant.ir.integer import qparams
from fxquant.primitives import elementwise
from fxquant.primitives.quantization import requantize_real
from tests.shared import onnx_files
from tests.shared.contract import VNNI, needs_vnni
from tests.shared.networks import Network
from tests.shared.onnx_files import MODELS, assert_verified, batch, conv, exported, integer_of, kernels_of, known, operators

pytestmark = pytest.mark.usefixtures("default_outputs")

REAL_TARGETS = ("nash-e", "nash-m", "x86", "qnnpack")
KERNELS = {  # that style "fast" makes of each
    "convolution": {"QLinearConv": 1}, "depthwise": {"QLinearConv": 2}, "grouped": {"QLinearConv": 2}, "linear": {"MatMulInteger": 2},
    "rows": {"MatMulInteger": 1}, "residual": {"QLinearConv": 1}, "addition": {"QLinearConv": 1}, "concatenation": {"QLinearConv": 2},
    "pooling": {"QLinearConv": 1}, "resizing": {"QLinearConv": 2}, "silu": {"QLinearConv": 2}, "transposed": {"QLinearConv": 1},
    "transposed in groups": {"QLinearConv": 1}, "products": {"QLinearConv": 2, "QLinearMatMul": 1}, "padding": {"QLinearConv": 1},
    "margins": {"QLinearConv": 2},
}  # fmt: skip


def computed(path: Path) -> int:
    """How many tables of a file are computed by operators."""
    return len(fxq.export.onnx_metadata(path)["kernels"]["computed"])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", MODELS)
def test_fast_files_give_the_integer_models_bits(name: str, tmp_path: Path) -> None:
    path = fxq.export_onnx(known(name), tmp_path / "model.onnx", style="fast")
    report = assert_verified(known(name), path)
    assert {node.name for node in known(name).graph.nodes if qparams(node) is not None} <= report.names  # every quantized tensor
    assert sum(kernels_of(path)) == sum(KERNELS[name].values())
    counts = {kernel: operators(path).count(kernel) for kernel in ("QLinearConv", "QLinearMatMul", "MatMulInteger")}
    assert not VNNI or {kernel: count for kernel, count in counts.items() if count} == KERNELS[name]


# ---- tables -----------------------------------------------------------------------------------------------------------
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {  # and the operator that computes each; None: it is looked up
    "sigmoid": (torch.sigmoid, "Sigmoid"), "hardsigmoid": (F.hardsigmoid, "HardSigmoid"), "tanh": (torch.tanh, "Tanh"),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), "LeakyRelu"), "silu": (F.silu, None), "gelu": (F.gelu, None), "elu": (F.elu, None),
    "left to the exporter": (lambda x: x.round(decimals=1), None),
    "hardswish": (F.hardswish, None), "tanh of a sum": (lambda x: torch.tanh(x * 2 + 0.5), None),
}  # fmt: skip


def on_scales(model: nn.Module, target: str, scales: dict[int, float]) -> fx.GraphModule:
    """The model as integers, with the scales of some tensors given, by their place."""
    prepared = fxq.calibrate(fxq.prepare(model.eval(), (batch(),), target=target), [batch()])
    names = list(fxq.qparams(prepared))
    fxq.set_qparams(prepared, {names[place]: scale for place, scale in scales.items()})
    return fxq.convert(prepared)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("target", ["nash-e", "x86"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_table_is_computed_where_that_is_quicker_and_no_rounding_can_change_an_entry(name: str, target: str, tmp_path: Path) -> None:
    function, operator = FUNCTIONS[name]
    integer = on_scales(Network(lambda s, x: s.b(function(s.a(x))), a=conv(3, 8), b=conv(8, 4)), target, {1: 0.0217, 2: 0.0181})
    path = exported(integer, tmp_path / "model.onnx", style="fast")
    assert computed(path) == (operator is not None)
    assert {operator or "GatherElements"} == {"Gather", "GatherElements", *fast_parts.QUICK} & set(operators(path))


def two_sigmoids() -> fx.GraphModule:
    """A network of which the first table alone is computed."""
    torch.manual_seed(0)
    return integer_of(Network(lambda s, x: s.b(s.a(x).sigmoid()).sigmoid(), a=conv(3, 8), b=conv(8, 8)))


@pytest.mark.parametrize(("scale", "wanted"), [(1 / 32, 0), (0.0301, 1)])
def test_a_table_with_an_entry_beside_a_tie_is_looked_up(scale: float, wanted: int, tmp_path: Path) -> None:
    """A quarter of a step below 0 and a half are ties on the same grid."""
    integer = on_scales(Network(lambda s, x: F.leaky_relu(s.a(x), 0.25), a=conv(3, 8)), "nash-e", {1: 1 / 32, 2: scale})
    path = exported(integer, tmp_path / "model.onnx", style="fast")
    assert computed(path) == wanted
    assert operators(path).count("GatherElements") == 1 - wanted


def test_a_table_that_is_not_of_its_function_is_looked_up() -> None:
    integer = two_sigmoids()
    node = next(node for node in integer.graph.nodes if node.target is elementwise.lookup)
    assert fast_parts.computes(integer, node, 21)
    assert not fast_parts.computes(integer, node, 17)
    integer.get_submodule(node.args[1].target.rpartition(".")[0]).table[100] += 1
    assert not fast_parts.computes(integer, node, 21)


@needs_vnni
def test_a_computed_table_that_differs_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fast_parts, "compute", lambda e, node, stored, zero: e.node("Identity", stored))
    monkeypatch.setattr(fast_parts, "_is_quick", lambda *_: True)
    path = exported(two_sigmoids(), tmp_path / "model.onnx", style="fast")
    kernels = fxq.export.onnx_metadata(path)["kernels"]
    assert (kernels["computed"], len(kernels["refused"])) == ([], 1)


# ---- targets, numbers and widths ----------------------------------------------------------------------------------------
@pytest.mark.sweep
@pytest.mark.parametrize("target", [*REAL_TARGETS, "bayes-e"])
@pytest.mark.parametrize("name", ["residual", "linear"])
@pytest.mark.parametrize("opset", [17, 19, 21])
def test_fast_files_on_every_target_and_opset(target: str, name: str, opset: int, tmp_path: Path) -> None:
    exported(known(name, target), tmp_path / "model.onnx", style="fast", opset=opset)


@pytest.mark.parametrize(("multiplier", "bits", "limits"), [(1.0, 32, True), (0.99, 32, False), (2.0**24, 8, True), (2.0**23, 8, False)])
def test_a_product_is_limited_where_it_could_leave_int32(multiplier: float, bits: int, limits: bool) -> None:
    """A runtime that saturates, as onnxruntime does, returns the same without."""
    emitter = Emitter({}, 21)
    writer = SimpleNamespace(emitter=emitter, zero=lambda node: emitter.constant(128, torch.uint8))
    fast_kernels._rounded(writer, None, emitter.constant(2.0), torch.tensor(multiplier), bits)
    assert ("Clip" in {node.op_type for node in emitter.nodes}) == limits


def test_products_far_beyond_what_is_stored_saturate_in_every_runtime(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    prepared = fxq.calibrate(fxq.prepare(model, x, "nash-e"), [x])
    fxq.set_qparams(prepared, {"_2": 1e-14})
    exported(fxq.convert(prepared), tmp_path / "model.onnx", [x], style="fast")


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["silu", "pooling", "residual", "concatenation"])
@pytest.mark.parametrize(("activation", "weight"), [("int4", "int4"), ("int8", "int4"), ("int16", "int8"), ("int16", "int16")])
def test_narrow_integers_are_stored_as_int8_and_wide_ones_have_no_kernel(activation: str, weight: str, name: str, tmp_path: Path) -> None:
    path = exported(known(name, "nash-e", activation, weight), tmp_path / "model.onnx", style="fast")
    assert fxq.export.onnx_metadata(path)["tensors"]["x_quantize"]["dtype"] == activation
    assert ("int16" in (activation, weight)) == (kernels_of(path)[0] == 0)


def test_a_mixture_of_widths_crosses_between_the_storages_and_a_file_that_takes_integers_takes_the_same_ones(tmp_path: Path) -> None:
    wide = fxq.QConfigMapping().set_module_name("a", fxq.QConfig(fxq.ActivationConfig("int16")))
    path = exported(integer_of(MODELS["silu"](), qconfig=wide), tmp_path / "model.onnx", style="fast")
    storages = {entry["storage"] for entry in fxq.export.onnx_metadata(path)["tensors"].values() if entry["kind"] == "quantized"}
    assert {"uint8", "int16"} <= storages
    onnx_files.assert_takes_integers(known("silu"), fxq.export_onnx(known("silu"), tmp_path / "model.onnx", style="fast", io="integer"))


def test_a_word_among_the_arguments_may_be_the_name_of_a_value(tmp_path: Path) -> None:
    net = Network(lambda s, x: (((x * 3).long() ^ ((x + x.flip(3)) * 2).long()).float(), s.a(x)), a=conv(3, 3))
    integer = integer_of(net)
    words = {value for node in integer.graph.nodes for value in node.args if isinstance(value, str)}
    assert words & {node.name for node in integer.graph.nodes}
    exported(integer, tmp_path / "model.onnx", [batch()], style="fast")


# ---- what is refused ----------------------------------------------------------------------------------------------------
@needs_vnni
@pytest.mark.disagrees
def test_a_kernel_that_is_not_exact_here_is_written_as_in_style_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = export._kernel_is_exact
    monkeypatch.setattr(export, "_kernel_is_exact", lambda integer, node, *rest: node.name != "b" and honest(integer, node, *rest))
    path = exported(two_sigmoids(), tmp_path / "model.onnx", style="fast")
    assert fxq.export.onnx_metadata(path)["kernels"] == {"integer": ["a"], "computed": ["sigmoid"], "refused": ["b"]}
    assert "onnxruntime's kernel is not used for %b, because it differs from the integer graph for 1 of 2 operators" in caplog.text
    assert operators(path).count("QLinearConv") == 1


@needs_vnni
def test_a_kernel_that_saturates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    node = next(node for node in known("silu").graph.nodes if node.name == "b")
    assert export._kernel_is_exact(known("silu"), node, 21)
    honest = export._run
    monkeypatch.setattr(export, "_run", lambda *arguments: {name: value.clamp(max=254) for name, value in honest(*arguments).items()})
    assert not export._kernel_is_exact(known("silu"), node, 21)


def test_a_file_that_is_wrong_as_a_whole_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(writer: fast_kernels.FastWriter, node: fx.Node, *arguments: Any) -> str:
        return writer.emitter.node("Identity", writer.shifted(node.args[0]))

    monkeypatch.setitem(fast_kernels.FORMS, elementwise.lookup, wrong)
    with pytest.raises(fxq.errors.ExportError, match="does not give the integer model's numbers"):
        fxq.export_onnx(known("silu"), tmp_path / "model.onnx", style="fast")
    assert list(tmp_path.iterdir()) == []


# ---- single operators -----------------------------------------------------------------------------------------------------
POOLS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "after a convolution": (lambda s, x: F.max_pool2d(F.relu(s.a(x)), 3, 2, 1), 1),
    "after a convolution that is not clamped": (lambda s, x: F.max_pool2d(s.a(x), (2, 3), (1, 2), (0, 1), dilation=(2, 1)), 1),
    "after an addition": (lambda s, x: F.max_pool2d(s.a(x) + s.b(x), 2), 1),
    "one after another, with padding": (lambda s, x: F.max_pool2d(F.max_pool2d(s.a(x), 3, 1, 1), 5, 1, 2), 2),
    "after zeros": (lambda s, x: F.max_pool2d(F.pad(s.a(x), (1, 1, 1, 1)), 3), 0),
    "of the input": (lambda s, x: s.a(F.max_pool2d(x, 3, 2, 1)), 0),
}


@pytest.mark.sweep
@needs_vnni
@pytest.mark.parametrize("target", ["nash-e/requantize", "x86"])
@pytest.mark.parametrize("name", POOLS)
def test_maxima_are_of_bytes_where_a_convolution_leaves_the_pixels_together(name: str, target: str, tmp_path: Path) -> None:
    forward, bytewise = POOLS[name]
    integer = fxq.quantize(Network(forward, a=conv(3, 8), b=conv(3, 8)).eval(), [batch()], target).integer
    path = exported(integer, tmp_path / "model.onnx", style="fast")
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    types = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.output)}
    pools = [types[node.output[0]] for node in graph.node if node.op_type == "MaxPool"]
    assert pools.count(TensorProto.UINT8) == bytewise
    assert pools.count(TensorProto.FLOAT) == len(pools) - bytewise


# ---- products of two tensors of bytes as one kernel ------------------------------------------------------------------
# Multiplier, zero points of both operands and of the result: small and large, powers of two with ties, and such as saturate.
GATES = {
    "a gate": (0.0043219, 128, 128, 128), "affine": (0.00712771, 3, 0, 17), "odd zero point": (0.0371313, 128, 0, 129),
    "saturating": (0.9013771, 128, 128, 128), "small": (3.1337e-5, 0, 0, 0), "a power of two, even zero point": (2.0**-7, 128, 0, 128),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("broadcast", [False, True])
def test_every_pair_of_bytes_in_every_runtime(name: str, broadcast: bool) -> None:
    multiplier, left_zero, right_zero, zero = GATES[name]
    divisor = exact_divisor(float(torch.tensor(multiplier)), left_zero, right_zero, zero)
    assert divisor is not None
    left, right = torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    shape = (1, 256, 16, 16), (1, 256, 1, 1) if broadcast else (1, 256, 16, 16)
    a = left.reshape(1, 1, 16, 16).expand(shape[0]).contiguous()
    b = right.reshape(1, 256, 1, 1).expand(shape[1]).contiguous()
    emitter = Emitter({}, 21)
    result = multiply(
        emitter,
        ("a", emitter.constant(left_zero, torch.uint8)),
        ("b", emitter.constant(right_zero, torch.uint8)),
        divisor,
        emitter.constant(zero, torch.uint8),
    )
    infos = [value_info("a", torch.uint8, a.shape), value_info("b", torch.uint8, b.shape)]
    output = helper.make_tensor_value_info(result, onnx.TensorProto.UINT8, None)
    graph = helper.make_graph(emitter.nodes, "gate", infos, [output], emitter.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sums = (a.int() - left_zero) * (b.int() - right_zero)
    wanted = requantize_real(sums, torch.tensor(multiplier), -zero, 255 - zero, torch.uint8, zero)
    for _, level, threads in RUNTIMES:
        assert torch.equal(Runner(model, level, threads, None, {})({"a": a, "b": b})[result], wanted)


def test_ties_that_a_zero_point_would_move_have_no_divisor() -> None:
    """2.5 becomes 2, and with an odd zero point added first 2.5 + 1 = 3.5 becomes 4: it would stand for 3."""
    assert exact_divisor(2.0**-7, 128, 0, 129) is None


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["x86", "nash-e"])
def test_gates_are_one_kernel_and_exact(target: str, tmp_path: Path) -> None:
    def gated(m: Network, x: Tensor) -> Tensor:
        """A squeeze, and SiLU as a product."""
        x = m.first(x)
        x = x * torch.sigmoid(x)
        return m.last(x * F.hardsigmoid(m.squeeze(F.adaptive_avg_pool2d(x, 1))))

    model = Network(gated, first=conv(3, 8), squeeze=nn.Conv2d(8, 8, 1), last=nn.Conv2d(8, 4, 1))
    batches = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    integer = fxq.quantize(model, batches, target=target).integer
    path = fxq.export_onnx(integer, tmp_path / "gated.onnx", style="fast")
    assert fxq.verify(integer, path, batches)
    gated = {node.name for node in integer.graph.nodes if qparams(node) is not None and node.name.startswith("mul")}
    assert gated & set(fxq.export.onnx_metadata(path)["kernels"]["integer"])

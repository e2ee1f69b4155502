"""Style "qdq" is measured: files of every opset and operator are within a few steps of the integer model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES
from fxquant.ir.integer import operation
from fxquant.ops import BY_NAME, OPERATORS
from tests.ops.test_operators import BY_OPERATOR, RECURRENT, WIDE_INSIDE, Pack, Sample, covering, inputs_of
from tests.shared.contract import compiled, graph_values, needs_vnni
from tests.shared.networks import Network
from tests.shared.onnx_files import MODELS, batch, conv, integer_of, known, operators, run

pytestmark = pytest.mark.nightly

OPSETS = (11, 13, 17, 21)


def measured(integer: fx.GraphModule, path: Path, inputs: Any = None) -> fxq.results.DeviationReport:
    report = fxq.verify(integer, path, [batch(3, seed=3) if inputs is None else inputs])
    assert isinstance(report, fxq.results.DeviationReport)
    assert not report
    assert set(report.outputs) == set(MEASURED_RUNTIMES)
    return report


def near(integer: fx.GraphModule, path: Path, steps: float, inputs: Any = None, **options: Any) -> fxq.results.DeviationReport:
    """The report of a file that is within some steps of the model."""
    report = measured(integer, fxq.export_onnx(integer, path, style="qdq", **options), inputs)
    assert max(output.largest for outputs in report.outputs.values() for output in outputs) <= steps, str(report)
    return report


def least_sqnr(report: fxq.results.DeviationReport) -> float:
    return min(output.sqnr for outputs in report.outputs.values() for output in outputs)


@needs_vnni
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", MODELS)
def test_qdq_files_run_and_are_near(name: str, opset: int, tmp_path: Path) -> None:
    report = near(known(name, "bayes-e"), tmp_path / "model.onnx", 3, opset=opset)
    model = onnx.load(str(tmp_path / "model.onnx"))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    assert {node.domain for node in model.graph.node} == {""}
    weights = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1]
    assert bool(weights) == (opset >= 13)  # below, there is no DequantizeLinear with an axis
    # Below opset 13 the weights are floats, which onnxruntime's optimiser quantizes once more, in its own way.
    assert least_sqnr(report) > (35 if opset >= 13 else 30), str(report)
    assert report.outputs["onnxruntime"][0].elements > 0


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("name", ["silu", "pooling", "residual", "concatenation"])
@pytest.mark.parametrize(("activation", "weight"), [("int4", "int4"), ("int8", "int4")])
def test_narrow_integers_are_near(activation: str, weight: str, name: str, opset: int, tmp_path: Path) -> None:
    near(known(name, "nash-e", activation, weight), tmp_path / "model.onnx", 2, opset=opset)


# ---- every operator -------------------------------------------------------------------------------------------------------
# Written by PyTorch's exporter, from opset 18 on; as are operators on integers.
NEW_FORMS = ("tril", "triu", "signbit", "isposinf", "isneginf", "isreal", "piece", "sum_at")
# Their records have no form of ONNX, and PyTorch's exporters write none.
WITHOUT_A_FORM = {f"adaptive_max_indices{rank}d" for rank in (1, 2, 3)}


def written_as_qdq(samples: list[Sample], opset: int, directory: Path) -> None:
    """The samples in one model, whose file is within a step of the integer model."""
    inputs = tuple(value for sample in samples for value in inputs_of(sample, 4))
    integer = compiled(Pack(samples).eval(), [inputs], "nash-e", covering()).integer
    near(integer, directory / "model.onnx", 1, inputs, opset=opset)


def is_wide(sample: Sample) -> bool:
    """Whether something in it has int16, which QuantizeLinear knows from opset 21 on."""
    return sample.bound in (*WIDE_INSIDE, RECURRENT) or sample.operator == "affine_grid"


def packs(samples: list[Sample], size: int = 8) -> list[list[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def is_new(sample: Sample) -> bool:
    """Whether it has no form before opset 18."""
    return sample.operator in NEW_FORMS or sample.operator.startswith("whole_")


EVERY = [sample for sample in BY_OPERATOR.values() if sample.operator not in WITHOUT_A_FORM]
# onnxruntime 1.32 moves an int8 pair over its Reshape, and then says that the zero point is uint8.
OPENED = [sample for sample in EVERY if sample.operator not in ("index_put", "setitem")]
QDQ = [*((pack, 21) for pack in packs(OPENED)), *((pack, 11) for pack in packs([s for s in EVERY if not is_new(s) and not is_wide(s)]))]


@needs_vnni
@pytest.mark.parametrize(("samples", "opset"), QDQ, ids=[f"{pack[0].operator} to {pack[-1].operator}-{opset}" for pack, opset in QDQ])
def test_every_operator_has_a_qdq_form(samples: list[Sample], opset: int, tmp_path: Path) -> None:
    written_as_qdq(samples, opset, tmp_path)


@pytest.mark.parametrize("operator", sorted(WITHOUT_A_FORM))
def test_what_has_no_qdq_form_is_refused(operator: str, tmp_path: Path) -> None:
    with pytest.raises(fxq.errors.ExportError):
        written_as_qdq([BY_OPERATOR[operator]], 21, tmp_path)


@needs_vnni
@pytest.mark.parametrize(
    ("operator", "model", "written"),
    [
        ("sin", lambda s, x: torch.sin(0.5 - s.a(x)), "Sin"),  # the number in front of it belongs to its table
        ("add", lambda s, x: F.relu(s.a(x).sin() + 2 * x[:, :1]), "Relu"),  # two operands, and a fused clamp
        ("prelu", lambda s, x: s.b(s.a(x)), None),  # its one parameter has another role in the arithmetic
        ("linear", lambda s, x: s.c(s.a(x)), "Gemm"),  # a weight and a bias
    ],
)
def test_an_operator_without_a_form_is_written_by_its_float_function(
    operator: str, model: Any, written: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integer = integer_of(Network(model, a=conv(3, 8), b=nn.PReLU(8), c=nn.Sequential(nn.Flatten(), nn.Linear(512, 5))))
    record, path = BY_NAME[operator], tmp_path / "model.onnx"
    for table, key in ((OPERATORS, record.function), (BY_NAME, operator)):
        monkeypatch.setitem(table, key, replace(record, onnx=None))
    if written is None:
        with pytest.raises(fxq.errors.ExportError, match="cannot be written in style 'qdq'") as caught:
            fxq.export_onnx(integer, path, style="qdq")
        assert "test_onnx_qdq.py" in str(caught.value)  # the user's line
        assert list(tmp_path.iterdir()) == []
        return
    near(integer, path, 1)
    assert written in operators(path)


# ---- widths and numbers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("opset", [11, 20, 21])
def test_int16_is_rounded_by_float_operators_before_opset_21(opset: int, tmp_path: Path) -> None:
    integer = known("silu", "nash-e", "int16", "int16")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=opset)
    assert least_sqnr(measured(integer, path)) > 80, str(measured(integer, path))
    assert ("QuantizeLinear" in operators(path)) == (opset == 21)
    if opset == 20:
        with pytest.raises(fxq.errors.ConfigurationError, match="export with opset=21"):
            fxq.export_onnx(integer, path, style="qdq", opset=20, io="integer")


@needs_vnni
def test_a_sum_of_32_bits_stays_a_float(tmp_path: Path) -> None:
    wide = fxq.QConfigMapping().set_module_name("b", fxq.QConfig(fxq.ActivationConfig("int32")))
    integer = integer_of(MODELS["linear"](), qconfig=wide)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq")
    (output,) = measured(integer, path).outputs["onnxruntime"]
    assert output.scale is None
    assert output.sqnr > 40
    with pytest.raises(fxq.errors.ExportError, match="its 32-bit output is a float"):
        fxq.export_onnx(integer, path, style="qdq", io="integer")


def test_weights_are_the_integer_graphs_own(tmp_path: Path) -> None:
    integer = known("grouped")
    model = onnx.load(str(fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=13)))
    stored = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in model.graph.initializer}
    constant = operation(next(node for node in integer.graph.nodes if node.name == "b")).constants["weight"]
    weight = dict(integer.named_buffers())["integer.b.weight"]
    chains = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored]
    chain = next(node for node in chains if torch.equal(stored[node.input[0]], weight))
    assert [attribute.i for attribute in chain.attribute if attribute.name == "axis"] == [0]
    assert torch.equal(stored[chain.input[1]], torch.tensor(constant.scale))
    assert not stored[chain.input[2]].any()


def test_large_biases_do_not_overflow(tmp_path: Path) -> None:
    """onnxruntime quantizes a float bias after an int16 weight to int32, in steps that may be too small for that."""
    model = MODELS["linear"]()
    nn.init.constant_(model.a.bias, 50.0)
    integer = integer_of(model, qconfig=fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int16")))
    report = measured(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=21))
    assert least_sqnr(report) > 60, str(report)


def test_qdq_files_can_take_and_return_integers(tmp_path: Path) -> None:
    integer = known("convolution")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", io="integer")
    values = graph_values(integer, batch())
    (output,) = run(path, values["x_quantize"])
    assert output.dtype == torch.int8
    assert int((output.int() - values["relu" if "relu" in values else "a"].int()).abs().max()) <= 1


def test_the_report_counts_in_steps(tmp_path: Path) -> None:
    integer = known("convolution")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq")
    model = onnx.load(str(path))
    scale = fxq.export.onnx_metadata(path)["tensors"]["a"]["scale"]
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


@needs_vnni
def test_float_operators_mean_the_same_in_an_old_opset_or_are_refused(tmp_path: Path) -> None:
    """Softmax flattened its operand before opset 13; sums at computed places, and the transform, are in no opset."""
    integer = integer_of(Network(lambda s, x: s.a(x).softmax(1), a=conv(3, 4)), target="bernoulli2")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=11)
    assert least_sqnr(measured(integer, path)) > 40
    integer = integer_of(Network(lambda s, x: torch.fft.rfft(s.a(x)).real, a=conv(3, 4)))
    with pytest.raises(fxq.errors.ExportError, match="cannot be exported with opset=11"):
        fxq.export_onnx(integer, path, style="qdq", opset=11)

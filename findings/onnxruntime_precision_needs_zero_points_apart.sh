#!/usr/bin/env bash
# onnxruntime 1.32.0 on a processor with AVX2 and without VNNI: with session.x64quantprecision=1 a valid QDQ model is not opened whose
# two weights share one initializer as their zero point.
#
# The option keeps sums of bytes exact where pairs of products would saturate in 16 bits. It changes the zero point of each weight, and meets
# the shared one a second time: Attempt to replace the existing tensor. The model opens without the option, and with it if each weight has a
# zero point of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if grep -qE 'avx512_vnni|avx_vnni' /proc/cpuinfo; then echo "this processor has VNNI: the finding is about processors without"; exit 0; fi
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def model(zeros: tuple[str, str]) -> bytes:
    """Two linear layers, 8 to 16 to 4, with these zero points of the weights."""
    draw = numpy.random.default_rng(0).integers
    values = {"s": numpy.float32(0.05), "z": numpy.uint8(0), "ws": numpy.float32(0.01), "zero": numpy.int8(0), "other": numpy.int8(0)}
    values |= {"w0": draw(-127, 128, (8, 16)).astype(numpy.int8), "w1": draw(-127, 128, (16, 4)).astype(numpy.int8)}
    nodes, value = [], "x"
    for layer, zero in enumerate(zeros):
        steps = (("QuantizeLinear", f"{value} s z", "q"), ("DequantizeLinear", f"q{layer} s z", "d"), ("DequantizeLinear", f"w{layer} ws {zero}", "v"), ("MatMul", f"d{layer} v{layer}", "m"))
        nodes += [helper.make_node(kind, read.split(), [f"{written}{layer}"]) for kind, read, written in steps]
        value = f"m{layer}"
    nodes += [helper.make_node("QuantizeLinear", [value, "s", "z"], ["q"]), helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 8), ("y", 4))]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], [numpy_helper.from_array(numpy.asarray(each), name) for name, each in values.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def outcome(data: bytes, precise: str) -> str:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", precise)
    try:
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return "opens"


shared, apart = model(("zero", "zero")), model(("zero", "other"))
refused = outcome(shared, "1")
print(onnxruntime.__version__, refused)
assert "Attempt to replace the existing tensor" in refused, "the finding no longer holds"
assert [outcome(shared, "0"), outcome(apart, "0"), outcome(apart, "1")] == ["opens"] * 3
PROGRAM

#!/usr/bin/env bash
# onnxruntime 1.32.0 on a processor with AVX2 and without VNNI: a valid QDQ model of opset 21 with int8 activations is not opened, if its
# linear layer reads three dimensions of fixed sizes.
#
# The optimizer makes a Gemm between two Reshapes of MatMul and Add, with a QuantizeLinear for the new value, and turns int8 into uint8. The
# session ends in: output_dtype INT8 does not match y_zero_point type UINT8. The same model opens at opset 17, with a batch of any size,
# with uint8 activations, and without optimization.
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


def model(opset: int, integer: type, batch: int | str) -> bytes:
    """A linear layer (8 to 4) with its relu, quantized before and after."""
    weight = numpy.random.default_rng(0).integers(-127, 128, (8, 4)).astype(numpy.int8)
    values = {"s": numpy.float32(0.05), "z": integer(0), "ws": numpy.float32(0.01), "wz": numpy.int8(0), "w": weight, "b": numpy.zeros(4, numpy.float32)}
    steps = [
        ("QuantizeLinear", "x s z", "qx"), ("DequantizeLinear", "qx s z", "dx"), ("DequantizeLinear", "w ws wz", "dw"), ("MatMul", "dx dw", "m"),
        ("Add", "m b", "a"), ("Relu", "a", "r"), ("QuantizeLinear", "r s z", "qy"), ("DequantizeLinear", "qy s z", "y"),
    ]
    nodes = [helper.make_node(kind, read.split(), [written]) for kind, read, written in steps]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 6, size]) for name, size in (("x", 8), ("y", 4))]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], [numpy_helper.from_array(numpy.asarray(value), name) for name, value in values.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def outcome(data: bytes, level: onnxruntime.GraphOptimizationLevel = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL) -> str:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, level
    try:
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return "opens"


plain = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
refused = outcome(model(21, numpy.int8, 4))
print(onnxruntime.__version__, refused)
assert "output_dtype INT8 does not match y_zero_point type UINT8" in refused, "the finding no longer holds"
others = [outcome(model(17, numpy.int8, 4)), outcome(model(21, numpy.int8, "n")), outcome(model(21, numpy.uint8, 4)), outcome(model(21, numpy.int8, 4), plain)]
assert others == ["opens"] * 4, others
PROGRAM

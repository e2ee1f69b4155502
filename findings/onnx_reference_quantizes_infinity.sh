#!/usr/bin/env bash
# onnx 1.23.2, onnxruntime 1.32.0: the reference evaluator's QuantizeLinear turns +infinity into the lowest integer, where the runtime gives the highest one.
#
# The specification saturates round(x / scale) + zero point. onnx.reference casts the quotient to int32 before it limits it, and the cast
# of infinity is the lowest int32. Of -inf, -3, 0, 3 and inf with scale 1, onnx.reference returned -128 -3 0 3 -128 for int8 and
# 0 0 0 3 0 for uint8; onnxruntime returned -128 -3 0 3 127 and 0 0 0 3 255. A file that is checked with the evaluator on data with
# infinities seems wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

x = numpy.array([-numpy.inf, -3, 0, 3, numpy.inf], numpy.float32)
results = {}
for kind in (TensorProto.INT8, TensorProto.UINT8):
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    graph = helper.make_graph(
        [node], "quantize", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5])], [helper.make_tensor_value_info("y", kind, [5])],
        [helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0]), helper.make_tensor("zero", kind, [], [0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results[kind] = ReferenceEvaluator(model).run(None, {"x": x})[0].tolist(), session.run(None, {"x": x})[0].tolist()
print(onnx.__version__, onnxruntime.__version__, results)
assert results[TensorProto.INT8][1] == [-128, -3, 0, 3, 127]
assert results[TensorProto.UINT8][1] == [0, 0, 0, 3, 255]
assert results[TensorProto.INT8][0] == [-128, -3, 0, 3, -128], "the finding no longer holds"
assert results[TensorProto.UINT8][0] == [0, 0, 0, 3, 0], "the finding no longer holds"
PROGRAM

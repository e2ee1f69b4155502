#!/usr/bin/env bash
# onnx 1.22.0: the reference evaluator joins the scan outputs of a Loop along the first dimension, and runs no iteration without a condition.
#
# The standard concatenates what each iteration gives along a new first axis, and takes an absent condition for true. A loop of three
# iterations that gives a tensor of shape (2, 4) at each returned the shape (6, 4) and not (3, 2, 4); what has one dimension, as in most
# examples, has the right shape. The same file without its optional condition returned an error of numpy about nothing to concatenate.
# onnxruntime 1.24.4 returned (3, 2, 4) for both files. A test that compares a runtime with the evaluator sees a difference of shapes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.22.0 onnxruntime==1.24.4 numpy==2.2.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def model(condition):
    scalar = [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, [])]
    state = helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, 4])
    outputs = [
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("next", TensorProto.FLOAT, [2, 4]),
        helper.make_tensor_value_info("seen", TensorProto.FLOAT, [2, 4]),
    ]
    nodes = [
        helper.make_node("Identity", ["go"], ["go_on"]),
        helper.make_node("Add", ["state", "state"], ["next"]),
        helper.make_node("Identity", ["state"], ["seen"]),
    ]
    body = helper.make_graph(nodes, "body", [*scalar, state], outputs)
    loop = helper.make_node("Loop", ["count", condition, "x"], ["last", "every"], body=body)
    constants = [numpy_helper.from_array(np.array(3), "count"), numpy_helper.from_array(np.array(True), "true")]
    graph = helper.make_graph(
        [loop], "loop", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("every", TensorProto.FLOAT, [3, 2, 4])], constants,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


x = np.ones((2, 4), np.float32)
for condition in ("true", ""):
    session = onnxruntime.InferenceSession(model(condition).SerializeToString(), providers=["CPUExecutionProvider"])
    shape = session.run(None, {"x": x})[0].shape
    print("onnxruntime", onnxruntime.__version__, repr(condition), shape)
    assert shape == (3, 2, 4), "the finding no longer holds"
shape = ReferenceEvaluator(model("true")).run(None, {"x": x})[0].shape
print("onnx", onnx.__version__, "'true'", shape)
assert shape == (6, 4), "the finding no longer holds"
try:
    ReferenceEvaluator(model("")).run(None, {"x": x})
except ValueError as error:
    print("onnx", onnx.__version__, "''", error)
else:
    raise AssertionError("the finding no longer holds")
PROGRAM

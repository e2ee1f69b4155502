#!/usr/bin/env bash
# onnx2fx 0.0.1: a linear Resize whose scales do not divide the size evenly samples other positions than the standard's.
#
# With scales of 0.5 a dimension of 5 becomes 2, and the standard maps positions by the scale: 0.5 and 2.5 in half_pixel coordinates. The
# module that onnx2fx makes maps them by the ratio of the sizes, 5 / 2. On a ramp of 0 to 4 it returned 0.75 and 3.25; onnxruntime and
# onnx's reference evaluator returned 0.5 and 2.5. Sizes that the scales divide evenly, as in most tests, are equal. Networks that halve
# an image of an odd size read other pixels, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 onnx==1.22.0 onnxruntime==1.24.4 onnx2fx==0.0.1 numpy==2.2.6
"$folder/venv/bin/python" - <<'PROGRAM'
from importlib.metadata import version

import numpy as np
import onnx
import onnx2fx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in (("x", [1, 1, 4, 5]), ("y", [1, 1, 4, 2]))]
scales = numpy_helper.from_array(np.array([1, 1, 1, 0.5], np.float32), "scales")
model = helper.make_model(
    helper.make_graph([node], "graph", ends[:1], ends[1:], [scales]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
)
onnx.checker.check_model(model, full_check=True)
x = np.broadcast_to(np.arange(5, dtype=np.float32), (1, 1, 4, 5)).copy()
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
with torch.no_grad():
    result = onnx2fx.convert(model)(torch.from_numpy(x))
result = next(iter(result.values())) if isinstance(result, dict) else result[0] if isinstance(result, (tuple, list)) else result
rows = {
    f"onnxruntime {onnxruntime.__version__}": session.run(None, {"x": x})[0][0, 0, 0].tolist(),
    f"onnx {onnx.__version__}": ReferenceEvaluator(model).run(None, {"x": x})[0][0, 0, 0].tolist(),
    f"onnx2fx {version('onnx2fx')}": result[0, 0, 0].tolist(),
}
for name, row in rows.items():
    print(name, row)
one, other, third = rows.values()
assert one == other == [0.5, 2.5], "the finding no longer holds"
assert third == [0.75, 3.25], "the finding no longer holds"
PROGRAM

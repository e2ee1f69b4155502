#!/usr/bin/env bash
# onnx2fx 0.0.1: a ConvTranspose whose padding follows from the attribute output_shape is read without padding.
#
# The standard derives the padding from output_shape: total = stride * (size - 1) + kernel - output_shape, here 1 along each dimension. The
# module that onnx2fx makes returned the shape (1, 2, 12, 14) in place of (1, 2, 10, 12), without an error or a warning; onnxruntime
# returned (1, 2, 10, 12). Exporters of TensorFlow write the attribute.
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

weight = np.arange(1, 1 + 3 * 2 * 3 * 3, dtype=np.float32).reshape(3, 2, 3, 3)
node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], output_shape=[10, 12])
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in (("x", [1, 3, 5, 6]), ("y", [1, 2, 10, 12]))]
model = helper.make_model(
    helper.make_graph([node], "graph", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")]),
    opset_imports=[helper.make_opsetid("", 17)], ir_version=8,
)
onnx.checker.check_model(model, full_check=True)
x = np.ones((1, 3, 5, 6), np.float32)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
wanted = session.run(None, {"x": x})[0]
print("onnxruntime", onnxruntime.__version__, wanted.shape)
assert wanted.shape == (1, 2, 10, 12), "the finding no longer holds"
with torch.no_grad():
    result = onnx2fx.convert(model)(torch.from_numpy(x))
result = next(iter(result.values())) if isinstance(result, dict) else result[0] if isinstance(result, (tuple, list)) else result
print("onnx2fx", version("onnx2fx"), tuple(result.shape))
assert tuple(result.shape) == (1, 2, 12, 14), "the finding no longer holds"
PROGRAM

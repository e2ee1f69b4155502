"""3.x: a module of the compiler from an ONNX file."""

import torch
from hbdk4.compiler.onnx import export
from horizon_plugin_pytorch import set_march

set_march("nash-e")
torch.onnx.export(torch.nn.Conv2d(3, 4, 1), torch.randn(1, 3, 8, 8), "model.onnx")
export("model.onnx")

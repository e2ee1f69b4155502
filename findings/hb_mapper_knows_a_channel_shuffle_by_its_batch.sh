#!/usr/bin/env bash
# hb_mapper 1.24.3 (rdkx5-yolo-mapper 1.0.0): whether a channel shuffle is one operator depends on how its reshapes write the batch.
#
# Reshape, Transpose and Reshape between two quantized convolutions become one HzChannelShuffle of the quantized model if both reshapes
# have a batch of 1, and stay three moves in five dimensions if they have -1 there, as most exporters write them, although the
# configuration fixes the batch at 1.
# PYTHON names a Python 3.10 on x86-64 Linux. The tool imports PyTorch and needs none of it: an empty package stands for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.10}" -m venv "$folder/venv"
pip="$folder/venv/bin/pip install --quiet"
$pip --no-deps rdkx5-yolo-mapper==1.0.0 dgdk==1.0.0 dg_nn_toolkit==1.0.0
$pip numpy==1.23.0 onnx==1.15.0 onnxruntime==1.16.2 protobuf==3.20.3 opencv-python-headless==4.6.0.66 scipy==1.13.1 \
    scikit-image==0.19.0 'setuptools<70' absl-py click coloredlogs easydict graphviz jinja2 matplotlib msgpack-numpy multiprocess paramiko \
    pathos pillow psutil pydot pyyaml schema six tabulate tqdm typing_extensions
torch=$("$folder/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch
mkdir "$torch"
cat > "$torch/__init__.py" <<'PROGRAM'
import importlib.machinery
import sys
import types


class Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, *given, **_: given[0] if given else self})


class Package(types.ModuleType):
    __path__ = []
    __getattr__ = Empty.__getattr__


class Packages:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec):
        return Package(spec.name)

    def exec_module(self, module):
        pass


__version__ = "2.0.0"
sys.meta_path.append(Packages())
sys.modules["torch"].__class__ = Package
PROGRAM
cd "$folder"
PATH="$folder/venv/bin:$PATH" python - <<'PROGRAM'
import collections
import pathlib
import subprocess

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CONFIGURATION = """\
model_parameters: {{onnx_model: {0}.onnx, march: bayes-e, output_model_file_prefix: {0}, working_dir: {0}}}
input_parameters: {{input_name: x, input_shape: 1x16x8x8, input_type_rt: featuremap, input_layout_rt: NCHW, input_type_train: featuremap,
                   input_layout_train: NCHW, norm_type: no_preprocess}}
calibration_parameters: {{calibration_type: load}}
compiler_parameters: {{compile_mode: latency, optimize_level: O0, debug: true, core_num: 1}}
"""


def network(batch):
    """Two convolutions, quantized at their ends, with a channel shuffle of two groups between them."""
    weight = np.random.default_rng(0).integers(-127, 128, (16, 16, 1, 1)).astype(np.float32)
    weight[:, 0] = 127
    values = {
        "weight": weight / 127, "scale": np.float32(0.1), "zero": np.int8(0),
        "apart": np.array([batch, 2, 8, 8, 8], np.int64), "together": np.array([batch, 16, 8, 8], np.int64),
    }
    nodes = []

    def add(operator, *inputs, **attributes):
        nodes.append(helper.make_node(operator, list(inputs), [f"v{len(nodes)}"], f"n{len(nodes)}", **attributes))
        return nodes[-1].output[0]

    def quantized(value):
        return add("DequantizeLinear", add("QuantizeLinear", value, "scale", "zero"), "scale", "zero")

    value = quantized(add("Conv", quantized("x"), "weight", kernel_shape=[1, 1]))
    value = add("Reshape", add("Transpose", add("Reshape", value, "apart"), perm=[0, 2, 1, 3, 4]), "together")
    value = quantized(add("Conv", quantized(value), "weight", kernel_shape=[1, 1]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16, 8, 8]) for name in ("x", value)]
    tensors = [numpy_helper.from_array(np.asarray(each), name) for name, each in values.items()]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    onnx.checker.check_model(model, full_check=True)
    return model


counts = {}
for name, batch in (("one", 1), ("open", -1)):
    onnx.save(network(batch), f"{name}.onnx")
    pathlib.Path(f"{name}.yaml").write_text(CONFIGURATION.format(name))
    subprocess.run(["hb_mapper", "makertbin", "--model-type", "onnx", "-c", f"{name}.yaml"], check=True, capture_output=True)
    quantized = onnx.load(f"{name}/{name}_quantized_model.onnx")
    counts[name] = collections.Counter(node.op_type for node in quantized.graph.node)
    print(name, dict(counts[name]))
assert counts["one"]["HzChannelShuffle"] == 1 and counts["open"]["HzChannelShuffle"] == 0, "the finding no longer holds"
assert counts["open"]["Reshape"] == counts["one"]["Reshape"] + 2, "the finding no longer holds"
PROGRAM

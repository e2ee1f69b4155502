"""Stand-ins for the programs of the vendor's tool: one script under their names, which does what a file beside it says."""

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, fx

import fxquant as fxq
from fxquant.ir.graph import shape_of
from fxquant.ir.integer import qparams
from tests.shared.programs import program

PROGRAMS = ("hb_mapper", "hb_extract_hbm", "hbdk-disas", "hbdk-sim", "hbdk-perf", "python")
SCRIPT = program("horizon_tool_script")
DATE = "2026-01-01 10:00:00,000"


class FakeTool:
    """A folder of stand-ins for the tool's programs; `told` is their behaviour."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, Any] = {"log": [], "signal": 0, "makes": True, "code": 0, "python": 3}
        self.told.update(programs=[], outputs=[], figures=[])
        folder.mkdir()
        for name in PROGRAMS:
            (folder / name).write_text(SCRIPT.format(python=sys.executable), encoding="utf-8")
            (folder / name).chmod(0o755)
        self.tell()

    def tell(self, **changed: Any) -> None:
        self.told.update(changed)
        (self.folder / "told.json").write_text(json.dumps(self.told), encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls.txt").read_text(encoding="utf-8").splitlines()

    def computes(self, integer: fx.GraphModule, name: str, values: Tensor, channels_last: bool = False) -> None:
        """Let the one program take the quantized input and give the values of a convolution of this name, of one row."""
        (input,) = (node for node in integer.graph.nodes if node.name == "x_quantize")
        shape = [1, *(int(size) for size in shape_of(input)[1:])]
        last = [values.shape[0], *values.shape[2:], values.shape[1]]
        described = [
            ("x_quantize_quantized", shape, "int8"),
            (f"{name}/Conv_1_quantized", last if channels_last else list(values.shape), "int8"),
        ]
        features = [{"feature name": each, "valid dim": sizes, "element type name": dtype} for each, sizes, dtype in described]
        program = {"model name": "part_0", "march": "bayes-e", "input features": features[:1], "output features": features[1:]}
        order = values.permute(0, 2, 3, 1) if channels_last else values
        self.tell(programs=[program], outputs=[order.flatten().tolist()])
        onnx.save(_quantized(name, shape, channels_last), str(self.folder / "quantized.onnx"))


def _quantized(name: str, shape: list[int], channels_last: bool) -> onnx.ModelProto:
    """A model whose names are connected as in the tool's own models."""
    built = f"{name}/Conv_1_quantized"
    nodes = [
        helper.make_node("HzQuantize", ["x"], ["x_quantize_quantized"], domain="horizon"),
        helper.make_node("HzConv", ["x_quantize_quantized"], [built], domain="horizon"),
    ]
    if channels_last:
        nodes.append(helper.make_node("Transpose", [built], ["turned"], perm=[0, 3, 1, 2]))
    nodes.append(helper.make_node("HzDequantize", ["turned" if channels_last else built], [f"{name}_dequantize"], domain="horizon"))
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(f"{name}_dequantize", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11), helper.make_opsetid("horizon", 1)])


def integers(integer: fx.GraphModule, name: str, x: Tensor) -> Tensor:
    """The integers of a tensor of an integer model."""
    assert qparams(next(node for node in integer.graph.nodes if node.name == name)) is not None
    recorded: Tensor = next(iter(fxq.inspect.record(integer, [x], [name])))[name]
    assert recorded.dtype == torch.int64
    return recorded

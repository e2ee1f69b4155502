"""Which operators of a compiled network run on the processor, and which differs first."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, fx

from benchmarks.silicon import tool
from benchmarks.silicon.tool import Compiled
from fxquant.graph import qparams, source

MOVING = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")  # which change no number


def on_processor(compiled: Compiled) -> list[list[str]]:
    """For each output of a compiled model, the nodes before it that compute on the processor, as "name (type)"."""
    graph = onnx.load(str(compiled.quantized)).graph
    makers = {output: node for node in graph.node for output in node.output}
    return [_behind(output.name, makers, compiled) for output in graph.output]


def _behind(name: str, makers: dict[str, onnx.NodeProto], compiled: Compiled) -> list[str]:
    found: dict[str, None] = {}
    waiting, seen = [name], set()
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.output[0] in seen:
            continue
        seen.add(node.output[0])
        if compiled.runs_on.get(node.name) == "CPU" and node.op_type not in MOVING:
            found[f"{node.name} ({node.op_type})"] = None
        waiting += node.input
    return list(found)


def first_difference(integer: fx.GraphModule, compiled: Compiled, given: Tensor) -> str | None:
    """The first layer of an integer graph whose integers are not those that the vendor's runtime computes; None where none is found.

    What the compiler calls by the name of a node, the last of it, is compared; what it has joined with others is not seen.
    """
    model = onnx.load(str(compiled.quantized))
    (given_name,) = (node.name for node in integer.graph.nodes if node.op == "placeholder")
    last: dict[str, tuple[str, bool]] = {}
    for node in model.graph.node:
        name, *rest = node.name.split("/")
        bits = [attribute.i for attribute in node.attribute if attribute.name in ("output_bit", "bits")]
        if rest and node.op_type not in ("Transpose", "HzDequantize", "Constant"):
            channels_last = any(attribute.name == "data_format" and attribute.s == b"NHWC" for attribute in node.attribute)
            last[name] = (node.output[0], channels_last)
            kind = {16: onnx.TensorProto.INT16, 32: onnx.TensorProto.INT32}.get(bits[0] if bits else 8, onnx.TensorProto.INT8)
            known = {output.name for output in model.graph.output}
            if node.op_type.startswith("Hz") and node.output[0] not in known:
                model.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], kind, None))
    names = [output.name for output in model.graph.output]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seen.onnx"
        onnx.save(model, path)
        found = dict(zip(names, tool.quantized(Compiled(path, (), {}), [{given_name: given.numpy()}])[0], strict=True))
    values = Values(integer)
    values.run(given)
    for node in integer.graph.nodes:
        if node.name in last and last[node.name][0] in found and qparams(node) is not None:
            theirs = torch.from_numpy(np.array(found[last[node.name][0]], np.int64))
            theirs = theirs.permute(0, 3, 1, 2) if last[node.name][1] and theirs.dim() == 4 else theirs
            ours = values.kept[node.name].long()
            differing = int((ours.flatten() != theirs.flatten()).sum()) if ours.numel() == theirs.numel() else ours.numel()
            if differing:
                return f"%{node.name} ({differing} of {ours.numel()}), {source(node)}"
    return None


class Values(fx.Interpreter):
    """Keeps what each node gives."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.kept: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.kept[n.name] = value
        return value

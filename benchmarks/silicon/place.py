"""Which operators of a compiled network run on the processor."""

from __future__ import annotations

import onnx

from benchmarks.silicon.tool import Compiled

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

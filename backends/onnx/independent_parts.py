"""Division of a model of independent parts into one model for each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import helper


def split(model: onnx.ModelProto, parts: Sequence[tuple[int, int]]) -> list[onnx.ModelProto]:
    """Return one model for each pair (number of inputs, number of outputs), in the order of the model's own inputs and outputs.

    Constants that several parts read are in each of them; the order of nodes is kept. Unlike `onnx.utils.extract_model`, this searches
    the graphs inside nodes, and does not need shapes. Raises ValueError if a part reads an input of another.
    """
    found: list[onnx.ModelProto] = []
    maker = {name: index for index, node in enumerate(model.graph.node) for name in node.output if name}
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    given = {entry.name for entry in model.graph.input}
    inputs, outputs = iter(model.graph.input), iter(model.graph.output)
    for many, results in parts:
        mine, ends = [next(inputs) for _ in range(many)], [next(outputs) for _ in range(results)]
        own, used, tensors = {entry.name for entry in mine}, set[int](), dict[str, onnx.TensorProto]()
        left = [entry.name for entry in ends]
        while left:
            name = left.pop()
            if name in own:
                continue
            if name in held:
                tensors[name] = held[name]
            elif name in given:
                raise ValueError(f"a part reads {name!r}, which is an input of another")
            elif maker[name] not in used:
                used.add(maker[name])
                left.extend(_read_by(model.graph.node[maker[name]]))
        nodes = [model.graph.node[index] for index in sorted(used)]
        graph = helper.make_graph(nodes, model.graph.name, mine, ends, list(tensors.values()))
        found.append(helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version, functions=model.functions))
    return found


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including outer values that the graphs inside it read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            own = {entry.name for entry in (*inner.input, *inner.initializer)} | {name for n in inner.node for name in n.output}
            ends = (entry.name for entry in inner.output)
            yield from (name for name in (*(name for n in inner.node for name in _read_by(n)), *ends) if name not in own)

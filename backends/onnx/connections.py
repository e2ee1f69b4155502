"""The mapping from tensors of the vendor's quantized model to tensors of an integer graph.

The tool names its tensors after those of the file that it reads, and inserts reshapes and transposes. A tensor of its quantized model
is followed through these to a value of that file, which is named after a node of the integer graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

from fxquant.errors import ExportError

BEHIND = {"Transpose", "Reshape", "Identity", "Flatten", "Squeeze", "Unsqueeze", "HzDequantize"}
BEFORE = BEHIND | {"HzQuantize"}
SUFFIX = "_quantized"
DOMAIN = "horizon"


@dataclass(frozen=True)
class Place:
    """The position of a tensor of the quantized model in the integer graph.

    node           the name of the node whose integers it holds
    channels_last  whether its dimensions are N, H, W, C if those of the node are N, C, H, W
    """

    node: str
    channels_last: bool


def named_values(model: onnx.ModelProto) -> dict[str, str]:
    """Return the integer graph's node for values of a file of style "horizon": those on both sides of a pair, and copies of them."""
    produced = {node.output[0]: node for node in model.graph.node}
    found = {}
    for node in model.graph.node:
        name = node.output[0]
        if node.op_type in ("DequantizeLinear", "HzDequantize") and node.input[0] in produced and "/" not in name:
            found[name] = name
            found.setdefault(produced[node.input[0]].input[0], name)
        elif node.op_type == "Identity" and node.input[0] in found:
            found[name] = found[node.input[0]]
    return found


class Connections:
    """The quantized model that the tool wrote, as a graph of names."""

    def __init__(self, path: Path, values: Mapping[str, str]) -> None:
        try:
            model = onnx.load(str(path))
        except Exception as error:
            raise ExportError(
                f"{path} cannot be read",
                because="the names of a program's tensors are in the quantized model that the compiler writes into the same folder",
                remedy="keep the folder that fxq.compile_horizon fills together",
            ) from error
        self.values = values
        self.outputs = [output.name for output in model.graph.output]
        self.producers = {name: node for node in model.graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.inner = [name for name in self.producers if name.endswith(SUFFIX)]

    def place(self, tensor: str) -> Place | None:
        """Return the node whose integers a tensor holds; None if it is not a value of the file."""
        node = self._named(tensor)
        for name, turned in (*self._behind(tensor), *self._before(tensor)):
            found = self._named(name)
            if name != tensor and found is not None and node in (None, found):
                return Place(found, turned)
        if node is None:
            return None
        producer = self.producers.get(tensor)  # the tool's own layers are channels last; tensors that it quantizes keep the file's order
        return Place(node, producer is not None and producer.op_type != "HzQuantize" and producer.domain == DOMAIN)

    def output(self, tensor: str) -> tuple[int, bool] | None:
        """Return which output of the file has a tensor's elements, and whether it is transposed relative to it; None if none has."""
        return next(((self.outputs.index(name), turned) for name, turned in self._behind(tensor) if name in self.outputs), None)

    def _named(self, tensor: str) -> str | None:
        return self.values.get(tensor) or self.values.get(tensor.removesuffix(SUFFIX))

    def _behind(self, tensor: str) -> Iterator[tuple[str, bool]]:
        """Yield the values after a tensor that hold its elements, and whether they are transposed relative to it."""
        waiting, seen = [(tensor, False)], {tensor}
        while waiting:
            name, turned = waiting.pop(0)
            yield name, turned
            for node in self.readers.get(name, []):
                if node.op_type in BEHIND and node.input[0] == name and node.output[0] not in seen:
                    seen.add(node.output[0])
                    waiting.append((node.output[0], turned != _turns(node)))

    def _before(self, tensor: str) -> Iterator[tuple[str, bool]]:
        """Yield the values before a tensor that hold its elements, and whether they are transposed relative to it."""
        name, turned = tensor, False
        while name in self.producers and self.producers[name].op_type in BEFORE:
            node = self.producers[name]
            name, turned = node.input[0], turned != _turns(node)
            yield name, turned


def _turns(node: onnx.NodeProto) -> bool:
    """Return whether a node transposes to channels last or back."""
    orders = [helper.get_attribute_value(entry) for entry in node.attribute if entry.name == "perm"]
    return node.op_type == "Transpose" and list(orders[0]) in ([0, 2, 3, 1], [0, 3, 1, 2])

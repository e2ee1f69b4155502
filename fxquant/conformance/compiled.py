"""A network compiled by the vendor's tool, and which of its operators run on the processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from torch import fx

from fxquant.backends.horizon.compiling import LOG, compile_horizon
from fxquant.backends.horizon.export import export_horizon

MOVING = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")  # operators that change no value


@dataclass(frozen=True)
class Compiled:
    """A compiled integer model: the .bin, its quantized model, and where each node of that runs."""

    binary: Path
    runs_on: Mapping[str, str]  # by node: "BPU" or "CPU"

    @property
    def quantized(self) -> Path:
        """Return the path of the quantized model, whose names are those of the program's tensors."""
        return self.binary.with_name(f"{self.binary.stem}_quantized_model.onnx")


def compile_model(integer: fx.GraphModule, to: Path, name: str = "model") -> Compiled:
    """Compile an integer model without optimization into a folder. Raises what `export_horizon` and `compile_horizon` raise."""
    folder = export_horizon(integer, to, name, optimize="O0")
    binary = compile_horizon(folder, show_progress=False)
    rows = (line.split() for line in (folder / LOG).read_text(encoding="utf-8").splitlines())
    return Compiled(binary, {row[0]: row[1] for row in rows if len(row) > 3 and row[1] in ("BPU", "CPU")})


def on_processor(compiled: Compiled) -> list[list[str]]:
    """Return, for each output of a compiled model, the nodes before it that compute on the processor, as "name (type)"."""
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

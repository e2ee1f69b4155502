"""A model compiled by the vendor's tool, and what the runtime of that computes of it, by `fxquant.backends.horizon`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from torch import Tensor, fx

import fxquant as fxq
from fxquant.backends.horizon.compiling import LOG
from fxquant.backends.horizon.program import inner_values
from fxquant.backends.horizon.tool import Tool


@dataclass(frozen=True)
class Compiled:
    """What the compiler makes of an integer model: the .bin, the quantized model beside it, and where each node of that runs."""

    binary: Path
    runs_on: Mapping[str, str]  # by node: "BPU" or "CPU"

    @property
    def quantized(self) -> Path:
        return self.binary.with_name(f"{self.binary.stem}_quantized_model.onnx")


def compile_model(integer: fx.GraphModule, to: Path) -> Compiled:
    """An integer model, compiled without optimization into a folder. Raises what `export_horizon` and `compile_horizon` raise."""
    folder = fxq.export_horizon(integer, to, optimize="O0")
    binary = fxq.compile_horizon(folder, show_progress=False)
    rows = (line.split() for line in (folder / LOG).read_text(encoding="utf-8").splitlines())
    return Compiled(binary, {row[0]: row[1] for row in rows if len(row) > 3 and row[1] in ("BPU", "CPU")})


def outputs(compiled: Compiled, images: Sequence[Tensor]) -> list[list[Tensor]]:
    """The outputs that the vendor's runtime computes from the quantized model, for each image."""
    names = [output.name for output in onnx.load(str(compiled.quantized)).graph.output]
    found = [inner_values(Tool.find(), compiled.quantized, [image], names) for image in images]
    return [[values[name] for name in names] for values in found]

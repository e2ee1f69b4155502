"""The vendor's simulator in place of the board: it runs a kit's programs and writes results as a board does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fxquant.analysis.recording import QUANTIZED, Wanted, returned
from fxquant.api import convert
from fxquant.backends.horizon.simulated import SimulatedForm
from fxquant.conformance import manifest
from fxquant.conformance.manifest import Array, Kit, ProbeProgram, packed, read_kit
from fxquant.conformance.results import kit_images, model_of
from fxquant.ir.interpreter import Interpreter
from fxquant.primitives import PRIMITIVES, shape
from fxquant.support.arguments import FOLDER, checked
from fxquant.support.files import write_file
from fxquant.support.progress import progress

SIMULATOR = "hbdk-sim"
MOVES = frozenset(function for function in PRIMITIVES if function.__module__ == shape.__name__)


@checked(folder=FOLDER, results=FOLDER.or_none("the kit's own folder simulated"))
def simulate_conformance(
    folder: str | os.PathLike[str], results: str | os.PathLike[str] | None = None, *, show_progress: bool | None = None
) -> Path:
    """Run a kit's programs in the vendor's simulator, and write the results into a folder; return its path.

    The BPU's part of each program is simulated. The processor's moves and dequantization after it are computed here. An output
    that the simulator does not compute is left out.

    Raises ConfigurationError if the kit or the tool is missing; ExportError for a damaged kit; CompilationError if the tool fails.
    """
    kit = read_kit(Path(folder))
    place = kit.folder / manifest.SIMULATED if results is None else Path(results)
    for program in progress(kit.programs, len(kit.programs), "simulating", show_progress):
        write_file(place / f"{program.name}.npz", packed({**_simulated(kit, program), **about(kit, SIMULATOR)}))
    return place


def about(kit: Kit, runtime: str) -> dict[str, Array]:
    """Return the arrays that identify the kit of results, and the runtime that computed them."""
    return {"kit": np.array(kit.identity), "runtime": np.array(runtime)}


def _simulated(kit: Kit, program: ProbeProgram) -> dict[str, Array]:
    integer = convert(model_of(kit, program), kernels="reference")
    kit.file(f"{manifest.BOARD}/{program.name}_quantized_model.onnx")
    form = SimulatedForm(kit.file(f"{manifest.BOARD}/{program.name}.bin"), integer)
    computed = [any(name in form.tensors for name in _along(node)) for node in returned(integer)]
    rows: list[dict[str, Tensor]] = []
    for image in kit_images(kit):
        values = form.run([image], Wanted(frozenset((QUANTIZED,))))
        outputs: Any = _Behind(integer, values).run(image)
        rows.append({str(index): outputs[index] for index, is_computed in enumerate(computed) if is_computed})
    return {index: torch.cat([row[index] for row in rows]).numpy() for index in rows[0]}


def _along(node: fx.Node) -> Iterator[str]:
    """Yield a tensor and those before it with equal elements, nearest first: through dequantization and operators that move elements."""
    seen: fx.Node | None = node
    first = True
    while seen is not None:
        yield seen.name
        passes = seen.target in MOVES or (first and seen.op == "call_function")
        first = False
        operands = [each for each in seen.all_input_nodes if each.op == "call_function"]
        seen = operands[0] if passes and len(operands) == 1 else None


class _Behind(Interpreter):
    """An integer graph with some of its tensors given."""

    def __init__(self, model: fx.GraphModule, values: dict[str, Tensor]) -> None:
        super().__init__(model)
        self.values = values

    def run_node(self, n: fx.Node) -> Any:
        """Return the given tensor, or the one that the graph computes."""
        found = super().run_node(n)
        given = self.values.get(n.name)
        return found if given is None else given.to(found.dtype).reshape(found.shape)

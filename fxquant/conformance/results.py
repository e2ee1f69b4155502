"""Comparison of a board's results with the expected integers: per operator, whether they are equal, and the simulator's with them."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from fxquant.accuracy.result import Rows
from fxquant.analysis.recording import QUANTIZED, Seen, Wanted, returned
from fxquant.api import convert, load
from fxquant.backends.horizon.compiled_program import SimulatedForm
from fxquant.conformance import manifest
from fxquant.conformance.board import UNKNOWN, integers
from fxquant.conformance.manifest import Array, Case, Kit, ProbeProgram, packed, read_arrays, read_kit
from fxquant.errors import ConfigurationError, ExportError
from fxquant.primitives import PRIMITIVES, shape
from fxquant.support.arguments import FOLDER, checked
from fxquant.support.files import write_file
from fxquant.support.progress import progress


def model_of(kit: Kit, program: ProbeProgram) -> fx.GraphModule:
    """Return the prepared model of a program. Raises ExportError if the kit is damaged."""
    return load(kit.file(f"{manifest.MODELS}/{program.name}.fxq"))  # type: ignore[no-any-return]


def kit_images(kit: Kit) -> list[Tensor]:
    """Return the inputs of every program, each a batch of one. Raises ExportError if the kit is damaged."""
    (whole,) = read_arrays(kit.file(f"{manifest.BOARD}/{manifest.INPUTS}")).values()
    return [torch.from_numpy(image[None]) for image in whole]


EQUAL, DIFFERS, NOT_RUN, PROCESSOR, REFUSED = "equal", "differs", "not run", "processor", "refused"


class ProbeResult(NamedTuple):
    """One operator as a board computed it.

    operator       its name
    dtype          of its activations
    result         "equal"; "differs"; "not run" if a program of it gave no results; "processor" if it does not run on the BPU, and
                   "refused" if it could not be compiled: these two are not compared
    elements       the number of its outputs' elements, over all programs that hold it and all inputs
    differing      the number of elements whose integer differs from the expected one
    largest_steps  the largest difference, in steps of the output
    simulated      whether the vendor's simulator gives every one of its elements, if the kit holds the simulator's results
    note           why it was not run or compared
    """

    operator: str
    dtype: str
    result: str
    elements: int = 0
    differing: int = 0
    largest_steps: int = 0
    simulated: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Conformance(Rows[ProbeResult]):
    """Compared results of a board: a row for each operator and dtype. True if every operator on the BPU was run and is equal.

    target   the target whose arithmetic was expected
    kit      the identity of the kit
    runtime  the runtime that computed the results, as they state
    """

    target: str
    kit: str
    runtime: str

    def __repr__(self) -> str:
        return f"<Conformance of {self.title}: {self.summary.splitlines()[0]}>"

    def __bool__(self) -> bool:
        compared = [row for row in self.items if row.result not in (PROCESSOR, REFUSED)]
        return bool(compared) and all(row.result == EQUAL for row in compared)

    @property
    def summary(self) -> str:
        """Return the number of equal operators, and a summary of the others, in lines."""
        counted = Counter(row.result for row in self.items)
        elements, differing = (sum(getattr(row, name) for row in self.items) for name in ("elements", "differing"))
        numbers = ", ".join(f"{counted[name]} {name}" for name in (EQUAL, DIFFERS, NOT_RUN, PROCESSOR, REFUSED) if counted[name])
        lines = [f"{EQUAL if self else 'NOT equal'}: {numbers}; {differing:,} of {elements:,} elements differ"]
        if shared := [row.operator for row in self.items if row.result == DIFFERS and row.simulated]:
            lines.append(f"  the vendor's simulator gives the same integers: {', '.join(shared)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{Rows(self.title, self.items)}\n{self.summary}"

    @checked()
    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows, with target, kit and runtime, as JSON; return the path."""
        about = {"target": self.target, "kit": self.kit, "runtime": self.runtime, "equal": bool(self)}
        return write_file(
            path, json.dumps({**about, "operators": [row._asdict() for row in self.items]}, indent=1, ensure_ascii=False) + "\n"
        )


@dataclass
class Ran:
    """An output of a program that a board returned."""

    expected: Array  # its expected integers
    found: Array  # its actual integers
    simulated: bool  # whether the vendor's simulator gives every element

    @property
    def differing(self) -> int:
        return int((self.found != self.expected).sum())

    @property
    def largest(self) -> int:
        comparable = self.found != UNKNOWN
        return int(np.abs(self.found - self.expected)[comparable].max(initial=0))


@checked(folder=FOLDER, results=FOLDER)
def check_conformance(folder: str | os.PathLike[str], results: str | os.PathLike[str]) -> Conformance:
    """Compare the results of a board with the expected integers of a kit.

    `folder` is the kit that `conformance_kit` wrote, `results` the folder that its run.py filled on the board. The
    elements of an operator that differ are compared with the vendor's simulator as well, if `simulate_conformance` has filled the kit's
    folder "simulated": where the simulator gives them, too, the difference is the compiler's, and not the board's.

    A program without results leaves its operators "not run".

    Raises ConfigurationError if the folder is not a kit or has no results at all. Raises ExportError for a damaged kit, and for results
    that cannot be read, belong to another kit, or have other shapes.
    """
    kit, place = read_kit(Path(folder)), Path(results)
    expected = read_arrays(kit.file(manifest.EXPECTED))
    ran: dict[tuple[str, int], Ran] = {}
    notes: dict[str, str] = {}
    runtimes: dict[str, None] = {}
    for program in kit.programs:
        path = place / f"{program.name}.npz"
        if not path.is_file():
            notes[program.name] = f"there is no {path.name}"
            continue
        arrays = _of_kit(kit, path)
        runtimes[str(arrays.get("runtime", "an unknown runtime"))] = None
        notes[program.name] = str(arrays["error"]) if "error" in arrays else "its output is missing"
        for index, case in enumerate(program.cases):
            name = f"{program.name}/{index}"
            if case.place == manifest.BPU and program.outputs[index] in arrays:
                step = expected[f"{name}/step"]
                result = _fitted(arrays[program.outputs[index]], expected[name], path, case)
                actual = integers(result, step)
                ran[program.name, index] = Ran(expected[name].astype(np.int64), actual, _simulates(kit, program, index, step, actual))
    if not runtimes:
        because = f"there is none of {', '.join(f'{program.name}.npz' for program in kit.programs[:4])}"
        remedy = f"copy {kit.folder / manifest.BOARD} to the board, run `python3 run.py` there, and pass the folder that it fills"
        raise ConfigurationError(f"{place} holds no results", because=because, remedy=remedy)
    runtime = ", ".join(runtimes)
    title = f"{kit.target} on {runtime}, kit {kit.identity}"
    return Conformance(title, tuple(_rows(kit, ran, notes)), target=kit.target, kit=kit.identity, runtime=runtime)


def _simulates(kit: Kit, program: ProbeProgram, index: int, step: Array, actual: Array) -> bool:
    """Return whether the simulator gave the integers `actual` for an output of a program; False if the kit has no such results."""
    path, name = kit.folder / manifest.SIMULATED / f"{program.name}.npz", program.outputs[index]
    simulated = _of_kit(kit, path) if path.is_file() else {}
    return name in simulated and np.array_equal(integers(simulated[name], step), actual)


def _of_kit(kit: Kit, path: Path) -> dict[str, Array]:
    """Return the arrays of a program's results. Raises ExportError if they belong to another kit."""
    arrays = read_arrays(path)
    of = str(arrays["kit"]) if "kit" in arrays else None
    if of != kit.identity:
        because = f"this kit is {kit.identity}, and it says {'nothing of a kit' if of is None else of}"
        remedy = f"copy {kit.folder / manifest.BOARD} to the board again, and run it"
        raise ExportError(f"{path} is not a result of this kit", because=because, remedy=remedy)
    return arrays


def _fitted(actual: Array, expected: Array, path: Path, case: Case) -> Array:
    """Return a result in the expected shape; runtimes drop or add dimensions of size 1. Raises ExportError for another shape."""
    if np.squeeze(actual).shape != np.squeeze(expected).shape or actual.dtype.kind not in "iuf":
        because = f"the output of {case.operator!r} is {actual.dtype} of shape {actual.shape}, and {expected.shape} is expected"
        raise ExportError(f"{path} does not fit its program", because=because, remedy="write results by the kit's own run.py")
    return actual.reshape(expected.shape)


def _rows(kit: Kit, ran: Mapping[tuple[str, int], Ran], notes: Mapping[str, str]) -> list[ProbeResult]:
    """Return a row for each operator and dtype, in the order of the kit."""
    cases: dict[tuple[str, str], list[tuple[ProbeProgram, int]]] = {}
    for program in kit.programs:
        for index, case in enumerate(program.cases):
            cases.setdefault((case.operator, program.dtype), []).append((program, index))
    for refusal in kit.refusals:
        cases.setdefault((refusal.operator, refusal.dtype), [])
    return [_row(*key, places, kit, ran, notes) for key, places in cases.items()]


def _row(
    operator: str, dtype: str, cases: Sequence[tuple[ProbeProgram, int]], kit: Kit, ran: Mapping[Any, Ran], notes: Mapping[str, str]
) -> ProbeResult:
    refused = [f"{each.scales}: {each.because}" for each in kit.refusals if (each.operator, each.dtype) == (operator, dtype)]
    on_bpu = [(program, index) for program, index in cases if program.cases[index].place == manifest.BPU]
    if not on_bpu:
        remarks = dict.fromkeys(program.cases[index].note for program, index in cases)
        return ProbeResult(operator, dtype, PROCESSOR if cases else REFUSED, note="; ".join([*remarks, *refused]))
    runs = [ran[program.name, index] for program, index in on_bpu if (program.name, index) in ran]
    missing = [f"{program.name}: {notes[program.name]}" for program, index in on_bpu if (program.name, index) not in ran]
    differing = sum(each.differing for each in runs)
    simulated = bool(differing) and all(each.simulated for each in runs)
    result = DIFFERS if differing else NOT_RUN if missing else EQUAL
    elements, largest = sum(each.expected.size for each in runs), max((each.largest for each in runs), default=0)
    return ProbeResult(operator, dtype, result, elements, differing, largest, simulated, "; ".join([*missing, *refused]))


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
    about = {"kit": np.array(kit.identity), "runtime": np.array("hbdk-sim")}
    for program in progress(kit.programs, len(kit.programs), "simulating", show_progress):
        write_file(place / f"{program.name}.npz", packed({**_simulated(kit, program), **about}))
    return place


def _simulated(kit: Kit, program: ProbeProgram) -> dict[str, Array]:
    integer = convert(model_of(kit, program), kernels="reference")
    kit.file(f"{manifest.BOARD}/{program.name}_quantized_model.onnx")
    form = SimulatedForm(kit.file(f"{manifest.BOARD}/{program.name}.bin"), integer)
    computed = [any(name in form.tensors for name in _along(node)) for node in returned(integer)]
    rows: list[dict[str, Tensor]] = []
    for image in kit_images(kit):
        values = form.run([image], Wanted(frozenset((QUANTIZED,))))

        def override(node: fx.Node, value: Any, read: tuple[Any, ...], values: dict[str, Tensor] = values) -> Any:
            return values[node.name].to(value.dtype).reshape(value.shape) if node.name in values else value

        outputs: Any = Seen(integer, override).run(image)
        rows.append({name: value for name, value, keep in zip(program.outputs, outputs, computed, strict=True) if keep})
    return {name: torch.cat([row[name] for row in rows]).numpy() for name in rows[0]}


def _along(node: fx.Node) -> Iterator[str]:
    """Yield a node's name, then names of earlier tensors with equal elements: before a dequantization, before movements of elements."""
    current: fx.Node | None = node
    first = True
    while current is not None:
        yield current.name
        passes = current.target in MOVES or (first and current.op == "call_function")
        first = False
        operands = [each for each in current.all_input_nodes if each.op == "call_function"]
        current = operands[0] if passes and len(operands) == 1 else None

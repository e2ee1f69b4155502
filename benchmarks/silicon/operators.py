"""Rows measured: several in one file, compiled once, and each compared with the integer graph."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import fxquant as fxq
from benchmarks.silicon import tool
from fxquant.conformance.kit import TOGETHER, compile_model, converted, groups, images, on_processor, output_steps
from fxquant.conformance.rows import Row


@dataclass(frozen=True)
class Result:
    """The measurements of one row on one march.

    place     "BPU"; "processor" where the compiler leaves a node of it there, "float" where fxquant does; "refused" where the compiler
              does not take it, "failed" where fxquant does not write it
    elements  those of its outputs over all inputs
    differing those in which the vendor's program differs from the integer graph
    steps     by how many steps of the output at most
    note      the nodes on the processor, or why it failed
    """

    row: str
    march: str
    dtype: str
    scales: str
    place: str
    elements: int = 0
    differing: int = 0
    steps: float = 0.0
    note: str = ""

    @property
    def equal(self) -> bool:
        return self.place == "BPU" and not self.differing


def measured(rows: Sequence[Row], march: str, dtype: str, scales: str, together: int = TOGETHER) -> Iterator[Result]:
    """The rows, so many in one file; where a file fails, its halves."""
    for group in groups(rows, together):
        yield from _of(group, march, dtype, scales)


def _of(rows: Sequence[Row], march: str, dtype: str, scales: str) -> list[Result]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _compared(rows, march, dtype, scales, Path(folder))
    except Exception as error:  # whatever it is, the row's note tells it
        if len(rows) == 1:
            lines = str(error).splitlines()
            reason = next((line for line in lines if "ERROR" in line or "unsupported" in line), lines[-1] if lines else "")
            place = "refused" if isinstance(error, fxq.FxQuantError) else "failed"
            return [Result(rows[0].name, march, dtype, scales, place, note=f"{type(error).__name__}: {reason}")]
        middle = len(rows) // 2
        return [*_of(rows[:middle], march, dtype, scales), *_of(rows[middle:], march, dtype, scales)]


def _compared(rows: Sequence[Row], march: str, dtype: str, scales: str, folder: Path) -> list[Result]:
    _, integer = converted(rows, march, dtype, scales)
    compiled = compile_model(integer, folder)
    _, samples = images()
    theirs = tool.outputs(compiled, samples)
    ours = [integer(image) for image in samples]
    steps, processor = output_steps(integer), on_processor(compiled)
    results = []
    for index, row in enumerate(rows):
        pairs = [(mine[index], other[index]) for mine, other in zip(ours, theirs, strict=True)]
        place = "float" if steps[index] is None else "processor" if processor[index] else "BPU"
        elements, differing, largest = compared(pairs, steps[index])
        results.append(Result(row.name, march, dtype, scales, place, elements, differing, largest, ", ".join(processor[index])))
    return results


def compared(pairs: Sequence[tuple[Tensor, Tensor]], step: Tensor | None) -> tuple[int, int, float]:
    """Count the elements of pairs of outputs and the elements that differ; return both, and the largest difference in steps."""
    elements = differing = 0
    largest = 0.0
    for mine, theirs in pairs:
        ours, vendor = (value.double() if step is None else (value.double() / step).round() for value in (mine, theirs.reshape(mine.shape)))
        distance = (ours - vendor).abs()
        elements += mine.numel()
        differing += int((distance != 0).sum())
        largest = max(largest, float(distance.max()))
    return elements, differing, largest

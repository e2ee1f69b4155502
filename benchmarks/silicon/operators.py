"""Rows measured: several in one file, compiled once, and each compared with the integer graph."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from benchmarks.silicon import tool
from benchmarks.silicon.place import on_processor
from benchmarks.silicon.rows import SIZE, Row
from fxquant.demo.training import seeded
from fxquant.graph import resolve
from fxquant.primitives.boundary import dequantize

TOGETHER = 40  # rows of one file
REACH = 2.5  # of calibration's images
SCALES = ("observed", "powers of two")


@dataclass(frozen=True)
class Result:
    """What was measured of one row on one march.

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


class Together(nn.Module):
    """Several rows side by side, of one image."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(row.build() for row in rows)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(row(image) for row in self.rows)


def images() -> tuple[list[Tensor], list[Tensor]]:
    """Batches to calibrate with, and images to compare on: beyond calibration's range, on ties of the input's scale, extremes."""
    with seeded(0):
        calibration = [torch.randn(4, 3, SIZE, SIZE).clamp(-REACH, REACH) for _ in range(3)]
        calibration[0][0, 0, 0, 0] = REACH
        beyond = 1.2 * torch.randn(1, 3, SIZE, SIZE).clamp(-REACH, REACH)
        ties = (torch.randint(-128, 128, (1, 3, SIZE, SIZE)) + 0.5) * (REACH / 127)
        extremes = torch.where(torch.rand(1, 3, SIZE, SIZE) < 0.5, -2 * REACH, 2 * REACH)
        small = 0.1 * torch.randn(1, 3, SIZE, SIZE)
    return calibration, [beyond, ties, extremes, small, torch.zeros(1, 3, SIZE, SIZE)]


def mapping_of(rows: Sequence[Row], dtype: str, scales: str) -> fxq.QConfigMapping:
    """How rows are quantized."""
    power = scales == SCALES[1]
    weight = fxq.WeightConfig(power_of_two=power)
    config = fxq.QConfig(fxq.ActivationConfig(dtype, power_of_two=power), weight)
    mapping = fxq.QConfigMapping().set_global(config).set_object_type(torch.cat, config)  # integer where it only leaves the model, too
    for index, row in enumerate(rows):
        if row.int32:
            mapping = mapping.set_module_name(f"rows.{index}.layers.c", fxq.QConfig(fxq.ActivationConfig("int32"), weight))
    return mapping


def converted(rows: Sequence[Row], march: str, dtype: str, scales: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The prepared and the integer model of rows, calibrated."""
    calibration, _ = images()
    prepared = fxq.prepare(Together(rows).eval(), calibration[0][:1], f"{march}", mapping_of(rows, dtype, scales))
    fxq.calibrate(prepared, calibration, show_progress=False, equalize=False)  # so that scales alone rebuild it
    return prepared, fxq.convert(prepared)


def measured(rows: Sequence[Row], march: str, dtype: str, scales: str, together: int = TOGETHER) -> Iterator[Result]:
    """The rows, so many in one file; where a file fails, its halves."""
    for group in groups(rows, together):
        yield from _of(group, march, dtype, scales)


def groups(rows: Sequence[Row], together: int) -> list[Sequence[Row]]:
    """Rows of one file each."""
    shared = [row for row in rows if not row.alone]
    return [*(shared[start : start + together] for start in range(0, len(shared), together)), *([row] for row in rows if row.alone)]


def _of(rows: Sequence[Row], march: str, dtype: str, scales: str) -> list[Result]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _compared(rows, march, dtype, scales, Path(folder))
    except Exception as error:  # whatever it is, the row's note tells it
        if len(rows) == 1:
            said = str(error).splitlines()
            reason = next((line for line in said if "ERROR" in line or "unsupported" in line), said[-1] if said else "")
            place = "refused" if isinstance(error, fxq.FxQuantError) else "failed"
            return [Result(rows[0].name, march, dtype, scales, place, note=f"{type(error).__name__}: {reason}")]
        middle = len(rows) // 2
        return [*_of(rows[:middle], march, dtype, scales), *_of(rows[middle:], march, dtype, scales)]


def _compared(rows: Sequence[Row], march: str, dtype: str, scales: str, folder: Path) -> list[Result]:
    _, integer = converted(rows, march, dtype, scales)
    compiled = tool.compile_model(integer, folder)
    _, given = images()
    theirs = tool.outputs(compiled, given)
    ours = [integer(image) for image in given]
    steps, processor = output_steps(integer), on_processor(compiled)
    results = []
    for index, row in enumerate(rows):
        pairs = [(mine[index], found[index]) for mine, found in zip(ours, theirs, strict=True)]
        place = "float" if steps[index] is None else "processor" if processor[index] else "BPU"
        elements, differing, largest = compared(pairs, steps[index])
        results.append(Result(row.name, march, dtype, scales, place, elements, differing, largest, ", ".join(processor[index])))
    return results


def compared(pairs: Sequence[tuple[Tensor, Tensor]], step: Tensor | None) -> tuple[int, int, float]:
    """Elements of pairs of outputs, those of other integers, and by how many steps at most."""
    elements = differing = 0
    largest = 0.0
    for mine, theirs in pairs:
        ours, found = (value.double() if step is None else (value.double() / step).round() for value in (mine, theirs.reshape(mine.shape)))
        distance = (ours - found).abs()
        elements += mine.numel()
        differing += int((distance != 0).sum())
        largest = max(largest, float(distance.max()))
    return elements, differing, largest


def output_steps(integer: fx.GraphModule) -> list[Tensor | None]:
    """What a step of each output is worth, float64, shaped to broadcast; None where it is not made of integers."""
    outputs: Any = next(node for node in integer.graph.nodes if node.op == "output").args[0]
    outputs = [outputs] if isinstance(outputs, fx.Node) else outputs
    return [resolve(integer, str(node.args[1].target)).double() if node.target is dequantize else None for node in outputs]

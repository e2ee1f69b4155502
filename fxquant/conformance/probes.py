"""Operators as networks that are compiled together: construction, calibration and conversion, and the images for the comparison."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant import backends
from fxquant.api import calibrate, convert, prepare
from fxquant.conformance.rows import SIZE, Row
from fxquant.ir.graph import resolve
from fxquant.primitives.quantization import dequantize
from fxquant.quantization.mapping import QConfigMapping
from fxquant.quantization.spec import ActivationConfig, QConfig, WeightConfig
from fxquant.support.seeding import seeded
from fxquant.target import Target

TOGETHER = 40  # rows in one file
REACH = 2.5  # the range of calibration's images
SCALES = ("observed", "powers of two")


def probe_target(march: str) -> Target:
    """Return the target whose arithmetic is that of the vendor compiler's programs for a march, or for one of its chips."""
    return backends.get(backends.get(march).march)


class Together(nn.Module):
    """Several rows in parallel, on one image."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(row.build() for row in rows)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(row(image) for row in self.rows)


def images() -> tuple[list[Tensor], list[Tensor]]:
    """Return batches for calibration, and images to compare: beyond calibration's range, on ties of the input's scale, extremes."""
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    with seeded(0):
        calibration = [torch.randn(4, 3, SIZE, SIZE, **on_cpu).clamp(-REACH, REACH) for _ in range(3)]
        calibration[0][0, 0, 0, 0] = REACH
        beyond = 1.2 * torch.randn(1, 3, SIZE, SIZE, **on_cpu).clamp(-REACH, REACH)
        ties = (torch.randint(-128, 128, (1, 3, SIZE, SIZE), device="cpu", dtype=torch.int64) + 0.5) * (REACH / 127)
        extremes = torch.where(torch.rand(1, 3, SIZE, SIZE, **on_cpu) < 0.5, -2 * REACH, 2 * REACH)
        small = 0.1 * torch.randn(1, 3, SIZE, SIZE, **on_cpu)
    return calibration, [beyond, ties, extremes, small, torch.zeros(1, 3, SIZE, SIZE, **on_cpu)]


def mapping_of(rows: Sequence[Row], dtype: str, scales: str) -> QConfigMapping:
    """Return the quantization of rows."""
    power = scales == SCALES[1]
    weight = WeightConfig(power_of_two=power)
    config = QConfig(ActivationConfig(dtype, power_of_two=power), weight)
    mapping = QConfigMapping().set_global(config).set_object_type(torch.cat, config)  # integer also if it is only an output
    for index, row in enumerate(rows):
        if row.int32:
            mapping = mapping.set_module_name(f"rows.{index}.layers.c", QConfig(ActivationConfig("int32"), weight))
    return mapping


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress logged warnings within the context: whether a probe breaks limits of a march does not matter."""
    logger = logging.getLogger("fxquant")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def converted(rows: Sequence[Row], march: str, dtype: str, scales: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the prepared and the integer model of rows, calibrated."""
    calibration, _ = images()
    with _quiet():
        prepared = prepare(Together(rows).eval(), calibration[0][:1], probe_target(march), mapping_of(rows, dtype, scales))
        calibrate(prepared, calibration, show_progress=False, equalize=False)  # without equalization, so that scales suffice to rebuild it
        return prepared, convert(prepared)


def groups(rows: Sequence[Row], together: int) -> list[Sequence[Row]]:
    """Return the rows grouped by file."""
    shared = [row for row in rows if not row.alone]
    return [*(shared[start : start + together] for start in range(0, len(shared), together)), *([row] for row in rows if row.alone)]


def output_steps(integer: fx.GraphModule) -> list[Tensor | None]:
    """Return the value of a step of each output, float64, shaped to broadcast; None for an output that is not made of integers."""
    outputs: Any = next(node for node in integer.graph.nodes if node.op == "output").args[0]
    outputs = [outputs] if isinstance(outputs, fx.Node) else outputs
    return [resolve(integer, str(node.args[1].target)).double() if node.target is dequantize else None for node in outputs]

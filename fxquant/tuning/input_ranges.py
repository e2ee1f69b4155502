"""Ranges of inputs many of whose values round to 0, narrowed where the outputs are better for it.

A few large values set the scale of such an input: a power spectrogram, say. The squared error of the input is that of these values, so no
observer cuts them off. What they do to the outputs is often the same at half their size, as behind a sigmoid. So the range is divided by
powers of two, and what the quantized input alone does to the outputs of the float model chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.calibration.lost_inputs import lost
from fxquant.ir.model import repeatable
from fxquant.numerics.grids import Grid
from fxquant.prepared.operators import quantized_operators
from fxquant.support.progress import progress
from fxquant.tuning.guard import tuning
from fxquant.tuning.output_noise import OutputNoise, decibels, is_lower

logger = logging.getLogger("fxquant")

MANY = 0.2  # of the values that are not 0, and become 0
FACTORS = (1.0, 0.5, 0.25, 0.125, 0.0625)
CHUNKS = 4  # of samples, which judge


def narrower(
    prepared: fx.GraphModule, chunks: Sequence[Sequence[Any]], before: Mapping[str, int], show_progress: bool | None
) -> dict[str, float]:
    """Return what the ranges of lost inputs are multiplied by so that the outputs for these chunks are best, by quantize node.

    Only inputs are looked at that were observed since `sample_ranges.counts` were `before`, by the default observer; only factors below 1
    are returned.
    """
    placeholders = [node.name for node in prepared.graph.find_nodes(op="placeholder")]
    seen = {name: _together([chunk[index] for chunk in chunks[:CHUNKS]]) for index, name in enumerate(placeholders)}
    found = {
        node.name: placeholders.index(node.all_input_nodes[0].name)
        for node, operator, _ in lost(prepared, seen, MANY)
        if operator.output.can_narrow and operator.output.observer.count > before.get(f"{node.name}.0", 0)  # type: ignore[union-attr]
    }
    if not found:
        return {}
    chosen = {}
    with tuning(prepared) as (_, operators, _), repeatable():
        outputs = OutputNoise(prepared, chunks[:CHUNKS])
        if not outputs.nodes:
            return {}
        for name, index in found.items():
            grid, noise = operators[name].output.grid, {}
            for factor in progress(FACTORS, len(FACTORS), f"range of {placeholders[index]}", show_progress):
                narrow = Grid(grid.type, grid.scale * factor, grid.zero_point)
                noise[factor] = outputs.of_inputs([_replaced(chunk, index, narrow) for chunk in chunks[:CHUNKS]])
            best = min(noise, key=noise.__getitem__)
            if is_lower(noise[best], noise[1.0]):
                chosen[name] = best
                logger.info(
                    "the range of input %s is multiplied by %g: rounding it alone leaves the outputs %.1f dB, and %.1f dB over its range",
                    placeholders[index], best, decibels(noise[best]), decibels(noise[1.0]),
                )  # fmt: skip
    return chosen


def narrow(prepared: fx.GraphModule, factors: Mapping[str, float]) -> None:
    """Multiply the ranges of these quantize nodes."""
    operators = quantized_operators(prepared)
    for name, factor in factors.items():
        operators[name].output.narrow(factor)


def _together(values: Sequence[Any]) -> Any:
    """Return the elements of an input in all chunks, whichever dimension is the batch; the input itself where it is not a tensor."""
    return torch.cat([value.flatten() for value in values]) if all(isinstance(value, Tensor) for value in values) else values[0]


def _replaced(chunk: Sequence[Any], index: int, grid: Grid) -> list[Any]:
    value = chunk[index]
    return [*chunk[:index], grid.dequantize(grid.quantize(value)).to(value.dtype), *chunk[index + 1 :]]

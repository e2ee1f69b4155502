"""Means over windows of which some reach over an edge, for targets whose average pooling is a layer.

The windows that are alike are one layer each, with the weight of their mean; side by side they are the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import FLOAT32_EXACT, SMALLEST_SCALE, WEIGHT_INT8
from fxquant.ops.core.operators import Call, Clamp, Lowering, Quantized, Ratio
from fxquant.primitives import elementwise
from fxquant.primitives.arithmetic import LAYER


def lower_uneven(lowering: Lowering, input: Quantized, total: Any, largest: float, divisor: Tensor, clamp: Clamp | None) -> Quantized:
    """Return the sums of windows, which stay below `largest`, times 127, by the constants of the layer that divides each by its divisor."""
    device = input.scale.device
    scale = (1 / divisor.to(device) / WEIGHT_INT8.high).clamp_min(SMALLEST_SCALE)
    steps = lowering.arithmetic.step(input.scale, scale)
    wide = lowering.prove(torch.tensor(largest * WEIGHT_INT8.high, dtype=torch.float64, device="cpu"), "the sum") >= FLOAT32_EXACT
    weight = lowering.constant("weight", torch.tensor(float(WEIGHT_INT8.high), device=device), torch.int32)
    scaled = lowering.call(elementwise.multiply, total, weight, wide)

    def lift(to: Tensor) -> Tensor:
        return lowering.arithmetic.layer_bias(torch.zeros_like(scale, dtype=torch.float64), steps[0], to.detach())

    if not lowering.lifts_late:
        held = lowering.constant("bias", lift(lowering.output.grid.scale), torch.int32)
        scaled = lowering.call(elementwise.add_constant, scaled, held)
    return lowering.requantize(scaled, Ratio(steps), clamp, lift=lift, kind=LAYER)


class Run(NamedTuple):
    """Windows along one dimension that are alike: the elements that they begin at and meet, and by what their sums are divided."""

    start: int
    length: int
    divisor: int
    windows: int


def runs(size: int, taps: int, step: int, padding: int, windows: int, counts_padding: bool) -> list[Run]:
    """Return the windows along one dimension, those that are alike together."""
    found: list[Run] = []
    for start in range(-padding, -padding + windows * step, step):
        low, high = max(start, 0), min(start + taps, size)
        divisor = min(start + taps, size + padding) - start if counts_padding else high - low
        last = found[-1] if found else None
        if last is not None and (last.length, last.divisor, last.start + last.windows * step) == (high - low, divisor, low):
            found[-1] = last._replace(windows=last.windows + 1)
        else:
            found.append(Run(low, high - low, divisor, 1))
    return found


def onnx_uneven(c: Call, along: list[list[Run]], stride: list[int], channels: int) -> str:
    """A convolution for each pair of runs, on the scale of the result, side by side."""
    rows = []
    for high in along[0]:
        row = []
        for wide in along[1]:
            pair = (high, wide)
            ends = [run.start + (run.windows - 1) * step + run.length for run, step in zip(pair, stride, strict=True)]
            part = c.do("Slice", c.input, c.integers([run.start for run in pair]), c.integers(ends), c.integers([2, 3]))
            value = torch.tensor(1 / float(high.divisor * wide.divisor), dtype=torch.float32, device="cpu")
            weight = c.e.constant(value.expand(channels, 1, high.length, wide.length).contiguous())
            shape = [high.length, wide.length]
            mean = c.do("Conv", part, weight, kernel_shape=shape, strides=list(stride), pads=[0, 0, 0, 0], group=channels)
            row.append(c.rounded(c.epilogue(mean)))
        rows.append(row[0] if len(row) == 1 else c.do("Concat", *row, axis=3))
    return rows[0] if len(rows) == 1 else c.do("Concat", *rows, axis=2)

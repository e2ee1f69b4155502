"""grid_sample by cubic interpolation, on a grid of its own: what it gives may lie beyond the values that it is between."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import shape_of
from fxquant.numerics.grids import EVERYTHING, FLOAT32_EXACT, INT32_MAX, INT48_MAX
from fxquant.ops.core.constants import real
from fxquant.ops.core.matrix import CUBIC, cubic_weight
from fxquant.ops.core.operators import SAMPLED, Call, Lowering, Quantized, Ratio, known_sizes, lowered, sampled
from fxquant.ops.sampling.grid import (
    GRID_SAMPLE_OPSET,
    LINEAR_OPSET,
    bits_of_positions,
    coordinates_of,
    cubic_sample,
    normalized,
    refuses_image,
)
from fxquant.primitives.cubic import sample_cubic

WEIGHT_BITS = 10


@functools.cache
def _weights(bits: int) -> tuple[tuple[int, ...], ...]:
    """Of each remainder, in steps of 2^-bits, the weights of the four neighbours in steps of 2^-10, halves up: they add up to 1."""
    rows = []
    for remainder in range(2**bits):
        behind = Fraction(remainder, 2**bits)
        row = [math.floor(cubic_weight(behind - (tap - 1), CUBIC) * 2**WEIGHT_BITS + Fraction(1, 2)) for tap in range(4)]
        row[row.index(max(row))] += 2**WEIGHT_BITS - sum(row)
        rows.append(tuple(row))
    return tuple(rows)


def _onnx(c: Call) -> str:
    if c.e.opset < GRID_SAMPLE_OPSET:
        return c.exported()
    settings = {"mode": "cubic" if c.e.opset >= LINEAR_OPSET else "bicubic", "padding_mode": c["padding_mode"]}
    return c.do("GridSample", c.operand("input"), c.operand("grid"), **settings, align_corners=int(c["align_corners"]))


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if len(shape_of(arguments["input"])) != 4:
        return "bicubic interpolation needs an input of four dimensions"
    return refuses_image(arguments["input"], "bilinear", arguments["padding_mode"])


@lowered(
    name="cubic_sample",
    operands=("input", "grid"),
    function=cubic_sample,
    dtypes={"grid": "int16"},
    keeps=lambda arguments, after: EVERYTHING,
    refuses=_refuses,
    onnx=_onnx,
)
@sampled("F.grid_sample(x, y, 'bicubic', 'border')", "torch.grid_sampler(x, y, 2, 1, False)", within=SAMPLED, x=(3, 6, 6), y=(4, 5, 2))
def cubic(
    lowering: Lowering, input: Quantized, grid: Quantized | Tensor, padding_mode: str = "zeros", align_corners: bool = False
) -> Quantized:
    """Sample the image at the positions of a grid by cubic interpolation."""
    sizes = known_sizes(input.shape[2:])
    bits, device = bits_of_positions(sizes), input.scale.device
    weights = torch.tensor(_weights(bits), dtype=torch.float32, device=device)
    reach = float(weights.abs().sum(1).max()) ** 2
    largest = lowering.prove(torch.tensor(input.grid.magnitude * reach, dtype=torch.float64, device="cpu"), "the weighted sum", INT48_MAX)

    def exact() -> Any:
        where = coordinates_of(lowering, input, grid, normalized(sizes, align_corners))
        held, wide = lowering.constant("weights", weights, torch.int32), largest >= FLOAT32_EXACT
        total = lowering.call(sample_cubic, input.value, where, held, sizes, bits, padding_mode, align_corners, wide)
        to, one = lowering.output, torch.tensor(2.0 ** (2 * WEIGHT_BITS), dtype=torch.float64, device=device)
        steps = Ratio((input.scale,), (one, to.scale))
        value = lowering.arithmetic.requantize(lowering, total, steps, *to.grid.bounds, to.grid, "", 32 if largest <= INT32_MAX else 48)
        return lowering.holds(value, to.grid)

    return lowering.result(exact, lambda: cubic_sample(input.real(), real(grid), padding_mode, align_corners))

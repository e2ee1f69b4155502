"""Slopes below zero as integers in steps of 2^-7, for targets that multiply by such."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.epilogue import Clamp
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import power_of_two
from fxquant.numerics.rescaling import Ratio
from fxquant.primitives import elementwise, product
from fxquant.primitives.comparison import choose, compare

LARGEST_DIFFERENCE = 127  # of one and a slope, in its steps, where what is added is a byte


def shifts_of(slopes: Tensor, bits: int, added: bool) -> tuple[Tensor, Tensor]:
    """(A, n) of slopes, int64: A = round_half_even(slope · 2^n), with n = `bits`, or less by one where 2^n - A is `added` and no byte."""
    shift = torch.full_like(slopes, bits, dtype=torch.int64)
    if added:
        shift = torch.where(2.0**bits - torch.round(slopes.double() * 2.0**bits) > LARGEST_DIFFERENCE, bits - 1, shift)
    return torch.round(slopes.double() * power_of_two(shift)).to(torch.int64), shift


def by_whole_slope(lowering: Lowering, input: Quantized, slopes: Tensor, clamp: Clamp | None, added: bool) -> Any:
    """Compute q where q ≥ 0, else ⌊q · A / 2^n + ½⌋, then on the output's grid.

    Where the target has `added` a byte to q, the result is at most q + 127.
    """
    whole, shift = shifts_of(slopes, lowering.arithmetic.slope_bits, added)
    lowering.describe("slope", power_of_two(-shift).float().flatten(), -slopes.dim() if slopes.dim() else None)
    held = lowering.constant("slope", whole, torch.int32)
    multiplied = lowering.call(elementwise.multiply, input.value, held, False)
    steeper = whole > torch.ones_like(shift) << shift
    if added and bool(steeper.any()):  # what is added to q is negative there, and its halves are rounded away from 0
        multiplied = lowering.call(
            elementwise.add_constant, multiplied, lowering.constant("half_step", -steeper.to(torch.int64), torch.int32)
        )
    unit = Ratio((torch.ones((), dtype=torch.float32, device=slopes.device),), (power_of_two(shift),))
    grid = input.grid
    below = lowering.arithmetic.requantize(lowering, multiplied, unit, *grid.bounds, grid, "negative_")
    if added and bool((whole <= 0).any()):
        most = lowering.constant("most", torch.tensor(LARGEST_DIFFERENCE, device=slopes.device), torch.int32)
        raised = lowering.call(elementwise.add_constant, lowering.call(elementwise.widen, input.value), most)
        one = Ratio((torch.ones((), dtype=torch.float32, device=slopes.device),))
        limit = lowering.arithmetic.requantize(lowering, raised, one, *grid.bounds, grid, "limit_")
        below = lowering.call(product.minimum, below, limit)
    zero = lowering.constant("zero", torch.zeros((), dtype=torch.float32, device=slopes.device), torch.int8)
    chosen = lowering.call(choose, input.value, below, lowering.call(compare, input.value, zero, "ge"))
    to = lowering.output
    moved = lowering.rescale(Quantized(chosen, grid, input.shape), to, "")
    if clamp is None or clamp == (None, None) or lowering.bounds(clamp, to) == to.grid.bounds:
        return moved
    return lowering.holds(lowering.call(elementwise.clamp, moved, *lowering.bounds(clamp, to)), to.grid)

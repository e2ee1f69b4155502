"""Functions by a table, with one fused kernel forward and one backward: those of `fused_elementwise`.

The float function is evaluated at every integer of the operand's grid, as its table is. Its observed values and its slopes are looked up.
Saved for backward are the indices in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import Grid, ends_of
from fxquant.training.fused_elementwise import SMALLEST, offered, passes_for
from fxquant.training.fused_layers import Gradients

FEW = 2**8  # integers of a grid: all of them are in its tables


class Curve(NamedTuple):
    """A function at every number of a grid from `low` on: its values, and how much they rise there, float32."""

    values: Tensor
    slopes: Tensor | None
    low: int


def curve_of(function: Callable[[Tensor], Tensor], grid: Grid, slopes: bool, integers: Tensor) -> Curve:
    """Return the values of a function at these consecutive float64 integers of a grid, and its slopes, 0 where they are not finite."""
    points, low = grid.dequantize(integers.float()), int(integers[0])
    if not slopes:
        with torch.no_grad():
            return Curve(function(points), None, low)
    with torch.enable_grad():
        points.requires_grad_()
        values = function(points)
        found = torch.autograd.grad(values.sum(), points)[0] if values.requires_grad else torch.zeros_like(points)
    return Curve(values.detach(), torch.where(torch.isfinite(found), found, 0.0), low)


def tabulated(value: Tensor, grid: Grid) -> bool:
    """Return whether a table of a tensor's grid is small enough to pay, and a backend offers kernels for the tensor."""
    few = grid.high - grid.low < min(value.numel(), 2**16)
    return few and value.numel() >= SMALLEST and not grid.scale.requires_grad and offered(value) is not None


def integers_of(value: Tensor, grid: Grid) -> Tensor:
    """Return all integers of a small grid, as float64; of a larger grid those from the least to the largest that a tensor holds."""
    low, high = grid.bounds
    if high - low >= FEW:
        low, high = map(int, ends_of(value))
    return torch.arange(low, high + 1, dtype=torch.float64, device=value.device)


def occurring(value: Tensor, integers: Tensor) -> Tensor:
    """Return which of these consecutive integers a tensor holds, as booleans. It must hold no others."""
    with torch.no_grad():
        return passes_for(value).occurs(value, int(integers[0]), int(integers[-1]))


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, table: Tensor, slopes: Tensor, low: int, scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        integers, real, places = passes_for(value).look_up(value, table, low, scale, True)
        ctx.save_for_backward(places, slopes)
        ctx.scale = scale
        return integers, real

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 5
        places, slopes = ctx.saved_tensors
        given: Tensor = of_integers if of_integers is not None else of_real  # type: ignore[assignment]
        passes = None if torch.is_grad_enabled() else offered(given)
        if passes is not None:
            return passes.look_back(places, slopes, ctx.scale, of_integers, of_real), None, None, None, None
        return Gradients(of_integers, of_real).of_steps(ctx.scale) * slopes[places.long() & 0xFFFF], None, None, None, None


def looked_up(value: Tensor, input: Grid, curve: Curve, table: Tensor, output: Grid) -> tuple[Tensor, Tensor]:
    """Return the table's integers and the dequantized tensor, float32; gradients run along the curve, as far as the grid reaches."""
    table = table.float()
    if curve.slopes is None or not torch.is_grad_enabled():
        integers, real, _ = passes_for(value).look_up(value, table, curve.low, output.scale, False)
        return integers, real
    steps = curve.values / output.scale
    inside = (steps >= output.low) & (steps <= output.high)
    slopes = torch.where(inside, curve.slopes, 0.0) / output.scale * input.scale
    result: tuple[Tensor, Tensor] = _LookedUp.apply(value, table, slopes, curve.low, output.scale)  # type: ignore[no-untyped-call]
    return result

"""Parameters, constants and numbers as operands next to activations, on the grid of the result: for selection and concatenation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.primitives import shape

Branch = Quantized | Tensor | float


def on_the_output(lowering: Lowering, branch: Branch, role: str) -> Any:
    """Return an operand, a constant tensor or a number as integers on the output's grid."""
    if lowering.plain:  # float values that are copied
        return branch.value if isinstance(branch, Quantized) else lowering.constant(role, torch.as_tensor(branch), torch.float32)
    to = lowering.output
    if isinstance(branch, Quantized):
        return lowering.rescale(branch, to, f"{role}_")
    value = torch.as_tensor(branch, dtype=torch.float32, device=to.grid.scale.device)
    refuse_nan(lowering, value, role)
    grid = to.grid
    lowering.describe(role, grid.scale, zero_point=grid.zero_point)
    return lowering.constant(role, lowering.stored(grid.quantize(value), grid), grid.type.storage)


def refuse_nan(lowering: Lowering, branch: Branch, role: str) -> None:
    """Raise NotFinite for a constant that holds NaN; an infinite one saturates."""
    if isinstance(branch, Tensor) and bool(torch.isnan(branch).any()):
        lowering.parameters[f"its constant {role!r}"] = branch
        raise lowering.not_finite()


def real(branch: Branch) -> Any:
    """Return the float value that an operand, a constant or a number represents."""
    return branch.real() if isinstance(branch, Quantized) else branch


def selected(lowering: Lowering, value: Any, dim: int, places: Iterable[int] | Tensor, role: str = "indices") -> Any:
    """Return the integers at these places along a dimension."""
    chosen = torch.as_tensor(places if isinstance(places, Tensor) else list(places), dtype=torch.int64, device=lowering.device)
    return lowering.call(shape.select, value, dim, lowering.constant(role, chosen, torch.int64))

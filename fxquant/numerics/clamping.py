"""Clamp tensors, with a gradient that does not depend on the version of PyTorch.

    y = min(max(x, low), high),    ∂y/∂x = 1 where low ≤ x ≤ high, 0 elsewhere

`torch.clamp` has this gradient up to PyTorch 2.13, and 0 at the limits themselves from 2.14 on. On a grid many elements are at a limit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

Limit = Tensor | float | None


@functools.lru_cache(maxsize=4096)
def _beyond(limit: float, to: float, dtype: torch.dtype) -> float:
    """Return the next number of a dtype beyond a limit, towards `to`."""
    ends = (torch.tensor(each, dtype=torch.float64, device="cpu").to(dtype) for each in (limit, to))
    return float(torch.nextafter(*ends))


def _of_value(gradient: Tensor, value: Tensor, low: Limit, high: Limit) -> Tensor:
    """Return the gradient of the value, given that of the result."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        inside = torch.ones_like(value, dtype=torch.bool)
        inside = inside if low is None else inside & (value >= low)
        return torch.where(inside if high is None else inside & (value <= high), gradient, 0.0)
    # One kernel, in every version: hardtanh has a gradient between its limits, and none at them.
    bottom = -math.inf if low is None else _beyond(low, -math.inf, value.dtype)
    top = math.inf if high is None else _beyond(high, math.inf, value.dtype)
    found: Tensor = torch.ops.aten.hardtanh_backward(gradient, value, bottom, top)
    return found


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, low: Limit, high: Limit) -> Tensor:
        ctx.save_for_backward(value)
        ctx.limits = low, high
        return torch.clamp(value, low, high)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _of_value(gradient, *ctx.saved_tensors, *ctx.limits), None, None


class _TransformedClamped(torch.autograd.Function):
    """`_Clamped` in the form that functorch's transforms ask for, whose calls take several times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, low: Limit, high: Limit) -> Tensor:
        return torch.clamp(value, low, high)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.limits = inputs[1:]

    backward = _Clamped.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _of_value(tangent, *ctx.saved_tensors, *ctx.limits)


def clamped(value: Tensor, low: Limit = None, high: Limit = None) -> Tensor:
    """Return `value.clamp(low, high)`, of the value's shape and dtype, with the gradient above. Limits that are tensors have no gradient.

    While a graph is traced, `torch.clamp` itself is called.
    """
    if low is None and high is None:
        return value
    if torch._C._are_functorch_transforms_active():
        result: Tensor = _TransformedClamped.apply(value, low, high)  # type: ignore[no-untyped-call]
        return result
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or not value.requires_grad or not torch.is_grad_enabled():
        return torch.clamp(value, low, high)  # type: ignore[arg-type]
    result = _Clamped.apply(value, low, high)  # type: ignore[no-untyped-call]
    return result

"""Integers chosen, concatenated, and reduced along dimensions: sums, extremes and their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.lowering.lowering import Lowering
from fxquant.ops.core.casting import to_integer
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.record import Operator, register
from fxquant.ops.elementwise.whole import TRUTH_VALUES, WHOLE_NUMBERS, Steps, as_whole, needs_numbers
from fxquant.primitives import comparison, selection, shape
from fxquant.primitives import whole as primitives

# ---- choosing, and along dimensions ---------------------------------------------------------------------------------


def whole_where(condition: Tensor, input: Tensor, other: Tensor) -> Tensor:
    """Return `input` where the condition holds, else `other`."""
    device = condition.device
    return torch.where(condition, as_whole(input).to(device), as_whole(other).to(device))


def whole_sum(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Return the sum along dimensions."""
    return torch.sum(input, dim, keepdim)


def whole_amax(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Return the largest along dimensions."""
    return torch.amax(input, dim, keepdim)


def whole_amin(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Return the smallest along dimensions."""
    return torch.amin(input, dim, keepdim)


def whole_cumsum(input: Tensor, dim: int) -> Tensor:
    """Return the sum up to each one along a dimension."""
    return torch.cumsum(input, dim)


def whole_argmax(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the place of the largest along a dimension, the first of equal ones."""
    return torch.argmax(input, dim, keepdim)


def whole_argmin(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the place of the smallest along a dimension, the first of equal ones."""
    return torch.argmin(input, dim, keepdim)


def _choose(lowering: Lowering, condition: Any, input: Any, other: Any) -> Any:
    steps = Steps(lowering)
    held = lowering.given("condition", condition, torch.bool)
    return lowering.call(primitives.chosen, steps.held(input), steps.held(other), held)


def _reduce(operation: str) -> Callable[..., Any]:
    return lambda lowering, input, dim, keepdim: lowering.call(primitives.reduced, input, list(dim), keepdim, operation)


def _place(operation: str) -> Callable[..., Any]:
    def lower(lowering: Lowering, input: Any, dim: int, keepdim: bool) -> Any:
        """The first that is equal to the extreme one."""
        extreme = lowering.call(primitives.reduced, input, [dim], True, operation)
        found = lowering.call(primitives.converted, lowering.call(comparison.compare, input, extreme, "eq"), torch.int64)
        return lowering.call(selection.arg_extremum, found, dim, keepdim, True)

    return lower


def _refuses_place(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known, dim = fact(arguments["input"]), arguments["dim"]
    if not isinstance(known, TensorFact) or not known.shape or dim is None:
        return "it reduces all elements" if dim is None else "its operand has no dimensions"
    return None if isinstance(known.shape[dim], int) else "it reduces the batch, whose size is not fixed"


register(
    Operator(
        "whole_where",
        whole_where,
        (),
        _choose,
        WHOLE_NUMBERS,
        reads=("condition", "input", "other"),
        refuses=needs_numbers("input", "other"),
    )
)
for _function, _lower, _refuses in (
    (whole_sum, _reduce("sum"), lambda node, arguments: None),
    (whole_amax, _reduce("largest"), lambda node, arguments: None),
    (whole_amin, _reduce("smallest"), lambda node, arguments: None),
    (whole_cumsum, lambda lowering, input, dim: lowering.call(primitives.running, input, dim), lambda node, arguments: None),
    (whole_argmax, _place("largest"), _refuses_place),
    (whole_argmin, _place("smallest"), _refuses_place),
):
    register(Operator(_function.__name__, _function, (), _lower, WHOLE_NUMBERS, reads=("input",), refuses=_refuses))


def whole_largest_along(input: Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype = torch.int64) -> Any:
    """Return the largest along a dimension, in a dtype, and their places."""
    values, places = torch.max(input, dim, keepdim)
    return values.to(dtype), places


def whole_smallest_along(input: Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype = torch.int64) -> Any:
    """Return the smallest along a dimension, in a dtype, and their places."""
    values, places = torch.min(input, dim, keepdim)
    return values.to(dtype), places


for _function, _value, _where in ((whole_largest_along, whole_amax, whole_argmax), (whole_smallest_along, whole_amin, whole_argmin)):

    def _expand(
        build: Builder, input: fx.Node, dim: int, keepdim: bool, dtype: torch.dtype, value: Any = _value, place: Any = _where
    ) -> Any:
        values = build(value, input, [dim], keepdim)
        return values if dtype == torch.int64 else build(to_integer, values, dtype), build(place, input, dim, keepdim)

    register(Operator(_function.__name__, _function, (), reads=("input",), expand=_expand, refuses=_refuses_place))


def whole_cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate integers or booleans."""
    return torch.cat(tensors, dim)


def _cat(lowering: Lowering, tensors: list[Any], dim: int) -> Any:
    dtype = next((tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)), torch.int64)
    parts = [lowering.given(f"tensor_{index}", tensor, dtype) for index, tensor in enumerate(tensors)]
    return lowering.call(shape.concatenate, parts, dim)


register(
    Operator(
        "whole_cat",
        whole_cat,
        (),
        _cat,
        lambda node, arguments: TRUTH_VALUES if fact(node).dtype == torch.bool else WHOLE_NUMBERS,
        reads=("tensors",),
    )
)

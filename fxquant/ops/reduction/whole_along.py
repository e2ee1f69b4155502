"""Integers chosen, concatenated, and reduced along dimensions: sums, extremes and their places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.lowering.lowering import Lowering
from fxquant.ops.core.casting import to_integer
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite, lowered
from fxquant.ops.elementwise.whole import TRUTH_VALUES, WHOLE_NUMBERS, Steps, as_whole, needs_numbers
from fxquant.primitives import comparison, selection, shape
from fxquant.primitives import whole as primitives

# ---- choosing, and along dimensions ---------------------------------------------------------------------------------


def _whole_where(condition: Tensor, input: Tensor, other: Tensor) -> Tensor:
    device = condition.device
    return torch.where(condition, as_whole(input).to(device), as_whole(other).to(device))


def _refuses_place(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known, dim = fact(arguments["input"]), arguments["dim"]
    if not isinstance(known, TensorFact) or not known.shape or dim is None:
        return "it reduces all elements" if dim is None else "its operand has no dimensions"
    return None if isinstance(known.shape[dim], int) else "it reduces the batch, whose size is not fixed"


@lowered(function=_whole_where, reads=("condition", "input", "other"), refuses=needs_numbers("input", "other"), demand=WHOLE_NUMBERS)
def whole_where(lowering: Lowering, condition: Any, input: Any, other: Any) -> Any:
    """Return `input` where the condition holds, else `other`."""
    steps = Steps(lowering)
    held = lowering.given("condition", condition, torch.bool)
    return lowering.call(primitives.chosen, steps.held(input), steps.held(other), held)


@lowered(function=lambda input, dim, keepdim=False: torch.sum(input, dim, keepdim), reads=("input",), demand=WHOLE_NUMBERS)
def whole_sum(lowering: Lowering, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Return the sum along dimensions."""
    return lowering.call(primitives.reduced, input, list(dim), keepdim, "sum")


@lowered(function=lambda input, dim, keepdim=False: torch.amax(input, dim, keepdim), reads=("input",), demand=WHOLE_NUMBERS)
def whole_amax(lowering: Lowering, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Return the largest along dimensions."""
    return lowering.call(primitives.reduced, input, list(dim), keepdim, "largest")


@lowered(function=lambda input, dim, keepdim=False: torch.amin(input, dim, keepdim), reads=("input",), demand=WHOLE_NUMBERS)
def whole_amin(lowering: Lowering, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Return the smallest along dimensions."""
    return lowering.call(primitives.reduced, input, list(dim), keepdim, "smallest")


@lowered(function=lambda input, dim: torch.cumsum(input, dim), reads=("input",), demand=WHOLE_NUMBERS)
def whole_cumsum(lowering: Lowering, input: Any, dim: int) -> Any:
    """Return the sum up to each one along a dimension."""
    return lowering.call(primitives.running, input, dim)


def _place(lowering: Lowering, input: Any, dim: int, keepdim: bool, operation: str) -> Any:
    """Return the first place of what is equal to the extreme one."""
    extreme = lowering.call(primitives.reduced, input, [dim], True, operation)
    found = lowering.call(primitives.converted, lowering.call(comparison.compare, input, extreme, "eq"), torch.int64)
    return lowering.call(selection.arg_extremum, found, dim, keepdim, True)


@lowered(
    function=lambda input, dim, keepdim=False: torch.argmax(input, dim, keepdim),
    reads=("input",),
    demand=WHOLE_NUMBERS,
    refuses=_refuses_place,
)
def whole_argmax(lowering: Lowering, input: Any, dim: int, keepdim: bool = False) -> Any:
    """Return the place of the largest along a dimension, the first of equal ones."""
    return _place(lowering, input, dim, keepdim, "largest")


@lowered(
    function=lambda input, dim, keepdim=False: torch.argmin(input, dim, keepdim),
    reads=("input",),
    demand=WHOLE_NUMBERS,
    refuses=_refuses_place,
)
def whole_argmin(lowering: Lowering, input: Any, dim: int, keepdim: bool = False) -> Any:
    """Return the place of the smallest along a dimension, the first of equal ones."""
    return _place(lowering, input, dim, keepdim, "smallest")


def _along(values: Any, dtype: torch.dtype) -> Any:
    return values[0].to(dtype), values[1]


@composite(
    function=lambda input, dim, keepdim=False, dtype=torch.int64: _along(torch.max(input, dim, keepdim), dtype),
    operands=(),
    reads=("input",),
    refuses=_refuses_place,
)
def whole_largest_along(build: Builder, input: fx.Node, dim: int, keepdim: bool = False, dtype: torch.dtype = torch.int64) -> Any:
    """Return the largest along a dimension, in a dtype, and their places."""
    values = build(whole_amax, input, [dim], keepdim)
    return values if dtype == torch.int64 else build(to_integer, values, dtype), build(whole_argmax, input, dim, keepdim)


@composite(
    function=lambda input, dim, keepdim=False, dtype=torch.int64: _along(torch.min(input, dim, keepdim), dtype),
    operands=(),
    reads=("input",),
    refuses=_refuses_place,
)
def whole_smallest_along(build: Builder, input: fx.Node, dim: int, keepdim: bool = False, dtype: torch.dtype = torch.int64) -> Any:
    """Return the smallest along a dimension, in a dtype, and their places."""
    values = build(whole_amin, input, [dim], keepdim)
    return values if dtype == torch.int64 else build(to_integer, values, dtype), build(whole_argmin, input, dim, keepdim)


def _whole_cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(tensors, dim)


@lowered(
    function=_whole_cat,
    reads=("tensors",),
    demand=lambda node, arguments: TRUTH_VALUES if fact(node).dtype == torch.bool else WHOLE_NUMBERS,
)
def whole_cat(lowering: Lowering, tensors: list[Any], dim: int = 0) -> Any:
    """Concatenate integers or booleans."""
    dtype = next((tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)), torch.int64)
    parts = [lowering.given(f"tensor_{index}", tensor, dtype) for index, tensor in enumerate(tensors)]
    return lowering.call(shape.concatenate, parts, dim)

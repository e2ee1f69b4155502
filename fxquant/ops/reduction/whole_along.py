"""Integers chosen, concatenated, and reduced along dimensions: sums, extremes and their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core.casting import to_integer
from fxquant.ops.core.operators import Builder, Lowering, Sample, TensorFact, composite, fact, lowered, sampled, written
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
@sampled("torch.where(x > 0, x.argmax(1, True), y.argmax(1, True))")
def whole_where(lowering: Lowering, condition: Any, input: Any, other: Any) -> Any:
    """Return `input` where the condition holds, else `other`."""
    steps = Steps(lowering)
    held = lowering.given("condition", condition, torch.bool)
    return lowering.call(primitives.chosen, steps.held(input), steps.held(other), held)


def _of_places(function: Callable[..., Tensor]) -> tuple[Sample, ...]:
    return written(f"torch.{function.__name__}(x.argmax(1), 1)")


def _reduces(function: Callable[..., Tensor], operation: str) -> Callable[..., Tensor]:
    """Register a reduction by one operation of `primitives.reduced`."""

    def lower(lowering: Lowering, input: Any, dim: Any, keepdim: bool = False) -> Any:
        return lowering.call(primitives.reduced, input, list(dim), keepdim, operation)

    lower.__doc__ = f"Return the {operation} along dimensions."
    own = lambda input, dim, keepdim=False: function(input, dim, keepdim)  # noqa: E731
    return lowered(name=f"whole_{function.__name__}", function=own, reads=("input",), demand=WHOLE_NUMBERS, samples=_of_places(function))(
        lower
    )


whole_sum = _reduces(torch.sum, "sum")
whole_amax = _reduces(torch.amax, "largest")
whole_amin = _reduces(torch.amin, "smallest")


@lowered(function=lambda input, dim: torch.cumsum(input, dim), reads=("input",), demand=WHOLE_NUMBERS)
@sampled("x.argmax(1).cumsum(1)")
def whole_cumsum(lowering: Lowering, input: Any, dim: int) -> Any:
    """Return the sum up to each one along a dimension."""
    return lowering.call(primitives.running, input, dim)


def _places(function: Callable[..., Tensor], operation: str) -> Callable[..., Tensor]:
    """Register where along a dimension the first of what is equal to the extreme one is."""

    def lower(lowering: Lowering, input: Any, dim: int, keepdim: bool = False) -> Any:
        extreme = lowering.call(primitives.reduced, input, [dim], True, operation)
        found = lowering.call(primitives.converted, lowering.call(comparison.compare, input, extreme, "eq"), torch.int64)
        return lowering.call(selection.arg_extremum, found, dim, keepdim, True)

    lower.__doc__ = f"Return the place of the {operation} along a dimension, the first of equal ones."
    own = lambda input, dim, keepdim=False: function(input, dim, keepdim)  # noqa: E731
    fields: dict[str, Any] = {"reads": ("input",), "demand": WHOLE_NUMBERS, "refuses": _refuses_place, "samples": _of_places(function)}
    return lowered(name=f"whole_{function.__name__}", function=own, **fields)(lower)


whole_argmax = _places(torch.argmax, "largest")
whole_argmin = _places(torch.argmin, "smallest")


def _both(function: Callable[..., Any], which: str, extreme: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
    """Register what is extreme along a dimension, together with its places."""

    def expand(build: Builder, input: fx.Node, dim: int, keepdim: bool = False, dtype: torch.dtype = torch.int64) -> Any:
        values = build(extreme, input, [dim], keepdim)
        return values if dtype == torch.int64 else build(to_integer, values, dtype), build(place, input, dim, keepdim)

    def own(input: Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype = torch.int64) -> Any:
        values, places = function(input, dim, keepdim)
        return values.to(dtype), places

    expand.__doc__ = f"Return the {which} along a dimension, in a dtype, and their places."
    name = f"whole_{which}_along"
    samples = written(f"torch.{function.__name__}(x.argmax(1), 1)[0]")
    return composite(name=name, function=own, operands=(), reads=("input",), refuses=_refuses_place, samples=samples)(expand)


whole_largest_along = _both(torch.max, "largest", whole_amax, whole_argmax)
whole_smallest_along = _both(torch.min, "smallest", whole_amin, whole_argmin)


@lowered(
    function=lambda tensors, dim=0: torch.cat(tensors, dim),
    reads=("tensors",),
    demand=lambda node, arguments: TRUTH_VALUES if fact(node).dtype == torch.bool else WHOLE_NUMBERS,
)
@sampled("torch.cat((x.argmax(1), y.argmin(1)), 1)")
def whole_cat(lowering: Lowering, tensors: list[Any], dim: int = 0) -> Any:
    """Concatenate integers or booleans."""
    dtype = next((tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)), torch.int64)
    parts = [lowering.given(f"tensor_{index}", tensor, dtype) for index, tensor in enumerate(tensors)]
    return lowering.call(shape.concatenate, parts, dim)

"""Reversing and rotating a tensor along dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.declare import lowered
from fxquant.ops.core.demands import Same
from fxquant.ops.movement.shape import rank_of, with_dims
from fxquant.primitives import shape


def _flip(input: Tensor, dims: list[int]) -> Tensor:
    return input.flip(dims)


def _refuses_flip(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    flips_batch = isinstance(known, TensorFact) and not all(isinstance(known.shape[dim], int) for dim in arguments["dims"])
    return "it reverses the batch" if flips_batch else None


@lowered(
    function=_flip,
    adapt=with_dims,
    calls={
        torch.fliplr: lambda input: {"input": input, "dims": [1]},
        torch.flipud: lambda input: {"input": input, "dims": [0]},
        "fliplr": lambda input: {"input": input, "dims": [1]},
        "flipud": lambda input: {"input": input, "dims": [0]},
    },
    moves=True,
    refuses=_refuses_flip,
    demand=Same(),
)
def flip(lowering: Lowering, input: Quantized, dims: list[int]) -> Quantized:
    """Return the elements in reverse order along `dims`."""
    value = input.value
    for dim in dims:
        size = input.shape[dim]
        assert isinstance(size, int)
        backwards = torch.arange(size - 1, -1, -1, device=input.scale.device)
        value = lowering.call(shape.select, value, dim, lowering.constant(f"indices{dim}", backwards, torch.int64))
    return input.with_value(value)


def _roll(input: Tensor, shifts: list[int], dims: list[int]) -> Tensor:
    return input.roll(shifts, dims)


def _rolled(input: Any, shifts: Any, dims: Any = None) -> dict[str, Any] | str:
    rolled = [dims] if isinstance(dims, int) else list(dims or ())
    if not rolled:
        return "it rolls the flattened tensor"
    return {"input": input, "shifts": [shifts] if isinstance(shifts, int) else list(shifts), "dims": [d % rank_of(input) for d in rolled]}


def _refuses_roll(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if not all(isinstance(shift, int) for shift in arguments["shifts"]):
        return "its shifts are computed"
    known = fact(arguments["input"])
    rolls_batch = isinstance(known, TensorFact) and not all(isinstance(known.shape[dim], int) for dim in arguments["dims"])
    return "it rolls along the batch" if rolls_batch else None


@lowered(function=_roll, adapt=_rolled, moves=True, refuses=_refuses_roll, demand=Same())
def roll(lowering: Lowering, input: Quantized, shifts: list[int], dims: list[int]) -> Quantized:
    """Return the elements moved on by `shifts` along `dims`; what leaves at the end comes in at the start.

    Crop the two parts of each dimension, and concatenate them in the other order.
    """
    value = input.value
    for shift, dim in zip(shifts, dims, strict=True):
        size = input.shape[dim]
        assert isinstance(size, int)
        if size and shift % size:
            cut = size - shift % size
            ends = ((cut, size), (0, cut))
            value = lowering.call(shape.concatenate, [lowering.call(shape.crop, value, [dim], [a], [b], [1]) for a, b in ends], dim)
    return input.with_value(value)

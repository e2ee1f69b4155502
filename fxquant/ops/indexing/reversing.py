"""Reversing and rotating a tensor along dimensions."""

from __future__ import annotations

from typing import Any

from fxquant.ops.core.declare import fixed_along, function_and_method, listed, lowered
from fxquant.ops.core.operators import Lowering, Quantized, Same, known_size, numbers, sample, sampled, selected
from fxquant.ops.movement.shape import rank_of, with_dims
from fxquant.primitives import shape


@lowered(
    adapt=with_dims,
    calls={
        **function_and_method(lambda input: {"input": input, "dims": [1]}, "fliplr"),
        **function_and_method(lambda input: {"input": input, "dims": [0]}, "flipud"),
    },
    moves=True,
    refuses=fixed_along("dims", "it reverses the batch"),
    demand=Same(),
)
@sampled("flip(x, [1, -1])", "x.flip(2)", "fliplr(x)", "flipud(x.transpose(0, 1))")
def flip(lowering: Lowering, input: Quantized, dims: list[int]) -> Quantized:
    """Return the elements in reverse order along `dims`."""
    value = input.value
    for dim in dims:
        value = selected(lowering, value, dim, reversed(range(known_size(input.shape[dim]))), f"indices{dim}")
    return input.with_value(value)


def _rolled(input: Any, shifts: Any, dims: Any = None) -> dict[str, Any] | str:
    rolled = listed([() if dims is None else dims])
    if not rolled:
        return "it rolls the flattened tensor"
    return {"input": input, "shifts": [shifts] if isinstance(shifts, int) else list(shifts), "dims": [d % rank_of(input) for d in rolled]}


@lowered(
    adapt=_rolled,
    moves=True,
    refuses=(numbers("shifts", because="its shifts are computed"), fixed_along("dims", "it rolls along the batch")),
    demand=Same(),
    samples=(sample(input=(3, 6, 6), shifts=[1, -2], dims=[2, 3]),),
)
def roll(lowering: Lowering, input: Quantized, shifts: list[int], dims: list[int]) -> Quantized:
    """Return the elements moved on by `shifts` along `dims`; what leaves at the end comes in at the start.

    Crop the two parts of each dimension, and concatenate them in the other order.
    """
    value = input.value
    for shift, dim in zip(shifts, dims, strict=True):
        size = known_size(input.shape[dim])
        if size and shift % size:
            cut = size - shift % size
            ends = [lowering.call(shape.crop, value, [dim], [a], [b], [1]) for a, b in ((cut, size), (0, cut))]
            value = lowering.call(shape.concatenate, ends, dim)
    return input.with_value(value)

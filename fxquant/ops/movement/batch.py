"""Pieces of the batch and repetitions of its items: how several images of one sample, stacked along the batch, are split and combined."""

from __future__ import annotations

from fractions import Fraction

import torch

from fxquant.ops.core.operators import LIMITED, BatchDim, Lowering, Quantized, Same, Size, lowered, sampled
from fxquant.ops.movement.shape import one_varying, result_varying
from fxquant.primitives import shape


def pieces_of(whole: Size, start: Size, size: Size) -> tuple[int, int] | None:
    """Return the number of pieces of this size at every batch size, and which of them begins there; None where they do not fit."""
    if not isinstance(whole, BatchDim) or not isinstance(size, BatchDim) or size.coefficient < 1 or size.coefficient.denominator != 1:
        return None
    begin = start if isinstance(start, BatchDim) else BatchDim(Fraction(0), Fraction(start))
    count, number = whole.coefficient / size.coefficient, begin.coefficient / size.coefficient
    exact = whole.offset == begin.offset == size.offset == 0 and count.denominator == number.denominator == 1
    return (int(count), int(number)) if exact and number < count else None


@lowered(
    function=lambda input, dim, count, number: torch.unflatten(input, dim, (count, -1)).select(dim, number),
    moves=True,
    refuses=(one_varying, result_varying),
    demand=Same(),
)
@sampled("torch.cat((x, x.relu())).chunk(2)[1]", within=LIMITED)
def piece(lowering: Lowering, input: Quantized, dim: int, count: int, number: int) -> Quantized:
    """Return one of `count` pieces of equal size along a dimension."""
    before, behind = input.shape[:dim], input.shape[dim + 1 :]
    value = lowering.call(shape.reshape, input.value, [*before, count, -1, *behind])
    value = lowering.call(shape.crop, value, [dim], [number], [number + 1], [1])
    return input.with_value(lowering.call(shape.reshape, value, [*before, -1, *behind]))


@lowered(
    function=lambda input, dim, repeats: input.repeat_interleave(repeats, dim),
    moves=True,
    refuses=(one_varying, result_varying),
    demand=Same(),
)
@sampled("x.repeat_interleave(2, 0)")
def interleave(lowering: Lowering, input: Quantized, dim: int, repeats: int) -> Quantized:
    """Repeat each item along a dimension this many times, one after another."""
    before, behind = input.shape[:dim], input.shape[dim + 1 :]
    value = lowering.call(shape.reshape, input.value, [*before, -1, 1, *behind])
    value = lowering.call(shape.tile, value, [*[1] * (dim + 1), repeats, *[1] * len(behind)])
    return input.with_value(lowering.call(shape.reshape, value, [*before, -1, *behind]))

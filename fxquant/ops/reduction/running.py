"""Running sums, and triangles of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core.operators import FLOAT32_EXACT, Lowering, Quantized, Ratio, Same, TensorFact, fact, fixed, lowered, sample
from fxquant.primitives import accumulate, comparison, shape

# ---- running sums ----------------------------------------------------------------------------------------------------


@lowered(
    takes="input dim dtype",
    refuses=fixed(because="it sums over the batch, whose size is not fixed"),
    samples=(sample(input=(3, 6), dim=1),),
)
def cumsum(lowering: Lowering, input: Quantized, dim: int) -> Quantized:
    """Return the sum of the elements up to each one along a dimension.

    Return the product with a triangle of ones, along the last dimension.
    """
    rank, size = len(input.shape), input.shape[dim]
    assert isinstance(size, int)
    largest = lowering.prove(torch.tensor(float(size * input.grid.magnitude), dtype=torch.float64, device="cpu"), "the sum")
    order = [d for d in range(rank) if d != dim % rank] + [dim % rank]
    triangle = torch.ones(size, size, dtype=torch.float32, device=input.scale.device).tril()
    value = lowering.call(shape.permute, input.value, order)
    summing = accumulate.linear if largest < FLOAT32_EXACT else accumulate.linear_wide
    total = lowering.call(summing, value, lowering.constant("ones", triangle, torch.int8), None)
    result = lowering.requantize(total, Ratio((input.scale,)))
    return result.with_value(lowering.call(shape.permute, result.value, [order.index(d) for d in range(rank)]))


# ---- triangles -------------------------------------------------------------------------------------------------------


def _refuses_triangle(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    fixed = isinstance(known, TensorFact) and all(isinstance(size, int) for size in known.shape[-2:])
    return None if fixed and isinstance(arguments["diagonal"], int) else "the size of its matrices is not fixed"


def _triangle(lowering: Lowering, input: Quantized, diagonal: int, function: Callable[..., Tensor]) -> Quantized:
    """Choose elements of a triangle, else 0, which is on every grid."""
    sizes = [size for size in input.shape[-2:] if isinstance(size, int)]
    kept = function(torch.ones(sizes, dtype=torch.bool, device=input.scale.device), diagonal)
    zero = lowering.stored(torch.zeros((), dtype=torch.float32, device=input.scale.device), input.grid)
    zeros = lowering.constant("zero", zero, input.dtype.storage)
    return input.with_value(lowering.call(comparison.choose, input.value, zeros, lowering.given("kept", kept, torch.bool)))


TRIANGLES = (sample(input=(4, 5)), sample(input=(4, 5), diagonal=-1))


@lowered(demand=Same(), refuses=_refuses_triangle, samples=TRIANGLES)
def tril(lowering: Lowering, input: Quantized, diagonal: int = 0) -> Quantized:
    """Return the elements on and below a diagonal; zeros above."""
    return _triangle(lowering, input, diagonal, torch.tril)


@lowered(demand=Same(), refuses=_refuses_triangle, samples=TRIANGLES)
def triu(lowering: Lowering, input: Quantized, diagonal: int = 0) -> Quantized:
    """Return the elements on and above a diagonal; zeros below."""
    return _triangle(lowering, input, diagonal, torch.triu)

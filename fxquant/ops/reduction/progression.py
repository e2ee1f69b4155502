"""Products of many elements, sums along a dimension, and triangles of matrices.

prod       halves multiplied with each other until one is left: log2 n products, each int16 with a separate scale
cumprod    each element times the product of the 1, 2, 4, … before it:  y = cat(y[:k], y[k:] · y[:-k])
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core import FLOAT32_EXACT, WIDE, Builder, Lowering, Quantized, Ratio, Same, fact, sample
from fxquant.ops.core.declare import are_fixed, composite, fixed, known_size, known_sizes, lowered, needs
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.whole import alike
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.movement.repeating import cat
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.primitives import accumulate, selection, shape

MOST_FACTORS = 32


def along(build: Builder, input: fx.Node, dim: int, entry: Any) -> Any:
    """input indexed by `entry` along one dimension."""
    index: list[Any] = [WHOLE] * len(build.fact(input).shape)
    index[dim] = entry
    return build(getitem, input, index)


def length_of(input: fx.Node, dim: int) -> int:
    """Return the size of a dimension, which does not depend on the batch."""
    size = Builder.fact(input).shape[dim]
    assert isinstance(size, int)
    return size


refuses_length = fixed()


def _refuses_product(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if arguments["dim"] is None:
        sizes = fact(arguments["input"]).shape
        if not all(isinstance(size, int) for size in sizes):
            return "it multiplies over the batch, whose size is not fixed"
        size = math.prod(sizes)
    else:
        because = refuses_length(node, arguments)
        if because is not None:
            return because
        size = length_of(arguments["input"], arguments["dim"])
    return None if 0 < size <= MOST_FACTORS else f"it multiplies {size} elements, and {MOST_FACTORS} at most have an integer form"


@composite(
    function=lambda input, dim=None, keepdim=False: torch.prod(input) if dim is None else torch.prod(input, dim, keepdim),
    takes="input dim keepdim dtype",
    refuses=_refuses_product,
    samples=(sample(input=(3, 5), dim=-1), sample(input=(3, 4), dim=1, keepdim=True)),
)
def prod(build: Builder, input: fx.Node, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the product of the elements along a dimension; of all elements if `dim` is None."""
    if dim is None:
        input, dim, keepdim = build(reshape, input, [math.prod(numbers(build.fact(input).shape))]), 0, False
    size = length_of(input, dim)
    while size > 1:
        half = size // 2
        halves = (along(build, input, dim, slice(start, start + half)) for start in (0, half))
        product = build(mul, *halves, demand=WIDE if size > 2 else None)
        input = build(cat, [product, along(build, input, dim, slice(2 * half, size))], dim, demand=WIDE) if size % 2 else product
        size = size - half
    return input if keepdim else along(build, input, dim, 0)


@composite(takes="input dim dtype", refuses=_refuses_product, samples=(sample(input=(3, 5), dim=-1),))
def cumprod(build: Builder, input: fx.Node, dim: int) -> Any:
    """Return the product of the elements up to each one along a dimension."""
    size, reach = length_of(input, dim), 1
    while reach < size:
        product = build(mul, along(build, input, dim, slice(reach, size)), along(build, input, dim, slice(0, size - reach)), demand=WIDE)
        last = 2 * reach >= size
        input = build(cat, [along(build, input, dim, slice(0, reach)), product], dim, demand=None if last else WIDE)
        reach *= 2
    return input


def sums_along(lowering: Lowering, input: Quantized, dim: int, matrix: Tensor, role: str) -> Quantized:
    """Return the product with a matrix [sums, size] of zeros and ones, a constant of this role, along a dimension."""
    terms = float(matrix.sum(1).max())
    largest = lowering.prove(terms * input.grid.magnitude, "the sum")
    dims = range(len(input.shape))
    order = [d for d in dims if d != dim] + [dim]
    value = lowering.call(shape.permute, input.value, order)
    summing = accumulate.linear if largest < FLOAT32_EXACT else accumulate.linear_wide
    total = lowering.call(summing, value, lowering.constant(role, matrix, torch.int8), None)
    result = lowering.requantize(total, Ratio((input.scale,)))
    return result.with_value(lowering.call(shape.permute, result.value, [order.index(d) for d in dims]))


@lowered(
    takes="input dim dtype",
    refuses=fixed(because="it sums over the batch, whose size is not fixed"),
    integers=alike("cumsum"),
    samples=(sample(input=(3, 6), dim=1),),
)
def cumsum(lowering: Lowering, input: Quantized, dim: int) -> Quantized:
    """Return the sum of the elements up to each one along a dimension.

    Return the product with a triangle of ones, along the last dimension.
    """
    size = known_size(input.shape[dim])
    triangle = torch.ones(size, size, dtype=torch.float32, device=input.scale.device).tril()
    return sums_along(lowering, input, dim % len(input.shape), triangle, "ones")


def _triangle(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @lowered(
        name=function.__name__,
        demand=Same(),
        refuses=needs(
            "the size of its matrices is not fixed",
            lambda arguments: are_fixed(fact(arguments["input"]).shape[-2:]) and isinstance(arguments["diagonal"], int),
        ),
        samples=(sample(input=(4, 5)), sample(input=(4, 5), diagonal=-1)),
    )
    def triangle(lowering: Lowering, input: Quantized, diagonal: int = 0) -> Quantized:
        """Return the elements on a diagonal and below it, or above it; zeros on the other side.

        Choose them, else 0, which is on every grid.
        """
        mask = function(torch.ones(known_sizes(input.shape[-2:]), dtype=torch.bool, device=input.scale.device), diagonal)
        zero = lowering.stored(torch.zeros((), dtype=torch.float32, device=input.scale.device), input.grid)
        zeros = lowering.constant("zero", zero, input.dtype.storage)
        return input.with_value(lowering.call(selection.choose, input.value, zeros, lowering.given("kept", mask, torch.bool)))

    return triangle


tril, triu = map(_triangle, (torch.tril, torch.triu))

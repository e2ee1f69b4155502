"""Products of many elements, and sums and differences of neighbours along a dimension: composites.

prod       halves multiplied with each other until one is left: log2 n products, each 16 bits wide on a grid of its own
cumprod    each element times the product of the 1, 2, 4, … before it:  y = cat(y[:k], y[k:] · y[:-k])
diff       x[i + 1] - x[i], as often as asked
trapezoid  Σ (y[i] + y[i + 1]) / 2 · width
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxquant.ops.core.operators import WIDE, Builder, composite, fact, fixed, sample
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.movement.join import cat
from fxquant.ops.movement.shape import numbers, reshape

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


# ---- products --------------------------------------------------------------------------------------------------------


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

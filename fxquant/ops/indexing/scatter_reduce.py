"""The mean, the largest and the smallest of the elements at each place, where integers give the places: scatter_reduce.

x.scatter_reduce(1, index, source, "mean")   →   (x + Σ of the source at each place) / (1 + how many have it)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core.casting import to_real
from fxquant.ops.core.constants import Branch, on_the_output, real
from fxquant.ops.core.creation import made_number
from fxquant.ops.core.operators import INNER, NORMED, Builder, Call, Fixed, Instead, Lowering, Quantized, composite, lowered, sampled
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.division import reciprocal_of
from fxquant.ops.elementwise.selection import where
from fxquant.ops.elementwise.whole import whole_add, whole_mul
from fxquant.ops.indexing.index import places_of
from fxquant.ops.indexing.scatter import ADDS, LARGEST, scatter_add, scatter_added, sum_at
from fxquant.ops.reduction.progression import length_of
from fxquant.primitives import PRIMITIVES, selection
from fxquant.primitives import scatter as primitives

COUNTS = Fixed(1.0, "int16", otherwise=Fixed(1.0, "int8"))


def _many(build: Builder, dim: int, index: fx.Node, size: int) -> Any:
    """Count how many elements have each place, as float values on a grid of scale 1."""
    ones = build(to_real, build(whole_add, build(whole_mul, index, 0), 1), demand=COUNTS)
    return build(sum_at, ones, dim, index, size, demand=COUNTS)


@composite(function=lambda input, dim, index, src: torch.scatter_reduce(input, dim, index, src, "sum", include_self=False), **ADDS)
@sampled("x.scatter_reduce(1, x.argmax(1, True).expand_as(x), y, 'sum', include_self=False)")
def scatter_sum(build: Builder, input: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> Any:
    """Return the sum of the elements of `src` that have each place along a dimension; an element that none has stays what it is."""
    size = length_of(input, dim)
    total = build(sum_at, src, dim, index, size)
    return build(where, build(torch.gt, _many(build, dim, index, size), 0.0), total, input)


@composite(
    function=lambda input, dim, index, src, include_self=True: torch.scatter_reduce(
        input, dim, index, src, "mean", include_self=include_self
    ),
    **ADDS,
)
@sampled("x.scatter_reduce(1, x.argmax(1, True).expand_as(x), y, 'mean')", within=NORMED)
@sampled("x.scatter_reduce(1, x.argmax(1, True).expand_as(x), y, 'mean', include_self=False)", within=NORMED)
def scatter_mean(build: Builder, input: fx.Node, dim: int, index: fx.Node, src: fx.Node, include_self: bool = True) -> Any:
    """Return the mean of the elements of `src` that have each place along a dimension, and, with `include_self`, of what is there."""
    size = length_of(input, dim)
    many = _many(build, dim, index, size)
    total, alone = build(sum_at, src, dim, index, size, demand=INNER), made_number(input) == 0
    if include_self:
        total = total if alone else build(add, input, total, demand=INNER)
        return build(mul, total, reciprocal_of(build, build(add, many, 1.0, demand=COUNTS)))
    share = reciprocal_of(build, build(clamp, many, 1.0, None))
    if alone:
        return build(mul, total, share)
    return build(where, build(torch.gt, many, 0.0), build(mul, total, share, demand=INNER), input)


# ---- the larger and the smaller ------------------------------------------------------------------------------------------


def _scatter_extremum(input: Tensor, dim: int, index: Tensor, src: Tensor, largest: bool, include_self: bool = True) -> Tensor:
    return torch.scatter_reduce(input, dim, index, src, "amax" if largest else "amin", include_self=include_self)


def _onnx_scatter_extremum(c: Call) -> str:
    """Both on the result's scale."""
    places, value = places_of(c), c.rounded(c.operand("input"))
    if not c["include_self"]:
        end = c.do("Expand", c.number(-LARGEST if c["largest"] else LARGEST), c.do("Shape", places))
        value = c.do("ScatterElements", value, places, end, axis=c["dim"])
    write, node = PRIMITIVES[primitives.extremum_along].onnx, c.primitive(primitives.extremum_along)
    assert node is not None
    return write(c.e, value, c.rounded(c.operand("src")), c["dim"], places, node.args[4], c["largest"])


# ---- how it is spelled ------------------------------------------------------------------------------------------------


_REDUCTIONS = {"amax": True, "amin": False}


def _scatter_reduced(
    input: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> dict[str, Any] | str | Instead:
    given = scatter_added(input, dim, index, src)
    if reduce in ("sum", "add"):
        return Instead(scatter_add if include_self or made_number(input) == 0 else scatter_sum, given)
    if reduce == "mean":
        return Instead(scatter_mean, {**given, "include_self": include_self})
    if reduce not in _REDUCTIONS:
        return f"a {reduce} of any number of elements exceeds every accumulator: add logarithms instead"
    return {**given, "largest": _REDUCTIONS[reduce], "include_self": include_self}


@lowered("scatter_reduce", function=_scatter_extremum, adapt=_scatter_reduced, onnx=_onnx_scatter_extremum, **ADDS)
@sampled("scatter_reduce(x, 1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y, 'amax')")
@sampled("x.scatter_reduce(1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y, 'amin', include_self=False)")
def scatter_extremum(
    lowering: Lowering, input: Branch, dim: int, index: Any, src: Quantized, largest: bool, include_self: bool = True
) -> Quantized:
    """Return the largest, or smallest, of an element and those of `src` that have its place; `include_self` is about named places.

    Without the elements themselves: these are as small, or as large, as can be, where a place is named.
    """
    places = lowering.given("index", index, torch.int64)
    terms = src.shape[dim]
    grid = lowering.output.grid

    def exact() -> Any:
        value, other = on_the_output(lowering, input, "input"), on_the_output(lowering, src, "src")
        if not include_self:
            end = torch.tensor(float(grid.bounds[0] if largest else grid.bounds[1]), dtype=torch.float32, device=grid.scale.device)
            held = lowering.constant("end", lowering.stored(end, grid), grid.type.storage)
            value = lowering.call(selection.put_along, value, held, dim, places, True)
        return lowering.call(primitives.extremum_along, value, other, dim, places, terms, largest)

    return lowering.result(exact, lambda: scatter_extremum(real(input), dim, index, real(src), largest, include_self))

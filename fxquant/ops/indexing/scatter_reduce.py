"""The largest and the smallest of the elements at each place, where integers give the places: scatter_reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.ops.core.constants import Branch, on_the_output, real
from fxquant.ops.core.creation import made_number
from fxquant.ops.core.operators import Call, Instead, Lowering, Quantized, lowered, sampled
from fxquant.ops.indexing.index import places_of
from fxquant.ops.indexing.scatter import ADDS, LARGEST, scatter_add, scatter_added
from fxquant.primitives import PRIMITIVES, selection
from fxquant.primitives import scatter as primitives

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
    if reduce in ("sum", "add") and (include_self or made_number(input) == 0):
        return Instead(scatter_add, given)
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

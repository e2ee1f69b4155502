"""argmax and argmin, sort, argsort and top-k, and gathering elements by indices.

Indices are integers without a scale (`Plain`). Of equal elements the first counts.
"""

from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import shape_of
from fxquant.ops.core import EXACT, Builder, Lowering, Plain, Quantized, Same, register, sampled, written
from fxquant.ops.core.declare import Guard, are_fixed, composite, first_reason, function_and_method, has_dimensions, lowered
from fxquant.ops.elementwise.whole import alike
from fxquant.ops.indexing.index import refuses_index
from fxquant.ops.reduction.extremum import amax, amin, largest_along, smallest_along
from fxquant.ops.reduction.progression import along, length_of
from fxquant.primitives import selection

PLACES = Plain("int64")


def fixed_dimension(verb: str, whole: bool = False) -> tuple[Guard, ...]:
    """Refuse a dimension whose size is not fixed, or depends on the data; `whole`: without one, all dimensions are meant."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        sizes, dim = shape_of(arguments["input"]), arguments["dim"]
        chosen = [sizes[dim]] if dim is not None else sizes if whole else [None]
        return None if are_fixed(chosen) else f"it {verb} the batch, whose size is not fixed"

    def refuses_size(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        computed = any(isinstance(value, fx.Node) for name, value in arguments.items() if name != "input")
        return "its size is computed" if computed else None

    return has_dimensions(), refuses, refuses_size


_LOOKS, _RANKS = fixed_dimension("looks through"), fixed_dimension("ranks")


@lowered(demand=PLACES, refuses=_LOOKS, integers=alike("argmax"))
@sampled("argmax(x, 1, True)", "argmax(x.flatten(1), 1)")
def argmax(lowering: Lowering, input: Quantized, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the place of the largest element along a dimension."""
    return lowering.call(selection.arg_extremum, input.value, dim, keepdim, True)


@lowered(demand=PLACES, refuses=_LOOKS)
@sampled("argmin(x, dim=-1)")
def argmin(lowering: Lowering, input: Quantized, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the place of the smallest element along a dimension."""
    return lowering.call(selection.arg_extremum, input.value, dim, keepdim, False)


@lowered(
    function=lambda input, dim, count, largest: torch.argsort(input, dim=dim, descending=largest, stable=True).narrow(dim, 0, count),
    moves=True,
    refuses=_RANKS,
    onnx=lambda c: c.do("TopK", c.input, c.integers([c["count"]]), axis=c["dim"], largest=int(c["largest"]), sorted=1),
    demand=PLACES,
)
@sampled("x.topk(2, 2, largest=False)[1]", share=0.1)
def ranked(lowering: Lowering, input: Quantized, dim: int, count: int, largest: bool) -> Any:
    """Return the places of the `count` largest, or smallest, elements along a dimension, in their order."""
    return lowering.call(selection.ranking, input.value, dim, count, largest)


def _taken(input: Any, indices: Any, dim: int | None = None) -> dict[str, Any] | str:
    if dim is None:
        return "it indexes the flattened tensor"
    mine, other = list(shape_of(input)), list(shape_of(indices))
    del mine[dim], other[dim]
    return {"input": input, "dim": dim, "index": indices} if mine == other else "its operand or its indices are broadcast"


@lowered(
    adapt=lambda input, dim, index, *, sparse_grad=False: {"input": input, "dim": dim, "index": index},
    calls=function_and_method(_taken, "take_along_dim"),
    moves=True,
    reads=("index",),
    refuses=refuses_index,
    demand=Same(),
)
@sampled("gather(x, 2, y.argmax(2, True))", "gather(x, 3, y.argsort(3))", "take_along_dim(x, y.argmax(1, True), 1)")
def gather(lowering: Lowering, input: Quantized, dim: int, index: Any) -> Quantized:
    """Return the elements at these places along a dimension."""
    places = lowering.given("index", index, torch.int64)
    return input.with_value(lowering.call(selection.take_along, input.value, dim % len(input.shape), places))


def _extreme(name: str, function: Any, extremum: Any, place: Any) -> None:
    def expand(build: Builder, input: fx.Node, dim: int, keepdim: bool) -> Any:
        return build(extremum, input, [dim], keepdim), build(place, input, dim, keepdim)

    samples = written(f"{name[:3]}(x, 1)[0]", f"{name[:3]}(x, -1, keepdim=True)[1]", within=EXACT)
    register(name, function, ("input",), expand=expand, refuses=first_reason(*_LOOKS), samples=samples)


_extreme("max_along", largest_along, amax, argmax)
_extreme("min_along", smallest_along, amin, argmin)


@sampled("kthvalue(x, 2, 1, True)[0]", within=EXACT)
def _expand_kthvalue(build: Builder, input: fx.Node, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the k-th smallest element along a dimension, and where it is."""
    places = along(build, build(ranked, input, dim, k, False), dim, slice(k - 1, k))
    values = build(gather, input, dim, places)
    return (values, places) if keepdim else (along(build, values, dim, 0), along(build, places, dim, 0))


def _with_places(build: Builder, input: fx.Node, dim: int, count: int, largest: bool) -> Any:
    places = build(ranked, input, dim, count, largest)
    return build(gather, input, dim, places), places


def _sorted(input: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = False) -> dict[str, Any]:
    return {"input": input, "dim": dim, "descending": descending, "stable": bool(stable)}


@composite(moves=True, refuses=_RANKS)
@sampled("topk(x, 2, 1)[0]", within=EXACT)
def topk(build: Builder, input: fx.Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest, or smallest, elements along a dimension, and where they are."""
    return _with_places(build, input, dim, k, largest)


@composite(adapt=_sorted, moves=True, refuses=_RANKS)
@sampled("sort(x, descending=True)[0]", "sort(x, 2)[1]", within=EXACT)
def sort(build: Builder, input: fx.Node, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return the elements along a dimension in order, and where they were."""
    return _with_places(build, input, dim, length_of(input, dim), descending)


kthvalue = composite(name="kthvalue", moves=True, refuses=_RANKS)(_expand_kthvalue)


@composite(
    "nanmedian",
    function=lambda input, dim=None, keepdim=False: torch.median(input) if dim is None else torch.median(input, dim, keepdim),
    moves=True,
    refuses=_RANKS,
)
@sampled("median(x, 2)[0]", "nanmedian(x, 1)[0]", within=EXACT)
def median(build: Builder, input: fx.Node, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the lower median along a dimension, and its index."""
    return _expand_kthvalue(build, input, (length_of(input, dim) + 1) // 2, dim, keepdim)


@composite(adapt=_sorted, moves=True, demand=PLACES, refuses=_RANKS)
@sampled("argsort(x, 1)", "argsort(x, descending=True)")
def argsort(build: Builder, input: fx.Node, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return the indices that sort the elements along a dimension."""
    return build(ranked, input, dim, length_of(input, dim), descending)

"""Indexing several dimensions by lists, taking from everything, diagonals: composites of permutations, reshapes and one list.

x[:, [0, 1], [2, 3]]   of [B, C, H, W]   →   x as [B, C·H, W], of which elements 0·H + 2 and 1·H + 3 of dimension 1 are taken
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, shape_of
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite
from fxquant.ops.core.demands import Same
from fxquant.ops.core.places import constant_value, index, index_parts, index_put, pick_each, pick_parts
from fxquant.ops.core.record import Instead, Operator, register
from fxquant.ops.elementwise.selection import where
from fxquant.ops.indexing.index import WHOLE, getitem, pick
from fxquant.ops.indexing.ranking import gather
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import MANY_SIZES, numbers, permute, reshape
from fxquant.ops.reduction.running import tril, triu

# ---- lists of places ---------------------------------------------------------------------------------------------------


def _tensor(entry: Any) -> Tensor:
    return torch.tensor(entry, dtype=torch.int64, device="cpu")


def _joined_places(lists: Sequence[Any], sizes: Sequence[int]) -> Tensor:
    """Lists of places along dimensions of these sizes as places in what they are together, row by row."""
    places = torch.broadcast_tensors(*map(_tensor, lists))  # type: ignore[no-untyped-call]
    joined = torch.zeros_like(places[0])
    for place, size in zip(places, sizes, strict=True):
        joined = joined * size + place % size
    return joined


def _expand_index(build: Builder, input: fx.Node, lists: list[Any]) -> Any:
    sizes = numbers(build.fact(input).shape)
    dims = [dim for dim, entry in enumerate(lists) if entry is not None]
    others = [dim for dim in range(len(sizes)) if dim not in dims]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    first = dims[0] if together else 0
    value = input if together else build(permute, input, [*dims, *others])
    before, after = [sizes[d] for d in others[:first]], [sizes[d] for d in others[first:]]
    if len(dims) > 1:
        value = build(reshape, value, [*before, math.prod(sizes[d] for d in dims), *after])
    places = _joined_places([lists[d] for d in dims], [sizes[d] for d in dims])
    entries: list[Any] = [WHOLE] * (len(others) + 1)
    entries[first] = places.flatten().tolist()
    value = build(getitem, value, entries)
    return value if places.dim() == 1 else build(reshape, value, [*before, *places.shape, *after])


def _refuses_lists(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact):
        return "its operand is not a tensor"
    if any(entry is not None and not isinstance(size, int) for entry, size in zip(arguments["lists"], known.shape, strict=True)):
        return "it indexes the batch by a list"
    return MANY_SIZES if sum(not isinstance(size, int) for size in known.shape) > 1 else None


register(Operator("index", index, ("input",), demand=Same(), moves=True, expand=_expand_index, refuses=_refuses_lists))


def _expand_parts(build: Builder, input: fx.Node, index: list[Any], lists: list[Any]) -> Any:
    return _expand_index(build, build(getitem, input, index), lists)


def _refuses_parts(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Its slices leave sizes that depend on the batch where they are whole."""
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or sum(not isinstance(size, int) for size in known.shape) > 1:
        return MANY_SIZES
    left = iter(known.shape)
    lists = iter(arguments["lists"])
    for entry in arguments["index"]:
        size = None if entry is None else next(left)
        if not isinstance(entry, int) and next(lists) is not None and not isinstance(size, int):
            return "it indexes the batch by a list"
    return None


register(Operator("index_parts", index_parts, ("input",), demand=Same(), moves=True, expand=_expand_parts, refuses=_refuses_parts))


def _expand_index_put(build: Builder, input: fx.Node, lists: list[Any], value: Any) -> Any:
    """Chosen by a constant mask."""
    sizes = [1 if entry is None else size for entry, size in zip(lists, build.fact(input).shape, strict=True)]
    mask = torch.zeros(sizes, dtype=torch.bool, device="cpu")  # type: ignore[arg-type]
    mask[tuple(WHOLE if entry is None else _tensor(entry) for entry in lists)] = True
    return build(where, build.constant(mask), value, input)


def _refuses_put(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    value = arguments["value"]
    if isinstance(value, fx.Node) and (not isinstance(fact(value), TensorFact) or fact(value).shape):
        return "it assigns a different element to each of several lists of indices"
    if not isinstance(value, fx.Node) and (not isinstance(value, int | float) or not math.isfinite(value)):
        return f"it assigns {value!r}"
    return _refuses_lists(node, arguments)


register(Operator("index_put", index_put, ("input", "value"), carries=("input", "value"), expand=_expand_index_put, refuses=_refuses_put))


def _expand_pick_each(build: Builder, input: fx.Node, dim: int, places: fx.Node) -> Any:
    shape = list(build.fact(input).shape)
    others = [d for d in range(1, len(shape)) if d != dim]
    value = input if dim == 1 else build(permute, input, [0, dim, *others])
    rest: list[int] = [shape[d] for d in others]  # type: ignore[misc]
    counts: list[int] = list(build.fact(places).shape[1:])  # type: ignore[arg-type]
    taken = math.prod(counts)
    index = build(reshape, places, [-1, taken, *[1] * len(rest)])
    if rest:
        index = build(expand, index, [-1, taken, *rest])
    picked = build(gather, value, 1, index)
    return picked if len(counts) == 1 else build(reshape, picked, [-1, *counts, *rest])


def _refuses_pick_each(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known, places = fact(arguments["input"]), fact(arguments["places"])
    if not isinstance(known, TensorFact) or not isinstance(places, TensorFact) or places.dtype != torch.int64:
        return "its index is not an integer tensor"
    if known.shape[0] != places.shape[0] or not all(isinstance(size, int) for size in (*known.shape[1:], *places.shape[1:])):
        return "it indexes the batch"
    return None


register(
    Operator(
        "pick_each",
        pick_each,
        ("input",),
        demand=Same(),
        moves=True,
        reads=("places",),
        expand=_expand_pick_each,
        refuses=_refuses_pick_each,
    )
)


def _expand_pick_parts(build: Builder, input: fx.Node, index: list[Any], dim: int, places: fx.Node) -> Any:
    return build(pick, build(getitem, input, index), dim, places)


def _refuses_pick_parts(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or fact(arguments["places"]).dtype != torch.int64:
        return "its index is not an integer tensor"
    sizes = iter(known.shape)
    left = [None if entry is None else next(sizes) for entry in arguments["index"]]
    kept = [size for entry, size in zip(arguments["index"], left, strict=True) if not isinstance(entry, int)]
    return None if isinstance(kept[arguments["dim"]], int) else "it indexes the batch"


register(
    Operator(
        "pick_parts",
        pick_parts,
        ("input",),
        demand=Same(),
        moves=True,
        reads=("places",),
        expand=_expand_pick_parts,
        refuses=_refuses_pick_parts,
    )
)

# ---- taking from everything ----------------------------------------------------------------------------------------------


def _take(input: Tensor, index: Any) -> Tensor:
    return torch.take(input, torch.as_tensor(index, device=input.device))


def _taken(input: Any, index: Any) -> dict[str, Any] | str:
    value = constant_value(index)
    return "its index is computed" if value is None else {"input": input, "index": value.tolist()}


def _refuses_take(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or not all(isinstance(size, int) for size in known.shape[1:]):
        return "the size of its operand is not fixed"
    count = math.prod(size for size in known.shape if isinstance(size, int))
    fixed = not known.shape or isinstance(known.shape[0], int)
    places = _tensor(arguments["index"])
    inside = bool((places >= 0).all() and (places < count).all())
    return None if fixed or inside else "it reads samples of the batch other than the first"


@composite(function=_take, adapt=_taken, demand=Same(), moves=True, refuses=_refuses_take)
def take(build: Builder, input: fx.Node, index: Any) -> Any:
    """Return the elements at these places, a list that may be nested, of all elements row by row.

    Of a batch of any size the places are in its first item.
    """
    shape = build.fact(input).shape
    if not isinstance(shape[0], int):
        input = build(getitem, input, [slice(0, 1), *[WHOLE] * (len(shape) - 1)])
    count = math.prod(size for size in shape if isinstance(size, int))
    places = _joined_places([index], [count])
    value = build(getitem, build(reshape, input, [count]), [places.flatten().tolist()])
    return value if places.dim() == 1 else build(reshape, value, list(places.shape))


# ---- diagonals ------------------------------------------------------------------------------------------------------------


def _refuses_diagonal(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or not all(isinstance(known.shape[arguments[name]], int) for name in ("dim1", "dim2")):
        return "the size of its matrices is not fixed"
    if 0 in fact(node).shape:
        return "its result is empty"
    return MANY_SIZES if sum(not isinstance(size, int) for size in known.shape) > 1 else None


def _diag(input: Any, diagonal: int = 0) -> dict[str, Any] | Instead:
    """Of a matrix its diagonal, of a row a matrix."""
    if len(shape_of(input)) == 1:
        return Instead(diag_embed, {"input": input, "offset": diagonal})
    return {"input": input, "offset": diagonal}


def _linalg_diagonal(A: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> dict[str, Any]:
    return {"input": A, "offset": offset, "dim1": dim1, "dim2": dim2}


@composite(
    calls={torch.linalg.diagonal: _linalg_diagonal, torch.diag: _diag, "diag": _diag}, demand=Same(), moves=True, refuses=_refuses_diagonal
)
def diagonal(build: Builder, input: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return a diagonal of the matrices that two dimensions hold, as the last dimension."""
    sizes = numbers(build.fact(input).shape)
    dims = [dim1 % len(sizes), dim2 % len(sizes)]
    others = [d for d in range(len(sizes)) if d not in dims]
    value = build(permute, input, [*others, *dims]) if dims != [len(others), len(others) + 1] else input
    rows, columns = (sizes[d] for d in dims)
    places = [row * columns + row + offset for row in range(rows) if 0 <= row + offset < columns]
    value = build(reshape, value, [*(sizes[d] for d in others), rows * columns])
    return build(getitem, value, [*[WHOLE] * len(others), places])


def _refuses_diag_embed(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or not known.shape or not isinstance(known.shape[-1], int):
        return "the size of its matrices is not fixed"
    return MANY_SIZES if sum(not isinstance(size, int) for size in known.shape) > 1 else None


@composite(demand=Same(), refuses=_refuses_diag_embed)
def diag_embed(build: Builder, input: fx.Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Matrices, in two new dimensions, with the elements of the last dimension on a diagonal, and zeros elsewhere.

    Write every row of a matrix as all elements, moved by the offset, and keep what lies on the diagonal.
    """
    sizes = numbers(build.fact(input).shape)
    length, size = sizes[-1], sizes[-1] + abs(offset)
    before = [WHOLE] * (len(sizes) - 1)
    if offset:
        columns = [min(max(column - max(offset, 0), 0), length - 1) for column in range(size)]
        input = build(getitem, input, [*before, columns])
    rows = build(expand, build(reshape, input, [*sizes[:-1], 1, size]), [*[-1] * (len(sizes) - 1), size, size])
    value = build(tril, build(triu, rows, offset), offset)
    rank = len(sizes) + 1
    one, other = dim1 % rank, dim2 % rank
    if (one, other) == (rank - 2, rank - 1):
        return value
    left = iter(range(rank - 2))
    return build(permute, value, [rank - 2 if d == one else rank - 1 if d == other else next(left) for d in range(rank)])

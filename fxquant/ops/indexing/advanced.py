"""Indexing several dimensions by lists, torch.take, diagonals: composites of permutations, reshapes and an index of one dimension.

x[:, [0, 1], [2, 3]]   of [B, C, H, W]   →   x.reshape(B, C·H, W)[:, [0·H + 2, 1·H + 3]]
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import fact, shape_of
from fxquant.ops.core import ALIGNED, Builder, Same, are_fixed, composite, places, sampled
from fxquant.ops.core.declare import dtype_of, fixed_sizes, function_and_method, is_finite
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.indexing.index import WHOLE, getitem, pick
from fxquant.ops.indexing.ranking import gather
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import numbers, one_varying, permute, reshape


def _joined_places(lists: Sequence[Any], sizes: Sequence[int]) -> Tensor:
    """Return the flat indices, row-major, of index lists along dimensions of these sizes, broadcast with each other."""
    broadcast = torch.broadcast_tensors(*places.tensors(lists))  # type: ignore[no-untyped-call]
    joined = torch.zeros_like(broadcast[0])
    for place, size in zip(broadcast, sizes, strict=True):
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
    joined = _joined_places([lists[d] for d in dims], [sizes[d] for d in dims])
    entries: list[Any] = [WHOLE] * (len(others) + 1)
    entries[first] = joined.flatten().tolist()
    value = build(getitem, value, entries)
    return value if joined.dim() == 1 else build(reshape, value, [*before, *joined.shape, *after])


def _refuses_lists(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    pairs = zip(arguments["lists"], shape_of(arguments["input"]), strict=True)
    fits = all(entry is None or isinstance(size, int) for entry, size in pairs)
    return None if fits else "it indexes the batch by a list"


@composite(function=places.index, by_name=False, demand=Same(), moves=True, refuses=(_refuses_lists, one_varying))
@sampled("x[:, [0, 1], :, [[2], [3]]]", "x[..., torch.ones(6, 6).tril().bool()]")
def index(build: Builder, input: fx.Node, lists: list[Any]) -> Any:
    """Return input[lists]: for every dimension None, which leaves it whole, or a list of integers, which may be nested."""
    return _expand_index(build, input, lists)


def _refuses_parts(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Its slices leave sizes that depend on the batch where they are whole."""
    sizes = iter(shape_of(arguments["input"]))
    lists = iter(arguments["lists"])
    for entry in arguments["index"]:
        size = None if entry is None else next(sizes)
        if not isinstance(entry, int) and next(lists) is not None and not isinstance(size, int):
            return "it indexes the batch by a list"
    return None


@composite(function=places.index_parts, by_name=False, demand=Same(), moves=True, refuses=(one_varying, _refuses_parts))
@sampled("x[:, None, [2, 1], 1:, [0, 5]]")
def index_parts(build: Builder, input: fx.Node, index: list[Any], lists: list[Any]) -> Any:
    """Return input[index], an index without lists, and of that result [lists]."""
    return _expand_index(build, build(getitem, input, index), lists)


def _refuses_put(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    value = arguments["value"]
    if isinstance(value, fx.Node):
        return "it assigns a different element to each of several lists of indices" if fact(value).shape else None
    return None if is_finite(value) else f"it assigns {value!r}"


@composite(
    function=places.index_put,
    by_name=False,
    operands=("input", "value"),
    carries=("input", "value"),
    refuses=(_refuses_put, _refuses_lists, one_varying),
)
@sampled("(x[0] * 2).index_put_((torch.tensor([0, 1]), torch.tensor([2, 5])), torch.tensor(0.5))", within=ALIGNED)
@sampled("x = x * 1; x[:, [0, 2], [1, 2]] = 0.25; return x", within=ALIGNED)
def index_put(build: Builder, input: fx.Node, lists: list[Any], value: Any) -> Any:
    """Return a copy of `input` in which input[lists] is one number: it is chosen by a constant mask."""
    sizes = [1 if entry is None else size for entry, size in zip(lists, build.fact(input).shape, strict=True)]
    mask = torch.zeros(sizes, dtype=torch.bool, device="cpu")  # type: ignore[arg-type]
    mask[places.tensors(lists)] = True
    return build(where, build.constant(mask), value, input)


def _refuses_pick_each(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if dtype_of(arguments["places"]) != torch.int64:
        return "its index is not an integer tensor"
    sizes, counts = shape_of(arguments["input"]), shape_of(arguments["places"])
    return None if sizes[0] == counts[0] and are_fixed([*sizes[1:], *counts[1:]]) else "it indexes the batch"


@composite(function=places.pick_each, operands=("input",), demand=Same(), moves=True, reads=("places",), refuses=_refuses_pick_each)
@sampled("x[torch.arange(x.shape[0]), :, y[:, 0, 0].argmax(1)]")
def pick_each(build: Builder, input: fx.Node, dim: int, places: fx.Node) -> Any:
    """Index `input` along `dim` with a different list `places` [batch, …] for each item: [batch, …, the other dimensions]."""
    shape = list(build.fact(input).shape)
    others = [d for d in range(1, len(shape)) if d != dim]
    value = input if dim == 1 else build(permute, input, [0, dim, *others])
    rest: list[int] = [shape[d] for d in others]  # type: ignore[misc]
    counts: list[int] = list(build.fact(places).shape[1:])  # type: ignore[arg-type]
    count = math.prod(counts)
    index = build(reshape, places, [-1, count, *[1] * len(rest)])
    if rest:
        index = build(expand, index, [-1, count, *rest])
    picked = build(gather, value, 1, index)
    return picked if len(counts) == 1 else build(reshape, picked, [-1, *counts, *rest])


def _refuses_pick_parts(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if fact(arguments["places"]).dtype != torch.int64:
        return "its index is not an integer tensor"
    sizes = iter(shape_of(arguments["input"]))
    remaining = [None if entry is None else next(sizes) for entry in arguments["index"]]
    indexed = [size for entry, size in zip(arguments["index"], remaining, strict=True) if not isinstance(entry, int)]
    return None if isinstance(indexed[arguments["dim"]], int) else "it indexes the batch"


@composite(function=places.pick_parts, operands=("input",), demand=Same(), moves=True, reads=("places",), refuses=_refuses_pick_parts)
@sampled("x[:, 1:3, y[0, 0, 0].argmax(0, keepdim=True)]")
def pick_parts(build: Builder, input: fx.Node, index: list[Any], dim: int, places: fx.Node) -> Any:
    """Return input[index], an index without lists, and of that result the slices along a dimension at the places."""
    return build(pick, build(getitem, input, index), dim, places)


def _taken(input: Any, index: Any) -> dict[str, Any] | str:
    value = places.constant_value(index)
    return "its index is computed" if value is None else {"input": input, "index": value.tolist()}


def _refuses_take(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = shape_of(arguments["input"])
    count = math.prod(size for size in sizes if isinstance(size, int))
    (indices,) = places.tensors([arguments["index"]])
    inside = bool((indices >= 0).all() and (indices < count).all())
    return None if are_fixed(sizes) or inside else "it reads samples of the batch other than the first"


@composite(
    function=lambda input, index: torch.take(input, torch.as_tensor(index, device=input.device)),
    adapt=_taken,
    demand=Same(),
    moves=True,
    refuses=(fixed_sizes("the size of its operand is not fixed", start=1), _refuses_take),
)
@sampled("take(x, torch.tensor([[3, 17], [0, 5]]))")
def take(build: Builder, input: fx.Node, index: Any) -> Any:
    """Return the elements at these places, a list that may be nested, of all elements row by row.

    Of a batch of any size the places are in its first item.
    """
    shape = build.fact(input).shape
    if not isinstance(shape[0], int):
        input = build(getitem, input, [slice(0, 1), *[WHOLE] * (len(shape) - 1)])
    count = math.prod(size for size in shape if isinstance(size, int))
    flat_places = _joined_places([index], [count])
    value = build(getitem, build(reshape, input, [count]), [flat_places.flatten().tolist()])
    return value if flat_places.dim() == 1 else build(reshape, value, list(flat_places.shape))


def _refuses_diagonal(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = shape_of(arguments["input"])
    if not are_fixed(sizes[arguments[name]] for name in ("dim1", "dim2")):
        return "the size of its matrices is not fixed"
    return "its result is empty" if 0 in shape_of(node) else None


def _diag(input: Any, diagonal: int = 0) -> dict[str, Any] | str:
    return "it makes a matrix of a vector" if len(shape_of(input)) == 1 else {"input": input, "offset": diagonal}


@composite(
    calls={
        torch.linalg.diagonal: lambda A, *, offset=0, dim1=-2, dim2=-1: {"input": A, "offset": offset, "dim1": dim1, "dim2": dim2},
        **function_and_method(_diag, "diag"),
    },
    demand=Same(),
    moves=True,
    refuses=(_refuses_diagonal, one_varying),
)
@sampled(
    "diagonal(x, 1, 2, 3)",
    "x.diagonal(-1, dim1=3, dim2=1)",
    "torch.linalg.diagonal(x, offset=2)",
    "torch.diag(x[0, 1])",
    "x[0, 1].diag(-1)",
)
def diagonal(build: Builder, input: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return a diagonal of the matrices that two dimensions hold, as the last dimension."""
    sizes = numbers(build.fact(input).shape)
    dims = [dim1 % len(sizes), dim2 % len(sizes)]
    others = [d for d in range(len(sizes)) if d not in dims]
    value = build(permute, input, [*others, *dims]) if dims != [len(others), len(others) + 1] else input
    rows, columns = (sizes[d] for d in dims)
    chosen = [row * columns + row + offset for row in range(rows) if 0 <= row + offset < columns]
    value = build(reshape, value, [*(sizes[d] for d in others), rows * columns])
    return build(getitem, value, [*[WHOLE] * len(others), chosen])

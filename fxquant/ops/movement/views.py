"""Writing into a view of a tensor: the written value is spread out to where the view has its elements, and chosen there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional
from fxquant.ir.facts import Size, TensorFact
from fxquant.ir.graph import fact, is_parameter, shape_of
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.creation import made_number
from fxquant.ops.core.declare import composite
from fxquant.ops.core.record import Operator, register
from fxquant.ops.elementwise.selection import where
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.movement.shape import reshape


def _put_lists(input: Tensor, value: Tensor, lists: Sequence[Any]) -> Tensor:
    index = tuple(slice(None) if entry is None else torch.tensor(entry, device=input.device) for entry in lists)
    return functional.setitem(input, index, value)


def write(input: Tensor, value: Tensor, way: Any) -> Tensor:
    """Return a copy of `input` in which the view of it that `way` leads to (`functional.write`) holds `value`."""
    return functional.write(input, value, way)


def _places(shape: tuple[Size, ...], way: Any) -> Tensor | None:
    """Where the elements of the view lie, in all of a tensor, or in each item of a batch of any size; None where that is not the same.

    They are in the shape of the view, which, of a batch, has a first dimension of 1.
    """
    if all(isinstance(size, int) for size in shape):
        return _view(shape, way)
    rest = [size for size in shape[1:] if isinstance(size, int)]
    if len(rest) < len(shape) - 1:
        return None
    one, two = (_view((count, *rest), way) for count in (1, 2))
    if one is None or two is None or one.shape[:1] != (1,) or two.shape != (2, *one.shape[1:]):
        return None
    return one if torch.equal(two, torch.cat((one, one + math.prod(rest)))) else None


def reach(shape: tuple[Size, ...], way: Any, dim: int) -> tuple[int, int] | None:
    """Return the first index along a dimension at which a view has elements, and the one behind the last; None where that is not known."""
    nodes: list[fx.Node] = []
    fx.map_arg(way, nodes.append)
    places, size = None if nodes else _places(shape, way), shape[dim]
    behind = [size for size in shape[dim + 1 :] if isinstance(size, int)]
    if places is None or not places.numel() or not isinstance(size, int) or len(behind) < len(shape) - dim - 1:
        return None
    along = places // math.prod(behind) % size
    return int(along.min()), int(along.max()) + 1


def _view(shape: Any, way: Any) -> Tensor | None:
    numbers = torch.arange(math.prod(shape), device="cpu").reshape(shape)
    try:
        found: Tensor = numbers[_index(way)] if isinstance(way, Lists) else functional.view_of(numbers, way)
    except (RuntimeError, IndexError, TypeError):
        return None
    return found


class Lists(list[Any]):
    """The entries of an index, in place of a way: for every dimension a list of places, or None."""


def _index(lists: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if entry is None else torch.tensor(entry, device="cpu") for entry in lists)


def _refuses_lists(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    shape, value = shape_of(arguments["input"]), arguments["value"]
    if not isinstance(value, fx.Node) or not isinstance(fact(value), TensorFact):
        return "it assigns a number that is computed"
    places = _places(shape, Lists(arguments["lists"]))
    if places is None or places.numel() == 0:
        return "it assigns to a part of the batch"
    sizes = shape_of(value)
    if is_parameter(value):
        return None
    one = len(sizes) == places.dim() and all(isinstance(size, int) for size in sizes[1:])
    fits = one and tuple(sizes[1:]) == tuple(places.shape[1:]) and (sizes[0] in (places.shape[0], shape[0]))
    return None if fits else "the assigned value and the indexed region differ in shape"


def _expand(build: Builder, input: fx.Node, value: fx.Node, way: Any) -> Any:
    shape = build.fact(input).shape
    places = _places(shape, way)
    assert places is not None
    rest = [size for size in shape if isinstance(size, int)]
    batch = [-1] * (len(shape) - len(rest))
    source = torch.full((math.prod(rest),), -1, device="cpu", dtype=torch.int64)
    source[places.flatten()] = torch.arange(places.numel(), device="cpu")
    mask = build.constant((source >= 0).reshape([1] * len(batch) + rest))
    number = made_number(value)
    if number is not None:
        return build(where, mask, number, input)
    flat = build(reshape, value, [*batch, places.numel()])
    spread = build(getitem, flat, [*[WHOLE] * len(batch), source.clamp(min=0).tolist()])
    return build(where, mask, build(reshape, spread, [*batch, *rest]), input)


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    nodes: list[fx.Node] = []
    fx.map_arg(arguments["way"], nodes.append)
    known = fact(arguments["value"]) if isinstance(arguments["value"], fx.Node) else None
    if nodes or not isinstance(known, TensorFact):
        return "the region it writes is computed"
    shape = shape_of(arguments["input"])
    places = _places(shape, arguments["way"])
    if places is None or places.numel() == 0:
        return "it writes to a part of the batch"
    fixed = all(isinstance(size, int) for size in shape)
    return None if tuple(known.shape[not fixed :]) == tuple(places.shape[not fixed :]) else "the value and the region differ in shape"


def _scattered(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> dict[str, Any]:
    return {"input": input, "value": src, "way": [("diagonal", (offset, dim1, dim2), {})]}


register(
    Operator(
        "write",
        write,
        ("input", "value"),
        carries=("input", "value"),
        expand=_expand,
        functions={
            functional.write: lambda tensor, value, way: {"input": tensor, "value": value, "way": way},
            torch.diagonal_scatter: _scattered,
        },
        methods={"diagonal_scatter": _scattered},
        refuses=_refuses,
    )
)


@composite(function=_put_lists, carries=("input", "value"), refuses=_refuses_lists)
def put_lists(build: Builder, input: fx.Node, value: fx.Node, lists: Sequence[Any]) -> Any:
    """Return a copy of `input` in which input[lists] is `value`; for every dimension a list of places, or None."""
    places = _places(build.fact(input).shape, Lists(lists))
    if is_parameter(value) and places is not None:
        value = build.host(torch.broadcast_to, value, list(places.shape))
    return _expand(build, input, value, Lists(lists))

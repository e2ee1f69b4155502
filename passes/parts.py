"""Slices of a concatenation read the concatenated part itself.

%y = cat([%boxes, %scores], 1)         →    %b = %boxes
%b = getitem(%y, [:, 0:4])                  %s = sigmoid(%scores)
%s = sigmoid(getitem(%y, [:, 4:84]))

A concatenation has one grid for all its parts, which is too coarse for some of them where their ranges differ. Parts that are sliced
apart again need no common grid. Between the concatenation and the slice there may be permutations, reshapes that keep the sliced
dimension, and further concatenations along other dimensions, which each part then gets separately.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxquant.ir.graph import Size, TensorFact, fact, inherit, is_parameter, set_fact, shape_of
from fxquant.ops import calls, operator_of
from fxquant.ops.indexing.advanced import setitem
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.movement.repeating import cat, stack
from fxquant.ops.movement.shape import permute, reshape
from fxquant.ops.movement.views import reach, write
from fxquant.passes.rewriting import eliminate_dead, is_named
from fxquant.pipeline import Context


def read_directly(gm: fx.GraphModule, context: Context) -> int:
    """Replace every slice of a concatenation by a slice of one of its parts, or by the part, where possible."""
    changes = 0
    for node in list(gm.graph.nodes):
        replaced = _replaced(node) if calls(node, getitem) and not is_named(node) else None
        if replaced is None:
            continue
        context.say(f"%{node.name} reads %{replaced.name}: it is one of the tensors that %{node.args[0].name} combines")
        node.replace_all_uses_with(replaced)
        changes += 1
    looked_through = {getitem, cat, stack, permute, reshape, setitem, write}
    eliminate_dead(gm.graph.nodes, lambda node: node.target in looked_through and operator_of(node) is not None)
    return changes


def _replaced(node: fx.Node) -> fx.Node | None:
    """Return an existing or new node with the elements of a slice that does not read the other parts of a concatenation; None if none."""
    value, index = node.args
    assert isinstance(value, fx.Node)
    assert isinstance(index, list)
    if is_parameter(value) or not isinstance(fact(value), TensorFact) or not all(isinstance(entry, int | slice | None) for entry in index):
        return None
    entries = [entry for entry in index if entry is not None]
    narrowed: fx.Node | None = None
    for dim, (entry, size) in enumerate(zip(entries, shape_of(value), strict=True)):
        bounds = _bounds(entry, size)
        part = None if bounds is None else _part(narrowed or value, dim, *bounds, node)
        if part is not None:
            narrowed = part
            entries[dim] = 0 if isinstance(entry, int) else WHOLE
    if narrowed is None:
        return None
    rest = iter(entries)
    reduced = [None if entry is None else next(rest) for entry in index]
    return narrowed if all(entry == WHOLE for entry in reduced) else _made(node, getitem, (narrowed, reduced), shape_of(node), node)


def _bounds(entry: Any, size: Size) -> tuple[int, int] | None:
    """Return (start, stop) of the elements that an index entry picks; None if it picks all, or skips elements between."""
    if not isinstance(size, int) or not isinstance(entry, int | slice):
        return None
    if isinstance(entry, int):
        return entry % size, entry % size + 1
    if not all(bound is None or isinstance(bound, int) for bound in (entry.start, entry.stop, entry.step)):
        return None
    start, stop, step = entry.indices(size)
    return (start, stop) if step == 1 and start < stop and (start, stop) != (0, size) else None


def _part(value: fx.Node, dim: int, start: int, stop: int, reader: fx.Node) -> fx.Node | None:
    """Return a node with elements `start` to `stop` of a value, without other parts of a concatenation; None where none fits."""
    operator = operator_of(value)
    if operator is None or is_named(value):
        return None
    arguments = operator.arguments(value)
    rank = len(shape_of(value))
    if operator.function in (cat, stack):
        return _part_of_cat(value, arguments["tensors"], arguments["dim"] % rank, dim, (start, stop), reader)
    operand: Any = arguments.get("input")
    if operator.function in (setitem, write):
        return _part_beside(value, arguments, dim, (start, stop), reader)
    shape = _cut(value, dim, stop - start)
    place: int | None = None  # the dimension of the operand
    if operator.function is getitem:
        moved = arguments["index"]
        place = dim if all(isinstance(entry, slice) for entry in moved) and moved[dim] == WHOLE else None
    elif operator.function is permute:
        moved = arguments["dims"]
        place = moved[dim] % rank
    elif operator.function is reshape:
        moved = [size if isinstance(size, int) else -1 for size in shape]
        place = _kept(shape_of(operand), shape_of(value), dim)
    inner = None if place is None else _part(operand, place, start, stop, reader)
    return None if inner is None else _made(value, operator.function, (inner, moved), shape, reader)


def _part_of_cat(
    value: fx.Node, tensors: Sequence[fx.Node], along: int, dim: int, bounds: tuple[int, int], reader: fx.Node
) -> fx.Node | None:
    """Return the node of `_part` for a concatenation along the dimension `along`."""
    start, stop = bounds
    shape = _cut(value, dim, stop - start)
    stacked = value.target is stack
    if along != dim:
        inner = dim - 1 if stacked and dim > along else dim
        parts = [_part(tensor, inner, start, stop, reader) for tensor in tensors]
        present = [part for part in parts if part is not None]
        return _made(value, value.target, (present, along), shape, reader) if len(present) == len(parts) else None
    sizes = [1 if stacked else shape_of(tensor)[dim] for tensor in tensors]
    position, pieces = 0, []
    for tensor, size in zip(tensors, sizes, strict=True):
        if not isinstance(size, int) or is_parameter(tensor):
            return None
        if start < position + size and position < stop:
            pieces.append((tensor, position, size))
        position += size
    if len(pieces) == len(tensors):
        return None
    if len(pieces) == 1 and not stacked:
        tensor, position, size = pieces[0]
        if (start, stop) == (position, position + size):
            return tensor
        return _sliced(tensor, dim, (start - position, stop - position), reader)
    if start != pieces[0][1] or stop != pieces[-1][1] + pieces[-1][2]:
        return None
    return _made(value, value.target, ([tensor for tensor, _, _ in pieces], dim), shape, reader)


def _part_beside(value: fx.Node, arguments: dict[str, Any], dim: int, bounds: tuple[int, int], reader: fx.Node) -> fx.Node | None:
    """Return the node of `_part` for a tensor that a value was written into: a part outside that value, or the value."""
    operand, source, shape = arguments["input"], arguments["value"], shape_of(value)
    written = _bounds(arguments["index"][dim], shape[dim]) if value.target is setitem else reach(shape, arguments["way"], dim)
    if written is None:
        return None
    if bounds[1] <= written[0] or written[1] <= bounds[0]:
        if is_parameter(operand):
            return None
        return _part(operand, dim, *bounds, reader) or _sliced(operand, dim, bounds, reader)
    whole = value.target is setitem and all(entry == WHOLE for place, entry in enumerate(arguments["index"]) if place != dim)
    inside = isinstance(source, fx.Node) and not is_parameter(source) and shape_of(source) == _cut(value, dim, written[1] - written[0])
    if not whole or not inside or bounds[0] < written[0] or written[1] < bounds[1]:
        return None
    return source if bounds == written else _sliced(source, dim, (bounds[0] - written[0], bounds[1] - written[0]), reader)


def _sliced(value: fx.Node, dim: int, bounds: tuple[int, int], reader: fx.Node) -> fx.Node:
    shape = _cut(value, dim, bounds[1] - bounds[0])
    index = [WHOLE] * len(shape)
    index[dim] = slice(*bounds)
    # The rules and the source line are those of the user's slice: an input has none, and a producer's are about another operator.
    return inherit(_made(value, getitem, (value, index), shape, reader), reader, "parts.read_directly")


def _kept(before: Sequence[Size], after: Sequence[Size], dim: int) -> int | None:
    """Return the dimension of a tensor that a reshape keeps as dimension `dim` of its result; None if it merges or splits dimensions."""
    target = after[dim], _product(after[dim + 1 :])
    places = [place for place, size in enumerate(before) if (size, _product(before[place + 1 :])) == target]
    return places[0] if len(places) == 1 else None


def _product(sizes: Sequence[Size]) -> tuple[int, tuple[str, ...]]:
    batched = sorted(str(size) for size in sizes if not isinstance(size, int))
    return math.prod(size for size in sizes if isinstance(size, int)), tuple(batched)


def _cut(value: fx.Node, dim: int, size: int) -> tuple[Size, ...]:
    shape = shape_of(value)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _made(like: fx.Node, function: Any, arguments: tuple[Any, ...], shape: Sequence[Size], reader: fx.Node) -> fx.Node:
    """Insert a call before the reader, which replaces node `like` for a part of its value."""
    with reader.graph.inserting_before(reader):
        part = reader.graph.create_node("call_function", function, arguments, name=f"{like.name}_part")
    set_fact(part, replace(fact(like), shape=tuple(shape)))
    return inherit(part, like, "parts.read_directly")

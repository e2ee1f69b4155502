"""Indexing several dimensions by lists, torch.take, diagonals: composites of permutations, reshapes and an index of one dimension.

x[:, [0, 1], [2, 3]]   of [B, C, H, W]   →   x.reshape(B, C·H, W)[:, [0·H + 2, 1·H + 3]]
"""

import builtins
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional
from fxquant.ir.graph import Size, TensorFact, fact, is_parameter, shape_of
from fxquant.ops.core import Builder, Call, Lowering, Quantized, Trait, are_fixed, composite, known_size, lowered, places, selected
from fxquant.ops.core.declare import Branch, dtype_of, fixed_sizes, function_and_method, is_finite, on_the_output, real, spelled
from fxquant.ops.core.places import is_list
from fxquant.ops.core.record import Instead, Same
from fxquant.ops.core.samples import ALIGNED, NORMED, sampled
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.indexing.index import WHOLE, along_dimension, entries_of, getitem, pick, whole_index
from fxquant.ops.indexing.scatter import gather
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import numbers, one_varying, permute, reshape
from fxquant.primitives import selection, shape


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


# ---- Assignment ------------------------------------------------------------------------------------------------------
def _positions(entry: Any, size: Size) -> list[int] | None:
    """Return where an entry writes along a dimension; None: everywhere."""
    if isinstance(entry, builtins.slice) and entry == WHOLE:
        return None
    every = list(range(known_size(size)))
    positions = every[entry] if isinstance(entry, builtins.slice) else [every[place] for place in torch.as_tensor(entry).flatten().tolist()]
    return None if positions == every else positions


def _sizes(value: Branch) -> tuple[Size, ...]:
    return value.shape if isinstance(value, Quantized) else tuple(value.shape) if isinstance(value, Tensor) else ()


def _aligned(index: Sequence[Any], sizes: tuple[Size, ...]) -> list[Size]:
    """Return the shape of a written value with a size for every dimension of the tensor: 1 for dimensions indexed by a number."""
    remaining = list(sizes)
    return [1 if isinstance(entry, int) or not remaining else remaining.pop() for entry in reversed(index)][::-1]


def _refuses_setitem(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    input_fact, value = fact(arguments["input"]), arguments["value"]
    if input_fact.dtype != fact(node).dtype:
        return "it assigns to a value that is not a tensor"
    if not isinstance(value, fx.Node) and not is_finite(value):
        return f"it assigns {value!r}"
    lists = 0
    for entry, size in zip(arguments["index"], input_fact.shape, strict=True):
        if isinstance(entry, builtins.slice):
            if not all(bound is None or isinstance(bound, int) for bound in (entry.start, entry.stop, entry.step)):
                return "the bounds of its index are computed"
        elif isinstance(entry, bool) or (isinstance(entry, fx.Node) and not is_parameter(entry)):
            return "its index is computed"
        lists += not isinstance(entry, int | builtins.slice)
        if not isinstance(size, int) and entry != WHOLE:
            return "it assigns to a part of a size that varies"
    return "it indexes several dimensions by lists" if lists > 1 else None


def _assigned(tensor: Any, index: Any, value: Any) -> dict[str, Any] | str | Instead:
    tensor_fact = fact(tensor)
    if not isinstance(tensor_fact, TensorFact):
        return "it assigns to a value that is not a tensor"
    mask = fact(index) if isinstance(index, fx.Node) else None
    if isinstance(mask, TensorFact) and mask.dtype == torch.bool:
        if mask.shape != tensor_fact.shape:
            return "its mask is not of the shape of what it assigns to"
        if isinstance(value, fx.Node) and shape_of(value):
            return "how many elements it assigns depends on the data"
        return Instead(where, {"condition": index, "input": value, "other": tensor})
    entries = entries_of(index)
    if any(entry is None for entry in entries):
        return "its index adds dimensions"
    whole = whole_index(tensor_fact.shape, entries)
    if whole is None:
        return "its index has too many entries"
    if sum(map(is_list, whole)) > 1 and all(is_list(entry) or entry == WHOLE for entry in whole):
        return Instead(places.index_put, {"input": tensor, "lists": [entry if is_list(entry) else None for entry in whole], "value": value})
    return {"input": tensor, "index": whole, "value": value}


def _put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> dict[str, Any] | str | Instead:
    """index_put: its indices are of the first dimensions."""
    if accumulate:
        return "it accumulates values at one index (accumulate=True)"
    return _assigned(input, tuple(WHOLE if entry is None else entry for entry in indices), values)


def _along(input: Any, dim: int, entry: Any, value: Any) -> dict[str, Any]:
    return {**along_dimension(input, dim, entry), "value": value}


def _slice_scattered(input: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> dict[str, Any]:
    return _along(input, dim, builtins.slice(start, end, step), src)


def _onnx_setitem(c: Call) -> str:
    """Spread the value out as the integer graph does, and choose it where it is written."""
    value = c.operand("value")
    for node in c.primitives:
        if node.target is shape.reshape:
            value = c.do("Reshape", value, c.integers(node.args[1]))  # type: ignore[arg-type]
        elif node.target is shape.select:
            value = c.gathered(node, value)
    # Both on the result's scale: onnxruntime cannot move QuantizeLinear of opset 21 by itself.
    return c.do("Where", c.e.constant(c.real("mask")), c.rounded(value), c.rounded(c.operand("input")))


@lowered(
    operands=("input", "value"),
    function=lambda input, index, value: functional.setitem(input, tuple(index), value),
    calls={
        functional.setitem: _assigned,
        **function_and_method(_slice_scattered, "slice_scatter"),
        **function_and_method(lambda input, src, dim, index: _along(input, dim, index, src), "select_scatter"),
        **dict.fromkeys(spelled("index_copy"), lambda input, dim, index, source: _along(input, dim, index, source)),
        **dict.fromkeys(spelled("index_fill"), lambda input, dim, index, value: _along(input, dim, index, value)),
        **dict.fromkeys((torch.index_put, "index_put", "index_put_"), _put),
    },
    carries=("input", "value"),
    traits=frozenset({Trait.COLLECTS}),
    refuses=(_refuses_setitem, one_varying),
    onnx=_onnx_setitem,
)
@sampled("x = x * 1.5; x[..., ::2] = y[..., 1::2]; x[:, 0] = y[:, 1]; x[:, 1, 2:4] = 0.5; x[x > 1] = 0.25; return x", within=NORMED)
@sampled("x = x * 1.5; x[:, torch.tensor([2, 1])] = y[:, :2]; return x", within=NORMED)
@sampled("slice_scatter(x, y[:, :, 1:3], 2, 2, 6, 2)", "select_scatter(x, y[:, 1], 1, 0)")
@sampled("index_copy(x, 2, torch.tensor([3, 1]), y[:, :, 2:4])", "index_fill(x, 1, torch.tensor([2, 1]), 0.4)")
@sampled("torch.index_put(x[0], (torch.tensor([0, 2]),), torch.tensor(0.5))", "x[0].index_put((torch.tensor([1]),), y[0, :1])")
def setitem(lowering: Lowering, input: Branch, index: list[Any], value: Branch) -> Quantized:
    """Return a copy of `input` in which input[index] is `value`; one entry for every dimension: a slice, a number, or a list of numbers.

    Spread the value out to where it is written, and choose it there.
    """
    whole = _sizes(input)
    written = {dim: positions for dim, entry in enumerate(index) if (positions := _positions(entry, whole[dim])) is not None}
    device = lowering.device
    mask = torch.ones([1] * len(index), dtype=torch.bool, device=device)
    for dim, positions in written.items():
        along = torch.zeros(known_size(whole[dim]), dtype=torch.bool, device=device)
        along[positions] = True
        mask = mask & along.reshape([-1 if d == dim else 1 for d in range(len(index))])

    sizes = _aligned(index, _sizes(value))

    def source(dim: int) -> Tensor:
        """Return the index of the value's element that each position of `dim` takes, int64; 0 for a position that is not written."""
        indices = torch.zeros(known_size(whole[dim]), dtype=torch.int64, device=device)
        indices[written[dim]] = torch.arange(len(written[dim]), device=device)
        return indices

    def exact() -> Any:
        if isinstance(value, Quantized):
            spread = on_the_output(lowering, value, "value")
            if any(isinstance(entry, int) for entry in index) or len(sizes) > len(value.shape):
                spread = lowering.call(shape.reshape, spread, [size if isinstance(size, int) else -1 for size in sizes])
            for dim in written:
                if sizes[dim] != 1:
                    spread = selected(lowering, spread, dim, source(dim), f"source{dim}")
        else:
            constant = torch.as_tensor(value, dtype=torch.float32, device=device).reshape(sizes)  # type: ignore[arg-type]
            for dim in written:
                constant = constant.index_select(dim, source(dim)) if sizes[dim] != 1 else constant
            spread = on_the_output(lowering, constant, "value")
        return lowering.call(selection.choose, spread, on_the_output(lowering, input, "input"), lowering.given("mask", mask, torch.bool))

    return lowering.result(exact, lambda: setitem(real(input), index, real(value)))

"""Assigning to a part of a tensor: slices, lists, a mask."""

import builtins
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional
from fxquant.ir.graph import fact, is_parameter, resolve, shape_of
from fxquant.ops.core import NORMED, Call, Instead, Lowering, Quantized, Size, TensorFact, Trait, known_size, sampled
from fxquant.ops.core.declare import Branch, function_and_method, is_finite, lowered, on_the_output, real, selected, spelled
from fxquant.ops.core.places import index_put, is_list
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.indexing.index import WHOLE, along_dimension, entries_of, whole_index
from fxquant.ops.movement.shape import one_varying
from fxquant.primitives import comparison, shape


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
            return "it assigns to a part of the batch"
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
        return Instead(index_put, {"input": tensor, "lists": [entry if is_list(entry) else None for entry in whole], "value": value})
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
            graph, source = node.graph.owning_module, node.args[2]
            assert graph is not None
            assert isinstance(source, fx.Node)
            value = c.do("Gather", value, c.e.constant(resolve(graph, str(source.target))), axis=node.args[1])
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
        return lowering.call(comparison.choose, spread, on_the_output(lowering, input, "input"), lowering.given("mask", mask, torch.bool))

    return lowering.result(exact, lambda: setitem(real(input), index, real(value)))

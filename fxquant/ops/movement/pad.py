"""Padding, with a constant or with the tensor's own elements."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import fact, inherit, set_fact, shape_of, spell, spelling
from fxquant.ops.core import Call, Lowering, Own, Quantized, Same, known_size, lowered, operator_of, selected
from fxquant.ops.core.samples import EXACT, IMAGES, LIMITED, sampled
from fxquant.primitives import shape

_MODES = {"Zero": "constant", "Constant": "constant", "Reflection": "reflect", "Replication": "replicate", "Circular": "circular"}

# The element that stands at each position, which may lie outside, of a dimension of a size.
OUTSIDE: dict[str, Callable[[int, int], int]] = {
    "replicate": lambda position, size: min(max(position, 0), size - 1),
    "circular": lambda position, size: position % size,
    "reflect": lambda position, size: abs((position + size - 1) % max(2 * size - 2, 1) - size + 1),
}


def margins_of(padding: list[int], rank: int) -> list[tuple[int, int]]:
    """Return the padding (before, after) of every dimension, first to last; `padding` has PyTorch's order, last dimension first."""
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def elements(mode: str, size: int, begin: int, end: int) -> list[int]:
    """Return the elements of a padded dimension. One that is wrapped around is first cut off where a margin is negative."""
    if mode == "circular":
        inner = range(max(-begin, 0), size - max(-end, 0))
        return [inner[OUTSIDE[mode](position, len(inner))] for position in range(-max(begin, 0), len(inner) + max(end, 0))]
    return [OUTSIDE[mode](position, size) for position in range(-begin, size + end)]


def _lower_constant_pad(lowering: Lowering, input: Quantized, margins: list[tuple[int, int]], value: float) -> Quantized:
    if lowering.shares or lowering.plain:
        return input.with_value(_padded(lowering, input, margins, value))
    to, padding = lowering.output, [size for pair in reversed(margins) for size in pair]

    def exact() -> Any:
        return _padded(lowering, Quantized(lowering.rescale(input, to, ""), to.grid, input.shape), margins, value)

    return lowering.result(exact, lambda: pad(input.real(), padding, value=value))


def _padded(lowering: Lowering, input: Quantized, margins: list[tuple[int, int]], value: float) -> Any:
    result = input.value
    cropped = {dim: (max(-begin, 0), -max(-end, 0) or shape.UNBOUNDED) for dim, (begin, end) in enumerate(margins) if min(begin, end) < 0}
    if cropped:
        starts, stops = ([bounds[part] for bounds in cropped.values()] for part in range(2))
        result = lowering.call(shape.crop, result, list(cropped), starts, stops, [1] * len(cropped))
    begin, end = ([max(pair[part], 0) for pair in margins] for part in range(2))
    if any(begin) or any(end):
        grid, number = input.grid, value
        if not lowering.plain:
            number = (grid.high if value > 0 else grid.low) if math.isinf(value) else grid.bound(value, 0)
        result = lowering.call(shape.pad, result, begin, end, number)
    return result


def _brings(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Return whether it pads with a number that the scale must cover: not 0, not infinity, not one that is never a window's largest."""
    value = arguments["value"]
    if arguments["mode"] != "constant" or value == 0 or math.isinf(value) or max(arguments["padding"]) <= 0:
        return False
    margins = margins_of(arguments["padding"], len(shape_of(node)))
    return value > 0 or not node.users or not all(_never_wins(reader, margins) for reader in node.users)


def _never_wins(reader: fx.Node, margins: list[tuple[int, int]]) -> bool:
    """Return whether the reader takes the largest of windows that all reach beyond margins of this size.

    Where a negative number is the largest of such a window, the window holds an element further below 0, which the scale covers.
    """
    operator = operator_of(reader)
    if operator is None or operator.layer.window is None:
        return False
    extents = operator.layer.window(operator.arguments(reader))
    extents = [1] * (len(margins) - len(extents)) + extents  # no window reaches along a dimension before these
    return all(max(pair) < extent for pair, extent in zip(margins, extents, strict=True))


def _pad_arguments(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> dict[str, Any]:
    return {"input": input, "padding": list(pad), "mode": mode, "value": 0.0 if value is None else value}


def _refuses_pad(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    padding, mode, value = arguments["padding"], arguments["mode"], arguments["value"]
    if not all(isinstance(size, int) for size in padding):
        return "its sizes are computed"
    if mode == "constant":
        return None if isinstance(value, int | float) and not math.isnan(value) else "its padding value is not a number"
    if mode not in OUTSIDE:
        return f"mode={mode!r} has no integer form"
    sizes = shape_of(arguments["input"])
    margins = zip(margins_of(padding, len(sizes)), sizes, strict=True)
    return "it pads the batch with its own elements" if any(any(m) and not isinstance(size, int) for m, size in margins) else None


def pad_before(node: fx.Node, operand: fx.Node, padding: list[int], mode: str) -> fx.Node:
    """Insert a canonical pad of the operand before the node that it was part of, and give it that node's source, module and call form."""
    shape = shape_of(operand)
    margins = margins_of(padding, len(shape))
    with node.graph.inserting_before(node):
        padded: fx.Node = node.graph.create_node("call_function", pad, (operand, padding, mode, 0.0), name=f"{node.name}_pad")
    inherit(padded, node, "canonical.rewrite")
    spell(padded, *spelling(node))
    sizes = [size + begin + end if isinstance(size, int) else size for size, (begin, end) in zip(shape, margins, strict=True)]
    set_fact(padded, replace(fact(operand), shape=tuple(sizes)))
    return padded


def _pad_module(mode: str) -> Callable[[Any], dict[str, Any]]:
    return lambda m: {"padding": list(m.padding), "mode": mode, "value": getattr(m, "value", 0.0)}


def _onnx_pad(c: Call) -> str:
    if c["mode"] != "constant":
        return c.selected()
    begins, ends = zip(*margins_of(c["padding"], len(fact(c.node).shape)), strict=True)
    return c.do("Pad", c.input, c.integers([*begins, *ends]), c.number(c["value"]))


@lowered(
    function=lambda input, padding, mode="constant", value=0.0: F.pad(input, padding, mode, value if mode == "constant" else None),
    adapt=_pad_arguments,
    calls={torch.constant_pad_nd: lambda input, pad, value=0: _pad_arguments(input, pad, value=value)},
    modules={getattr(nn, f"{kind}Pad{rank}d"): _pad_module(mode) for kind, mode in _MODES.items() for rank in (1, 2, 3)},
    carries=("input", "value"),
    idle=lambda arguments: not any(arguments["padding"]),
    refuses=_refuses_pad,
    onnx=_onnx_pad,
    demand=lambda node, arguments: Own() if _brings(node, arguments) else Same(),
)
@sampled("F.pad(x, (1, 2))", "F.pad(x, (2, -1, 1, 0), mode='reflect')", "nn.ReflectionPad2d((2, 1, 1, 0))", within=EXACT)
@sampled("nn.ReplicationPad2d((2, 1, 1, 0))", "nn.CircularPad2d((2, 1, 1, 0))", "nn.ZeroPad2d(1)", within=EXACT)
@sampled("nn.ReflectionPad1d((2, 1))", "nn.ReplicationPad1d((2, 1))", "nn.CircularPad1d((2, 1))", within=EXACT, x=IMAGES[1])
@sampled("nn.ZeroPad1d(1)", within=EXACT, x=IMAGES[1])
@sampled("nn.ReflectionPad3d((2, 1, 1, 0, 1, 0))", "nn.ReplicationPad3d((2, 1, 1, 0, 1, 0))", within=EXACT, x=IMAGES[3])
@sampled("nn.CircularPad3d((2, 1, 1, 0, 1, 0))", "nn.ZeroPad3d(1)", within=EXACT, x=IMAGES[3])
@sampled("F.pad(x, (1, 0, 2, 0, 0, 1), value=0.37)", "torch.constant_pad_nd(x, (1, 0, 2, 1), 0.5)", within=LIMITED)
@sampled("nn.ConstantPad2d(1, -0.5)", within=LIMITED)
@sampled("nn.ConstantPad1d(1, -0.5)", within=LIMITED, x=IMAGES[1])
@sampled("nn.ConstantPad3d(1, -0.5)", within=LIMITED, x=IMAGES[3])
def pad(lowering: Lowering, input: Quantized, padding: list[int], mode: str = "constant", value: float = 0.0) -> Quantized:
    """Pad a tensor as F.pad; `padding` is before and after the last dimension, then the one before it, …

    A constant is padded as its integer ⌊value/scale + ½⌋; any other mode selects elements of the tensor.
    """
    margins = margins_of(padding, len(input.shape))
    if mode == "constant":
        return _lower_constant_pad(lowering, input, margins, value)
    result = input.value
    for dim, (begin, end) in enumerate(margins):
        if (begin, end) != (0, 0):
            places = elements(mode, known_size(input.shape[dim]), begin, end)
            result = selected(lowering, result, dim, places, f"indices{dim}")
    return input.with_value(result)

"""Padding, with a constant or with the tensor's own elements; sliding windows as a dimension of their own, and their sum (col2im)."""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import fact, inherit, set_fact, shape_of, spell, spelling
from fxquant.ops.core import Call, Lowering, Own, Quantized, Ratio, Same, known_size, lowered, operator_of, sample, selected
from fxquant.ops.core.declare import fixed, fixed_sizes, with_batch
from fxquant.ops.core.samples import EXACT, IMAGES, LIMITED, sampled
from fxquant.ops.core.sums import onnx_matrices, weighted_sums
from fxquant.ops.core.weighted import sizes
from fxquant.ops.movement.shape import rank_of, result_varying, sizes_of
from fxquant.ops.pooling.pool import needs_batch
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


# ---- Sliding windows -------------------------------------------------------------------------------------------------
Window = tuple[int, int, int, int]  # taps, dilation, padding, stride
WINDOW = {"kernel_size": inspect.Parameter.empty, "dilation": 1, "padding": 0, "stride": 1}


def _taps(length: int, window: Window) -> list[list[int]]:
    """Return where the taps of each window lie in a padded dimension: [tap][window]."""
    taps, dilation, padding, stride = window
    count = (length + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    return [[tap * dilation + index * stride for index in range(count)] for tap in range(taps)]


def _geometry(arguments: Mapping[str, Any]) -> list[Window]:
    """Return the windows of rows and of columns."""
    named = (sizes(arguments[name], 2) for name in WINDOW)
    rows, columns = zip(*named, strict=True)
    return [rows, columns]


def _onnx_unfold(c: Call) -> str:
    """Write the unfold in ONNX on float values."""
    windows, parts = _geometry(c.arguments), []
    margins = [0, 0, windows[0][2], windows[1][2]]
    value = c.do("Pad", c.input, c.integers(margins * 2), c.number(0)) if any(margins) else c.input
    channels, *lengths = (size for size in c.operand_shape[1:] if isinstance(size, int))
    for axis, (length, window) in enumerate(zip(lengths, windows, strict=True)):
        places = _taps(length, window)
        value = c.do("Gather", value, c.integers(list(itertools.chain(*places))), axis=2 + axis)
        parts += [len(places), len(places[0])]
    value = c.do("Transpose", c.do("Reshape", value, c.integers([0, channels, *parts])), perm=[0, 1, 2, 4, 3, 5])
    return c.do("Reshape", value, c.integers([0, channels * parts[0] * parts[2], parts[1] * parts[3]]))


@lowered(
    nn.Unfold,
    by_name=False,
    calls={F.unfold: None},
    settings=WINDOW,
    carries=("input",),
    refuses=(needs_batch(2), fixed(1, because="the number of its channels depends on the batch size")),
    onnx=_onnx_unfold,
    demand=Same(),
    samples=(
        sample(input=(3, 6, 6), kernel_size=3, padding=1, stride=2),
        sample(input=(3, 6, 6), kernel_size=(2, 3), dilation=2, padding=(0, 1)),
    ),
)
def unfold(lowering: Lowering, input: Quantized, **settings: Any) -> Quantized:
    """Return every window of images (N, C, H, W) as a column: (N, C · taps, windows), as F.unfold.

    Pad with zeros, order rows and columns by taps and windows, and put both kinds of taps before the windows.
    """
    windows = _geometry(settings)
    value, parts = input.value, []
    if any(window[2] for window in windows):
        margins = [0, 0, windows[0][2], windows[1][2]]
        value = lowering.call(shape.pad, value, margins, margins, 0)
    for axis, window in enumerate(windows):
        places = _taps(known_size(input.shape[2 + axis]), window)
        value = selected(lowering, value, 2 + axis, itertools.chain(*places), f"indices{axis}")
        parts += [len(places), len(places[0])]
    channels, taps = known_size(input.shape[1]), parts[0] * parts[2]
    value = lowering.call(shape.permute, lowering.call(shape.reshape, value, [-1, channels, *parts]), [0, 1, 2, 4, 3, 5])
    return input.with_value(lowering.call(shape.reshape, value, [-1, channels * taps, parts[1] * parts[3]]))


def _places(length: int, window: Window) -> list[list[int]]:
    """Return for each position of an image dimension the flat indices (tap, window) of the column elements that lie there."""
    by_place: list[list[int]] = [[] for _ in range(length)]
    for element, place in enumerate(itertools.chain(*_taps(length, window))):
        if 0 <= place - window[2] < length:
            by_place[place - window[2]].append(element)
    return by_place


def _axes(arguments: dict[str, Any]) -> list[list[list[int]]]:
    return [_places(*axis) for axis in zip(sizes(arguments["output_size"], 2), _geometry(arguments), strict=True)]


def _moves_only(arguments: dict[str, Any]) -> bool:
    """Return whether every pixel is one element: nothing is added, and nothing is left empty."""
    return all(len(elements) == 1 for axis in _axes(arguments) for elements in axis)


def _matrices(axes: list[list[list[int]]], lengths: list[int]) -> list[Tensor]:
    matrices = []
    for axis, length in zip(axes, lengths, strict=True):
        matrix = torch.zeros(len(axis), length, device="cpu", dtype=torch.float32)
        for position, elements in enumerate(axis):
            matrix[position, elements] = 1
        matrices.append(matrix)
    return matrices


def _parts(shape: Any, arguments: dict[str, Any]) -> tuple[int, list[int]]:
    """Return the channels of the image; taps and windows of its rows, and of its columns."""
    parts = []
    for axis in zip(sizes(arguments["output_size"], 2), _geometry(arguments), strict=True):
        places = _taps(*axis)
        parts += [len(places), len(places[0])]
    return shape[1] // (parts[0] * parts[2]), parts


COL2IM_OPSET = 18  # the first that has it


def _onnx_fold(c: Call) -> str:
    if c.e.opset >= COL2IM_OPSET:
        dilation, padding, stride = (sizes(c[name], 2) for name in ("dilation", "padding", "stride"))
        attributes = {"dilations": dilation, "pads": padding * 2, "strides": stride}
        return c.do("Col2Im", c.input, c.integers(sizes(c["output_size"], 2)), c.integers(sizes(c["kernel_size"], 2)), **attributes)
    channels, (rows, down, columns, across) = _parts(c.operand_shape, c.arguments)
    lengths = [rows * down, columns * across]
    value = c.do("Reshape", c.input, c.integers([0, channels, rows, columns, down, across]))
    value = c.do("Transpose", value, perm=[0, 1, 2, 4, 3, 5])
    value = c.do("Reshape", value, c.integers([0, channels, *lengths]))
    return onnx_matrices(c, value, [-1, channels, *lengths], _matrices(_axes(c.arguments), lengths))


@lowered(
    settings=WINDOW,
    refuses=(with_batch(1), fixed_sizes("its windows would run along the batch", start=1)),
    onnx=_onnx_fold,
    demand=lambda node, arguments: Same() if _moves_only(arguments) else Own(),
    samples=(
        sample(input=(27, 36), output_size=(6, 6), kernel_size=3, padding=1),
        sample(input=(6, 12), output_size=(4, 6), kernel_size=(2, 1), stride=(2, 1), within=0.0),
    ),
)
def fold(lowering: Lowering, input: Quantized, output_size: Any, **window: Any) -> Quantized:
    """Sum windows (N, C · taps, windows) into an image (N, C, H, W), each window at its position, as F.fold.

    The columns are arranged as an image of all taps of all windows; each result pixel is the sum of the taps that cover it.
    """
    arguments = {"output_size": output_size, **window}
    channels, (rows, down, columns, across) = _parts(input.shape, arguments)
    value = lowering.call(shape.reshape, input.value, [-1, channels, rows, columns, down, across])
    value = lowering.call(shape.permute, value, [0, 1, 2, 4, 3, 5])
    lengths = [rows * down, columns * across]
    value = lowering.call(shape.reshape, value, [-1, channels, *lengths])
    axes = _axes(arguments)
    if not _moves_only(arguments):
        image = replace(input, value=value, shape=(input.shape[0], channels, *lengths))
        return weighted_sums(lowering, image, _matrices(axes, lengths), Ratio((input.scale,)))
    for axis, elements in enumerate(axes):
        value = selected(lowering, value, 2 + axis, [element for (element,) in elements], f"indices{axis}")
    return input.with_value(value)


def _windows_of(input: Any, dimension: int, size: Any, step: Any) -> dict[str, Any] | str:
    if not isinstance(size, int) or not isinstance(step, int):
        return "its size or its step is computed"
    return {"input": input, "dimension": dimension % rank_of(input), "size": size, "step": step}


@lowered(
    function=lambda input, dimension, size, step: input.unfold(dimension, size, step),
    calls={"unfold": _windows_of},
    refuses=(fixed("dimension", because="its windows would run along the batch"), result_varying),
    demand=Same(),
    samples=(sample(input=(3, 6, 6), dimension=3, size=3, step=2), sample(input=(3, 6, 6), dimension=1, size=2, step=1)),
)
def unfold_dimension(lowering: Lowering, input: Quantized, dimension: int, size: int, step: int) -> Quantized:
    """Return every window of one dimension, in place of it, the elements of a window along a new last dimension: Tensor.unfold."""
    rank, starts = len(input.shape), range(0, known_size(input.shape[dimension]) - size + 1, step)
    value = selected(lowering, input.value, dimension, [start + tap for start in starts for tap in range(size)])
    split = sizes_of(lowering, value, input.shape)
    split[dimension : dimension + 1] = [len(starts), size]
    order = [dim for dim in range(rank + 1) if dim != dimension + 1]
    return input.with_value(lowering.call(shape.permute, lowering.call(shape.reshape, value, split), [*order, dimension + 1]))

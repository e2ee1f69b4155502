"""Sliding windows as a dimension of their own, and their sum where they came from: unfold (im2col) and fold (col2im)."""

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.ops.core import Call, Lowering, Own, Quantized, Ratio, Same, known_size, lowered, sample, selected
from fxquant.ops.core.declare import fixed, fixed_sizes, with_batch
from fxquant.ops.core.matrix import onnx_matrices, weighted_sums
from fxquant.ops.core.weighted import sizes
from fxquant.ops.movement.shape import rank_of, result_varying, sizes_of
from fxquant.ops.pooling.pool import needs_batch
from fxquant.primitives import shape

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

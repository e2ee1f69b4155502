"""Convolutions and linear layers that are too large for a target: several ones, summed in integers or concatenated.

A sum of parts is a chain: each part adds the one before it in its accumulator, and the last one the bias. The loss
against one convolution is the rounding of the intermediate sums, which are 16 bits wide if the target supports it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import shape_of
from fxquant.ops import operator_of
from fxquant.ops.core.weighted import sizes, spread
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add
from fxquant.ops.layers.convolution import conv2d
from fxquant.ops.movement.pad import pad
from fxquant.ops.movement.shape import numbers, permute, reshape
from fxquant.primitives.accumulate import sides, window_padding
from fxquant.remedies.rewriting import Rewriting, even, remedy

PLAIN = "conv1d conv2d conv3d"
REVERSED = "conv_transpose1d conv_transpose2d conv_transpose3d"
BETWEEN = "padding that is not a multiple of half the stride"
INPUTS = ("channels", "channels of a kernel without groups", "weights for one output channel")


def _attributes(b: Rewriting) -> dict[str, Any]:
    names = ("stride", "padding", "output_padding", "dilation", "groups")
    rank = len(b.shape) - 2
    return {n: b.arguments[n] if n == "groups" else sizes(b.arguments[n], rank) for n in names if n in b.arguments}


def chain(b: Rewriting, parts: Sequence[tuple[fx.Node, Any]], bias: Any, **changes: Any) -> fx.Node:
    """Return the sum of the layers of these operands and weights, with the operators that were fused into the whole."""
    total = b.arguments.get("residual")
    for index, (operand, weight) in enumerate(parts):
        last = index == len(parts) - 1
        own = {"input": operand, "weight": weight, "bias": bias if last else None, "residual": total, "clamp": b.clamp if last else None}
        total = b.again(dtype=b.dtype if last else b.partial, **changes, **own, batch_norm=None)
    assert isinstance(total, fx.Node)
    return total


@remedy("without dilation", f"{PLAIN} {REVERSED}", "dilation", "stride where it is dilated", "bits of the result where it is dilated")
def undilated(b: Rewriting) -> fx.Node | None:
    """Insert zeros between the taps of the kernel; the sums are unchanged."""
    attributes = _attributes(b)
    wide = b.parameter(spread, b.arguments["weight"], attributes["dilation"])
    return b.again(**{**attributes, "weight": wide, "dilation": [1] * len(attributes["dilation"])})


@remedy("split by kernel", PLAIN, "kernel")
def kernel_tiles(b: Rewriting) -> fx.Node | None:
    """Split the kernel into tiles, each over the elements that it covers."""
    return _tiles(b, b.most)


def _tiles(b: Rewriting, largest: int) -> fx.Node | None:
    attributes = _attributes(b)
    outputs = b.result[2:]
    if not all(isinstance(size, int) for size in (*outputs, *b.shape[2:])):
        return None
    weight, bias = b.folded(0)
    kernel = shape_of(weight)[2:]
    padded = _padded(b, attributes) if any(attributes["padding"]) else b.input
    tiles = [even(int(taps), -(-int(taps) // largest)) for taps in kernel]  # type: ignore[arg-type]
    parts = []
    for tile in itertools.product(*tiles):
        operand, part = padded, weight
        for dim, ((start, stop), taps) in enumerate(zip(tile, kernel, strict=True), 2):
            step, spread_by = attributes["stride"][dim - 2], attributes["dilation"][dim - 2]
            begin = start * spread_by
            extent = (outputs[dim - 2] - 1) * step + (stop - start - 1) * spread_by + 1
            operand = b.cut(operand, dim, begin, begin + extent)
            if (start, stop) != (0, taps):
                part = b.narrow(part, dim, start, stop)
        parts.append((operand, part))
    return chain(b, parts, bias, **{**attributes, "padding": [0] * len(outputs)})


def _padded(b: Rewriting, attributes: dict[str, Any]) -> fx.Node:
    return b(pad, b.input, window_padding(*sides(attributes["padding"], len(attributes["stride"]))))


@remedy("split by channels", f"{PLAIN} {REVERSED}", *INPUTS)
def input_channels(b: Rewriting) -> fx.Node | None:
    """Split the input channels of a layer without groups; if one channel's kernel is too large, the kernel."""
    attributes = _attributes(b)
    transposed = "output_padding" in attributes
    channels = b.shape[1]
    if attributes["groups"] > 1:
        return None
    if channels < b.pieces:
        return None if transposed else _tiles(b, max(1, math.isqrt(b.most)))
    weight, bias = b.folded(1 if transposed else 0)
    dim = 0 if transposed else 1
    return chain(b, [(b.cut(b.input, 1, *edges), b.narrow(weight, dim, *edges)) for edges in even(channels, b.pieces)], bias, **attributes)


@remedy("with its residual added after it", f"{PLAIN} {REVERSED}", "stride with a residual added")
def residual_after(b: Rewriting) -> fx.Node | None:
    """Add the residual in a separate operator."""
    return b(add, b.again(**_attributes(b), dtype=b.partial, residual=None, clamp=None), b.arguments["residual"], clamp=b.clamp)


@remedy("cropped", "conv_transpose1d conv_transpose2d", BETWEEN, "padding beyond kernel / stride", "padding beyond (kernel - 1) / 2")
def cropped(b: Rewriting) -> fx.Node | None:
    """Compute the elements that padding leaves out, and leave them out afterwards; the integers are unchanged."""
    if b.arguments.get("residual") is not None:
        return residual_after(b)
    attributes, outputs = _attributes(b), b.result[2:]
    if not all(isinstance(size, int) for size in outputs):
        return None
    extra = [max(more - left, 0) for more, left in zip(attributes["output_padding"], attributes["padding"], strict=True)]
    result = b.again(**{**attributes, "padding": [0] * len(outputs), "output_padding": extra})
    for dim, (left, size) in enumerate(zip(attributes["padding"], outputs, strict=True), 2):
        result = b.cut(result, dim, left, left + size)
    return result


@remedy("with its limits after it", "*", "bounds")
def limits_after(b: Rewriting) -> fx.Node | None:
    """Move the fused clamp into a separate operator, which can then run elsewhere."""
    return None if b.clamp is None else b(clamp, b.again(clamp=None), *b.clamp)


@remedy("as a 1×1 convolution", "linear", "area of an image that is flattened before it", "bits")
def as_convolution(b: Rewriting) -> fx.Node | None:
    """Compute the sums by a convolution: features are channels, and rows positions. A flattened image before it is used directly."""
    weight, bias = b.arguments["weight"], b.arguments["bias"]
    image = _before_flatten(b.input)
    if image is not None:
        kernel = [int(size) for size in shape_of(image)[1:]]  # type: ignore[arg-type]
        operand, own = image, b.parameter(torch.reshape, weight, [shape_of(weight)[0], *kernel])
    else:
        laid = _as_image(b, b.input)
        if laid is None:
            return None
        operand, own = laid, b.parameter(torch.reshape, weight, [*shape_of(weight), 1, 1])
    residual = b.arguments.get("residual")
    added = None if residual is None else _as_image(b, residual)
    result = b(conv2d, operand, own, bias, batch_norm=b.arguments.get("batch_norm"), residual=added, clamp=b.clamp)
    rank = len(b.result)
    if rank < 4:
        result = b(reshape, result, numbers(shape_of(result)[:rank]))
    return b(permute, result, [0, *range(2, rank), 1]) if rank > 2 else result


def _before_flatten(operand: fx.Node) -> fx.Node | None:
    """Return the image (N, C, H, W) that was flattened to (N, C·H·W), if there is one."""
    operator = operator_of(operand)
    if operator is None or operator.function is not reshape or len(shape_of(operand)) != 2:
        return None
    image = operand.all_input_nodes[0]
    image_shape = shape_of(image)
    plain = len(image_shape) == 4 and image_shape[0] == shape_of(operand)[0] and all(isinstance(size, int) for size in image_shape[1:])
    return image if plain else None


def _as_image(b: Rewriting, rows: fx.Node) -> fx.Node | None:
    """Reshape (…, F) to (N, F, …) with two dimensions after the features."""
    if (image := _before_flatten(rows)) is not None and shape_of(image)[2:] == (1, 1):
        return image
    rank = len(shape_of(rows))
    if not 2 <= rank <= 4:
        return None
    if rank > 2:
        rows = b(permute, rows, [0, rank - 1, *range(1, rank - 1)])
    if rank < 4:
        rows = b(reshape, rows, numbers([*shape_of(rows), *[1] * (4 - rank)]))
    return rows


@remedy("split by features", "linear", "features")
def features(b: Rewriting) -> fx.Node | None:
    """Split the input features, as a sum."""
    outputs, inputs = shape_of(b.arguments["weight"])
    if outputs > b.most:  # type: ignore[operator]
        return None
    weight, bias = b.folded(0)
    pieces, last = even(int(inputs), b.pieces), len(b.shape) - 1  # type: ignore[arg-type]
    return chain(b, [(b.cut(b.input, last, *edges), b.narrow(weight, 1, *edges)) for edges in pieces], bias)

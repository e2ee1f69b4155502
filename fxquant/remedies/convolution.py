"""Convolutions that are too large for a target: several supported ones, summed in integers or concatenated.

A sum of parts is a chain: each part adds the one before it in its accumulator, and the last one the bias. The loss
against one convolution is the rounding of the intermediate sums, which are 16 bits wide if the target supports it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import shape_of
from fxquant.ops.core.parameters import spread
from fxquant.ops.core.weighted import FUSED, sizes
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add
from fxquant.ops.movement.join import cat
from fxquant.ops.movement.pad import pad
from fxquant.remedies.rewriting import Rewriting, even, remedy

PLAIN = "conv1d conv2d conv3d"
REVERSED = "conv_transpose1d conv_transpose2d conv_transpose3d"
KERNELS = ("kernel", "kernel in depth and height", "kernel in width")
INPUTS = ("channels", "channels of a kernel without groups", "channels of a kernel with groups", "weights for one output channel")
OUTPUTS = ("output channels", "output channels inside the model")


def _attributes(b: Rewriting) -> dict[str, Any]:
    names = ("stride", "padding", "output_padding", "dilation", "groups")
    rank = len(b.shape) - 2
    return {n: b.arguments[n] if n == "groups" else sizes(b.arguments[n], rank) for n in names if n in b.arguments}


def _call(b: Rewriting, input: fx.Node, weight: Any, bias: Any, attributes: dict[str, Any], **kwargs: Any) -> fx.Node:
    made: fx.Node = b(b.operator.function, input, weight, bias, **attributes, **kwargs)
    return made


def chain(b: Rewriting, parts: Sequence[tuple[fx.Node, Any]], bias: Any, call: Any) -> fx.Node:
    """Return the sum of the layers of these operands and weights, with the operators that were fused into the whole."""
    total = b.arguments.get("residual")
    for index, (operand, weight) in enumerate(parts):
        last = index == len(parts) - 1
        fused = {"residual": total, "clamp": b.arguments.get("clamp") if last else None}
        total = call(operand, weight, bias if last else None, dtype=b.dtype if last else b.partial, **fused)
    assert isinstance(total, fx.Node)
    return total


@remedy("without dilation", f"{PLAIN} {REVERSED}", "dilation", "stride where it is dilated", "bits of the result where it is dilated")
def undilated(b: Rewriting) -> fx.Node | None:
    """Insert zeros between the taps of the kernel; the sums are unchanged."""
    attributes = _attributes(b)
    wide = b.parameter(spread, b.arguments["weight"], attributes["dilation"])
    fused = {name: b.arguments.get(name) for name in FUSED}
    return _call(b, b.input, wide, b.arguments["bias"], {**attributes, "dilation": [1] * len(attributes["dilation"])}, **fused)


@remedy("split by kernel", PLAIN, *KERNELS)
def kernel_tiles(b: Rewriting) -> fx.Node | None:
    """Split the kernel into tiles, each over the elements that it covers."""
    assert isinstance(b.limit.high, int)
    return _tiles(b, b.limit.high)


def _tiles(b: Rewriting, largest: int) -> fx.Node | None:
    attributes = _attributes(b)
    outputs = b.result[2:]
    if not all(isinstance(size, int) for size in (*outputs, *b.shape[2:])):
        return None
    weight, bias = b.folded(0)
    kernel = shape_of(weight)[2:]
    padded = b.input
    if any(attributes["padding"]):
        padded = b(pad, padded, [size for size in reversed(attributes["padding"]) for _ in range(2)])
    tiles = [even(int(taps), -(-int(taps) // largest)) for taps in kernel]  # type: ignore[arg-type]
    parts = []
    for tile in itertools.product(*tiles):
        operand, part = padded, weight
        for dim, ((start, stop), taps) in enumerate(zip(tile, kernel, strict=True), 2):
            step, spread_by = attributes["stride"][dim - 2], attributes["dilation"][dim - 2]
            begin = start * spread_by
            extent = (outputs[dim - 2] - 1) * step + (stop - start - 1) * spread_by + 1  # type: ignore[operator]
            operand = b.cut(operand, dim, begin, begin + extent)
            if (start, stop) != (0, taps):
                part = b.parameter(torch.narrow, part, dim, start, stop - start)
        parts.append((operand, part))
    plain = {**attributes, "padding": [0] * len(outputs)}
    return chain(b, parts, bias, lambda x, w, bias, **fused: _call(b, x, w, bias, plain, **fused))


@remedy("split by channels", f"{PLAIN} {REVERSED}", *INPUTS)
def input_channels(b: Rewriting) -> fx.Node | None:
    """Split the input channels; if there are groups, the groups; if one channel's kernel is too large, the kernel."""
    attributes = _attributes(b)
    transposed = "output_padding" in attributes
    channels, groups = b.shape[1], attributes["groups"]
    assert isinstance(channels, int)
    if groups > 1:
        return _groups(b, attributes, channels, groups)
    if channels < b.pieces:
        return None if transposed else _tiles(b, max(1, math.isqrt(b.limit.high)))  # type: ignore[arg-type]
    weight, bias = b.folded(1 if transposed else 0)
    parts = [
        (b.cut(b.input, 1, start, stop), b.parameter(torch.narrow, weight, 0 if transposed else 1, start, stop - start))
        for start, stop in even(channels, b.pieces)
    ]
    return chain(b, parts, bias, lambda x, w, bias, **fused: _call(b, x, w, bias, attributes, **fused))


@remedy("split by output channels", f"{PLAIN} {REVERSED}", *OUTPUTS)
def output_channels(b: Rewriting) -> fx.Node | None:
    """Split the output channels, concatenated on one grid: bit-equal to one convolution on that grid."""
    attributes = _attributes(b)
    transposed = "output_padding" in attributes
    channels = b.result[1]
    assert isinstance(channels, int)
    if attributes["groups"] > 1:
        return _groups(b, attributes, b.shape[1], attributes["groups"])
    weight, bias = b.folded(1 if transposed else 0)
    parts = []
    for start, stop in even(channels, b.pieces):
        own = b.parameter(torch.narrow, weight, 1 if transposed else 0, start, stop - start)
        own_bias = None if bias is None else b.parameter(torch.narrow, bias, 0, start, stop - start)
        parts.append(_call(b, b.input, own, own_bias, attributes, **_cut_fused(b, start, stop)))
    return _joined(b, parts)


def _cut_fused(b: Rewriting, start: int, stop: int) -> dict[str, Any]:
    residual = b.arguments.get("residual")
    return {"residual": None if residual is None else b.cut(residual, 1, start, stop), "clamp": b.arguments.get("clamp")}


def _joined(b: Rewriting, parts: list[fx.Node]) -> fx.Node:
    joined: fx.Node = b(cat, parts, 1)
    b.on_one_grid(*parts, joined)
    return joined


def _groups(b: Rewriting, attributes: dict[str, Any], channels: Any, groups: int) -> fx.Node | None:
    """Split the groups, concatenated on one grid."""
    if b.pieces > groups:
        return None
    transposed = "output_padding" in attributes
    outputs = b.result[1]
    assert isinstance(outputs, int)
    weight, bias = b.arguments["weight"], b.arguments["bias"]
    if b.arguments.get("batch_norm") is not None:
        if transposed:
            return None  # a part of the groups cannot be cut from its folded weight
        weight, bias = b.folded(0)
    rows = (channels if transposed else outputs) // groups
    parts = []
    for start, stop in even(groups, b.pieces):
        own = b.parameter(torch.narrow, weight, 0, start * rows, (stop - start) * rows)
        first, last = (edge * outputs // groups for edge in (start, stop))
        own_bias = None if bias is None else b.parameter(torch.narrow, bias, 0, first, last - first)
        operand = b.cut(b.input, 1, start * channels // groups, stop * channels // groups)
        parts.append(_call(b, operand, own, own_bias, {**attributes, "groups": stop - start}, **_cut_fused(b, first, last)))
    return _joined(b, parts)


@remedy("padded before", f"{PLAIN}", "padding", "padding beyond kernel / 2")
def padded_before(b: Rewriting) -> fx.Node | None:
    """Pad the operand with zeros in a separate operator."""
    attributes = _attributes(b)
    around = [size for size in reversed(attributes["padding"]) for _ in range(2)]
    padded = b(pad, b.input, around)
    fused = {name: b.arguments.get(name) for name in FUSED}
    return _call(
        b, padded, b.arguments["weight"], b.arguments["bias"], {**attributes, "padding": [0] * len(attributes["padding"])}, **fused
    )


@remedy("with its residual added after it", f"{PLAIN} {REVERSED}", "stride with a residual added")
def residual_behind(b: Rewriting) -> fx.Node | None:
    """Add the residual in a separate operator."""
    fused = {"batch_norm": b.arguments.get("batch_norm"), "dtype": b.partial}
    own = _call(b, b.input, b.arguments["weight"], b.arguments["bias"], _attributes(b), **fused)
    total: fx.Node = b(add, own, b.arguments["residual"], clamp=b.arguments.get("clamp"))
    return total


@remedy("with its limits after it", "*", "bounds")
def limits_behind(b: Rewriting) -> fx.Node | None:
    """Move the fused clamp into a separate operator, which can then run elsewhere."""
    limits = b.arguments.get("clamp")
    if limits is None or "clamp" not in b.node.kwargs:
        return None
    own = b(b.operator.function, *b.node.args)
    own.kwargs = {name: value for name, value in b.node.kwargs.items() if name != "clamp"}
    limited: fx.Node = b(clamp, own, *limits)
    return limited

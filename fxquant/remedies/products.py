"""Linear layers that are too large for a target, or that it supports only as convolutions."""

from __future__ import annotations

import torch
from torch import fx

from fxquant.ir.graph import is_parameter, shape_of
from fxquant.ops import operator_of
from fxquant.ops.elementwise.arithmetic import add
from fxquant.ops.layers.convolution import conv2d
from fxquant.ops.layers.linear import matmul
from fxquant.ops.movement.shape import numbers, permute, reshape
from fxquant.remedies.convolution import chain
from fxquant.remedies.rewriting import Rewriting, even, remedy


@remedy("as a 1×1 convolution", "linear", None, "bits")
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
    made = b(conv2d, operand, own, bias, batch_norm=b.arguments.get("batch_norm"), residual=added, clamp=b.clamp)
    return _as_rows(b, made)


def _before_flatten(operand: fx.Node) -> fx.Node | None:
    """Return the image (N, C, H, W) that was flattened to (N, C·H·W), if there is one."""
    operator = operator_of(operand)
    if operator is None or operator.function is not reshape or len(shape_of(operand)) != 2:
        return None
    image = operand.args[0]
    assert isinstance(image, fx.Node)
    known = shape_of(image)
    plain = len(known) == 4 and known[0] == shape_of(operand)[0] and all(isinstance(size, int) for size in known[1:])
    return image if plain else None


def _as_image(b: Rewriting, rows: fx.Node) -> fx.Node | None:
    """Reshape (…, F) to (N, F, …) with two dimensions after the features."""
    image = _before_flatten(rows)
    if image is not None and shape_of(image)[2:] == (1, 1):
        return image
    rank = len(shape_of(rows))
    if not 2 <= rank <= 4:
        return None
    if rank > 2:
        rows = b(permute, rows, [0, rank - 1, *range(1, rank - 1)])
    if rank < 4:
        known = shape_of(rows)
        rows = b(reshape, rows, numbers([*known, *[1] * (4 - rank)]))
    return rows


def _as_rows(b: Rewriting, image: fx.Node) -> fx.Node:
    rank = len(b.result)
    if rank < 4:
        image = b(reshape, image, numbers(shape_of(image)[:rank]))
    if rank > 2:
        image = b(permute, image, [0, *range(2, rank), 1])
    return image


@remedy("split by features", "linear", "features")
def features(b: Rewriting) -> fx.Node | None:
    """Split the output features, concatenated on one grid; or the input features, as a sum."""
    weight, bias = b.folded(0)
    outputs, inputs = shape_of(weight)
    assert isinstance(outputs, int)
    assert isinstance(inputs, int)
    last = len(b.shape) - 1
    if outputs > b.most:
        parts = []
        for edges in even(outputs, -(-outputs // b.most)):
            own, own_bias = b.narrow(weight, 0, *edges), b.narrow(bias, 0, *edges)
            residual = b.cut(b.arguments.get("residual"), last, *edges)
            parts.append(b.again(weight=own, bias=own_bias, residual=residual, batch_norm=None))
        return b.joined(parts, last)
    pieces = even(inputs, -(-inputs // b.most))
    return chain(b, [(b.cut(b.input, last, *edges), b.narrow(weight, 1, *edges)) for edges in pieces], bias)


@remedy("split by rows and columns", "matmul", "matrix sizes")
def matrices(b: Rewriting) -> fx.Node | None:
    """Split a product with too many rows or columns into parts, concatenated on one grid."""
    left, right = b.arguments["input"], b.arguments["other"]
    if is_parameter(left) or is_parameter(right) or b.arguments.get("bias") is not None:
        return None
    for name, operand, dim in (("input", left, -2), ("other", right, -1)):
        shape = shape_of(operand)
        size = shape[dim]
        if isinstance(size, int) and size > b.most:
            pieces = [b.cut(operand, len(shape) + dim, *edges) for edges in even(size, -(-size // b.most))]
            return b.joined([b.again(**{name: piece}) for piece in pieces], len(b.result) + dim)
    terms = shape_of(left)[-1]
    if not isinstance(terms, int) or terms <= b.most:
        return None
    total: fx.Node | None = None
    for start, stop in even(terms, -(-terms // b.most)):
        row, column = b.cut(left, len(shape_of(left)) - 1, start, stop), b.cut(right, len(shape_of(right)) - 2, start, stop)
        part = b(matmul, row, column, dtype=b.partial)
        dtype, clamp = (b.dtype, b.clamp) if stop == terms else (b.partial, None)
        total = part if total is None else b(add, total, part, dtype=dtype, clamp=clamp)
    return total

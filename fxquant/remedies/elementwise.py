"""Sums, products, activations and concatenations that a target does not support directly, and layers of one dimension."""

import math
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import fact, is_parameter, shape_of
from fxquant.ops.core.composite import REQUANTIZE
from fxquant.ops.core.declare import are_fixed, known_sizes
from fxquant.ops.core.record import BY_NAME
from fxquant.ops.core.weighted import channel_weight, sizes
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.elementwise.comparison import maximum
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.layers.convolution import conv2d, conv_transpose2d
from fxquant.ops.movement.pad import OUTSIDE, margins_of, pad
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.ops.pooling.pool import avg_pool1d, avg_pool2d
from fxquant.ops.sampling.resize import interpolate
from fxquant.remedies.pooling import window
from fxquant.remedies.rewriting import Rewriting, is_activation, remedy


@remedy("as a depthwise convolution", "add sub mul", "number of constant operands")
def as_depthwise(b: Rewriting) -> fx.Node | None:
    """Replace an operator with a constant for each channel by a depthwise 1×1 convolution with it as weight or bias."""
    left, right = b.arguments["input"], b.arguments["other"]
    operand, constant = (right, left) if is_parameter(left) else (left, right)
    shape = shape_of(operand)
    channels = shape[1] if len(shape) == 4 else None
    full_shape = [1, *fact(constant).shape] if len(fact(constant).shape) == 3 else list(fact(constant).shape)
    if not isinstance(channels, int) or full_shape != [1, channels, 1, 1]:
        return None
    if b.operator.function is mul:
        weight, bias = b.parameter(torch.reshape, constant, [channels, 1, 1, 1]), None
    else:
        alpha = b.arguments["alpha"] * (1 if b.operator.function is add else -1)
        of_operand, of_constant = (alpha, 1) if operand is right else (1, alpha)
        weight = b.parameter(channel_weight, constant, float(of_operand))
        bias = b.parameter(torch.mul, b.parameter(torch.reshape, constant, [channels]), float(of_constant))
    return b(conv2d, operand, weight, bias, groups=channels, clamp=b.clamp)


@remedy("expanded first", "add sub mul", "number of operands that are broadcast")
def expanded(b: Rewriting) -> fx.Node | None:
    """Expand the larger of two operands that are both broadcast to the result's shape, before the operator."""
    names = [name for name in ("input", "other") if is_activation(b.arguments[name])]
    if len(names) != 2 or (not isinstance(b.result[0], int) and any(shape_of(b.arguments[n])[0] != b.result[0] for n in names)):
        return None
    chosen = max(names, key=lambda name: sum(size == whole for size, whole in zip(shape_of(b.arguments[name]), b.result, strict=False)))
    return b.again(**{chosen: b(expand, b.arguments[chosen], numbers(b.result))})


@remedy("in two dimensions", "add sub mul", "rank")
def flattened(b: Rewriting) -> fx.Node | None:
    """Reshape operands of one shape to (batch, elements), apply the operator, and reshape the result back."""
    names = [name for name in ("input", "other") if is_activation(b.arguments[name])]
    others = [b.arguments[name] for name in ("input", "other") if name not in names]
    if any(shape_of(b.arguments[name]) != b.result for name in names) or any(isinstance(value, fx.Node) for value in others):
        return None
    if not are_fixed(b.result[1:]):
        return None
    rows = math.prod(known_sizes(b.result[1:]))
    return b(reshape, b.again(**{name: b(reshape, b.arguments[name], numbers([b.result[0], rows])) for name in names}), numbers(b.result))


@remedy("as a selection", "pad", "padding mode")
def selected(b: Rewriting) -> fx.Node | None:
    """Pad a tensor with its own elements, selected by their positions; the integers are unchanged."""
    mode, value = b.arguments["mode"], b.input
    for dim, (before, after) in enumerate(margins_of(b.arguments["padding"], len(b.shape))):
        if (before, after) != (0, 0):
            size = b.shape[dim]
            if not isinstance(size, int):
                return None
            index: list[Any] = [WHOLE] * len(b.shape)
            index[dim] = [OUTSIDE[mode](position, size) for position in range(-before, size + after)]
            value = b(getitem, value, index)
    return value


@remedy("in two dimensions", "conv_transpose1d avg_pool1d", None)
@remedy("in two dimensions", "pad interpolate", "rank")
def lifted(b: Rewriting) -> fx.Node | None:
    """Compute an operator on (N, C, L) as one on images (N, C, 1, L); a pad of C and L on images (N, 1, C, L)."""
    shape = b.shape
    padding: Any = b.arguments.get("padding")
    is_pad = b.operator.function is pad
    if len(shape) != 3 or (is_pad and (len(padding) > 4 or b.arguments["mode"] != "constant")):
        return None
    place = 1 if is_pad and len(padding) > 2 else 2
    image = b(reshape, b.input, numbers([*shape[:place], 1, *shape[place:]]))
    if is_pad:
        result = b.again(input=image)
    elif b.operator.function is interpolate:
        resized = {name: [1, *value] for name in ("size", "scale_factor") if (value := b.arguments[name]) is not None}
        result = b.again(input=image, mode=b.arguments["mode"].replace("linear", "bilinear"), **resized)
    elif b.operator.function is avg_pool1d:
        (kernel,), (stride,), (padding,) = window(b, 1)
        counted = b.arguments["count_include_pad"]
        result = b(avg_pool2d, image, [1, kernel], [1, stride], [0, padding], b.arguments["ceil_mode"], counted, clamp=b.clamp)
    else:
        own = b.parameter(torch.unsqueeze, b.arguments["weight"], 2)
        residual = b.arguments.get("residual")
        added = None if residual is None else b(reshape, residual, numbers([*shape_of(residual)[:2], 1, shape_of(residual)[2]]))
        stride, padding, extra, dilation = (sizes(b.arguments[n], 1)[0] for n in ("stride", "padding", "output_padding", "dilation"))
        places = ([1, stride], [0, padding], [0, extra], b.arguments["groups"], [1, dilation])
        norm, bias = b.arguments.get("batch_norm"), b.arguments["bias"]
        result = b(conv_transpose2d, image, own, bias, *places, batch_norm=norm, residual=added, clamp=b.clamp)
    return b(reshape, result, numbers(b.result))


@remedy("of a sigmoid", "gelu", "approximation")
def of_a_sigmoid(b: Rewriting) -> fx.Node | None:
    """Return x · sigmoid(2√(2/π) · (x + 0.044715 x³)), which equals the tanh form exactly."""
    factor = 2 * math.sqrt(2 / math.pi)
    square = b(mul, b.input, b.input, dtype=b.partial)
    inner = b(mul, b.input, b(add, b(mul, square, 0.044715 * factor, dtype=b.partial), factor, dtype=b.partial), dtype=b.partial)
    return b(mul, b.input, b(BY_NAME["sigmoid"].function, inner, dtype=b.partial))


NARROWED = "conv3d conv_transpose2d interpolate avg_pool2d adaptive_avg_pool2d"


@remedy("on 8 bits", NARROWED, "bits")
def narrowed(b: Rewriting) -> fx.Node | None:
    """Requantize the operand to 8 bits before the operator."""
    return b.again(input=b(REQUANTIZE.function, b.input, dtype="int8"))


@remedy("rounded to 8 bits before", "conv_transpose1d conv_transpose2d", "bits of the result")
def narrow_before(b: Rewriting) -> fx.Node | None:
    """Compute the operator on 8 bits, and bring its result to the grid that it has."""
    return b(REQUANTIZE.function, b.again(dtype="int8"), dtype=b.dtype)


@remedy("of relu", "maximum minimum", None)
def of_difference(b: Rewriting) -> fx.Node | None:
    """Return relu(x - y) + y, or x - relu(x - y)."""
    left, right = b.arguments["input"], b.arguments["other"]
    if not is_activation(left) or not is_activation(right):
        return None
    above = b(sub, left, right, clamp=(0.0, None))
    return b(add, above, right) if b.operator.function is maximum else b(sub, left, above)

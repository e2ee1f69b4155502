"""Activations that a target has no table for, written with relu, relu6, sums and products."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from fxquant.ops.core.record import BY_NAME
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.reduction.extremum import maximum
from fxquant.remedies.rewriting import Rewriting, is_activation, remedy


@remedy("of relu6", "hardsigmoid hardswish", None)
def of_relu6(b: Rewriting) -> fx.Node | None:
    """Return relu6(x + 3) / 6, and for hardswish times x."""
    gate = b(add, b.input, 3.0, clamp=(0.0, 6.0))
    return b(mul, gate if b.operator.function is F.hardsigmoid else b(mul, b.input, gate), 1 / 6)


@remedy("of relu", "leaky_relu abs", None)
def of_relu(b: Rewriting) -> fx.Node | None:
    """Return relu(x) - slope · relu(-x), with a slope of -1 for abs."""
    slope = -1.0 if b.operator.function is torch.abs else float(b.arguments["negative_slope"])
    below = b(mul, b.input, -1.0, clamp=(0.0, None))
    return b(sub, b(clamp, b.input, 0.0, None), below, slope)


@remedy("of relu", "maximum minimum", None)
def of_difference(b: Rewriting) -> fx.Node | None:
    """Return relu(x - y) + y, or x - relu(x - y)."""
    left, right = b.arguments["input"], b.arguments["other"]
    if not is_activation(left) or not is_activation(right):
        return None
    above = b(sub, left, right, clamp=(0.0, None))
    return b(add, above, right) if b.operator.function is maximum else b(sub, left, above)


@remedy("as a product", "square", None)
def of_itself(b: Rewriting) -> fx.Node | None:
    """Return x · x."""
    return b(mul, b.input, b.input)


@remedy("of tanh", "tanhshrink", None)
def of_tanh(b: Rewriting) -> fx.Node | None:
    """Return x - tanh(x)."""
    return b(sub, b.input, b(BY_NAME["tanh"].function, b.input))

"""Layer normalisation: a composite, 16 bits wide inside.

    y = c / sqrt(mean c² + ε) · weight + bias,   c = x - mean x

Items are brought to one magnitude first; `magnitude` says how, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxquant.ops.core.operators import NORMED, WIDE, Builder, composite, numbers, sample
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.normalization.channels import scale_channels
from fxquant.ops.normalization.magnitude import CENTRED, extent_of, unit_and_inverse
from fxquant.ops.pooling.totals import mean


@composite(
    takes="input normalized_shape weight bias eps cudnn_enable",
    refuses=numbers("eps", "normalized_shape"),
    samples=(sample(within=NORMED, input=(3, 6, 6), normalized_shape=[6], eps=0.1),),
)
def layer_norm(
    build: Builder,
    input: fx.Node,
    normalized_shape: Sequence[int],
    weight: fx.Node | None = None,
    bias: fx.Node | None = None,
    eps: float = 1e-05,
) -> Any:
    """Normalize the last dimensions to mean 0 and variance 1, multiply by weight and add bias."""
    dims = list(range(-len(normalized_shape), 0))
    centred = build(sub, input, build(mean, input, dims, True, demand=WIDE), demand=CENTRED if build.normalizes_items else WIDE)
    unit, inverse = unit_and_inverse(build, centred, lambda: extent_of(build, input, dims), dims, float(eps))
    if weight is None and bias is None:
        return build(mul, unit, inverse)
    normalized = build(mul, unit, inverse, demand=WIDE)
    if weight is not None and len(normalized_shape) == 1:
        return build(scale_channels, normalized, weight, bias)
    if weight is None:
        return build(add, normalized, bias)
    if bias is None:
        return build(mul, normalized, weight)
    return build(add, build(mul, normalized, weight, demand=WIDE), bias)

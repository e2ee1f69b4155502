"""Layer normalisation: a composite, 16 bits wide inside.

    y = c / sqrt(mean c² + ε) · weight + bias,   c = x - mean x

Items are brought to one magnitude first; `magnitude` says how, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite
from fxquant.ops.core.demands import WIDE
from fxquant.ops.core.record import Parameter
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.normalization.channels import scale_channels
from fxquant.ops.normalization.magnitude import CENTRED, extent_of, unit_and_inverse
from fxquant.ops.pooling.totals import mean


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def _module(module: Any) -> dict[str, Any]:
    parameters = {name: None if getattr(module, name) is None else Parameter(name) for name in ("weight", "bias")}
    return {"normalized_shape": list(module.normalized_shape), **parameters, "eps": module.eps}


def _low_level(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enable: bool = True
) -> dict[str, Any]:
    """torch.layer_norm, which also says which kernel may compute it."""
    return {"input": input, "normalized_shape": normalized_shape, "weight": weight, "bias": bias, "eps": eps}


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    given = [arguments["eps"], *arguments["normalized_shape"]]
    return None if all(isinstance(value, int | float) for value in given) else "one of its settings is computed, not a number"


@composite(function=_layer_norm, calls={torch.layer_norm: _low_level}, modules={nn.LayerNorm: _module}, refuses=_refuses)
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

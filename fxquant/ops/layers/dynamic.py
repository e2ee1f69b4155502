"""Dynamic quantization: a linear layer between float tensors, whose operand is quantized at run time.

For the rest of the compiler it is an operator in float: nothing of it is calibrated, and its input and output have no grid.
The QConfig asks for it (`QConfig(dynamic=True)`). The pass `composite.choose_dynamic` replaces layers and products with a parameter by it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.lowering.lowering import named_parameters
from fxquant.numerics.grids import INT32_MAX, accumulator_bound
from fxquant.ops.attention.attention import multi_head_attention
from fxquant.ops.core.operators import Layer, Lowering, TensorFact, Trait, fact, is_parameter, lowered, operator_of
from fxquant.ops.core.weighted import shape_of
from fxquant.ops.layers.linear import linear, matmul
from fxquant.primitives import runtime_scales

MOST_INPUTS = INT32_MAX // (runtime_scales.MAGNITUDE * 127)  # of a layer whose sum fits 32 bits whatever its weight

NOT_DYNAMIC = "the qconfig is dynamic, and only linear and recurrent layers are quantized dynamically"


@lowered(
    function=lambda input, weight, bias=None: F.linear(input, weight, bias),
    layer=Layer(weight=lambda weight, **_: weight, macs=lambda shapes, result: math.prod(result) * shapes["weight"][-1]),
    traits=frozenset({Trait.DYNAMIC}),
)
def dynamic_linear(lowering: Lowering, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Compute x · wᵀ + b over the last dimension, as the float model sees it; x becomes integers on a grid that is found at run time.

    Call the primitive on float values; the weight's integers and scales are constants, and its bias stays in float.
    """
    lowering.parameters.update(named_parameters(weight, bias, None))
    bias = lowering.weight.corrected(bias)
    quantized = lowering.weight.integers(weight, keep=lowering.keeps_start)
    lowering.prove(accumulator_bound(quantized.integers, None, 0, runtime_scales.MAGNITUDE), "the sum")
    lowering.describe("weight", quantized.scale, -2)
    lowering.describe("bias", torch.ones((), dtype=torch.float32, device="cpu"))
    return lowering.call(
        runtime_scales.dynamic_linear,
        input,
        lowering.constant("weight", quantized.integers, lowering.weight.dtype.storage),
        lowering.constant("scale", quantized.scale if quantized.scale.numel() > 1 else quantized.scale.reshape(()), torch.float32),
        None if bias is None else lowering.constant("bias", bias, torch.float32),
    )


def may_be_dynamic(node: fx.Node) -> bool:
    """Return whether a node is of the kind that dynamic quantization is about: a linear layer, a product, or made of such."""
    operator = operator_of(node)
    return operator is not None and (operator.function in (linear, matmul, multi_head_attention) or "hx" in operator.operands)


def why_not_dynamic(node: fx.Node, input: Any, weight: Any, bias: Any) -> str | None:
    """Return why a layer or a product stays in float; None if it can be a dynamic layer. `weight` is the matrix, either way round."""
    for name, value in (("matrix", weight), ("bias", bias)):
        if isinstance(value, fx.Node) and not is_parameter(value):
            return f"dynamic quantization needs a constant matrix and bias, and its {name}, %{value.name}, is computed"
    input_fact, sizes = fact(input) if isinstance(input, fx.Node) else None, shape_of(weight)
    if not isinstance(input_fact, TensorFact) or is_parameter(input):
        return "its operand is not an activation"
    if input_fact.dtype != torch.float32 or not isinstance(fact(node), TensorFact) or fact(node).dtype != torch.float32:
        return f"it is computed in {str(input_fact.dtype).removeprefix('torch.')}, and dynamic quantization needs float32"
    if sizes is None or len(sizes) != 2 or len(input_fact.shape) < 2:
        return "dynamic quantization needs a weight of two dimensions and an input of two or more"
    inputs = input_fact.shape[-1]
    if not isinstance(inputs, int) or inputs > MOST_INPUTS:
        return f"its sum of {inputs} products may exceed 32 bits: at most {MOST_INPUTS} fit"
    return None

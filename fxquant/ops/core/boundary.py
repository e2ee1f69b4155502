"""Quantize, requantize and dequantize: inserted by passes, never written by a user."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.declare import lowered
from fxquant.ops.core.record import OPERATORS, Same, Trait
from fxquant.primitives import quantization


@lowered(function=lambda input: input, by_name=False)
def quantize(lowering: Lowering, input: Tensor) -> Quantized:
    """Return the input itself, as the float model sees it; its integers are clip(round(x / s))."""
    return lowering.quantize(input)


@lowered(function=lambda input, dtype=None: input if dtype is None else input.to(dtype), by_name=False, demand=Same())
def dequantize(lowering: Lowering, input: Quantized, dtype: torch.dtype | None = None) -> Quantized:
    """Return the input itself, as the float model sees it: the integers times their scale, in `dtype` where that is not float32."""
    arguments: list[Any] = [input.value, lowering.constant("scale", input.scale, input.scale.dtype)]
    return input.with_value(lowering.call(quantization.dequantize, *arguments, *([] if dtype is None else [dtype])))


@lowered(
    function=lambda input: input, keeps=lambda arguments, after, bits: after, onnx=lambda c: c.input, traits=frozenset({Trait.HOMOGENEOUS})
)
def requantize(lowering: Lowering, input: Quantized) -> Quantized:
    """Return the input itself, as the float model sees it; its integers are on another grid than the operand's."""
    return lowering.result(lambda: lowering.rescale(input, lowering.output, ""), input.real)


QUANTIZE, DEQUANTIZE, REQUANTIZE = (OPERATORS[function] for function in (quantize, dequantize, requantize))

"""Quantize, requantize and dequantize: inserted by passes, never written by a user."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.demands import Same
from fxquant.ops.core.record import Operator, register
from fxquant.ops.core.traits import Trait
from fxquant.primitives import quantization


def quantize(input: Tensor) -> Tensor:
    """Return the input itself, as the float model sees it; its integers are clip(round(x / s))."""
    return input


def _lower_quantize(lowering: Lowering, input: Tensor) -> Quantized:
    return lowering.quantize(input)


def dequantize(input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the input itself, as the float model sees it: the integers times their scale, in `dtype` where that is not float32."""
    return input if dtype is None else input.to(dtype)


def _lower_dequantize(lowering: Lowering, input: Quantized, dtype: torch.dtype | None = None) -> Quantized:
    arguments: list[Any] = [input.value, lowering.constant("scale", input.scale, input.scale.dtype)]
    return input.with_value(lowering.call(quantization.dequantize, *arguments, *([] if dtype is None else [dtype])))


def requantize(input: Tensor) -> Tensor:
    """Return the input itself, as the float model sees it; its integers are on another grid than the operand's."""
    return input


def _lower_requantize(lowering: Lowering, input: Quantized) -> Quantized:
    return lowering.result(lambda: lowering.rescale(input, lowering.output, ""), input.real)


QUANTIZE = register(Operator("quantize", quantize, (), _lower_quantize))
DEQUANTIZE = register(Operator("dequantize", dequantize, ("input",), _lower_dequantize, Same()))
REQUANTIZE = register(
    Operator(
        "requantize",
        requantize,
        ("input",),
        _lower_requantize,
        keeps=lambda arguments, after: after,
        onnx=lambda c: c.input,
        traits=frozenset({Trait.HOMOGENEOUS}),
    )
)

"""Where real numbers become integers, and where they become real again."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.primitives.record import Emitter, primitive

BOUNDARY_LIMIT = 2.0**20  # inputs are clipped to ±2^20 steps: far outside every dtype here, and safe to convert


def as_float32(e: Emitter, input: str) -> str:
    """A real tensor of any dtype as the boundary reads it."""
    return input if e.dtype(input) == torch.float32 else e.node("Cast", input, to=torch.float32)


def _onnx_quantize(e: Emitter, input: str, scale: Tensor, low: int, high: int, dtype: torch.dtype) -> str:
    def body(e: Emitter, x: str, scale: str, limit: str, low: str, high: str) -> str:
        zero = e.constant(0.0)
        x = e.node("Where", e.node("IsNaN", x), zero, x)
        x = e.node("Clip", x, e.node("Neg", limit), limit)
        return e.node("Cast", e.node("Clip", e.node("Round", e.node("Div", x, scale)), low, high), to=dtype)

    limit = e.constant(scale * BOUNDARY_LIMIT)
    bounds = e.constant(float(low)), e.constant(float(high))
    return e.call(f"quantize_{str(dtype).removeprefix('torch.')}", body, as_float32(e, input), e.constant(scale), limit, *bounds)


def _surrogate_quantize(input: Tensor, scale: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return (input / scale).clamp(low, high)


@primitive(_onnx_quantize, surrogate=_surrogate_quantize)
def quantize(input: Tensor, scale: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """clip(round_half_even(x / scale), low, high), IEEE float32 division; NaN gives 0.

    `input` is the real tensor. The result has `dtype`, or float32 (the same integers) while gradients are
    recorded: `quantized_value` below.
    """
    return quantized_value(input, scale, low, high).to(dtype)


def quantized_value(input: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """The integers of `quantize` as float32."""
    limit = scale * BOUNDARY_LIMIT
    x = torch.nan_to_num(input.float(), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return torch.clamp(x, -limit, limit).div_(scale).round_().clamp_(low, high)


def _onnx_dequantize(e: Emitter, input: str, scale: Tensor, dtype: torch.dtype = torch.float32) -> str:
    # DequantizeLinear is this very product, but the reference evaluator lacks it before opset 19.
    product = e.node("Mul", e.node("Cast", input, to=torch.float32), e.constant(scale))
    return product if dtype == torch.float32 else e.node("Cast", product, to=dtype)


@primitive(_onnx_dequantize, kind="float")
def dequantize(input: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """float32(q) · scale, rounded to `dtype`."""
    return (input.float() * scale).to(dtype)

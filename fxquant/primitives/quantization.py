"""Quantization of float tensors to integers, and dequantization."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.numerics.grids import BOUNDARY_LIMIT, is_scale, quantized_value
from fxquant.numerics.rounding import clamped
from fxquant.primitives.bounds import Range, Value, constant_of, need, stored_limits
from fxquant.primitives.record import Emitter, ZeroPoint, primitive


def as_float32(e: Emitter, input: str) -> str:
    """Emit a cast of a float tensor to float32, where it has another dtype."""
    return input if e.dtype(input) == torch.float32 else e.node("Cast", input, to=torch.float32)


def _onnx_quantize_byte(e: Emitter, input: str, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int) -> str:
    """Emit `quantize` to an 8-bit dtype as QuantizeLinear."""

    def body(e: Emitter, x: str, scale: str, limit: str) -> str:
        x = e.node("Where", e.node("IsNaN", x), e.constant(0.0), x)
        stored = e.node("QuantizeLinear", e.node("Clip", x, e.node("Neg", limit), limit), scale, e.constant(zero_point, dtype))
        return clipped(e, stored, low + zero_point, high + zero_point, dtype)

    name = f"quantize_{str(dtype).removeprefix('torch.')}"
    return e.call(name, body, as_float32(e, input), e.constant(scale), e.constant(scale * BOUNDARY_LIMIT))


def clipped(e: Emitter, stored: str, low: int, high: int, dtype: torch.dtype) -> str:
    """Emit a Clip of an integer tensor to these limits, where they are narrower than its dtype."""
    limits = torch.iinfo(dtype)
    return stored if (low, high) == (limits.min, limits.max) else e.node("Clip", stored, e.constant(low, dtype), e.constant(high, dtype))


def _onnx_quantize(e: Emitter, input: str, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> str:
    if dtype.itemsize == 1:
        return _onnx_quantize_byte(e, input, scale, low, high, dtype, zero_point)

    def body(e: Emitter, x: str, scale: str, limit: str, low: str, high: str, *zero_point: str) -> str:
        zero = e.constant(0.0)
        x = e.node("Where", e.node("IsNaN", x), zero, x)
        x = e.node("Clip", x, e.node("Neg", limit), limit)
        x = e.node("Clip", e.node("Round", e.node("Div", x, scale)), low, high)
        return e.node("Cast", e.node("Add", x, zero_point[0]) if zero_point else x, to=dtype)

    limit = e.constant(scale * BOUNDARY_LIMIT)
    bounds = e.constant(float(low)), e.constant(float(high))
    name = f"quantize_{str(dtype).removeprefix('torch.')}{'_offset' * bool(zero_point)}"
    return e.call(name, body, as_float32(e, input), e.constant(scale), limit, *bounds, *offset(e, zero_point))


def offset(e: Emitter, zero_point: int, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return the zero point as a further operand, where it is not 0; else nothing."""
    return [e.constant(float(zero_point), dtype)] if zero_point else []


def _surrogate_quantize(input: Tensor, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    return clamped(input / scale, low, high) + zero_point


def _bounds_quantize(input: Value | None, scale: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    tensor = constant_of(scale, "scale")
    need(tensor.dim() == 0 and tensor.dtype == torch.float32 and is_scale(float(tensor)), f"its scale is {tensor.tolist()}")
    return stored_limits(low, high, zero_point)


@primitive(_onnx_quantize, bounds=_bounds_quantize, surrogate=_surrogate_quantize)
def quantize(input: Tensor, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Tensor:
    """Compute clip(round_half_even(x / scale), low, high) + zero_point, with IEEE float32 division; NaN gives the zero point.

    `input` is a float tensor and `scale` a float32 tensor of shape (). `low` and `high` limit the centred integers. The result has
    the shape of `input` and `dtype`.
    """
    return quantized_value(input, scale, low, high).add_(zero_point).to(dtype)


def _onnx_dequantize(e: Emitter, input: str, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: int = 0) -> str:
    # DequantizeLinear is this very product, but the reference evaluator lacks it before opset 19.
    value = e.node("Cast", input, to=torch.float32)
    if zero_point:
        value = e.node("Sub", value, e.constant(float(zero_point)))
    product = e.node("Mul", value, e.constant(scale))
    return product if dtype == torch.float32 else e.node("Cast", product, to=dtype)


@primitive(_onnx_dequantize, bounds=None, kind="float", zero_point=ZeroPoint.INVARIANT, shifted=("zero_point",))
def dequantize(input: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: int = 0) -> Tensor:
    """Compute float32(q - zero_point) · scale, rounded to `dtype`; `scale` is float32."""
    value = input.float()
    return ((value - zero_point if zero_point else value) * scale).to(dtype)

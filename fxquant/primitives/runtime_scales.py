"""A linear layer from float to float whose operand is quantized at run time, by its own range: dynamic quantization.

The operand's grid is that of ONNX's DynamicQuantizeLinear, uint8 with one scale for the whole tensor; the weight's integers and scales
are constants. Every step is one operation of IEEE float32, or exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.numerics.grids import FLOAT32_EXACT, INT32_MAX, LARGEST_DYNAMIC, SMALLEST_DYNAMIC, UINT8, accumulator_bound
from fxquant.primitives.record import Emitter, Range, Value, constant_of, full_precision, need, primitive, within

MAGNITUDE = UINT8.high  # of the operand's centred integers: 255 where the zero point is 0 or 255


class Centred(NamedTuple):
    """A float tensor quantized dynamically, with a scale and zero point from its own range."""

    integers: Tensor  # q - zero_point, integers in float32, of the tensor's shape
    scale: Tensor  # float32, shape ()
    zero_point: Tensor  # an integer in float32, shape ()


def centred(input: Tensor) -> Centred:
    """Quantize a float tensor dynamically to centred uint8 integers, as DynamicQuantizeLinear; ARITHMETIC.md has the formula.

    NaN, and values below 2^-110 in magnitude, count as 0; magnitudes above 2^126 are clamped to it. So the range is finite, and no
    scale is subnormal. An empty tensor, and one that is 0 everywhere, has the scale 1 and the zero point 0.
    """
    input = input.float()  # autocast may give less
    value = torch.where(input.abs() >= SMALLEST_DYNAMIC, input, 0.0).clamp_(-LARGEST_DYNAMIC, LARGEST_DYNAMIC)
    if value.numel() == 0:
        return Centred(value, value.new_ones(()), value.new_zeros(()))
    low, high = value.amin().clamp_max(0.0), value.amax().clamp_min(0.0)
    # Tensors, since a division by a number is a product with its reciprocal on some devices.
    scale = torch.where(high == low, torch.ones_like(high), (high - low) / torch.full_like(high, UINT8.high))
    zero_point = (-(low / scale)).clamp(UINT8.low, UINT8.high).round_()
    integers = value.div_(scale).round_()
    integers = torch.minimum(torch.maximum(integers, -zero_point), UINT8.high - zero_point)
    return Centred(integers, scale, zero_point)


def emit(e: Emitter, input: str, weight: Tensor, scale: Tensor, bias: Tensor | None, *, signed: bool = False) -> str:
    """Emit the layer in standard operators and return the name of its float32 result.

    `signed` keeps the weight int8, for kernels that are twice as fast on most x86 processors. On those without VNNI they add pairs of
    products in 16 bits, which can saturate. A uint8 weight with the zero point 128 is exact everywhere.
    """

    def body(e: Emitter, x: str, weight: str, scale: str, *rest: str) -> str:
        x = e.node("Where", e.node("GreaterOrEqual", e.node("Abs", x), e.constant(SMALLEST_DYNAMIC)), x, e.constant(0.0))
        x = e.node("Clip", x, e.constant(-LARGEST_DYNAMIC), e.constant(LARGEST_DYNAMIC))
        q, step, zero_point = e.results("DynamicQuantizeLinear", (torch.uint8, torch.float32, torch.uint8), x)
        weight_zero = [] if signed else [e.constant(128, torch.uint8)]
        total = e.node("Cast", e.node("MatMulInteger", q, weight, zero_point, *weight_zero), to=torch.float32)
        # Round is a barrier: a runtime that fuses the sum with the product and the bias may round once where this rounds twice.
        value = e.node("Mul", e.node("Round", total), e.node("Mul", step, scale))
        return e.node("Add", value, rest[0]) if rest else value

    stored = weight.t().contiguous() if signed else (weight.t().to(torch.int16) + 128).to(torch.uint8)
    operands = [input, e.constant(stored), e.constant(scale), *([] if bias is None else [e.constant(bias)])]
    return e.call(f"dynamic_linear{'_signed' * signed}{'' if bias is None else '_bias'}", body, *operands)


def _bounds_dynamic_linear(input: Value | None, weight: Value, scale: Value, bias: Value | None) -> Range:
    """Return the range of the int32 sum."""
    need(input is None or input.fact.dtype == torch.float32, "it reads integers, and its operand must be float")
    integers, steps = constant_of(weight, "weight"), constant_of(scale, "scale")
    need(integers.dtype == torch.int8 and integers.dim() == 2, f"its weight is {integers.dtype} of shape {tuple(integers.shape)}")
    channels = ((), (len(integers),))
    need(steps.dtype == torch.float32 and tuple(steps.shape) in channels, f"its scale is {steps.dtype} of shape {tuple(steps.shape)}")
    need(torch.isfinite(steps).all() and (steps > 0).all(), f"its scale is {steps.tolist()}")
    if bias is not None:
        added = constant_of(bias, "bias")
        need(added.dtype == torch.float32 and tuple(added.shape) == channels[1], f"its bias is {added.dtype} of shape {tuple(added.shape)}")
    reached = accumulator_bound(integers.double(), None, 0, MAGNITUDE)
    largest = float(reached.max()) if reached.numel() else 0.0
    need(largest <= INT32_MAX, f"its sum can reach {largest:.0f}, and fits up to {INT32_MAX}")
    return within(reached, INT32_MAX + 1)


def _surrogate_dynamic_linear(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product of the dequantized operand and weight; the rounding of the operand has a straight-through gradient."""
    with torch.no_grad():
        quantized = centred(input)
        error = quantized.integers * quantized.scale - input
    return F.linear(input.float() + error, weight * scale.reshape(-1, 1), bias)


@primitive(emit, bounds=_bounds_dynamic_linear, surrogate=_surrogate_dynamic_linear, kind="dynamic")
def dynamic_linear(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute float32(Σ (q - zero_point) · w) · (s_x · scale) + bias, each operation rounded to float32.

    `centred` gives q, zero_point and s_x. `input` is float32 of shape (…, in), `weight` int8 of shape (out, in), `scale` float32 of
    shape (out,) or (), `bias` float32 of shape (out,). The sum is exact: Σ |w| · 255 is below 2^31 for each output.
    """
    quantized = centred(input)
    # A float32 kernel is exact where no sum of this many products reaches 2^24.
    exact = torch.float32 if weight.shape[-1] * MAGNITUDE * 128 < FLOAT32_EXACT else torch.float64
    with full_precision(input):
        total = F.linear(quantized.integers.to(exact), weight.to(exact)).float().add_(0.0)  # a sum is never -0.0
    value = total.mul_(quantized.scale * scale)
    return value if bias is None else value.add_(bias)

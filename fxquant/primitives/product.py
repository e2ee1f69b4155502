"""Products of activations with each other, and with one factor per channel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.primitives.accumulate import accumulated, onnx_double
from fxquant.primitives.record import (
    FLOAT64_EXACT,
    Emitter,
    Range,
    Role,
    Value,
    ZeroPoint,
    bias_of,
    constant_of,
    exact_below,
    full_precision,
    primitive,
    stored,
    sum_of_products,
    within,
)
from fxquant.primitives.steps import Op, Writer, binary


def _onnx_product(e: Emitter, input: str | Tensor, other: str | Tensor, convert: Callable[[Emitter, str], str]) -> str:
    operands = [convert(e, value if isinstance(value, str) else e.constant(value)) for value in (input, other)]
    # Round is a barrier: without it the runtime may fuse the product with the multiplier that follows.
    return e.node("Round", e.node("MatMul", *operands))


def _onnx_float(e: Emitter, value: str) -> str:
    return e.node("Cast", value, to=torch.float32)


def _onnx_matrix_product(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_product(e, input, other, _onnx_float)


def _bounds_matrix_product(input: Value, other: Value) -> Range:
    return within(input.size(-1) * input.largest * other.largest, FLOAT32_EXACT)


@primitive(_onnx_matrix_product, bounds=_bounds_matrix_product, kind="accumulator", chip_bits=8, role=Role.MATRIX_PRODUCT, casts=True)
def matrix_product(input: Tensor, other: Tensor) -> Tensor:
    """Compute input · other over the last two dimensions, as int32; |result| < 2^24 for every input of their dtypes."""
    with full_precision(input):
        return stored(torch.matmul(input.float(), other.float()), input, torch.int32)


def _onnx_matrix_product_wide(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_product(e, input, other, onnx_double)


def _bounds_matrix_product_wide(input: Value, other: Value) -> Range:
    return within(input.size(-1) * input.largest * other.largest, FLOAT64_EXACT)


@primitive(
    _onnx_matrix_product_wide,
    bounds=_bounds_matrix_product_wide,
    kind="accumulator",
    chip_bits=8,
    role=Role.MATRIX_PRODUCT,
    wide=True,
    casts=True,
)
def matrix_product_wide(input: Tensor, other: Tensor) -> Tensor:
    """Compute `matrix_product` where the sum can reach 2^24, in float64; int32, or int64 where both operands are int16."""
    total = torch.matmul(input.double(), other.double())  # autocast leaves float64 alone
    return accumulated(total, input, other if input.dtype == torch.int16 else input)


def _shaped(channels: Tensor, trailing: int) -> Tensor:
    """Return values per channel, reshaped to broadcast against a tensor with `trailing` dimensions after its channels."""
    return channels.reshape(-1, *[1] * trailing)


def _onnx_scaled(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, trailing: int, dtype: torch.dtype) -> str:
    scaled = e.node("Mul", e.node("Cast", input, to=dtype), e.constant(_shaped(weight.to(dtype), trailing)))
    return scaled if bias is None else e.node("Add", scaled, e.constant(_shaped(bias.to(dtype), trailing)))


def _scaled(input: Tensor, weight: Tensor, bias: Tensor | None, trailing: int) -> Tensor:
    """In the dtype of the input."""
    scaled = input * _shaped(weight.to(input.dtype), trailing)
    return scaled if bias is None else scaled + _shaped(bias.to(input.dtype), trailing)


def _onnx_scale_channels(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, trailing: int) -> str:
    return _onnx_scaled(e, input, weight, bias, trailing, torch.float32)


def _bounds_scale_channels(input: Value, weight: Value, bias: Value | None, trailing: int) -> Range:
    return sum_of_products(input, constant_of(weight, "weight").reshape(-1, 1), bias_of(bias), trailing, FLOAT32_EXACT)


def _steps_scale_channels(w: Writer, input: int, weight: Tensor, bias: Tensor | None, trailing: int) -> int:
    scaled = w.write(Op.MULTIPLY, input, _shaped(weight, trailing))
    return scaled if bias is None else w.write(Op.ADD, scaled, _shaped(bias, trailing))


@primitive(
    _onnx_scale_channels,
    bounds=_bounds_scale_channels,
    kind="accumulator",
    role=Role.CHANNEL_SCALING,
    casts=True,
    steps=_steps_scale_channels,
)
def scale_channels(input: Tensor, weight: Tensor, bias: Tensor | None, trailing: int) -> Tensor:
    """Compute x · weight + bias per channel, as int32; |result| < 2^24 for every input of its dtype."""
    return stored(_scaled(input.float(), weight, bias, trailing), input, torch.int32)


def _onnx_scale_channels_wide(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, trailing: int) -> str:
    return _onnx_scaled(e, input, weight, bias, trailing, torch.float64)


def _bounds_scale_channels_wide(input: Value, weight: Value, bias: Value | None, trailing: int) -> Range:
    return sum_of_products(input, constant_of(weight, "weight").reshape(-1, 1), bias_of(bias), trailing, FLOAT64_EXACT)


@primitive(
    _onnx_scale_channels_wide,
    bounds=_bounds_scale_channels_wide,
    surrogate=_scaled,
    kind="accumulator",
    role=Role.CHANNEL_SCALING,
    wide=True,
    steps=_steps_scale_channels,
)
def scale_channels_wide(input: Tensor, weight: Tensor, bias: Tensor | None, trailing: int) -> Tensor:
    """Compute `scale_channels` where the result can reach 2^24, in float64; int32, or int64 for int16 weights."""
    return accumulated(_scaled(input.double(), weight, bias, trailing), input, weight)


def _onnx_rectify(e: Emitter, input: str, positive: int, negative: Tensor, wide: bool = False) -> str:
    width = torch.float64 if wide else torch.float32
    value, zero = e.node("Cast", input, to=width), e.constant(0.0, width)
    above = e.node("Mul", e.node("Max", value, zero), e.constant(float(positive), width))
    below = e.node("Mul", e.node("Min", value, zero), e.constant(negative, width))
    return e.node("Add", above, below)


def _bounds_rectify(input: Value, positive: int, negative: Value, wide: bool = False) -> Range:
    steepest = max(abs(positive), int(constant_of(negative, "slope").abs().max()))
    return within(steepest * input.largest, exact_below(wide))


@primitive(_onnx_rectify, bounds=_bounds_rectify, kind="accumulator", casts=True)
def rectify(input: Tensor, positive: int, negative: Tensor, wide: bool = False) -> Tensor:
    """Compute positive · max(x, 0) + negative · min(x, 0), as int32; `negative` broadcasts. |result| < 2^24 unless `wide`."""
    value = input.double() if wide else input.float()
    # At 0 the gradient is the negative slope, as that of torch.prelu is; the sum with 0 leaves no -0.0.
    result = torch.where(value > 0, float(positive), negative.to(value.dtype)) * value + 0.0
    return result if input.is_floating_point() else result.to(torch.int32)


def _onnx_extremum(operator: str, e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    names = [value if isinstance(value, str) else e.constant(value) for value in (input, other)]
    dtype = e.dtype(names[0])
    # Not every runtime has the operator for every integer dtype.
    return e.node("Cast", e.node(operator, *(e.node("Cast", name, to=torch.float32) for name in names)), to=dtype)


def _onnx_maximum(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_extremum("Max", e, input, other)


def _bounds_extremum(input: Value, other: Value) -> Range:
    return Range(torch.minimum(input.low.min(), other.low.min()), torch.maximum(input.high.max(), other.high.max()))


@primitive(_onnx_maximum, bounds=_bounds_extremum, role=Role.POINTWISE, zero_point=ZeroPoint.EQUIVARIANT, steps=binary(Op.LARGEST))
def maximum(input: Tensor, other: Tensor) -> Tensor:
    """Return the larger of two tensors on one scale, element by element."""
    return torch.maximum(input, other)


def _onnx_minimum(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_extremum("Min", e, input, other)


@primitive(_onnx_minimum, bounds=_bounds_extremum, role=Role.POINTWISE, zero_point=ZeroPoint.EQUIVARIANT, steps=binary(Op.LEAST))
def minimum(input: Tensor, other: Tensor) -> Tensor:
    """Return the smaller of two tensors on one scale, element by element."""
    return torch.minimum(input, other)

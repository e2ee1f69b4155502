"""Products of activations with each other, and with one factor per channel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.primitives import record
from fxquant.primitives.accumulate import accumulated, onnx_double, per_channel
from fxquant.primitives.record import FLOAT64_EXACT, Emitter, Range, Role, Value, ZeroPoint, constant_of, primitive, stored, union, within
from fxquant.primitives.shape import named, one_node
from fxquant.primitives.steps import Op, Writer, binary


def _onnx_matrix_product(convert: Callable[[Emitter, str], str], e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    operands = [convert(e, named(e, value)) for value in (input, other)]
    # Round is a barrier: without it the runtime may fuse the product with the multiplier that follows.
    return e.node("Round", e.node("MatMul", *operands))


def _bounds_matrix_product(exact: int, input: Value, other: Value) -> Range:
    return within(input.terms(-1) * input.largest * other.largest, exact)


_MATRIX_PRODUCT: dict[str, Any] = {"kind": "accumulator", "chip_bits": 8, "role": Role.MATRIX_PRODUCT, "casts": True}
_onnx_cast = one_node("Cast", to=torch.float32)


@primitive(partial(_onnx_matrix_product, _onnx_cast), bounds=partial(_bounds_matrix_product, FLOAT32_EXACT), **_MATRIX_PRODUCT)
def matrix_product(input: Tensor, other: Tensor) -> Tensor:
    """Compute input · other over the last two dimensions, as int32; |result| < 2^24 for every input of their dtypes."""
    with record.full_precision(input):
        return stored(torch.matmul(input.float(), other.float()), input, torch.int32)


@primitive(partial(_onnx_matrix_product, onnx_double), bounds=partial(_bounds_matrix_product, FLOAT64_EXACT), wide=True, **_MATRIX_PRODUCT)
def matrix_product_wide(input: Tensor, other: Tensor) -> Tensor:
    """Compute `matrix_product` where the sum can reach 2^24, in float64; int32, or int64 where both operands are int16."""
    total = torch.matmul(input.double(), other.double())  # autocast leaves float64 alone
    return accumulated(total, input, other if input.dtype == torch.int16 else input)


def _onnx_scale_channels(dtype: torch.dtype, e: Emitter, input: str, weight: Tensor, bias: Tensor | None, trailing: int) -> str:
    scaled = e.node("Mul", e.node("Cast", input, to=dtype), e.constant(per_channel(weight.to(dtype), trailing)))
    return scaled if bias is None else e.node("Add", scaled, e.constant(per_channel(bias.to(dtype), trailing)))


def _scaled(input: Tensor, weight: Tensor, bias: Tensor | None, trailing: int) -> Tensor:
    scaled = input * per_channel(weight.to(input.dtype), trailing)
    return scaled if bias is None else scaled + per_channel(bias.to(input.dtype), trailing)


def _bounds_scale_channels(exact: int, input: Value, weight: Value, bias: Value | None, trailing: int) -> Range:
    return record.sum_of_products(input, constant_of(weight, "weight").reshape(-1, 1), bias, trailing, exact)


def _steps_scale_channels(w: Writer, input: int, weight: Tensor, bias: Tensor | None, trailing: int) -> int:
    scaled = w.write(Op.MULTIPLY, input, per_channel(weight, trailing))
    return scaled if bias is None else w.write(Op.ADD, scaled, per_channel(bias, trailing))


_SCALING: dict[str, Any] = {"kind": "accumulator", "role": Role.CHANNEL_SCALING, "steps": _steps_scale_channels}


@primitive(partial(_onnx_scale_channels, torch.float32), bounds=partial(_bounds_scale_channels, FLOAT32_EXACT), casts=True, **_SCALING)
def scale_channels(input: Tensor, weight: Tensor, bias: Tensor | None, trailing: int) -> Tensor:
    """Compute x · weight + bias per channel, as int32; |result| < 2^24 for every input of its dtype."""
    return stored(_scaled(input.float(), weight, bias, trailing), input, torch.int32)


@primitive(
    partial(_onnx_scale_channels, torch.float64),
    bounds=partial(_bounds_scale_channels, FLOAT64_EXACT),
    surrogate=_scaled,
    wide=True,
    **_SCALING,
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
    return within(steepest * input.largest, record.exact_below(wide))


def _steps_rectify(w: Writer, input: int, positive: int, negative: Tensor, wide: bool = False) -> int:
    w.wide |= wide
    above, below = (w.write(op, input, w.operand(0)) for op in (Op.LARGEST, Op.LEAST))
    return w.write(Op.ADD, w.write(Op.MULTIPLY, above, w.operand(positive)), w.write(Op.MULTIPLY, below, negative))


@primitive(_onnx_rectify, bounds=_bounds_rectify, kind="accumulator", casts=True, steps=_steps_rectify)
def rectify(input: Tensor, positive: int, negative: Tensor, wide: bool = False) -> Tensor:
    """Compute positive · max(x, 0) + negative · min(x, 0), as int32; `negative` broadcasts. |result| < 2^24 unless `wide`."""
    value = input.double() if wide else input.float()
    # At 0 the gradient is the negative slope, as that of torch.prelu is; the sum with 0 leaves no -0.0.
    result = torch.where(value > 0, float(positive), negative.to(value.dtype)) * value + 0.0
    return result if input.is_floating_point() else result.to(torch.int32)


def _onnx_extremum(operator: str, e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    names = [named(e, value) for value in (input, other)]
    dtype = e.dtype(names[0])
    # Not every runtime has the operator for every integer dtype.
    return e.node("Cast", e.node(operator, *(e.node("Cast", name, to=torch.float32) for name in names)), to=dtype)


_EXTREME: dict[str, Any] = {"bounds": lambda input, other: union(input, other), "role": Role.POINTWISE, "zero_point": ZeroPoint.EQUIVARIANT}


@primitive(partial(_onnx_extremum, "Max"), steps=binary(Op.LARGEST), **_EXTREME)
def maximum(input: Tensor, other: Tensor) -> Tensor:
    """Return the larger of two tensors on one scale, element by element."""
    return torch.maximum(input, other)


@primitive(partial(_onnx_extremum, "Min"), steps=binary(Op.LEAST), **_EXTREME)
def minimum(input: Tensor, other: Tensor) -> Tensor:
    """Return the smaller of two tensors on one scale, element by element."""
    return torch.minimum(input, other)

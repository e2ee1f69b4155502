"""Products of activations with each other, and with one factor per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.primitives.accumulate import onnx_join, onnx_split, split
from fxquant.primitives.record import Emitter, full_precision, primitive, stored

# ---- matrix product of activations ------------------------------------------------------------------------------------


def _onnx_product(e: Emitter, input: str | Tensor, other: str | Tensor, dtype: torch.dtype) -> str:
    operands = [e.node("Cast", value if isinstance(value, str) else e.constant(value), to=dtype) for value in (input, other)]
    # Round is a barrier: without it the runtime may join the product with the multiplier that follows.
    return e.node("Round", e.node("MatMul", *operands))


def _onnx_matrix_product(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_product(e, input, other, torch.float32)


@primitive(_onnx_matrix_product, kind="accumulator")
def matrix_product(input: Tensor, other: Tensor) -> Tensor:
    """input · other over the last two dimensions, as int32; |result| < 2^24 for every input of their dtypes."""
    with full_precision(input):
        return stored(torch.matmul(input.float(), other.float()), input, torch.int32)


def _onnx_matrix_product_wide(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_product(e, input, other, torch.float64)


@primitive(_onnx_matrix_product_wide, kind="accumulator")
def matrix_product_wide(input: Tensor, other: Tensor) -> Tensor:
    """`matrix_product` for accumulators up to int32, summed in float64."""
    with full_precision(input):
        total = torch.matmul(input.double(), other.double())
    return total if input.is_floating_point() else total.to(torch.int32)


# ---- one factor per channel -------------------------------------------------------------------------------------------


def _shaped(channels: Tensor, trailing: int) -> Tensor:
    """Values per channel, shaped against a tensor with `trailing` dimensions after its channels."""
    return channels.reshape(-1, *[1] * trailing)


def _onnx_scale_channels(e: Emitter, input: str, weight: Tensor, bias: Tensor, trailing: int) -> str:
    scaled = e.node("Mul", e.node("Cast", input, to=torch.float32), e.constant(_shaped(weight.float(), trailing)))
    return e.node("Add", scaled, e.constant(_shaped(bias.float(), trailing)))


@primitive(_onnx_scale_channels, kind="accumulator")
def scale_channels(input: Tensor, weight: Tensor, bias: Tensor, trailing: int) -> Tensor:
    """x · weight + bias per channel, as int32; |result| < 2^24 for every input of its dtype."""
    return stored(input.float() * _shaped(weight.float(), trailing) + _shaped(bias.float(), trailing), input, torch.int32)


def _onnx_scale_channels_wide(e: Emitter, input: str, weight: Tensor, bias: Tensor, trailing: int, bits: int) -> str:
    def body(e: Emitter, x: str, weight: str, bias: str) -> str:
        halves = onnx_split(e, e.node("Cast", x, to=torch.float32), bits)
        high, low = (e.node("Mul", e.node("Cast", half, to=torch.float64), weight) for half in halves)
        return onnx_join(e, high, low, bits, bias)

    constants = (e.constant(_shaped(value.double(), trailing)) for value in (weight, bias))
    return e.call(f"scale_channels_wide_{bits}", body, input, *constants)


def _scale_channels_real(input: Tensor, weight: Tensor, bias: Tensor, trailing: int, bits: int) -> Tensor:
    return input * _shaped(weight, trailing) + _shaped(bias, trailing)


@primitive(_onnx_scale_channels_wide, surrogate=_scale_channels_real, kind="accumulator")
def scale_channels_wide(input: Tensor, weight: Tensor, bias: Tensor, trailing: int, bits: int) -> Tensor:
    """`scale_channels` for accumulators up to int32: the operand is split at `bits`, each half's product stays below 2^24."""
    high, low = (half.double() * _shaped(weight.double(), trailing) for half in split(input.float(), bits))
    total = high.mul_(2**bits).add_(low).add_(_shaped(bias.double(), trailing))
    return total if input.is_floating_point() else total.to(torch.int32)


# ---- one factor per sign ----------------------------------------------------------------------------------------------


def _onnx_rectify(e: Emitter, input: str, positive: int, negative: Tensor) -> str:
    value, zero = e.node("Cast", input, to=torch.float32), e.constant(0.0)
    above = e.node("Mul", e.node("Max", value, zero), e.constant(float(positive)))
    below = e.node("Mul", e.node("Min", value, zero), e.constant(negative.float()))
    return e.node("Add", above, below)


@primitive(_onnx_rectify, kind="accumulator")
def rectify(input: Tensor, positive: int, negative: Tensor) -> Tensor:
    """positive · max(x, 0) + negative · min(x, 0), as int32; `negative` is shaped to broadcast, and |result| < 2^24."""
    value = input.float()
    return stored(positive * value.clamp(min=0) + negative.float() * value.clamp(max=0), input, torch.int32)


# ---- the larger and the smaller ---------------------------------------------------------------------------------------


def _onnx_extremum(operator: str, e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    names = [value if isinstance(value, str) else e.constant(value) for value in (input, other)]
    dtype = e.dtype(names[0])
    # Not every runtime has the operator for every integer dtype.
    return e.node("Cast", e.node(operator, *(e.node("Cast", name, to=torch.float32) for name in names)), to=dtype)


def _onnx_maximum(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_extremum("Max", e, input, other)


@primitive(_onnx_maximum)
def maximum(input: Tensor, other: Tensor) -> Tensor:
    """The larger of two tensors on one scale, element by element."""
    return torch.maximum(input, other)


def _onnx_minimum(e: Emitter, input: str | Tensor, other: str | Tensor) -> str:
    return _onnx_extremum("Min", e, input, other)


@primitive(_onnx_minimum)
def minimum(input: Tensor, other: Tensor) -> Tensor:
    """The smaller of two tensors on one scale, element by element."""
    return torch.minimum(input, other)

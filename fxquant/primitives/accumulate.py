"""Sums of products: convolution and matrix product, and what is added to them before requantization.

The accumulator is proved, from the actual weights, to stay below 2^24 in magnitude (`convolution`,
`linear`), where float32 kernels compute integers exactly in any order; or to do so after the operand is
split in two halves of its bits (`*_wide`), with the halves' sums joined in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.primitives.record import Emitter, full_precision, primitive, stored

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def split(input: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(high, low) with input = high · 2^bits + low and low in [-2^(bits-1), 2^(bits-1) - 1]; floating integers in and out."""
    high = torch.floor((input + 2 ** (bits - 1)) * 2.0**-bits)
    return high, input - high * 2**bits


def onnx_split(e: Emitter, input: str, bits: int) -> tuple[str, str]:
    step = e.constant(float(2**bits))
    high = e.node("Floor", e.node("Mul", e.node("Add", input, e.constant(float(2 ** (bits - 1)))), e.constant(2.0**-bits)))
    return high, e.node("Sub", input, e.node("Mul", high, step))


# ---- convolution ----------------------------------------------------------------------------------------------------


def _attributes(weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> dict[str, object]:
    return {
        "kernel_shape": list(weight.shape[2:]),
        "strides": list(stride),
        "pads": list(padding) * 2,
        "dilations": list(dilation),
        "group": groups,
    }


def _onnx_convolution(
    e: Emitter, input: str, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> str:
    inputs = [e.node("Cast", input, to=torch.float32), e.node("Cast", e.constant(weight), to=torch.float32)]
    if bias is not None:
        inputs.append(e.node("Cast", e.constant(bias), to=torch.float32))
    return e.node("Conv", *inputs, **_attributes(weight, stride, padding, dilation, groups))


@primitive(_onnx_convolution, kind="accumulator")
def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """Σ x·w + bias, zero padding, as int32; |result| < 2^24 for every input of its dtype."""
    with full_precision(input):
        result = CONVOLUTIONS[weight.dim() - 2](
            input.float(), weight.float(), None if bias is None else bias.float(), stride, padding, dilation, groups
        )
    return stored(result, input, torch.int32)


def _convolution_real(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int, bits: int
) -> Tensor:
    with full_precision(input):
        return CONVOLUTIONS[weight.dim() - 2](input, weight, None if bias is None else bias.float(), stride, padding, dilation, groups)


def _onnx_convolution_wide(
    e: Emitter,
    input: str,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bits: int,
) -> str:
    attributes = _attributes(weight, stride, padding, dilation, groups)

    def body(e: Emitter, x: str, w: str, *bias: str) -> str:
        w = e.node("Cast", w, to=torch.float32)
        halves = [
            e.node("Cast", e.node("Conv", half, w, **attributes), to=torch.float64)
            for half in onnx_split(e, e.node("Cast", x, to=torch.float32), bits)
        ]
        return onnx_join(e, halves[0], halves[1], bits, *bias)

    name = "convolution_wide_" + "_".join(str(v).strip("[]").replace(", ", "x") for v in (*attributes.values(), bits, bias is not None))
    shaped = [] if bias is None else [e.constant(bias.double().reshape(-1, *[1] * (weight.dim() - 2)))]
    return e.call(name, body, input, e.constant(weight), *shaped)


def onnx_join(e: Emitter, high: str, low: str, bits: int, *bias: str) -> str:
    total = e.node("Add", e.node("Mul", high, e.constant(float(2**bits), torch.float64)), low)
    return e.node("Add", total, bias[0]) if bias else total


@primitive(_onnx_convolution_wide, surrogate=_convolution_real, kind="accumulator")
def convolution_wide(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int, bits: int
) -> Tensor:
    """`convolution` for accumulators up to int32: the operand is split at `bits`, each half's sum stays below 2^24."""
    with full_precision(input):
        kernel = CONVOLUTIONS[weight.dim() - 2]
        high, low = (kernel(half, weight.float(), None, stride, padding, dilation, groups) for half in split(input.float(), bits))
    total = high.double().mul_(2**bits).add_(low)
    if bias is not None:
        total += bias.double().reshape(-1, *[1] * (weight.dim() - 2))
    return total if input.is_floating_point() else total.to(torch.int32)


# ---- linear -----------------------------------------------------------------------------------------------------------


def _onnx_linear(e: Emitter, input: str, weight: Tensor, bias: Tensor | None) -> str:
    transposed = e.node("Cast", e.constant(weight.t().contiguous()), to=torch.float32)
    product = e.node("MatMul", e.node("Cast", input, to=torch.float32), transposed)
    return product if bias is None else e.node("Add", product, e.node("Cast", e.constant(bias), to=torch.float32))


@primitive(_onnx_linear, kind="accumulator")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · wᵀ + bias over the last dimension, as int32; |result| < 2^24 for every input of its dtype."""
    with full_precision(input):
        result = F.linear(input.float(), weight.float(), None if bias is None else bias.float())
    return stored(result, input, torch.int32)


def _linear_real(input: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    with full_precision(input):
        return F.linear(input, weight, None if bias is None else bias.float())


def _onnx_linear_wide(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, bits: int) -> str:
    def body(e: Emitter, x: str, w: str, *bias: str) -> str:
        w = e.node("Cast", w, to=torch.float32)
        halves = [
            e.node("Cast", e.node("MatMul", half, w), to=torch.float64) for half in onnx_split(e, e.node("Cast", x, to=torch.float32), bits)
        ]
        return onnx_join(e, halves[0], halves[1], bits, *bias)

    constants = [e.constant(weight.t().contiguous())] + ([] if bias is None else [e.constant(bias.double())])
    return e.call(f"linear_wide_{bits}_{bias is not None}", body, input, *constants)


@primitive(_onnx_linear_wide, surrogate=_linear_real, kind="accumulator")
def linear_wide(input: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    """`linear` for accumulators up to int32: the operand is split at `bits`, each half's sum stays below 2^24."""
    with full_precision(input):
        high, low = (F.linear(half, weight.float()) for half in split(input.float(), bits))
    total = high.double().mul_(2**bits).add_(low)
    if bias is not None:
        total += bias.double()
    return total if input.is_floating_point() else total.to(torch.int32)


# ---- residual ---------------------------------------------------------------------------------------------------------


def _onnx_add_residual(e: Emitter, accumulator: str, residual: str, multiplier: Tensor) -> str:
    dtype = e.dtype(accumulator)

    def body(e: Emitter, accumulator: str, residual: str, multiplier: str) -> str:
        # Round is a barrier: without it the runtime may fold the constant into a neighbouring operator.
        return e.node("Add", accumulator, e.node("Round", e.node("Mul", e.node("Cast", residual, to=dtype), multiplier)))

    return e.call(f"add_residual_{str(dtype).removeprefix('torch.')}", body, accumulator, residual, e.constant(multiplier, dtype))


@primitive(_onnx_add_residual, kind="accumulator")
def add_residual(accumulator: Tensor, residual: Tensor, multiplier: Tensor) -> Tensor:
    """accumulator + residual · multiplier, with whole multipliers per channel, shaped to broadcast."""
    if accumulator.is_floating_point():
        return accumulator + residual * multiplier.to(accumulator.dtype)
    return accumulator + residual.to(torch.int32) * multiplier

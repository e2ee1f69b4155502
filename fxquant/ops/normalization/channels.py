"""One factor and one bias per channel: batch normalization that is not folded into a layer, and the affine part of layer norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ops.core.operators import Call, Clamp, Layer, Lowering, Quantized, TensorFact, fact, is_parameter, lowered
from fxquant.ops.core.record import Parameter
from fxquant.ops.core.samples import IMAGES, NORMED, sampled
from fxquant.ops.core.weighted import Product, epilogue, lower_weighted, refuses_weighted
from fxquant.primitives import product
from fxquant.quantization.weights import BatchNorm, BatchNormTensors, multiplied

NO_STATISTICS = "it has no running statistics"


def _batch_norm(input: Tensor, batch_norm: BatchNorm, *, clamp: Clamp | None = None) -> Tensor:
    bn = batch_norm
    return epilogue(F.batch_norm(input, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps), None, clamp, None)


def _functional(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Any] | str:  # fmt: skip
    if training or running_mean is None or running_var is None:
        return NO_STATISTICS
    return {"input": input, "batch_norm": BatchNormTensors(running_mean, running_var, weight, bias, momentum, eps)}


def _by_function(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float, *_: Any, **__: Any
) -> dict[str, Any] | str:
    """torch.batch_norm, whose weight and bias stand first."""
    return _functional(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    operand, norm = fact(arguments["input"]), arguments["batch_norm"]
    if isinstance(operand, TensorFact) and (len(operand.shape) < 2 or not isinstance(operand.shape[1], int)):
        return "its input has no channels of a fixed number"
    computed = [value.name for value in norm if isinstance(value, fx.Node) and not is_parameter(value)] if isinstance(norm, tuple) else []
    return f"its statistics are computed by %{computed[0]}: neither stored nor computed from stored values" if computed else None


def _shaped(channels: Tensor, trailing: int) -> Tensor:
    return channels.reshape(-1, *[1] * trailing)


def _onnx_scaled(c: Call, trailing: int) -> str:
    weight, *bias = (c.e.constant(_shaped(c.real(role), trailing)) for role in ("weight", "bias") if role in c.constants)
    scaled = c.do("Mul", c.input, weight)
    return c.epilogue(c.do("Add", scaled, *bias) if bias else scaled)


def _form(trailing: int) -> Product:
    return Product(product.scale_channels, product.scale_channels_wide, (trailing,), trailing, layout=torch.flatten, channels=1)


@lowered(
    function=_batch_norm,
    adapt=_functional,
    calls={torch.batch_norm: _by_function},
    modules=dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        lambda m: NO_STATISTICS if m.running_mean is None else {"batch_norm": Parameter("")},
    ),
    absorbs=frozenset({"clamp"}),
    refuses=_refuses,
    layer=Layer(
        channels=lambda arguments: 1,
        # What it reads is never multiplied: its statistics are of that.
        rescaled=lambda arguments, inputs, outputs: {"batch_norm": multiplied(arguments["batch_norm"], outputs)},
    ),
    onnx=lambda c: _onnx_scaled(c, len(c.operand_shape) - 2),
)
@sampled("F.batch_norm(x, {B(torch.randn(3))}, {B(torch.rand(3) + 0.5)}, {P(3)}, {P(3)})", "{nn.BatchNorm2d(3)}(x.relu())")
@sampled("torch.batch_norm(x, {P(3)}, {P(3)}, {B(torch.randn(3))}, {B(torch.rand(3) + 0.5)}, False, 0.1, 1e-5, True)")
@sampled("nn.BatchNorm1d(8)", x=(8,))
@sampled("nn.BatchNorm3d(3)", x=IMAGES[3])
def batch_norm(lowering: Lowering, input: Quantized, batch_norm: BatchNorm, *, clamp: Clamp | None = None) -> Quantized:
    """Normalize channels with running statistics, and apply a fused clamp.

    Fold it into a layer that multiplies every channel by one; a channel's only weight is then ±127 steps.
    """
    mean = batch_norm.running_mean
    assert mean is not None
    form = _form(len(input.shape) - 2)
    return lower_weighted(lowering, form, input, torch.ones_like(mean).unsqueeze(1), None, clamp=clamp, batch_norm=batch_norm)


# ---- channels of one dimension, before `trailing` others ---------------------------------------------------------------


def _scale_channels(input: Tensor, weight: Tensor, bias: Tensor | None = None, trailing: int = 0, *, clamp: Clamp | None = None) -> Tensor:
    value = input * _shaped(weight, trailing)
    return epilogue(value if bias is None else value + _shaped(bias, trailing), None, clamp, None)


def _rescaled_channels(arguments: dict[str, Any], inputs: Tensor, outputs: Tensor) -> dict[str, Any]:
    weight, bias = arguments["weight"] * (outputs / inputs), arguments.get("bias")
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias * outputs}


@lowered(
    function=_scale_channels,
    absorbs=frozenset({"clamp"}),
    refuses=refuses_weighted,
    layer=Layer(
        weight=lambda weight, **_: weight.unsqueeze(1),
        channels=lambda arguments: -1 - arguments.get("trailing", 0),
        rescaled=_rescaled_channels,
    ),
    onnx=lambda c: _onnx_scaled(c, c.arguments.get("trailing", 0)),
)
@sampled("F.layer_norm(x, (8,), {P(8)}, {P(8)})", within=NORMED, x=(8,))
def scale_channels(
    lowering: Lowering, input: Quantized, weight: Tensor, bias: Tensor | None = None, trailing: int = 0, *, clamp: Clamp | None = None
) -> Quantized:
    """Compute x · weight + bias per channel, and a fused clamp; `trailing` dimensions follow the channels."""
    return lower_weighted(lowering, _form(trailing), input, weight.unsqueeze(1), bias, clamp=clamp)

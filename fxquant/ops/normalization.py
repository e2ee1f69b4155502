"""Batch normalisation: recognised so that it can be folded into the layer before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.batch_norm import BatchNorm, BatchNormTensors
from fxquant.lowering import Quantized
from fxquant.ops.record import Operator, Parameter, register


def batch_norm(input: Tensor, batch_norm: BatchNorm) -> Tensor:
    """Batch normalisation with running statistics."""
    bn = batch_norm
    return F.batch_norm(input, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps)


def _unreachable(*arguments: Any, **keywords: Any) -> Quantized:
    raise AssertionError("a batch norm that is not folded stays in float")


def _functional(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Any] | str:
    if training or running_mean is None or running_var is None:
        return "it has no running statistics"
    return {"input": input, "batch_norm": BatchNormTensors(running_mean, running_var, weight, bias, momentum, eps)}


def _module(module: Any) -> dict[str, Any] | str:
    return "it has no running statistics" if module.running_mean is None else {"batch_norm": Parameter("")}


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return "it follows no convolution or linear layer that it could be folded into"


register(
    Operator(
        "batch_norm",
        batch_norm,
        ("input",),
        _unreachable,
        functions={F.batch_norm: _functional},
        modules={nn.BatchNorm1d: _module, nn.BatchNorm2d: _module, nn.BatchNorm3d: _module, nn.SyncBatchNorm: _module},
        refuses=_refuses,
    )
)

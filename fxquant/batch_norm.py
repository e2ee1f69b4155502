"""Batch normalisation as a function of weight and bias, in every state and never destructive.

    y = (conv(x, w) + b - mean) · γ / sqrt(var + ε) + β  =  conv(x, w · g) + (b - mean) · g + β,   g = γ / sqrt(var + ε)

Nothing is ever divided by γ, so a small or zero γ is harmless.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class BatchNorm(Protocol):
    """What folding needs to know; an `nn.BatchNorm2d` is one, and so is `BatchNormTensors`."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float


class BatchNormTensors(NamedTuple):
    """The tensors of a functional batch norm, with the names of the module's."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float | None
    eps: float
    num_batches_tracked: Tensor | None = None


def fold(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer that equals layer then batch norm with running statistics; differentiable.

    `axis` is the weight's output channel dimension.
    """
    assert batch_norm.running_mean is not None
    assert batch_norm.running_var is not None
    return _fold(weight, bias, batch_norm, axis, batch_norm.running_mean, batch_norm.running_var)


def fold_batch(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int, output: Tensor) -> tuple[Tensor, Tensor]:
    """`fold` with the statistics of this batch, where `output` (N, C, …) is the layer's; the running ones move on."""
    dims = [d for d in range(output.dim()) if d != 1]
    variance, mean = torch.var_mean(output, dims, correction=0)
    _update_running(batch_norm, mean.detach(), variance.detach(), output.numel() // output.shape[1])
    return _fold(weight, bias, batch_norm, axis, mean, variance)


def _fold(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    gain = torch.rsqrt(variance + batch_norm.eps)
    if batch_norm.weight is not None:
        gain = gain * batch_norm.weight
    shape = [1] * weight.dim()
    shape[axis] = -1
    offset = -mean if bias is None else bias - mean
    folded = offset * gain
    return weight * gain.reshape(shape), folded if batch_norm.bias is None else folded + batch_norm.bias


@torch.no_grad()
def _update_running(batch_norm: BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    if batch_norm.running_mean is None or batch_norm.running_var is None:
        return
    if batch_norm.num_batches_tracked is not None:
        batch_norm.num_batches_tracked += 1
    momentum = batch_norm.momentum
    if momentum is None:
        momentum = 1.0 / float(batch_norm.num_batches_tracked) if batch_norm.num_batches_tracked is not None else 0.0
    batch_norm.running_mean += (mean - batch_norm.running_mean) * momentum
    batch_norm.running_var += (variance * (count / max(count - 1, 1)) - batch_norm.running_var) * momentum

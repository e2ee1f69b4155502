"""Batch normalisation as a function of weight and bias, in every state and never destructive.

    y = (conv(x, w) + b - mean) · γ / sqrt(var + ε) + β  =  conv(x, w · g) + (b - mean) · g + β,   g = γ / sqrt(var + ε)

The layer is never divided by γ; a γ of zero is harmless.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class BatchNorm(Protocol):
    """The attributes of a batch norm that folding reads; an `nn.BatchNorm2d` has them, and so has `BatchNormTensors`."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    track_running_stats: bool


class BatchNormTensors(NamedTuple):
    """The tensors of a functional batch norm, with the names of the module's."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float | None
    eps: float
    num_batches_tracked: Tensor | None = None
    track_running_stats: bool = True


def multiplied(batch_norm: BatchNorm, factors: Tensor) -> BatchNorm:
    """The batch norm whose result is multiplied by one factor for each channel; its statistics are the same tensors, which move alike."""
    bn = BatchNormTensors(*(getattr(batch_norm, name) for name in BatchNormTensors._fields))
    weight = factors if bn.weight is None else bn.weight * factors
    bias = None if bn.bias is None else bn.bias * factors
    return bn._replace(weight=weight, bias=bias)  # type: ignore[return-value]  # a tuple's fields are read, as all readers do


def running_gain(batch_norm: BatchNorm) -> Tensor:
    """g, with the running statistics."""
    assert batch_norm.running_var is not None
    # float32 roots, and torch.rsqrt on GPUs, are not correctly rounded everywhere; a root in float64 and a division are
    gain = torch.reciprocal(torch.sqrt((batch_norm.running_var + batch_norm.eps).double()).float())
    return gain if batch_norm.weight is None else gain * batch_norm.weight


def fold(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of the layer that equals a layer followed by a batch norm with running statistics; differentiable.

    `axis` is the weight's output channel dimension.
    """
    gain = running_gain(batch_norm)
    shape = [1] * weight.dim()
    shape[axis] = -1
    return weight * gain.reshape(shape), fold_bias(bias, batch_norm)


def fold_bias(bias: Tensor | None, batch_norm: BatchNorm) -> Tensor:
    """Return the bias of the layer that `fold` describes."""
    assert batch_norm.running_mean is not None
    offset = -batch_norm.running_mean if bias is None else bias - batch_norm.running_mean
    folded = offset * running_gain(batch_norm)
    return folded if batch_norm.bias is None else folded + batch_norm.bias


def correct_batch(
    batch_norm: BatchNorm, weight_bias: Tensor | None, mean: Tensor, variance: Tensor, count: int, step: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    """(c, b) with which (z + b) · c has the statistics of this batch instead of the running ones, which move on; differentiable.

    z is the layer with the running statistics folded in, without its bias; in steps of `step`, one number for each channel or a
    scalar, it has this mean and this variance over `count` values of each channel, float32:

        (z - mean(z)) · c + β  =  (z + β/c - mean(z)) · c,    c = sqrt((running_var + ε) / (var(z)/g² + ε)),   g = γ / sqrt(running_var + ε)

    The statistics are therefore those of the quantized weights. A channel that is not `usable`, or whose γ is 0,
    shows nothing of them: it keeps the running ones.
    """
    assert batch_norm.running_mean is not None
    assert batch_norm.running_var is not None
    known = batch_norm.running_var + batch_norm.eps
    gain = running_gain(batch_norm)
    usable = usable & (gain != 0)
    unit = step / torch.where(usable, gain, 1)  # of the layer before its batch norm
    of_batch = variance * unit.square()
    correction = torch.where(usable, torch.sqrt(known / (of_batch + batch_norm.eps)), 1)
    beta = torch.zeros_like(known) if batch_norm.bias is None else batch_norm.bias
    offset = -batch_norm.running_mean if weight_bias is None else weight_bias - batch_norm.running_mean
    bias = torch.where(usable, beta / correction - mean * step, offset * gain + beta)
    center = mean * unit if weight_bias is None else mean * unit + weight_bias
    _update_running(batch_norm, center.detach(), of_batch.detach(), count, usable)
    return correction, bias


@torch.no_grad()
def _update_running(batch_norm: BatchNorm, mean: Tensor, variance: Tensor, count: int, usable: Tensor) -> None:
    if not batch_norm.track_running_stats or batch_norm.running_mean is None or batch_norm.running_var is None:
        return
    if batch_norm.num_batches_tracked is not None:
        batch_norm.num_batches_tracked.add_(1)
    momentum = batch_norm.momentum
    if momentum is None:
        momentum = 1.0 / float(batch_norm.num_batches_tracked) if batch_norm.num_batches_tracked is not None else 0.0
    unbiased = variance * (count / max(count - 1, 1))
    for running, seen in ((batch_norm.running_mean, mean), (batch_norm.running_var, unbiased)):
        if not running.requires_grad:  # what is trained does not follow the batches
            running.add_((seen - running) * momentum * usable)

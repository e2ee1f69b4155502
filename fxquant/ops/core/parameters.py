"""Functions of a model's parameters that passes and remedies compute: a graph may call them, and a file may name them."""

import torch
from torch import Tensor

from fxquant.quantization.weights import BatchNorm, fold


def folded_weight(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> Tensor:
    """Return the weight of a layer with its batch norm, of running statistics, multiplied in; `axis` has its output channels."""
    return fold(weight.transpose(0, axis), bias, batch_norm, 0)[0].transpose(0, axis)


def folded_bias(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> Tensor:
    """Return a layer's bias (C,), multiplied by the factors (C,)."""
    return fold(weight.transpose(0, axis), bias, batch_norm, 0)[1]


def multiplied_weight(weight: Tensor, factors: Tensor) -> Tensor:
    """Return a layer's weight (C, …), with output channel c multiplied by element c of the factors (C,)."""
    return weight * factors.reshape(-1, *[1] * (weight.dim() - 1))


def multiplied_bias(bias: Tensor, factors: Tensor) -> Tensor:
    """Return the bias beside that weight."""
    return bias * factors.reshape(-1)


def increased_bias(bias: Tensor | None, terms: Tensor, times: float) -> Tensor:
    """Return a layer's bias (C,), or 0 where it has none, plus `times` · the C elements of the terms."""
    added = terms.reshape(-1) * times
    return added if bias is None else bias + added


def spread(weight: Tensor, dilation: list[int]) -> Tensor:
    """Return a kernel with zeros between its taps, whose convolution without dilation equals that of `weight` with `dilation`."""
    sizes = [(taps - 1) * step + 1 for taps, step in zip(weight.shape[2:], dilation, strict=True)]
    result = weight.new_zeros((*weight.shape[:2], *sizes))
    places = (slice(None), slice(None), *(slice(None, None, step) for step in dilation))
    result[places] = weight
    return result


def channel_weight(like: Tensor, factor: float) -> Tensor:
    """Return the weight (C, 1, 1, 1) of a depthwise 1×1 convolution, all `factor`, with C elements of `like`."""
    return torch.full((like.numel(), 1, 1, 1), factor, dtype=like.dtype, device=like.device)


FUNCTIONS = (folded_weight, folded_bias, multiplied_weight, multiplied_bias, increased_bias, spread, channel_weight)

"""What is known of a layer's result without running the layer: the commonest ones give a tensor like the one they take.

PyTorch works a batch norm out from some fifteen operators on tensors without values, at four batch sizes; that was most of a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxquant.frontend.values import TracedTensor, Value

_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
_ELEMENTWISE = frozenset((
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid, nn.Tanhshrink, nn.Softsign,
))  # fmt: skip


def result_like_input(function: Callable[..., Any], args: Any, kwargs: Any) -> Value | None:
    """The result of a module's forward, where it is a new tensor of its input's shape, strides and dtype; None where that is not known."""
    module = getattr(function, "__self__", None)
    if kwargs or len(args) != 1 or not isinstance(args[0], TracedTensor) or not isinstance(module, nn.Module):
        return None
    known = args[0].value.abstract
    sides = known.a, known.b
    if known.dtype != torch.float32 or not all(side.stride() == _strides(tuple(side.shape)) for side in sides):
        return None
    if type(module) in _ELEMENTWISE:
        return known
    return known if isinstance(module, _BatchNorm) and all(_is_normalized_by(module, side) for side in sides) else None


def _is_normalized_by(module: _BatchNorm, input: torch.Tensor) -> bool:
    """Whether the running statistics of a batch norm are those of an input's channels."""
    tensors = [tensor for tensor in (*module._parameters.values(), module.running_mean, module.running_var) if tensor is not None]
    like = (module.num_features,), torch.float32, input.device
    plain = all((tuple(tensor.shape), tensor.dtype, tensor.device) == like for tensor in tensors)
    complete = module.running_mean is not None and module.running_var is not None and not module.training
    return plain and complete and input.dim() in _DIMENSIONS.get(type(module), ()) and input.shape[1] == module.num_features


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a new tensor of this shape."""
    return torch.empty(shape, device="meta").stride()

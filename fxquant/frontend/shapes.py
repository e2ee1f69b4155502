"""The shape of a batch norm's result without running it: PyTorch computes one by about fifteen operators on tensors without values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxquant.frontend.values import TracedTensor, Value

_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


def known_result(function: Callable[..., Any], args: Any, kwargs: Any) -> Value | None:
    """Return the result of a batch norm's forward, a new tensor like its input; None where anything is unusual, and for other functions."""
    module = getattr(function, "__self__", None)
    if kwargs or len(args) != 1 or not isinstance(args[0], TracedTensor) or not isinstance(module, _BatchNorm):
        return None
    known = args[0].value.abstract
    return known if all(_is_normalized_by(module, side) for side in (known.a, known.b)) else None


def _is_normalized_by(module: _BatchNorm, input: torch.Tensor) -> bool:
    """Return whether the running statistics of a batch norm are those of an input's channels, and all is in float32 and contiguous."""
    if input.dtype != torch.float32 or input.stride() != _strides(tuple(input.shape)):
        return False
    tensors = [tensor for tensor in (*module._parameters.values(), module.running_mean, module.running_var) if tensor is not None]
    like = (module.num_features,), torch.float32, input.device
    plain = all((tuple(tensor.shape), tensor.dtype, tensor.device) == like for tensor in tensors)
    complete = module.running_mean is not None and module.running_var is not None and not module.training
    return plain and complete and input.dim() in _DIMENSIONS.get(type(module), ()) and input.shape[1] == module.num_features


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of a new tensor of this shape."""
    return torch.empty(shape, device="meta", dtype=torch.float32).stride()

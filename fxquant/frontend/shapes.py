"""Facts of a layer's result without running the layer: the most common layers return a tensor like the one they take.

PyTorch computes a batch norm by about fifteen operators on tensors without values, at four batch sizes; that was most of a trace.
Where anything is unusual, from strides to the dtype of a parameter, no fact is returned, and the layer runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxquant.frontend.fake import Evaluator
from fxquant.frontend.values import TracedTensor, Value

_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
_ELEMENTWISE = frozenset((
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid, nn.Tanhshrink, nn.Softsign,
))  # fmt: skip


def known_result(evaluator: Evaluator, function: Callable[..., Any], args: Any, kwargs: Any) -> Value | None:
    """Return the result of a module's forward, a new tensor of its input's dtype; None where it is not known without running it."""
    module = getattr(function, "__self__", None)
    if kwargs or len(args) != 1 or not isinstance(args[0], TracedTensor) or not isinstance(module, nn.Module):
        return None
    known = args[0].value.abstract
    sides = known.a, known.b
    if known.dtype != torch.float32 or not all(side.stride() == _strides(tuple(side.shape)) for side in sides):
        return None
    if type(module) in _ELEMENTWISE:
        return known
    if type(module) is nn.Linear:
        return _projected(evaluator, module, known)
    if type(module) is nn.LayerNorm:
        return known if all(_is_layer_of(module, side) for side in sides) else None
    return known if isinstance(module, _BatchNorm) and all(_is_normalized_by(module, side) for side in sides) else None


def _projected(evaluator: Evaluator, module: nn.Linear, known: Value) -> Value | None:
    if not _are(module, {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}, known):
        return None
    a, b = tuple(known.a.shape), tuple(known.b.shape)
    if not a or not a[-1] == b[-1] == module.in_features:
        return None
    return evaluator.new((*a[:-1], module.out_features), (*b[:-1], module.out_features), known)


def _is_layer_of(module: nn.LayerNorm, input: torch.Tensor) -> bool:
    shape = tuple(module.normalized_shape)
    return tuple(input.shape[-len(shape) :]) == shape and _are(module, {"weight": shape, "bias": shape}, input)


def _are(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], like: torch.Tensor | Value) -> bool:
    """Return whether a module's parameters, those that it has, have these shapes, and the dtype and device of a tensor."""
    held = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    return held.keys() <= shapes.keys() and all(
        (tuple(tensor.shape), tensor.dtype, tensor.device) == (shapes[name], like.dtype, like.device) for name, tensor in held.items()
    )


def _is_normalized_by(module: _BatchNorm, input: torch.Tensor) -> bool:
    """Return whether the running statistics of a batch norm are those of an input's channels."""
    tensors = [tensor for tensor in (*module._parameters.values(), module.running_mean, module.running_var) if tensor is not None]
    like = (module.num_features,), torch.float32, input.device
    plain = all((tuple(tensor.shape), tensor.dtype, tensor.device) == like for tensor in tensors)
    complete = module.running_mean is not None and module.running_var is not None and not module.training
    return plain and complete and input.dim() in _DIMENSIONS.get(type(module), ()) and input.shape[1] == module.num_features


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of a new tensor of this shape."""
    return torch.empty(shape, device="meta", dtype=torch.float32).stride()

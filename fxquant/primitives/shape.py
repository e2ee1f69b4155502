"""Moving integers about: no arithmetic, any integer dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.primitives.record import Emitter, primitive


def _onnx_reshape(e: Emitter, input: str, shape: list[int | str]) -> str:
    if all(isinstance(size, int) for size in shape):
        return e.node("Reshape", input, e.constant(torch.tensor(shape, dtype=torch.int64)))
    one = e.constant(torch.tensor([1], dtype=torch.int64))
    sizes = [
        e.node("Reshape", size, one) if isinstance(size, str) else e.constant(torch.tensor([size], dtype=torch.int64)) for size in shape
    ]
    return e.node("Reshape", input, e.node("Concat", *sizes, axis=0))


@primitive(_onnx_reshape)
def reshape(input: Tensor, shape: list[int]) -> Tensor:
    """The same elements in another shape; one size may be -1."""
    return input.reshape(shape)


def _onnx_permute(e: Emitter, input: str, dims: list[int]) -> str:
    return e.node("Transpose", input, perm=list(dims))


@primitive(_onnx_permute)
def permute(input: Tensor, dims: list[int]) -> Tensor:
    """The same elements with dimensions in another order."""
    return input.permute(dims)


def _onnx_concatenate(e: Emitter, tensors: list[str], dim: int) -> str:
    return e.node("Concat", *tensors, axis=dim)


@primitive(_onnx_concatenate)
def concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """The tensors one after another along `dim`."""
    return torch.cat(tensors, dim)

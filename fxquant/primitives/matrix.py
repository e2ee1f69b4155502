"""Product with an integer matrix along one dimension: resizing, windows of unequal sizes, overlapping sums."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.primitives.record import Emitter, Range, Value, constant_of, exact_below, full_precision, need, primitive, within


def _product(e: Emitter, value: str, matrix: Tensor, dim: int, width: torch.dtype) -> str:
    if dim == -2:
        return e.node("MatMul", e.constant(matrix, width), value)
    return e.node("MatMul", value, e.constant(matrix.t().contiguous(), width))


def _onnx_transform(e: Emitter, input: str, matrix: Tensor, dim: int, rank: int, wide: bool) -> str:
    width = torch.float64 if wide else torch.float32
    # Round is a barrier, on both sides: without it a runtime may fuse the product with a transposition, or with a multiplier after it.
    value = e.node("Round", e.node("Cast", input, to=width))
    if dim >= -2:
        return e.node("Round", _product(e, value, matrix, dim, width))
    order = list(range(rank))
    order[dim], order[-1] = order[-1], order[dim]
    turned = e.node("Round", _product(e, e.node("Transpose", value, perm=order), matrix, -1, width))
    return e.node("Transpose", turned, perm=order)


def _along(input: Tensor, matrix: Tensor, dim: int, rank: int, wide: bool) -> Tensor:
    width = torch.float64 if wide else torch.float32
    with full_precision(input):
        value, factors = input.to(width), matrix.to(width)
        if dim == -2:
            return factors @ value
        return (value.transpose(dim, -1) @ factors.t()).transpose(dim, -1)


def _bounds_transform(input: Value, matrix: Value, dim: int, rank: int, wide: bool) -> Range:
    factors = constant_of(matrix, "matrix").double()
    need(factors.dim() == 2 and -rank <= dim < 0 and rank == len(input.fact.shape), "its matrix or its dimension is out of range")
    need(factors.shape[1] == input.size(dim), "its matrix has another size than its operand")
    reach = float(factors.abs().sum(1).max()) if factors.numel() else 0.0
    return within(reach * input.largest, exact_below(wide))


@primitive(_onnx_transform, bounds=_bounds_transform, surrogate=_along, kind="accumulator")
def transform(input: Tensor, matrix: Tensor, dim: int, rank: int, wide: bool) -> Tensor:
    """Compute the accumulator Σ_j matrix[i, j] · x_j along dimension `dim`, which is negative, of a tensor of `rank` dimensions.

    The result is int32, below 2^24 in magnitude, or, if `wide`, int64, below 2^53.
    """
    total = _along(input, matrix, dim, rank, wide)
    return total if input.is_floating_point() else total.to(torch.int64 if wide else torch.int32)

"""Products with matrices along dimensions: linear interpolation, windows of unequal sizes, overlapping sums."""

import torch
from torch import Tensor

from fxquant.primitives.record import (
    Emitter,
    Range,
    Value,
    ZeroPoint,
    constant_of,
    exact_below,
    full_precision,
    need,
    primitive,
    stored,
    within,
)


def _onnx_resize_linear(
    e: Emitter, input: str, rows: Tensor | None, columns: Tensor | None, bits: int, wide: bool, nearest: bool = True
) -> str:
    dtype, width = e.dtype(input), torch.float64 if wide else torch.float32

    def body(e: Emitter, x: str, *weights: str) -> str:
        remaining = list(weights)
        x = e.node("Cast", x, to=width)
        if columns is not None:
            x = e.node("MatMul", x, remaining.pop(0))
        if rows is not None:
            x = e.node("MatMul", remaining.pop(0), x)
        # Round is a barrier: without it the runtime may fold the constant into the product.
        x = e.node("Mul", e.node("Round", x), e.constant(_step(rows, columns, bits), width))
        return e.node("Cast", e.node("Floor", e.node("Add", x, e.constant(0.5, width)) if nearest else x), to=dtype)

    axes = f"{'rows' * (rows is not None)}{'columns' * (columns is not None)}"
    name = (
        f"resize_linear_{'' if nearest else 'floor_'}{axes}_{bits}_{str(width).removeprefix('torch.')}_{str(dtype).removeprefix('torch.')}"
    )
    weights = [] if columns is None else [e.constant(columns.t().contiguous(), width)]
    return e.call(name, body, input, *weights, *([] if rows is None else [e.constant(rows, width)]))


def _step(rows: Tensor | None, columns: Tensor | None, bits: int) -> float:
    """Return the scale of the sum's integers relative to the operand's."""
    return 2.0 ** (-bits * ((rows is not None) + (columns is not None)))


def _products(input: Tensor, rows: Tensor | None, columns: Tensor | None, width: torch.dtype) -> Tensor:
    with full_precision(input):
        value = input.to(width)
        if columns is not None:
            value = value @ columns.to(width).t()
        return value if rows is None else rows.to(width) @ value


def _resize_linear_real(input: Tensor, rows: Tensor | None, columns: Tensor | None, bits: int, wide: bool, nearest: bool = True) -> Tensor:
    return _products(input, rows, columns, torch.float32) * _step(rows, columns, bits)


def _bounds_resize_linear(input: Value, rows: Value | None, columns: Value | None, bits: int, wide: bool, nearest: bool = True) -> Range:
    matrices = [constant_of(matrix, "matrix") for matrix in (rows, columns) if matrix is not None]
    for matrix in matrices:
        need((matrix >= 0).all() and (matrix.long().sum(1) == 2**bits).all(), "the weights of its neighbours do not sum to 1")
    largest = input.largest * 2 ** (bits * len(matrices))
    need(largest < exact_below(wide), f"its sum can reach {largest}")
    return Range(input.low, input.high)


@primitive(_onnx_resize_linear, bounds=_bounds_resize_linear, surrogate=_resize_linear_real, chip_bits=8, zero_point=ZeroPoint.EQUIVARIANT)
def resize_linear(input: Tensor, rows: Tensor | None, columns: Tensor | None, bits: int, wide: bool, nearest: bool = True) -> Tensor:
    """Compute ⌊rows · input · columnsᵀ + ½⌋ over the last two dimensions; the weights of a row, in 2^-bits, sum to 1.

    The half is left out if `nearest` is false. None for a matrix leaves its dimension unchanged. The sums stay below 2^24 in magnitude,
    or, if `wide`, below 2^53. The result has the dtype of `input`.
    """
    total = _products(input, rows, columns, torch.float64 if wide else torch.float32)
    return stored(torch.floor(total * _step(rows, columns, bits) + (0.5 if nearest else 0.0)), input, input.dtype)


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
        return factors @ value if dim == -2 else (value.transpose(dim, -1) @ factors.t()).transpose(dim, -1)


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

"""Products with matrices along dimensions: linear interpolation, windows of unequal sizes, overlapping sums."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from fxquant.primitives import record
from fxquant.primitives.record import Emitter, Range, Value, ZeroPoint, constant_of, exact_below, full_precision, need, primitive, stored


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
    return record.within(reach * input.largest, exact_below(wide))


@primitive(_onnx_transform, bounds=_bounds_transform, surrogate=_along, kind="accumulator")
def transform(input: Tensor, matrix: Tensor, dim: int, rank: int, wide: bool) -> Tensor:
    """Compute the accumulator Σ_j matrix[i, j] · x_j along dimension `dim`, which is negative, of a tensor of `rank` dimensions.

    The result is int32, below 2^24 in magnitude, or, if `wide`, int64, below 2^53.
    """
    total = _along(input, matrix, dim, rank, wide)
    return total if input.is_floating_point() else total.to(torch.int64 if wide else torch.int32)


# ---- Sampling of an image at positions between its pixels ------------------------------------------------------------
def onnx_brought_inside(e: Emitter, position: str, size: int, bits: int, padding: str, corners: bool) -> str:
    """Emit the positions moved inside the image, as `padding` specifies, in float32, which is exact for them."""
    low, span = (0.0, (size - 1) * 2.0**bits) if corners else (-(2.0 ** (bits - 1)), size * 2.0**bits)
    if padding == "reflection":
        away = e.node("Abs", e.node("Sub", position, e.constant(low)))
        twice = e.constant(2 * max(span, 1.0))
        away = e.node("Sub", away, e.node("Mul", e.node("Floor", e.node("Div", away, twice)), twice))
        position = e.node("Add", e.node("Min", away, e.node("Sub", twice, away)), e.constant(low))
    if padding != "zeros":
        position = e.node("Clip", position, e.constant(0.0), e.constant((size - 1) * 2.0**bits))
    return position


def _onnx_neighbours(e: Emitter, position: str, size: int, bits: int, mode: str, padding: str) -> list[tuple[str, str | None]]:
    step = e.constant(2.0**-bits)

    def index(value: str) -> str:
        if padding == "zeros":  # the image has zeros around it
            value = e.node("Add", value, e.constant(1.0))
        return e.node("Clip", value, e.constant(0.0), e.constant(size + 1.0 if padding == "zeros" else size - 1.0))

    if mode == "nearest":
        return [(index(e.node("Round", e.node("Mul", position, step))), None)]
    pixel = e.constant(2.0**bits)
    first = e.node("Floor", e.node("Mul", position, step))
    second_weight = e.node("Sub", position, e.node("Mul", first, pixel))
    second = e.node("Add", first, e.constant(1.0))
    return [(index(first), e.node("Sub", pixel, second_weight)), (index(second), second_weight)]


def _onnx_sample(e: Emitter, input: str, coordinates: str | Tensor, sizes: list[int], *settings: Any) -> str:
    bits, mode, padding, corners, outside, wide = settings
    rank, width, dtype = len(sizes), torch.float64 if wide else torch.float32, e.dtype(input)
    image = e.node("Cast", input, to=width)
    around = 1 if padding == "zeros" else 0
    if around:
        image = e.node("Pad", image, e.constant([0, 0, *[1] * rank, 0, 0, *[1] * rank]), e.constant(float(outside), width))
    strides = [math.prod(size + 2 * around for size in sizes[axis + 1 :]) for axis in range(rank)]
    pixels = e.node("Transpose", e.node("Reshape", image, e.constant([0, 0, -1])), perm=[0, 2, 1])
    where = e.constant(coordinates.float()) if isinstance(coordinates, Tensor) else e.node("Cast", coordinates, to=torch.float32)
    axes = []
    for axis, size in enumerate(sizes):
        # The last coordinate is the first dimension's; one is kept as a dimension, which is that of the index into the image.
        position = e.node("Gather", where, e.constant([rank - 1 - axis]), axis=rank + 1)
        position = onnx_brought_inside(e, position, size, bits, padding, corners)
        axes.append(_onnx_neighbours(e, position, size, bits, mode, padding))
    total = ""
    for corner in itertools.product(*axes):
        place, weight = "", ""
        for (index, factor), stride in zip(corner, strides, strict=True):
            whole = e.node("Mul", e.node("Cast", index, to=torch.int64), e.constant(stride, torch.int64))
            place = e.node("Add", place, whole) if place else whole
            if factor is not None:
                factor = e.node("Cast", factor, to=width)
                weight = e.node("Mul", weight, factor) if weight else factor
        term = e.node("GatherND", pixels, place, batch_dims=1)
        term = e.node("Mul", term, weight) if weight else term
        total = e.node("Add", total, term) if total else term
    if mode != "nearest":
        # Round is a barrier: without it the runtime may fold the constant into the product.
        total = e.node("Mul", e.node("Round", total), e.constant(2.0 ** (-bits * rank), width))
        total = e.node("Floor", e.node("Add", total, e.constant(0.5, width)))
    return e.node("Cast", e.node("Transpose", total, perm=[0, rank + 1, *range(1, rank + 1)]), to=dtype)


def brought_inside(position: Tensor, size: int, bits: int, padding: str, corners: bool) -> Tensor:
    """Return the positions moved inside the image, as `padding` specifies."""
    low, span = (0, (size - 1) * 2**bits) if corners else (-(2 ** (bits - 1)), size * 2**bits)
    if padding == "reflection":
        twice = 2 * max(span, 1)
        away = (position - low).abs() % twice
        position = torch.minimum(away, twice - away) + low
    return position if padding == "zeros" else position.clamp(0, (size - 1) * 2**bits)


def _neighbours(position: Tensor, size: int, bits: int, mode: str, padding: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return the index along an axis, and the weight in steps of 2^-bits, of the one or two neighbours of each position."""

    def index(value: Tensor) -> Tensor:
        return (value + 1).clamp(0, size + 1) if padding == "zeros" else value.clamp(0, size - 1)

    if mode == "nearest":
        return [(index(torch.round(position.double() * 2.0**-bits).long()), None)]
    first = position >> bits
    second_weight = position - (first << bits)
    return [(index(first), 2**bits - second_weight), (index(first + 1), second_weight)]


def _bounds_sample(
    input: Value, coordinates: Value, sizes: list[int], bits: int, mode: str, padding: str, corners: bool, outside: int, wide: bool
) -> Range:
    rank = len(sizes)
    need(list(input.fact.shape[2:]) == list(sizes) and rank in (2, 3), "its image and its annotation differ in size")
    need(coordinates.fact.shape[-1] == rank and len(coordinates.fact.shape) == rank + 2, "it has not one coordinate per dimension")
    need(1 <= bits <= 8 and mode in ("bilinear", "nearest") and padding in ("zeros", "border", "reflection"), "its settings are unknown")
    need(coordinates.largest + (max(sizes) + 2) * 2**bits < 2**23, f"its coordinates can reach {coordinates.largest}")
    # Sums of products with weights that add up to 2^(rank · bits).
    largest = max(input.largest, abs(outside)) * (1 if mode == "nearest" else 2 ** (rank * bits))
    need(largest < exact_below(wide), f"its sum can reach {largest}")
    return Range(input.low.min().clamp_max(outside), input.high.max().clamp_min(outside))


@primitive(_onnx_sample, bounds=_bounds_sample, zero_point=ZeroPoint.EQUIVARIANT, shifted=("outside",))
def sample(
    input: Tensor, coordinates: Tensor, sizes: list[int], bits: int, mode: str, padding: str, corners: bool, outside: int, wide: bool
) -> Tensor:
    """Sample an image (N, C, *sizes) at every position of (N, *, rank), in steps of 2^-bits of a pixel from the first one's centre.

    Between pixels, the result is ⌊Σ w·q / 2^(rank · bits) + ½⌋ with the weights of linear interpolation. If `mode` is "nearest", it is the
    nearest pixel; of two equally near ones, that with the even index. Outside, the image is `outside` if `padding` is "zeros", and the
    nearest pixel if it is "border". For "reflection" it is mirrored, at the centres of the outermost pixels (`corners`) or at their outer
    edges. The sums stay below 2^24 in magnitude, or, if `wide`, below 2^53.
    """
    image = input.to(torch.float64 if wide else torch.float32)
    around = 1 if padding == "zeros" else 0
    if around:
        image = torch.nn.functional.pad(image, [1] * (2 * len(sizes)), value=float(outside))
    strides = [math.prod(size + 2 * around for size in sizes[axis + 1 :]) for axis in range(len(sizes))]
    pixels = image.flatten(2)
    positions = coordinates.to(torch.int64).flip(-1).unbind(-1)
    axes = [
        _neighbours(brought_inside(position, size, bits, padding, corners), size, bits, mode, padding)
        for position, size in zip(positions, sizes, strict=True)
    ]
    total = torch.zeros((), dtype=image.dtype, device=image.device)
    for corner in itertools.product(*axes):
        place = torch.stack([index * stride for (index, _), stride in zip(corner, strides, strict=True)]).sum(0)
        term = pixels.gather(2, place.flatten(1).unsqueeze(1).expand(-1, pixels.shape[1], -1))
        for _, weight in corner:
            if weight is not None:
                term = term * weight.flatten(1).unsqueeze(1).to(term.dtype)
        total = total + term
    if mode != "nearest":
        total = torch.floor(total * 2.0 ** (-bits * len(sizes)) + 0.5)
    return stored(total.reshape(*input.shape[:2], *positions[0].shape[1:]), input, input.dtype)

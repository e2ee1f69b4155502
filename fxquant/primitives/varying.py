"""Primitives whose constants depend on sizes that vary: rescaling of sums of so many elements, and resizing.

Constants by the number of elements are tables, with their rows along dimension 0, the first for a sum of no elements. Places and weights
of a resize are computed from the sizes where the model runs, by integers alone but for "nearest". A number or a size is an int, or in a
graph a node; a size of None stands for the length times a factor, rounded down. Sources lie at (i + ½) p / q - ½, where p / q is the length
over the new size, or one over a given factor; with `align_corners` at i (length - 1) / (size - 1).
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from fxquant.primitives import elementwise, quantization
from fxquant.primitives.record import PRIMITIVES, Emitter, Range, Value, ZeroPoint, constant_of, exact_below, need, primitive, union, within
from fxquant.primitives.resize import resize_linear
from fxquant.primitives.shape import select


# ---- the elements of a sum -------------------------------------------------------------------------------------------
def _row(e: Emitter, count: str | int) -> Any:
    """Return a function of a table that emits its row of this number."""
    place = count if isinstance(count, str) else e.constant(count, torch.int64)
    return lambda table, dtype: e.node("Gather", e.constant(table, dtype), place, axis=0)


@primitive(
    lambda e, input, count, table: e.node("Add", input, _row(e, count)(table, e.dtype(input))),
    bounds=lambda input, count, table: within(input.magnitude + constant_of(table, "table").abs().max(), input.exact),
    kind="accumulator",
    counts=elementwise.add_constant,
)
def add_counted(input: Tensor, count: int, table: Tensor) -> Tensor:
    """Add the table's integer of this number of elements to an accumulator; the result has the accumulator's dtype."""
    return input + table[count].to(input.dtype)


@primitive(
    lambda e, accumulator, count, *constants: quantization.onnx_general_fixed(e, accumulator, *(*constants, _row(e, count))),
    bounds=lambda count, **arguments: quantization.requantized_range(**arguments),
    counts=quantization.requantize_fixed,
)
def requantize_fixed_counted(
    accumulator: Tensor, count: int, shift: Tensor, multiplier: Tensor, right_shift: Tensor, intermediate_bits: int, rounding: str,
    low: int, high: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `requantize_fixed` with the tables' shifts and multiplier of this number of elements, int32."""
    rest = intermediate_bits, rounding, low, high, dtype
    return quantization.requantize_fixed(accumulator, shift[count], multiplier[count], right_shift[count], *rest)


@primitive(
    lambda e, accumulator, count, multiplier, low, high, dtype, zero_point=0: quantization.onnx_placed_real(
        e, accumulator, multiplier, low, high, dtype, zero_point, _row(e, count)
    ),
    bounds=lambda count, accumulator, multiplier, low, high, dtype, zero_point=0: quantization.real_range(
        accumulator, multiplier, low, high, dtype, zero_point
    ),
    counts=quantization.requantize_real,
)
def requantize_real_counted(
    accumulator: Tensor, count: int, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> Tensor:
    """Compute `requantize_real` with the table's multiplier of this number of elements, float32."""
    return quantization.requantize_real(accumulator, multiplier[count], low, high, dtype, zero_point)


# ---- resizing --------------------------------------------------------------------------------------------------------
Step = Sequence[int] | None
FRACTION_BITS = 8  # of a position's fraction that weigh, where positions are stepped through


def fits(factor: float | None) -> bool:
    """Return whether positions for this factor are computed within 64 bits."""
    return max(_step(factor) or [0]) < 2**20


def _step(factor: float | None) -> Step:
    return None if factor is None else (1 / Fraction(factor)).as_integer_ratio()


def _scaled(length: Any, factor: float | None) -> Any:
    """Return a length times a factor, rounded down; exact, since `fits` admits quotients by small powers of two alone."""
    p, q = _step(factor) or (1, 1)
    return length * q // p


def _sizes(lengths: Sequence[int], sizes: list[int | None], factors: list[float | None]) -> list[int]:
    rows = zip(lengths, sizes, factors, strict=True)
    return [_scaled(length, factor) if size is None else size for length, size, factor in rows]


def _onnx_sizes(e: Emitter, input: str, sizes: list[Any], factors: list[float | None]) -> tuple[list["_Ints"], list["_Ints"]]:
    """Return the lengths of the last dimensions, and the new sizes."""
    shape, lengths, wanted = e.node("Shape", input), [], []
    for dim, (size, factor) in enumerate(zip(sizes, factors, strict=True)):
        lengths.append(_Ints(e, e.node("Gather", shape, e.constant(dim - len(sizes), torch.int64), axis=0)))
        wanted.append(_scaled(lengths[-1], factor) if size is None else ints(e, size))
    return lengths, wanted


class _Ints:
    """Arithmetic on int64 scalars and vectors as ONNX operators, with Python's, which do the same to ints and tensors."""

    def __init__(self, e: Emitter, name: str) -> None:
        self.e, self.name = e, name

    def _with(self, operator: str, other: Any, swapped: bool = False) -> "_Ints":
        names = (self.name, ints(self.e, other).name)
        return _Ints(self.e, self.e.node(operator, *(names[::-1] if swapped else names)))

    __add__, __mul__, __sub__ = partialmethod(_with, "Add"), partialmethod(_with, "Mul"), partialmethod(_with, "Sub")
    __rsub__ = partialmethod(_with, "Sub", swapped=True)
    __floordiv__, __mod__ = partialmethod(_with, "Div"), partialmethod(_with, "Mod")  # of numbers that are not negative
    clamp_min, clamp_max = partialmethod(_with, "Max"), partialmethod(_with, "Min")

    def chosen(self, condition: str, other: Any) -> "_Ints":
        """Return these numbers where the condition holds, else the others."""
        return _Ints(self.e, self.e.node("Where", condition, self.name, ints(self.e, other).name))


def _at_least(value: Any, limit: int) -> Any:
    return max(value, limit) if isinstance(value, int) else value.clamp_min(limit)


def _at_most(value: Any, limit: Any) -> Any:
    return min(value, limit) if isinstance(value, int) else value.clamp_max(limit)


def ints(e: Emitter, value: Any) -> _Ints:
    """Return a number, or the name of one, as an int64 scalar of ONNX."""
    if isinstance(value, _Ints):
        return value
    return _Ints(e, value if isinstance(value, str) else e.constant(value, torch.int64))


def _neighbours(outputs: Any, length: Any, size: Any, step: Step, align_corners: bool, bits: int, places: int) -> tuple[Any, Any]:
    """Return for every output the index of its first neighbour, and the weight of the second in units of 2^-bits.

    With `places`, positions are stepped through in units of 2^-places. See ARITHMETIC.md, section 9.
    """
    p, q = (length, size) if step is None else step
    if align_corners:
        p, q = length - 1, _at_least(size - 1, 1)
    last = length - 1
    if places:
        stride = p * 2**places // q
        start = 0 if align_corners else (stride + 2**places) // 2 - 2**places
        place = _at_most(_at_least(outputs * stride + start, 0), last * 2**places)
        first, second = place // 2**places, place % 2**places // 2 ** (places - bits)
        return first, second * _at_most(last - first, 1)
    over = outputs * p * 2 if align_corners else _at_least(outputs * (p * 2) + p - q, 0)
    below = q * 2
    first = _at_most(over // below, last)
    rest = over - first * below
    up, down = ((each * 2 ** (bits + 1) + below) // (below * 2) for each in (rest, below - rest))
    half = rest * 2 // (below + 1)  # 1 where the second neighbour is nearer
    return first, (up * (1 - half) + (2**bits - down) * half) * _at_most(last - first, 1)


def _matrix(length: int, size: int, step: Step, align_corners: bool, bits: int, places: int, device: torch.device) -> Tensor:
    first, second = _neighbours(torch.arange(size, device=device), length, size, step, align_corners, bits, places)
    weights = torch.zeros(size, length, dtype=torch.float32, device=device)
    weights.scatter_(1, first.unsqueeze(1), (2**bits - second).float().unsqueeze(1))
    return weights.scatter_add_(1, (first + 1).clamp_max(length - 1).unsqueeze(1), second.float().unsqueeze(1))


def _onnx_matrix(
    e: Emitter, length: _Ints, size: _Ints, width: torch.dtype, step: Step, align_corners: bool, bits: int, places: int
) -> str:
    first, second = _neighbours(_outputs(e, size), length, size, step, align_corners, bits, places)
    columns = e.node("Unsqueeze", _outputs(e, length).name, e.constant([0]))
    zero, parts = e.constant(0, torch.int64), []
    for place, weight in ((first, 2**bits - second), (_at_most(first + 1, length - 1), second)):
        here = e.node("Equal", e.node("Unsqueeze", place.name, e.constant([1])), columns)
        parts.append(e.node("Where", here, e.node("Unsqueeze", weight.name, e.constant([1])), zero))
    return e.node("Cast", e.node("Add", *parts), to=width)


def _outputs(e: Emitter, size: _Ints) -> _Ints:
    return _Ints(e, e.node("Range", e.constant(0, torch.int64), size.name, e.constant(1, torch.int64)))


def _onnx_linear(
    e: Emitter, input: str, sizes: list[Any], factors: list[Any], align_corners: bool, bits: int, places: int, floors: bool, wide: bool
) -> str:
    dtype, width = e.dtype(input), torch.float64 if wide else torch.float32
    axes = zip(*_onnx_sizes(e, input, sizes, factors), map(_step, factors), strict=True)
    matrices = [_onnx_matrix(e, length, size, width, step, align_corners, bits, places) for length, size, step in axes]
    value = e.node("MatMul", e.node("Cast", input, to=width), e.node("Transpose", matrices[-1], perm=[1, 0]))

    def rounded(value: str, count: int) -> str:
        value = e.node("Mul", e.node("Round", value), e.constant(2.0 ** (-bits * count), width))
        return e.node("Floor", value if floors else e.node("Add", value, e.constant(0.5, width)))

    if len(sizes) > 1:
        value = e.node("MatMul", matrices[0], rounded(value, 1) if floors else value)
    return e.node("Cast", rounded(value, 1 if floors else len(sizes)), to=dtype)


def _bounds_linear(input: Value, sizes: list[Any], factors: list[Any], bits: int, wide: bool, **_: Any) -> Range:
    need(input.largest * 2 ** (bits * len(sizes)) < exact_below(wide), "its interpolated sum is not exact")
    need(all(map(fits, factors)), "its positions do not fit in 64 bits")
    return Range(input.low.min(), input.high.max())


def _fixed_linear(lengths: Sequence[int], sizes: list[Any], factors: list[Any], *rest: Any) -> list[tuple[Any, ...]]:
    """Return the calls with constant weights that resize these lengths: the primitive, and its arguments after the operand."""
    align_corners, bits, places, floors, wide = rest
    axes = zip(lengths, _sizes(lengths, sizes, factors), map(_step, factors), strict=True)
    *rows, columns = [_matrix(*axis, align_corners, bits, places, torch.device("cpu")).to(torch.int32) for axis in axes]
    if not floors:
        return [(resize_linear, rows[0] if rows else None, columns, bits, wide)]
    return [(resize_linear, None, columns, bits, False, False), *((resize_linear, each, None, bits, False, False) for each in rows)]


@primitive(_onnx_linear, bounds=_bounds_linear, chip_bits=8, zero_point=ZeroPoint.EQUIVARIANT, fixed=_fixed_linear)
def resize_linear_to(
    input: Tensor, sizes: list[int | None], factors: list[float | None], align_corners: bool, bits: int, places: int, floors: bool,
    wide: bool,
) -> Tensor:  # fmt: skip
    """Compute `resize_linear` of the last one or two dimensions to these sizes, with weights in units of 2^-bits."""
    axes = zip(input.shape[-len(sizes) :], _sizes(input.shape[-len(sizes) :], sizes, factors), map(_step, factors), strict=True)
    *rows, columns = [_matrix(*axis, align_corners, bits, places, input.device) for axis in axes]
    if not floors:
        return resize_linear(input, rows[0] if rows else None, columns, bits, wide)
    value = resize_linear(input, None, columns, bits, False, False)
    return resize_linear(value, rows[0], None, bits, False, False) if rows else value


def _onnx_nearest(e: Emitter, input: str, sizes: list[Any], factors: list[float | None], exact: bool) -> str:
    real = torch.float32
    for axis, (length, count, factor) in enumerate(zip(*_onnx_sizes(e, input, sizes, factors), factors, strict=True)):
        outputs = _outputs(e, count)
        ratio = e.node("Div", *(e.node("Cast", each.name, to=real) for each in (length, count)))
        step = ratio if factor is None else e.constant(1.0 / factor, real)
        position = e.node("Cast", outputs.name, to=real)
        position = e.node("Add", position, e.constant(0.5)) if exact else position
        places = _at_most(_Ints(e, e.node("Cast", e.node("Floor", e.node("Mul", position, step)), to=torch.int64)), length - 1)
        if not exact:
            places = (outputs // 2).chosen(e.node("Equal", count.name, (length * 2).name), places)
            places = outputs.chosen(e.node("Equal", count.name, length.name), places)
        input = e.node("Gather", input, places.name, axis=axis + 2)
    return input


def _fixed_nearest(lengths: Sequence[int], sizes: list[Any], factors: list[Any], exact: bool) -> list[tuple[Any, ...]]:
    """Return the selections that resize these lengths: the primitive, and its arguments after the operand."""
    axes = enumerate(zip(lengths, _sizes(lengths, sizes, factors), factors, strict=True))
    places = (torch.arange(length, device="cpu").reshape(1, 1, -1) for length in lengths)
    return [(select, axis + 2, resize_nearest_to(next(places), [size], [factor], exact).flatten()) for axis, (_, size, factor) in axes]


@primitive(_onnx_nearest, bounds=lambda input, **_: union(input), zero_point=ZeroPoint.EQUIVARIANT, fixed=_fixed_nearest)
def resize_nearest_to(input: Tensor, sizes: list[int | None], factors: list[float | None], exact: bool) -> Tensor:
    """Return the nearest elements along the dimensions after the channels, for these sizes: PyTorch's own choice in float32.

    With `exact`, the choice is that of "nearest-exact". A factor replaces the quotient of size and length.
    """
    for axis, (size, factor) in enumerate(zip(_sizes(input.shape[2:], sizes, factors), factors, strict=True)):
        length, outputs = input.shape[axis + 2], torch.arange(size, device=input.device)
        ratio = torch.tensor([length, size], dtype=torch.float32, device=input.device)
        step = ratio[0] / ratio[1] if factor is None else torch.full_like(ratio[0], 1.0 / factor)
        places = ((outputs.float() + (0.5 if exact else 0.0)) * step).floor().long().clamp_max(length - 1)
        if not exact and size in (length, 2 * length):
            places = outputs // (size // length)
        input = input.index_select(axis + 2, places)
    return input


# Of each primitive with constants, the one that takes tables of them after its first argument and the number.
COUNTED = {record.counts: record.function for record in PRIMITIVES.values() if record.counts is not None}

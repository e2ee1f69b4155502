"""The C forms of primitives, elementwise ones first, with quantization and dequantization at the ends of the integer part."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxquant import primitives
from fxquant.backends.c.program import C_TYPES, VIEWS, Call, Value, Window, form


# ---- Strides for reading tensors of different shapes together over common dimensions, with as few dimensions as possible ----
def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def steps(shape: Sequence[int], to: Sequence[int]) -> list[int]:
    """Return the strides of a tensor of one shape along the dimensions of a larger shape that it is broadcast to."""
    return [0] * (len(to) - len(shape)) + [step if size != 1 else 0 for size, step in zip(shape, strides_of(shape), strict=True)]


def joined(size: Sequence[int], *moved: Sequence[int]) -> tuple[list[int], ...]:
    """Merge adjacent dimensions that all tensors traverse contiguously; return the sizes and each tensor's strides, at least one."""
    dims = [dim for dim in range(len(size)) if size[dim] != 1]
    sizes, strides = [size[dim] for dim in dims], [[step[dim] for dim in dims] for step in moved]
    for dim in reversed(range(len(sizes) - 1)):
        if all(step[dim] == step[dim + 1] * sizes[dim + 1] for step in strides):
            sizes[dim] *= sizes.pop(dim + 1)
            for step in strides:
                step[dim] = step.pop(dim + 1)
    return (sizes or [1], *([*step] or [0] for step in strides))


def around(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Return the products of the sizes before, at and after a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


ROUNDINGS = {"floor": 0, "half_up": 1, primitives.quantization.HALF_STEP: 2, primitives.quantization.NEAREST_HALF_STEP: 3}
ROUNDINGS |= {primitives.quantization.HALF_AWAY: 4, primitives.quantization.HALF_EVEN: 5}


def sum_types(call: Call, input: Value, weight: Value, bias: Value | None) -> list[torch.dtype]:
    """Return the element types of a sum of products; without a bias its place is that of an int32 one."""
    return [input.dtype, weight.dtype, torch.int32 if bias is None else bias.dtype, call.dtype]


def _beside(call: Call, *operands: Value) -> tuple[Any, ...]:
    """Return the first arguments of an elementwise call over several operands: count, rank, sizes, and the strides of each."""
    sizes, *moved = joined(call.shape, *(steps(operand.shape, call.shape) for operand in operands))
    return (call.count, len(sizes), sizes, *moved)


def _in_one_shape(call: Call, *constants: Value) -> list[Value]:
    """Return constants broadcast to their common shape, so that they share one index."""
    if len({value.shape for value in constants}) == 1:
        return list(constants)
    tensors = [value.constant for value in constants]
    assert all(tensor is not None for tensor in tensors)
    return [call.constant(tensor) for tensor in torch.broadcast_tensors(*tensors)]  # type: ignore[no-untyped-call]


@form(primitives.quantization.requantize_fixed)
def _requantize_fixed(call: Call, acc: Value, shift: Value, multiplier: Value, right: Value, *settings: Any) -> None:
    bits, rounding, low, high, _ = settings
    constants, numbers = _in_one_shape(call, shift, multiplier, right), (bits, ROUNDINGS[rounding], low, high)
    call.emit("requantize_fixed", [acc.dtype, call.dtype], *_beside(call, constants[0]), acc, *constants, *numbers)


@form(primitives.elementwise.align_fixed, primitives.elementwise.align_real)
def _align(call: Call, input: Value, *rest: Any, residual: tuple[Value, ...] = ()) -> None:
    """Emit a primitive that reads an accumulator, a residual if it has one, and constants for its channels."""
    constants = _in_one_shape(call, *(each for each in rest if isinstance(each, Value)))
    types = [input.dtype, *(operand.dtype for operand in residual), call.dtype]
    call.emit(call.name, types, *_beside(call, *residual, constants[0]), input, *residual, *constants)


@form(primitives.accumulate.add_residual, primitives.accumulate.add_residual_shifted)
def _add_residual(call: Call, input: Value, residual: Value, *constants: Value) -> None:
    _align(call, input, *constants, residual=(residual,))


@form(primitives.quantization.clamp_accumulator)
def _clamp_accumulator(call: Call, input: Value, low: Value, high: Value) -> None:
    limits = _in_one_shape(call, low, high)
    call.emit("clamp_accumulator", [input.dtype, limits[0].dtype, call.dtype], *_beside(call, limits[0]), input, *limits)


@form(primitives.product.scale_channels, primitives.product.scale_channels_wide)
def _scale_channels(call: Call, input: Value, weight: Value, bias: Value | None, trailing: int) -> None:
    place = _beside(call, Value("", weight.dtype, (weight.count, *[1] * trailing)))
    call.emit("scale_channels", sum_types(call, input, weight, bias), *place, input, weight, bias)


@form(primitives.elementwise.widen, primitives.elementwise.negate, primitives.selection.opposite, primitives.whole.converted)
@form(primitives.elementwise.centre, primitives.elementwise.shift_right, primitives.elementwise.clamp)
@form(primitives.quantization.accumulator_output)
def _each(call: Call, input: Value, *rest: Any) -> None:
    """Emit a primitive that reads a single tensor, and numbers."""
    call.emit(call.name, [input.dtype, call.dtype], call.count, input, *(each for each in rest if isinstance(each, int)))


RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LOGIC = {"and": "a && b", "or": "a || b", "xor": "!a != !b"}
WHOLE = {
    "add": "wrapped((uint64_t)(int64_t)a + (uint64_t)(int64_t)b)",
    "subtract": "wrapped((uint64_t)(int64_t)a - (uint64_t)(int64_t)b)",
    "multiply": "wrapped((uint64_t)(int64_t)a * (uint64_t)(int64_t)b)",
    "larger": "(int64_t)a > (int64_t)b ? (int64_t)a : (int64_t)b",
    "smaller": "(int64_t)a < (int64_t)b ? (int64_t)a : (int64_t)b",
    "and": "(int64_t)a & (int64_t)b",
}
NEGATED, LESS_REMAINDER = "wrapped(0 - (uint64_t)a)", "wrapped((uint64_t)a - (uint64_t)remainder_of(a, b))"
DIVISIONS = {
    "quotient": ("floor(a / b), modulo 2^64. 1 where b is 0.", f"b == -1 ? {NEGATED} : {LESS_REMAINDER} / b"),
    "remainder": ("The remainder of a / b, which has the sign of b. 1 where b is 0.", "remainder_of(a, b)"),
}


def pair(call: Call, name: str, document: str, expression: str, input: Value, other: Value, divides: bool = False) -> None:
    """Emit a function of two tensors, element by element; one that `divides` fails where PyTorch does."""
    words = {"DOCUMENT": document, "EXPRESSION": expression.replace("(Y)", f"({C_TYPES[call.dtype]})")}
    types, template = [input.dtype, other.dtype, *([] if divides else [call.dtype])], "DIVISION" if divides else "PAIR"
    call.emit(name, types, *_beside(call, input, other), input, other, template=template, replaced=words, fails=divides)


def _pair_form(primitive: Any, document: str, expression: str) -> None:
    form(primitive)(lambda call, input, other, *_: pair(call, call.name, document, expression, input, other))


_pair_form(primitives.elementwise.add, "The sum of two accumulators.", "(Y)a + (Y)b")
_pair_form(primitives.elementwise.subtract, "The difference of two accumulators.", "(Y)a - (Y)b")
_pair_form(primitives.elementwise.add_constant, "An accumulator plus an integer constant.", "(Y)a + (Y)b")
_pair_form(primitives.elementwise.multiply, "Section 16: the product of two integers.", "(Y)a * (Y)b")
_pair_form(primitives.product.maximum, "The larger of two integers on one scale.", "a > b ? a : b")
_pair_form(primitives.product.minimum, "The smaller of two integers on one scale.", "a < b ? a : b")


@form(primitives.selection.compare)
def _compare(call: Call, input: Value, other: Value, relation: str) -> None:
    width = torch.promote_types(input.dtype, other.dtype)
    kind = {torch.float32: "float", torch.float64: "double"}.get(width, "int64_t")
    expression = f"({kind})a {RELATIONS[relation]} ({kind})b"
    pair(call, f"compare_{relation}", "Section 16: a comparison; the result is bool.", expression, input, other)


@form(primitives.whole.joined)
def _joined(call: Call, input: Value, other: Value, operation: str) -> None:
    whole = "Section 16: an operation on two int64 tensors, modulo 2^64.", WHOLE.get(operation, "")
    pair(call, f"joined_{operation}", *DIVISIONS.get(operation, whole), input, other, operation in DIVISIONS)


# ---- The C forms of primitives that move elements or index them ------------------------------------------------------
MODES = {"zeros": 0, "border": 1, "reflection": 2}


def _moved(call: Call, input: Value, size: list[int], step: list[int], start: int = 0) -> None:
    """Emit a copy of the elements from `start` on, with these strides along dimensions of these sizes, into a contiguous result."""
    sizes, moved = joined(size, step)
    first = Value(f"{input.text} + {start}", input.dtype, input.shape) if start else input
    call.emit("moved", [input.dtype], call.count, len(sizes), sizes, moved, first)


VIEWS.add(primitives.shape.reshape)


@form(primitives.shape.permute)
def _permute(call: Call, input: Value, dims: list[int]) -> None:
    strides = strides_of(input.shape)
    _moved(call, input, list(call.shape), [strides[dim] for dim in dims])


@form(primitives.shape.crop)
def _crop(call: Call, input: Value, dims: list[int], starts: list[int], stops: list[int], step: list[int]) -> None:
    strides = strides_of(input.shape)
    moved, start = list(strides), 0
    for dim, first, stop, each in zip(dims, starts, stops, step, strict=True):
        dim %= len(input.shape)
        start += slice(first, stop, each).indices(input.shape[dim])[0] * strides[dim]
        moved[dim] = strides[dim] * each
    _moved(call, input, list(call.shape), moved, start if math.prod(call.shape) else 0)


@form(primitives.shape.tile)
def _tile(call: Call, input: Value, repeats: list[int]) -> None:
    inner = [1] * (len(repeats) - len(input.shape)) + list(input.shape)
    size = [number for pair in zip(repeats, inner, strict=True) for number in pair]
    _moved(call, input, size, [number for step in strides_of(inner) for number in (0, step)])


@form(primitives.shape.concatenate)
def _concatenate(call: Call, tensors: list[Value], dim: int) -> None:
    y = call.result()
    outer, whole, inner = around(y.shape, dim)
    start = 0
    for tensor in tensors:
        length = around(tensor.shape, dim)[1] * inner
        part = Value(f"{y.text} + {start}", y.dtype, y.shape) if start else y
        call.emit("concatenate", [y.dtype], outer, length, whole * inner, tensor, into=part)
        start += length


@form(primitives.shape.select, primitives.selection.pick)
def _pick(call: Call, input: Value, dim: int, index: Value) -> None:
    outer, terms, inner = around(input.shape, dim)
    call.emit("pick", [input.dtype, index.dtype], outer, terms, inner, index.count, input, index, fails=True)


def _along(shape: Sequence[int], index: Value, dim: int, *others: Value) -> tuple[Any, ...]:
    """Return the loop sizes and strides of an index tensor, and the strides with which it addresses the other dimensions of `shape`.

    These are count, rank, sizes and strides; then the size of the dimension, and its stride.
    """
    dim %= len(shape)
    strides = strides_of(shape)
    fixed = [0 if d == dim else step for d, step in enumerate(strides)]
    sizes, *moved = joined(index.shape, fixed, *(strides_of(other.shape) if other.shape else [0] * len(index.shape) for other in others))
    return (index.count, len(sizes), sizes, *moved, shape[dim], strides[dim])


@form(primitives.selection.put_along)
def _put_along(call: Call, input: Value, source: Value, dim: int, index: Value, number: bool = False) -> None:
    places = _along(input.shape, index, dim, source)
    call.emit("put_along", [input.dtype, source.dtype, index.dtype], call.count, *places, input, source, index, fails=True)


@form(primitives.selection.extremum_along)
def _extremum_along(call: Call, input: Value, source: Value, dim: int, index: Value, terms: int, largest: bool) -> None:
    places = _along(input.shape, index, dim)
    call.emit("extremum_along", [input.dtype, index.dtype], call.count, *places, largest, input, source, index, fails=True)


@form(primitives.pool.unpool)
def _unpool(call: Call, input: Value, indices: Value, sizes: list[int], outside: int) -> None:
    planes, count = math.prod(input.shape[:2]), math.prod(sizes)
    call.emit("unpool", [input.dtype], planes, math.prod(input.shape[2:]), count, outside, input, indices, fails=True)


@form(primitives.resize.sample)
def _sample(call: Call, input: Value, coordinates: Value, sizes: list[int], *settings: Any) -> None:
    bits, mode, padding, corners, outside, _ = settings
    rank = len(sizes)
    positions = math.prod(coordinates.shape[1:-1])
    numbers = bits, mode == "nearest", MODES[padding], corners, outside
    call.emit("sample", [input.dtype, coordinates.dtype], *input.shape[:2], rank, list(sizes), positions, *numbers, input, coordinates)


# ---- The C forms of sums of products, of window operators, and of reductions -----------------------------------------
def _window(call: Call, input: Value, kernel: list[int], stride: list[int], before: list[int], dilation: list[int] | None = None) -> Window:
    """Return the window over the last dimensions; missing dimensions have size 1."""
    rank = len(kernel)

    def row(values: Sequence[int], missing: int = 1) -> list[int]:
        return [*[missing] * (3 - rank), *values]

    sides = row(input.shape[-rank:]), row(call.shape[-rank:])
    return Window(*sides, row(kernel), row(stride), row(before, 0), row(dilation or [1] * rank))


def _planes(input: Value, rank: int) -> int:
    return math.prod(input.shape[: len(input.shape) - rank])


@form(primitives.accumulate.convolution, primitives.accumulate.convolution_wide)
@form(primitives.accumulate.transposed_convolution, primitives.accumulate.transposed_convolution_wide)
def _convolution(call: Call, input: Value, weight: Value, bias: Value | None, *settings: Any) -> None:
    name, kernel = call.name.removesuffix("_wide"), list(weight.shape[2:])
    stride, padding, *rest = settings
    begin = 1 if name == "transposed_convolution" else 0  # the output's own padding, which is in its shape
    dilation, groups = rest[begin : begin + 2]  # a cut after these is a method of the float kernels, not another sum
    window = _window(call, input, kernel, stride, padding[: len(kernel)], dilation)
    sizes = _planes(input, len(kernel) + 1), input.shape[-len(kernel) - 1], call.shape[-len(kernel) - 1], groups
    call.emit(name, sum_types(call, input, weight, bias), *sizes, window, input, weight, bias)


@form(primitives.runtime_scales.dynamic_linear)
def _dynamic_linear(call: Call, input: Value, weight: Value, scale: Value, bias: Value | None) -> None:
    columns, terms = weight.shape
    step = 1 if scale.count > 1 else 0
    call.emit("dynamic_linear", [weight.dtype], math.prod(input.shape[:-1]), terms, columns, input, weight, scale, step, bias)


@form(primitives.product.matrix_product, primitives.product.matrix_product_wide)
def _matrix_product(call: Call, input: Value, other: Value) -> None:
    (*_, rows, terms), (*batch, _, columns) = input.shape, call.shape
    items = ((operand, math.prod(operand.shape[-2:])) for operand in (input, other))
    sizes, *strides = joined(batch, *([step * each for step in steps(operand.shape[:-2], batch)] for operand, each in items))
    numbers = math.prod(batch), len(sizes), sizes, *strides, rows, terms, columns
    call.emit("matrix_product", [input.dtype, other.dtype, call.dtype], *numbers, input, other)


@form(primitives.resize.transform)
def _transform(call: Call, input: Value, matrix: Value, dim: int, rank: int, wide: bool) -> None:
    outer, terms, inner = around(input.shape, dim)
    call.emit("transform", [input.dtype, matrix.dtype, call.dtype], outer, terms, matrix.shape[0], inner, input, matrix)


@form(primitives.resize.resize_linear)
def _resize_linear(
    call: Call, input: Value, rows: Value | None, columns: Value | None, bits: int, wide: bool, nearest: bool = True
) -> None:
    weights = [matrix for matrix in (rows, columns) if matrix is not None]
    sizes, numbers = (_planes(input, 2), *input.shape[-2:], *call.shape[-2:]), (bits * len(weights), nearest)
    call.emit("resize_linear", [input.dtype, weights[0].dtype, call.dtype], *sizes, input, rows, columns, *numbers)


@form(primitives.pool.pool_indices)
def _pool_indices(call: Call, input: Value, kernel: list[int], stride: list[int], begin: list[int], *rest: Any) -> None:
    _, dilation, _, _, places = rest if len(rest) == 5 else (*rest, None)
    window = _window(call, input, kernel, stride, begin, dilation)
    call.emit("pool_indices", [input.dtype], _planes(input, len(kernel)), window, input, places)


@form(primitives.pool.max_pool, primitives.pool.sum_pool)
def _pool(call: Call, input: Value, kernel: list[int], stride: list[int], begin: list[int], _: list[int], *rest: Any) -> None:
    window = _window(call, input, kernel, stride, begin, rest[0] if call.name == "max_pool" else None)
    call.emit(call.name, [input.dtype, call.dtype], _planes(input, len(kernel)), window, input)


REDUCED = {"sum": "wrapped((uint64_t)total + (uint64_t)(int64_t)q)", "largest": "k == 0 || q > total ? q : total"}


def _reduce(call: Call, name: str, document: str, expression: str, input: Value, dim: list[int], start: int = 0) -> None:
    rank = len(input.shape)
    gone = {d % rank for d in dim}
    along, others, strides = sorted(gone), [d for d in range(rank) if d not in gone], strides_of(input.shape)
    arguments: list[Any] = []
    for dims in (others, along):
        sizes, moved = joined([input.shape[d] for d in dims], [strides[d] for d in dims])
        arguments += [math.prod(input.shape[d] for d in dims), len(sizes), sizes, moved]
    words = {"DOCUMENT": document, "EXPRESSION": expression, "START": str(start)}
    call.emit(name, [input.dtype, call.dtype], *arguments, input, template="REDUCE", replaced=words)


def _reduce_form(primitive: Any, document: str, expression: str) -> None:
    """Declare the form of a reduction that C computes by this expression of `total` and `q`."""
    form(primitive)(lambda call, input, dim, *_: _reduce(call, call.name, document, expression, input, dim))


_reduce_form(primitives.pool.sum, "Section 15: Σ q over dimensions.", "total + q")
_reduce_form(primitives.selection.least, "The smallest element along dimensions.", "k == 0 || q < total ? q : total")
_reduce_form(primitives.selection.greatest, "The largest element along dimensions.", "k == 0 || q > total ? q : total")
_reduce_form(primitives.selection.count, "How many elements hold.", "total + (q != 0)")


@form(primitives.selection.truth)
def _truth(call: Call, input: Value, dim: list[int], keepdim: bool, every: bool) -> None:
    which, joins = ("every", "&&") if every else ("any", "||")
    _reduce(call, f"truth_{which}", f"Whether {which} element holds.", f"total {joins} q", input, dim, int(every))


# ---- The C forms that are one call -----------------------------------------------------------------------------------
form(primitives.quantization.quantize)(
    lambda call, input, scale, low, high, dtype, zero_point=0: call.emit(
        "quantize", [input.dtype, call.dtype], call.count, input, float(scale.constant), low, high, zero_point
    )
)
form(primitives.whole.truncated)(
    lambda call, input, scale, margin: call.emit(
        "truncated", [input.dtype], call.count, input, float(scale.constant), float(margin.constant)
    )
)
form(primitives.quantization.dequantize)(
    lambda call, input, scale, dtype=torch.float32, zero_point=0: call.emit(
        "dequantize", [input.dtype, call.dtype], *_beside(call, scale), input, scale, zero_point
    )
)
form(primitives.quantization.requantize_real)(
    lambda call, acc, multiplier, low, high, dtype, zero_point=0: call.emit(
        "requantize_real", [acc.dtype, call.dtype], *_beside(call, multiplier), acc, multiplier, low, high, zero_point
    )
)
form(primitives.elementwise.lookup)(
    lambda call, input, table, first=None: call.emit(
        "lookup", [input.dtype, call.dtype], call.count, input, table, -(table.count // 2) if first is None else first
    )
)
form(primitives.product.rectify)(
    lambda call, input, positive, negative, *_: call.emit(
        "rectify", [input.dtype, negative.dtype, call.dtype], *_beside(call, negative), input, positive, negative
    )
)
form(primitives.selection.logic)(
    lambda call, input, other, operation: pair(
        call, f"logic_{operation}", "A logical operation on two bool tensors.", LOGIC[operation], input, other
    )
)
form(primitives.shape.reshape)(lambda call, input, *_: Value(input.text, input.dtype, call.shape))
form(primitives.shape.expand)(lambda call, input, *_: _moved(call, input, list(call.shape), steps(input.shape, call.shape)))
form(primitives.shape.pad)(
    lambda call, input, begin, end, value: call.emit(
        "pad", [input.dtype], call.count, len(call.shape), list(call.shape), list(begin), list(input.shape), value, input
    )
)
form(primitives.shape.rows)(lambda call, table, indices: _pick(call, table, 0, indices))
form(primitives.selection.take_along)(
    lambda call, input, dim, index: call.emit(
        "take_along", [input.dtype, index.dtype], *_along(input.shape, index, dim), input, index, fails=True
    )
)
form(primitives.selection.sum_along)(
    lambda call, source, dim, index, *_: call.emit(
        "sum_along", [source.dtype, index.dtype, call.dtype], call.count, *_along(call.shape, index, dim), source, index, fails=True
    )
)
form(primitives.selection.arg_extremum)(
    lambda call, input, dim, keepdim, largest: call.emit("arg_extremum", [input.dtype], *around(input.shape, dim), largest, input)
)
form(primitives.selection.ranking, primitives.whole.running)(
    lambda call, input, dim, *numbers: call.emit(call.name, [input.dtype], *around(input.shape, dim), *numbers, input)
)
form(primitives.whole.reduced)(
    lambda call, input, dim, keepdim, operation: _reduce(
        call, f"reduced_{operation}", "A reduction of int64 tensors along dimensions.", REDUCED[operation], input, dim
    )
)
form(primitives.accumulate.linear, primitives.accumulate.linear_wide)(
    lambda call, input, weight, bias: call.emit(
        "linear", sum_types(call, input, weight, bias), math.prod(input.shape[:-1]), *reversed(weight.shape), input, weight, bias
    )
)
form(primitives.selection.choose, primitives.whole.chosen)(
    lambda call, input, other, condition: call.emit(
        "choose", [input.dtype, other.dtype, condition.dtype, call.dtype], *_beside(call, input, other, condition), input, other, condition
    )
)

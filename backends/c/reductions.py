"""The C forms of sums of products, of window operators, and of reductions over whole dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxquant.backends.c.elementwise_forms import around, joined, steps, strides_of, sum_types
from fxquant.backends.c.program import Call, Value, Window, form
from fxquant.primitives import accumulate, pool, position, product, resize, runtime_scales, scatter, selection, transposed, whole


def _window(call: Call, input: Value, kernel: list[int], stride: list[int], before: list[int], dilation: list[int] | None = None) -> Window:
    """Return the window over the last dimensions; missing dimensions have size 1."""
    rank = len(kernel)

    def row(values: Sequence[int], missing: int = 1) -> list[int]:
        return [*[missing] * (3 - rank), *values]

    sides = row(input.shape[-rank:]), row(call.shape[-rank:])
    return Window(*sides, row(kernel), row(stride), row(before, 0), row(dilation or [1] * rank))


def _planes(input: Value, rank: int) -> int:
    return math.prod(input.shape[: len(input.shape) - rank])


@form(accumulate.convolution, accumulate.convolution_wide)
def _convolution(call: Call, input: Value, weight: Value, bias: Value | None, *settings: Any) -> None:
    stride, padding, dilation, groups, *_ = settings  # the cut is a method of the float kernels, not another sum
    kernel = list(weight.shape[2:])
    window = _window(call, input, kernel, stride, padding, dilation)
    sizes = _planes(input, len(kernel) + 1), input.shape[-len(kernel) - 1], weight.shape[0], groups
    call.emit("convolution", sum_types(call, input, weight, bias), *sizes, window, input, weight, bias)


@form(transposed.transposed_convolution, transposed.transposed_convolution_wide)
def _transposed_convolution(call: Call, input: Value, weight: Value, bias: Value | None, *settings: Any) -> None:
    stride, padding, _, dilation, groups, *_ = settings  # the output's own padding is in its shape
    kernel = list(weight.shape[2:])
    window = _window(call, input, kernel, stride, padding, dilation)
    sizes = _planes(input, len(kernel) + 1), weight.shape[0], weight.shape[1] * groups, groups
    call.emit("transposed_convolution", sum_types(call, input, weight, bias), *sizes, window, input, weight, bias)


@form(accumulate.linear, accumulate.linear_wide)
def _linear(call: Call, input: Value, weight: Value, bias: Value | None) -> None:
    columns, terms = weight.shape
    call.emit("linear", sum_types(call, input, weight, bias), math.prod(input.shape[:-1]), terms, columns, input, weight, bias)


@form(runtime_scales.dynamic_linear)
def _dynamic_linear(call: Call, input: Value, weight: Value, scale: Value, bias: Value | None) -> None:
    columns, terms = weight.shape
    step = 1 if scale.count > 1 else 0
    call.emit("dynamic_linear", [weight.dtype], math.prod(input.shape[:-1]), terms, columns, input, weight, scale, step, bias)


@form(product.matrix_product, product.matrix_product_wide)
def _matrix_product(call: Call, input: Value, other: Value) -> None:
    (*_, rows, terms), (*batch, _, columns) = input.shape, call.shape
    items = ((operand, math.prod(operand.shape[-2:])) for operand in (input, other))
    sizes, *strides = joined(batch, *([step * each for step in steps(operand.shape[:-2], batch)] for operand, each in items))
    numbers = math.prod(batch), len(sizes), sizes, *strides, rows, terms, columns
    call.emit("matrix_product", [input.dtype, other.dtype, call.dtype], *numbers, input, other)


@form(resize.transform)
def _transform(call: Call, input: Value, matrix: Value, dim: int, rank: int, wide: bool) -> None:
    outer, terms, inner = around(input.shape, dim)
    call.emit("transform", [input.dtype, matrix.dtype, call.dtype], outer, terms, matrix.shape[0], inner, input, matrix)


@form(resize.resize_linear)
def _resize_linear(
    call: Call, input: Value, rows: Value | None, columns: Value | None, bits: int, wide: bool, nearest: bool = True
) -> None:
    weights = [matrix for matrix in (rows, columns) if matrix is not None]
    sizes, numbers = (_planes(input, 2), *input.shape[-2:], *call.shape[-2:]), (bits * len(weights), nearest)
    call.emit("resize_linear", [input.dtype, weights[0].dtype, call.dtype], *sizes, input, rows, columns, *numbers)


@form(pool.max_pool)
def _max_pool(
    call: Call, input: Value, kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int]
) -> None:
    window = _window(call, input, kernel, stride, begin, dilation)
    call.emit("max_pool", [input.dtype, call.dtype], _planes(input, len(kernel)), window, input)


@form(pool.sum_pool)
def _sum_pool(call: Call, input: Value, kernel: list[int], stride: list[int], begin: list[int], end: list[int], wide: bool = False) -> None:
    call.emit("sum_pool", [input.dtype, call.dtype], _planes(input, len(kernel)), _window(call, input, kernel, stride, begin), input)


@form(position.pool_indices)
def _pool_indices(call: Call, input: Value, kernel: list[int], stride: list[int], begin: list[int], *rest: Any) -> None:
    _, dilation, _, _, places = rest if len(rest) == 5 else (*rest, None)
    window = _window(call, input, kernel, stride, begin, dilation)
    call.emit("pool_indices", [input.dtype], _planes(input, len(kernel)), window, input, places)


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
    form(primitive)(lambda call, input, dim, *_: _reduce(call, primitive.__name__, document, expression, input, dim))


_reduce_form(pool.sum, "Section 15: Σ q over dimensions.", "total + q")
_reduce_form(selection.least, "The smallest element along dimensions.", "k == 0 || q < total ? q : total")
_reduce_form(scatter.count, "How many elements hold.", "total + (q != 0)")


@form(selection.truth)
def _truth(call: Call, input: Value, dim: list[int], keepdim: bool, every: bool) -> None:
    if every:
        _reduce(call, "truth_every", "Whether every element holds.", "total && q", input, dim, 1)
    else:
        _reduce(call, "truth_any", "Whether any element holds.", "total || q", input, dim)


@form(whole.reduced)
def _reduced(call: Call, input: Value, dim: list[int], keepdim: bool, operation: str) -> None:
    _reduce(call, f"reduced_{operation}", "Of whole numbers along dimensions.", REDUCED[operation], input, dim)


@form(whole.running)
def _running(call: Call, input: Value, dim: int) -> None:
    call.emit("running", [input.dtype], *around(input.shape, dim), input)

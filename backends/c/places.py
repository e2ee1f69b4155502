"""The C forms of primitives that move elements or index them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxquant.backends.c.elementwise_forms import around, joined, steps, strides_of
from fxquant.backends.c.program import VIEWS, Call, Value, form
from fxquant.primitives import position, sampling, scatter, selection, shape

MODES = {"zeros": 0, "border": 1, "reflection": 2}


def _moved(call: Call, input: Value, size: list[int], step: list[int], start: int = 0) -> None:
    """Emit a copy of the elements from `start` on, with these strides along dimensions of these sizes, into a contiguous result."""
    sizes, moved = joined(size, step)
    first = Value(f"{input.text} + {start}", input.dtype, input.shape) if start else input
    call.emit("moved", [input.dtype], call.count, len(sizes), sizes, moved, first)


VIEWS.add(shape.reshape)


@form(shape.reshape)
def _reshape(call: Call, input: Value, shape: list[int]) -> Value:
    return Value(input.text, input.dtype, call.shape)


@form(shape.permute)
def _permute(call: Call, input: Value, dims: list[int]) -> None:
    strides = strides_of(input.shape)
    _moved(call, input, list(call.shape), [strides[dim] for dim in dims])


@form(shape.crop)
def _crop(call: Call, input: Value, dims: list[int], starts: list[int], stops: list[int], step: list[int]) -> None:
    strides = strides_of(input.shape)
    moved, start = list(strides), 0
    for dim, first, stop, each in zip(dims, starts, stops, step, strict=True):
        dim %= len(input.shape)
        start += slice(first, stop, each).indices(input.shape[dim])[0] * strides[dim]
        moved[dim] = strides[dim] * each
    _moved(call, input, list(call.shape), moved, start if math.prod(call.shape) else 0)


@form(shape.expand)
def _expand(call: Call, input: Value, sizes: list[int]) -> None:
    _moved(call, input, list(call.shape), steps(input.shape, call.shape))


@form(shape.tile)
def _tile(call: Call, input: Value, repeats: list[int]) -> None:
    inner = [1] * (len(repeats) - len(input.shape)) + list(input.shape)
    size = [number for pair in zip(repeats, inner, strict=True) for number in pair]
    _moved(call, input, size, [number for step in strides_of(inner) for number in (0, step)])


@form(shape.concatenate)
def _concatenate(call: Call, tensors: list[Value], dim: int) -> None:
    y = call.result()
    outer, whole, inner = around(y.shape, dim)
    start = 0
    for tensor in tensors:
        length = around(tensor.shape, dim)[1] * inner
        part = Value(f"{y.text} + {start}", y.dtype, y.shape) if start else y
        call.emit("concatenate", [y.dtype], outer, length, whole * inner, tensor, into=part)
        start += length


@form(shape.pad)
def _pad(call: Call, input: Value, begin: list[int], end: list[int], value: int) -> None:
    call.emit("pad", [input.dtype], call.count, len(call.shape), list(call.shape), list(begin), list(input.shape), value, input)


def _pick(call: Call, input: Value, dim: int, index: Value) -> None:
    outer, terms, inner = around(input.shape, dim)
    call.emit("pick", [input.dtype, index.dtype], outer, terms, inner, index.count, input, index, fails=True)


form(shape.select, selection.pick)(_pick)


@form(shape.rows)
def _rows(call: Call, table: Value, indices: Value) -> None:
    _pick(call, table, 0, indices)


def _along(shape: Sequence[int], index: Value, dim: int, *others: Value) -> tuple[Any, ...]:
    """Return the loop sizes and strides of an index tensor, and the strides with which it addresses the other dimensions of `shape`.

    These are count, rank, sizes and strides; then the size of the dimension, and its stride.
    """
    dim %= len(shape)
    strides = strides_of(shape)
    fixed = [0 if d == dim else step for d, step in enumerate(strides)]
    sizes, *moved = joined(index.shape, fixed, *(strides_of(other.shape) if other.shape else [0] * len(index.shape) for other in others))
    return (index.count, len(sizes), sizes, *moved, shape[dim], strides[dim])


@form(selection.take_along)
def _take_along(call: Call, input: Value, dim: int, index: Value) -> None:
    call.emit("take_along", [input.dtype, index.dtype], *_along(input.shape, index, dim), input, index, fails=True)


@form(selection.put_along)
def _put_along(call: Call, input: Value, source: Value, dim: int, index: Value, number: bool = False) -> None:
    places = _along(input.shape, index, dim, source)
    call.emit("put_along", [input.dtype, source.dtype, index.dtype], call.count, *places, input, source, index, fails=True)


@form(scatter.sum_along)
def _sum_along(call: Call, source: Value, dim: int, index: Value, size: int, wide: bool) -> None:
    call.emit("sum_along", [source.dtype, index.dtype, call.dtype], call.count, *_along(call.shape, index, dim), source, index, fails=True)


@form(scatter.extremum_along)
def _extremum_along(call: Call, input: Value, source: Value, dim: int, index: Value, terms: int, largest: bool) -> None:
    places = _along(input.shape, index, dim)
    call.emit("extremum_along", [input.dtype, index.dtype], call.count, *places, largest, input, source, index, fails=True)


@form(position.unpool)
def _unpool(call: Call, input: Value, indices: Value, sizes: list[int], outside: int) -> None:
    planes, count = math.prod(input.shape[:2]), math.prod(sizes)
    call.emit("unpool", [input.dtype], planes, math.prod(input.shape[2:]), count, outside, input, indices, fails=True)


@form(selection.arg_extremum)
def _arg_extremum(call: Call, input: Value, dim: int, keepdim: bool, largest: bool) -> None:
    call.emit("arg_extremum", [input.dtype], *around(input.shape, dim), largest, input)


@form(selection.ranking)
def _ranking(call: Call, input: Value, dim: int, count: int, largest: bool) -> None:
    call.emit("ranking", [input.dtype], *around(input.shape, dim), count, largest, input)


@form(sampling.sample)
def _sample(call: Call, input: Value, coordinates: Value, sizes: list[int], *settings: Any) -> None:
    bits, mode, padding, corners, outside, _ = settings
    rank = len(sizes)
    positions = math.prod(coordinates.shape[1:-1])
    numbers = bits, mode == "nearest", MODES[padding], corners, outside
    call.emit("sample", [input.dtype, coordinates.dtype], *input.shape[:2], rank, list(sizes), positions, *numbers, input, coordinates)

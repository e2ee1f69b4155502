"""Primitives that move or copy integers without arithmetic, for any integer dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.primitives.record import Emitter, Range, Role, Value, ZeroPoint, constant_of, need, primitive, union


def named(e: Emitter, value: str | Tensor) -> str:
    """Return the name of an operand that may be a constant."""
    return value if isinstance(value, str) else e.constant(value)


def one_node(operator: str, **attributes: Any) -> Callable[..., str]:
    """Return the ONNX form that is one standard operator of all operands."""
    return lambda e, *operands: e.node(operator, *(named(e, operand) for operand in operands), **attributes)


def _sizes(e: Emitter, sizes: list[int | str]) -> str:
    """Return the name of an int64 tensor of these sizes; a computed one, which varies, is a name itself."""
    if all(isinstance(size, int) for size in sizes):
        return e.constant(list(sizes), torch.int64)  # type: ignore[arg-type]
    one = e.constant([1])
    return e.node("Concat", *(e.node("Reshape", size, one) if isinstance(size, str) else e.constant([size]) for size in sizes), axis=0)


_MOVEMENT: dict[str, Any] = {"role": Role.MOVEMENT, "zero_point": ZeroPoint.EQUIVARIANT}
_MOVED = {"bounds": lambda input, *_, **__: Range(input.low.min(), input.high.max(), input.exact), **_MOVEMENT}


@primitive(lambda e, input, shape: e.node("Reshape", named(e, input), _sizes(e, shape)), view=True, **_MOVED)
def reshape(input: Tensor, shape: list[int]) -> Tensor:
    """Return the elements in another shape; one size may be -1."""
    return input.reshape(shape)


@primitive(lambda e, input, dims: e.node("Transpose", input, perm=list(dims)), view=True, **_MOVED)
def permute(input: Tensor, dims: list[int]) -> Tensor:
    """Return the elements with the dimensions in another order."""
    return input.permute(dims)


@primitive(
    lambda e, tensors, dim: e.node("Concat", *(named(e, tensor) for tensor in tensors), axis=dim),
    bounds=lambda tensors, dim: union(*tensors),
    layout="same",
    **_MOVEMENT,
)
def concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate the tensors along `dim`."""
    return torch.cat(tensors, dim)


UNBOUNDED = 2**63 - 1  # a stop beyond every size


def _onnx_crop(e: Emitter, input: str, dims: list[int], starts: list[int], stops: list[int], steps: list[int]) -> str:
    return e.node("Slice", input, *(_sizes(e, list(values)) for values in (starts, stops, dims, steps)))


@primitive(_onnx_crop, layout="same", **_MOVED)
def crop(input: Tensor, dims: list[int], starts: list[int], stops: list[int], steps: list[int]) -> Tensor:
    """Return every `steps`-th element from `starts` up to, not including, `stops` along each of `dims`.

    Negative bounds count from the end.
    """
    index = [slice(None)] * input.dim()
    for dim, start, stop, step in zip(dims, starts, stops, steps, strict=True):
        index[dim] = slice(start, stop, step)
    return input[tuple(index)]


def _bounds_select(input: Value, dim: int, indices: Value) -> Range:
    chosen = constant_of(indices, "indices")
    need((chosen >= 0).all() and (chosen < input.size(dim)).all(), "it indexes elements that do not exist")
    return union(input)


@primitive(
    lambda e, input, dim, indices: e.node("Gather", input, e.constant(indices), axis=dim), bounds=_bounds_select, layout="same", **_MOVEMENT
)
def select(input: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return the elements at these indices along `dim`, in this order."""
    return input.index_select(dim, indices)


@primitive(one_node("Gather", axis=0), bounds=lambda table, indices: union(table), zero_point=ZeroPoint.EQUIVARIANT)
def rows(table: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of the table at the indices, integers from 0 in a tensor of any shape."""
    return F.embedding(indices, table)


@primitive(lambda e, input, sizes: e.node("Expand", named(e, input), _sizes(e, [1 if size == -1 else size for size in sizes])), **_MOVED)
def expand(input: Tensor, sizes: list[int]) -> Tensor:
    """Repeat dimensions of size 1 to these sizes, and add new ones in front; -1 keeps a size."""
    return input.expand(sizes)


@primitive(lambda e, input, repeats: e.node("Tile", named(e, input), _sizes(e, repeats)), **_MOVED)
def tile(input: Tensor, repeats: list[int]) -> Tensor:
    """Repeat the tensor this many times along each of its dimensions."""
    return input.repeat(repeats)


def _onnx_pad(e: Emitter, input: str, begin: list[int], end: list[int], value: int) -> str:
    dtype = e.dtype(input)
    pads = e.constant([*begin, *end], torch.int64)
    if dtype in (torch.int8, torch.uint8):
        return e.node("Pad", input, pads, e.constant(value, dtype))
    # onnxruntime pads no int16.
    padded = e.node("Pad", e.node("Cast", input, to=torch.float32), pads, e.constant(float(value)))
    return e.node("Cast", padded, to=dtype)


def _bounds_pad(input: Value, begin: list[int], end: list[int], value: int) -> Range:
    return Range(input.low.min().clamp_max(value), input.high.max().clamp_min(value))


@primitive(_onnx_pad, bounds=_bounds_pad, zero_point=ZeroPoint.EQUIVARIANT, shifted=("value",), layout="same")
def pad(input: Tensor, begin: list[int], end: list[int], value: int) -> Tensor:
    """Pad each dimension with `begin` elements of `value` before and `end` after it."""
    return F.pad(input, [size for pair in reversed(list(zip(begin, end, strict=True))) for size in pair], value=value)

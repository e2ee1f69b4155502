"""Primitives between the steps of a loop and the tensors around it; see `ir.loops`. A frame of None has no further steps."""

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.loops import Frame
from fxquant.primitives.record import Range, Role, Value, ZeroPoint, primitive, union


def carried_bounds(input: Value, **_: Any) -> Range:
    """Return the range of the dtype, whatever the first step gives: the others may carry anything that it holds."""
    dtype = torch.iinfo(input.fact.dtype)
    return Range(dtype.min, dtype.max)


_MOVED: dict[str, Any] = {"bounds": lambda input, **_: union(input), "role": Role.LOOP, "zero_point": ZeroPoint.EQUIVARIANT}
_CARRIED: dict[str, Any] = {**_MOVED, "bounds": carried_bounds}
_LEAVING: dict[str, Any] = {**_CARRIED, "role": Role.LEAVING}


@primitive(lambda e, input, frame, dim, backwards: e.node("Gather", input, frame.place(e, backwards), axis=dim), **_MOVED)
def item(input: Tensor, frame: Frame | None, dim: int, backwards: bool) -> Tensor:
    """Return what a sequence has at this step along `dim`, without that dimension; `backwards`, from the end."""
    step = 0 if frame is None else frame.step
    return input.select(dim, input.shape[dim] - 1 - step if backwards else step)


@primitive(lambda e, input, frame, index: frame.begun(index, input), **_CARRIED)
def state(input: Tensor, frame: Frame | None, index: int) -> Tensor:
    """Return what the step before carried at position `index`; at the second step `input`."""
    carried = None if frame is None else frame.carried.get(index)
    return carried[-1] if carried else input


@fx.node.has_side_effect
@primitive(lambda e, input, frame, index: frame.carry(input), **_MOVED)
def carry(input: Tensor, frame: Frame | None, index: int) -> Tensor:
    """Carry a tensor on to the next step, at position `index`, and return it."""
    if frame is not None:
        frame.carried.setdefault(index, []).append(input)
    return input


@primitive(lambda e, input, frame, index: frame.last(e, index), **_LEAVING)
def last(input: Tensor, frame: Frame | None, index: int) -> Tensor:
    """Return what the last step carried at position `index`; without further steps `input`, of the first."""
    return state(input, frame, index)


@primitive(lambda e, input, frame, index, dim, count, backwards: frame.stacked(e, index, dim, backwards), **_LEAVING)
def stack(input: Tensor, frame: Frame | None, index: int, dim: int, count: int, backwards: bool) -> Tensor:
    """Return what all `count` steps carried at position `index`, the first of which gave `input`, stacked along `dim`."""
    if frame is None:
        return input.unsqueeze(dim).expand(*input.shape[:dim], count, *input.shape[dim:])
    steps = [input, *frame.carried.get(index, [])]
    return torch.stack(steps[::-1] if backwards else steps, dim)

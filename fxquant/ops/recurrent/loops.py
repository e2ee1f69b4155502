"""The operators between the steps of a loop and the tensors around it; see `ir.loops`. A recurrent layer is written in them."""

from typing import Any

from torch import fx

from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.declare import lowered
from fxquant.ops.core.record import Same
from fxquant.primitives import loop

_MARK: dict[str, Any] = {"by_name": False, "demand": Same(), "moves": True}


@lowered(function=lambda input, frame, dim, backwards: loop.item(input, frame, dim, backwards), **_MARK)
def loop_item(lowering: Lowering, input: Quantized, frame: Any, dim: int, backwards: bool) -> Quantized:
    """Return the part of a sequence at this step, without the dimension of the steps."""
    return input.with_value(lowering.call(loop.item, input.value, frame, dim, backwards))


@lowered(function=lambda input, frame, index: loop.state(input, frame, index), **_MARK)
def loop_state(lowering: Lowering, input: Quantized, frame: Any, index: int) -> Quantized:
    """Return the state that the step before carried; at the second step `input`."""
    return input.with_value(lowering.call(loop.state, input.value, frame, index))


@lowered(function=lambda input, frame, index: loop.carry(input, frame, index), **_MARK)
def loop_carry(lowering: Lowering, input: Quantized, frame: Any, index: int) -> Quantized:
    """Return a tensor, and carry it on to the next step."""
    return input.with_value(lowering.call(loop.carry, input.value, frame, index))


@lowered(function=lambda input, frame, index: loop.last(input, frame, index), **_MARK)
def loop_last(lowering: Lowering, input: Quantized, frame: Any, index: int) -> Quantized:
    """Return the state that the last step carried; without further steps `input`."""
    return input.with_value(lowering.call(loop.last, input.value, frame, index))


@lowered(
    function=lambda input, frame, index, dim, count, backwards: loop.stack(input, frame, index, dim, count, backwards),
    reads=("count",),
    **_MARK,
)
def loop_stack(lowering: Lowering, input: Quantized, frame: Any, index: int, dim: int, count: Any, backwards: bool) -> Quantized:
    """Return the states of all steps, stacked along a dimension."""
    return input.with_value(lowering.call(loop.stack, input.value, frame, index, dim, count, backwards))


fx.node.has_side_effect(loop_carry)

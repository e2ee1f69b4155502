"""How recurrent layers and cells are written in other operators: step by step, 16 bits wide inside where the target has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import parameter_value
from fxquant.ops.core.boundary import requantize
from fxquant.ops.core.operators import INNER, Builder, Fixed, Own, Same, Trait, is_parameter
from fxquant.ops.core.record import Demand, traits_of
from fxquant.ops.elementwise.activation import clamp, dropout
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.table import shifted
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.layers.linear import linear
from fxquant.ops.movement.join import cat, stack
from fxquant.ops.movement.shape import numbers, reshape

WITHIN_ONE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))
GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-8, "uint8", 0, otherwise=Fixed(2.0**-7, "int8")))  # from 0 to 1
SATURATED = 8.0  # beyond it, a sigmoid and a tanh do not change any more
BENT = Fixed(SATURATED * 2.0**-15, "int16", otherwise=Own("int8"))  # before them


@dataclass
class _Layer:
    """One direction of one layer while it is being written.

    build       writes its parts
    weight      U, the state's weight; `bias` is added to its product; `projection` is W_r, or None
    size        how many numbers a gate has
    bounded     whether the state begins at zero, so that a GRU's state stays within (-1, 1)
    tied        by role, the first tensor of those that share a scale at all steps
    """

    build: Builder
    weight: fx.Node
    bias: fx.Node | None
    projection: fx.Node | None
    size: int
    bounded: bool
    tied: dict[str, list[fx.Node]] = field(default_factory=dict)

    def made(self, tie: str, function: Callable[..., Any], *args: Any, demand: Demand) -> fx.Node:
        """Add a part that has one grid at all steps with all others of this name."""
        node: fx.Node = self.build(function, *args, demand=demand)
        self.tied.setdefault(tie, []).append(node)
        return node

    def recurrent(self, hidden: fx.Node | None) -> fx.Node | None:
        """Compute U h + b'; without a hidden state, before the first step, return the bias alone, which may be None, too."""
        return self.bias if hidden is None else self.made("recurrent", linear, hidden, self.weight, self.bias, demand=INNER)

    def sum(self, projected: fx.Node, recurrent: fx.Node | None, demand: Demand = BENT) -> fx.Node:
        """Add the parts of the input and of the hidden state."""
        if recurrent is None:
            return self.made("sum", requantize, projected, demand=demand)
        return self.made("sum", add, projected, recurrent, demand=demand)

    def gate(self, value: fx.Node | None, number: int, count: int = 1) -> fx.Node | None:
        """Return `count` gates' parts of a value, from gate `number` on."""
        if value is None:
            return None
        part = slice(number * self.size, (number + count) * self.size)
        if is_parameter(value):
            return self.build.host(getitem, value, [part])
        return self.build(getitem, value, [WHOLE] * (len(self.build.fact(value).shape) - 1) + [part])  # type: ignore[no-any-return]


# What the step is given, a_t, and the state before it -> the state after it: h, which is multiplied by U and is what others see, and
# beside it what is only remembered, the cell of an LSTM or, 16 bits wide, the h of a GRU. None is a state of zeros.
State = tuple[fx.Node | None, ...]
Step = Callable[[_Layer, fx.Node, State], tuple[fx.Node, ...]]


def _lstm_step(layer: _Layer, projected: fx.Node, state: State) -> tuple[fx.Node, ...]:
    build, (hidden, before) = layer.build, state
    bent = layer.sum(projected, layer.recurrent(hidden))
    entering, forgetting, candidate, leaving = (layer.gate(bent, number) for number in range(4))
    entered = build(torch.sigmoid, entering, demand=GATE), build(torch.tanh, candidate, demand=WITHIN_ONE)
    if before is None:
        cell = layer.made("cell", mul, *entered, demand=INNER)
    else:
        carried = layer.made("cell", mul, build(torch.sigmoid, forgetting, demand=GATE), before, demand=INNER)
        cell = layer.made("cell", add, carried, build(mul, *entered, demand=WITHIN_ONE), demand=INNER)
    value = layer.made("value", mul, build(torch.sigmoid, leaving, demand=GATE), build(torch.tanh, cell, demand=WITHIN_ONE), demand=Own())
    return value if layer.projection is None else layer.made("state", linear, value, layer.projection, None, demand=Own()), cell


def _gru_step(layer: _Layer, projected: fx.Node, state: State) -> tuple[fx.Node, ...]:
    build, (hidden, before) = layer.build, state
    recurrent = layer.recurrent(hidden)
    gates = layer.sum(layer.gate(projected, 0, 2), layer.gate(recurrent, 0, 2))  # type: ignore[arg-type]
    update, inner = layer.gate(gates, 1), layer.gate(recurrent, 2)
    if inner is not None:
        reset = build(torch.sigmoid, layer.gate(gates, 0), demand=GATE)
        inner = layer.made("reset", mul, reset, inner, demand=INNER)
    candidate = build(torch.tanh, layer.sum(layer.gate(projected, 2), inner), demand=WITHIN_ONE)  # type: ignore[arg-type]
    share = build(shifted, update, "sigmoid", -1.0, 0.0, {}, demand=GATE)
    wide = "int16" in build.activations
    remembered = Own() if not wide else WITHIN_ONE if layer.bounded else INNER
    after = layer.made("state", mul, share, candidate, demand=remembered)
    if before is not None:
        carried = layer.made("state", mul, build(torch.sigmoid, update, demand=GATE), before, demand=remembered)
        after = layer.made("state", add, after, carried, demand=remembered)
    return layer.made("shown", requantize, after, demand=Own()) if wide else after, after


def _tanh_step(layer: _Layer, projected: fx.Node, state: State) -> tuple[fx.Node, ...]:
    return (layer.made("state", torch.tanh, layer.sum(projected, layer.recurrent(state[0])), demand=Own()),)


def _relu_step(layer: _Layer, projected: fx.Node, state: State) -> tuple[fx.Node, ...]:
    return (layer.build(clamp, layer.sum(projected, layer.recurrent(state[0]), Own()), 0.0, None, demand=Same()),)


# Of each kind: its step, how many gates it has, and how many tensors its state.
STEPS: dict[str, tuple[Step, int, int]] = {
    "lstm": (_lstm_step, 4, 2), "gru": (_gru_step, 3, 2), "tanh": (_tanh_step, 1, 1), "relu": (_relu_step, 1, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Layers:
    """The parameters and the settings of a recurrent layer, as PyTorch's functions take them."""

    parameters: Sequence[fx.Node]
    biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    dropout: float


def _limit(build: Builder, weight: fx.Node, bias: fx.Node | None) -> float | None:
    """Return a bound of W x + b beyond which no gate changes, since U h + b' cannot bring it back: 8 + max (Σ |U| + |b'|), as |h| <= 1.

    None where a parameter is not finite, which is an error later.
    """
    model = build.node.graph.owning_module
    assert model is not None
    values = [parameter_value(model, each).detach() for each in (weight, bias) if each is not None]
    reached = sum(float(value.abs().reshape(len(value), -1).sum(1).max()) for value in values)
    return SATURATED + math.ceil(reached) if math.isfinite(reached) else None


@dataclass
class _Sequence:
    """A recurrent layer while it is being written.

    build   writes its parts
    kind    which step it repeats: "lstm", "gru", "tanh" or "relu"
    axis    the dimension of its input that the steps run along
    """

    build: Builder
    kind: str
    axis: int

    def direction(
        self, input: fx.Node, weights: Sequence[fx.Node], biases: bool, state: State, backwards: bool
    ) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """Return one direction of one layer: its outputs at all steps, in the order of the input, and its state after the last step."""
        build, (step, gates, _) = self.build, STEPS[self.kind]
        bias_ih, bias_hh = weights[2:4] if biases else (None, None)
        if biases and self.kind != "gru":  # where both are added to the same sum, the first step has nothing else to add
            bias_ih, bias_hh = build.host(torch.add, bias_ih, bias_hh), None
        projection = weights[-1] if len(weights) in (3, 5) else None
        limit = None if self.kind == "relu" or projection is not None or state[0] is not None else _limit(build, weights[1], bias_hh)
        projected = build(linear, input, weights[0], bias_ih, demand=replace(INNER, limit=limit))
        shape = build.fact(projected).shape
        layer = _Layer(build, weights[1], bias_hh, projection, _whole(shape[-1]) // gates, bounded=state[0] is None)
        steps = range(_whole(shape[self.axis]))
        shown: dict[int, fx.Node] = {}
        after: tuple[fx.Node, ...] = ()
        for number, position in enumerate(reversed(steps) if backwards else steps):
            build.step = number
            state = after = step(layer, build(getitem, projected, [position if dim == self.axis else WHOLE for dim in range(3)]), state)
            shown[position] = _with(build, after[0], self.axis)
        build.step = None
        for nodes in layer.tied.values():
            build.tie(*nodes)
        return build(cat, [shown[position] for position in steps], self.axis, demand=Same()), after

    def layers(self, input: fx.Node, state: Sequence[fx.Node] | None, layers: Layers) -> tuple[fx.Node, list[tuple[fx.Node, ...]]]:
        """Return the last layer's output at all steps, and the states of every layer and direction after the last step."""
        build, parameters, directions = self.build, layers.parameters, 2 if layers.bidirectional else 1
        count = len(parameters) // (layers.num_layers * directions)
        last: list[tuple[fx.Node, ...]] = []
        for index in range(layers.num_layers):
            outputs = []
            for backwards in (False, True)[:directions]:
                begin = len(last)
                weights = parameters[begin * count : (begin + 1) * count]
                first = [build(getitem, each, [begin, WHOLE, WHOLE]) for each in state] if state else [None]
                shown, after = self.direction(input, weights, layers.biases, _filled(first, self.kind), backwards)
                last.append(after)
                outputs.append(shown)
            input = outputs[0] if directions == 1 else build(cat, outputs, 2)
            if layers.dropout and index < layers.num_layers - 1:
                input = build(dropout, input, layers.dropout, "dropout")
        return input, last


def _filled(state: Sequence[fx.Node | None], kind: str) -> State:
    """As many tensors as the step takes: what is remembered of a GRU is what was given."""
    return tuple(state) if len(state) == STEPS[kind][2] else (state[0],) * STEPS[kind][2]


def _whole(size: Any) -> int:
    assert isinstance(size, int)
    return size


def listed(value: Any) -> list[Any]:
    """Return the states that are given: one, several, or none."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def expand_layers(build: Builder, kind: str, input: fx.Node, hx: Any, layers: Layers) -> list[fx.Node]:
    """Return the results of a layer: its states at all steps, and those after the last step, one tensor for each kind of state."""
    shape = build.fact(input).shape
    state = None if all(map(_is_zero, listed(hx))) else listed(hx)
    axis = 1 if layers.batch_first else 0
    batched = len(shape) == 3
    if not batched:
        input = build(reshape, input, [1, *shape] if layers.batch_first else [shape[0], 1, shape[1]])
        state = None if state is None else [_with(build, each, 1) for each in state]
    output, last = _Sequence(build, kind, axis).layers(input, state, layers)
    results = [output]
    for at, states in enumerate(list(zip(*last, strict=True))[: 2 if kind == "lstm" else 1]):
        results.append(build(stack, list(states), 0, demand=Same() if len(states) == 1 else INNER if at else Own()))
    if batched:
        return results
    return [_without(build, value, 1 - axis if at == 0 else 1) for at, value in enumerate(results)]


def _with(build: Builder, value: fx.Node, dim: int) -> Any:
    """Return a value with another dimension, of size 1."""
    shape = numbers(build.fact(value).shape)
    return build(reshape, value, [*shape[:dim], 1, *shape[dim:]])


def _without(build: Builder, value: fx.Node, dim: int) -> Any:
    """Return a value without a dimension, of size 1."""
    shape = numbers(build.fact(value).shape)
    return build(reshape, value, [*shape[:dim], *shape[dim + 1 :]])


def _is_zero(value: Any) -> bool:
    """Return whether it is made as zeros, so that the first step needs no state."""
    while isinstance(value, fx.Node) and Trait.VIEWS in traits_of(value):
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.op not in ("call_function", "call_method"):
        return False
    return value.target in (torch.zeros, torch.zeros_like, "new_zeros")


def expand_cell(build: Builder, kind: str, input: fx.Node, hx: Any, weights: Sequence[fx.Node | None]) -> list[fx.Node]:
    """Return the states after one step, each with its own scale. The cell has the widest dtype, since the next step adds to it."""
    state = None if all(map(_is_zero, listed(hx))) else listed(hx)
    sizes = build.fact(input).shape
    if len(sizes) == 1:
        input = build(reshape, input, [1, *sizes])
        state = None if state is None else [build(reshape, each, [1, *build.fact(each).shape]) for each in state]
    step, gates, _ = STEPS[kind]
    projected = build(linear, input, weights[0], weights[2], demand=INNER)
    assert weights[1] is not None
    layer = _Layer(build, weights[1], weights[3], None, _whole(build.fact(projected).shape[-1]) // gates, bounded=state is None)
    results = step(layer, projected, _filled(state or [None], kind))[: 2 if kind == "lstm" else 1]
    return list(results) if len(sizes) == 2 else [build(reshape, value, [-1]) for value in results]

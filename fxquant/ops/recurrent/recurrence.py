"""Recurrent layers and cells, written in other operators: a first step and a loop over the others, 16 bits wide inside where possible."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ir import functional, loops
from fxquant.ir.graph import TensorFact, fact, is_parameter, largest_size, parameter_value
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core import INNER, Builder, Fixed, Instead, Own, Same, Trait, known_size, register, settings_of
from fxquant.ops.core.composite import requantize
from fxquant.ops.core.declare import lowered
from fxquant.ops.core.record import Adapt, Demand, Parameter, traits_of
from fxquant.ops.core.samples import RECURRENT, written
from fxquant.ops.elementwise.activation import clamp, dropout
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.table import shifted
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.indexing.scatter import gather
from fxquant.ops.layers.linear import linear
from fxquant.ops.movement.repeating import cat, expand, stack
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.primitives import loop

# ---- Between the steps of a loop and the tensors around it: see `ir.loops` -------------------------------------------
MARKS: dict[Any, Callable[..., Tensor]] = {}  # the primitives, by the functions of their operators


def _mark(primitive: Callable[..., Tensor], **more: Any) -> Callable[..., Tensor]:
    """Declare the operator of a primitive between steps: with the primitive's arguments and docstring, and "loop_" before its name."""
    arguments = list(inspect.signature(primitive).parameters)[1:]

    def lower(lowering: Lowering, input: Quantized, **settings: Any) -> Quantized:
        return input.with_value(lowering.call(primitive, input.value, *(settings[name] for name in arguments)))

    lower.__name__, lower.__doc__ = f"loop_{primitive.__name__}", primitive.__doc__
    more |= {"settings": dict.fromkeys(arguments, inspect.Parameter.empty), "by_name": False, "demand": Same(), "moves": True}
    function: Callable[..., Tensor] = lowered(function=lambda *args, **settings: primitive(*args, **settings), **more)(lower)
    MARKS[function] = primitive
    return function


loop_item, loop_state, loop_carry, loop_last = _mark(loop.item), _mark(loop.state), _mark(loop.carry), _mark(loop.last)
loop_stack = _mark(loop.stack, reads=("count",))
fx.node.has_side_effect(loop_carry)


# ---- Layers and cells -----------------------------------------------------------------------------------------------
WITHIN_ONE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))
GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-8, "uint8", 0, otherwise=Fixed(2.0**-7, "int8")))  # from 0 to 1
SATURATED = 8.0  # beyond it, a sigmoid and a tanh do not change any more
BENT = Fixed(SATURATED * 2.0**-15, "int16", otherwise=Own("int8"))  # before them


@dataclass
class _Layer:
    """One direction of one layer while it is being written."""

    build: Builder  # writes its parts
    weight: fx.Node  # U, the state's weight; `bias` is added to its product; `projection` is W_r, or None
    bias: fx.Node | None
    projection: fx.Node | None
    size: int  # how many numbers a gate has
    bounded: bool  # whether the state begins at zero, so that a GRU's state stays within (-1, 1)
    tied: dict[str, list[fx.Node]] = field(default_factory=dict)  # by role, the first tensor of those that share a scale at all steps

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
    """A recurrent layer while it is being written."""

    build: Builder  # writes its parts
    kind: str  # which step it repeats: "lstm", "gru", "tanh" or "relu"
    axis: int  # the dimension of its input that the steps run along
    order: fx.Node | None = None  # of padded sequences (batch, steps, features): see `functional.over_lengths`

    def flipped(self, value: fx.Node) -> fx.Node:
        """Return each padded sequence with its steps in the other order, before its padding."""
        places = self.build(expand, self.order, [-1, -1, self.build.fact(value).shape[2]])
        return self.build(gather, value, 1, places)  # type: ignore[no-any-return]

    def at_end(self, every: fx.Node) -> fx.Node:
        """Return the state (batch, features) of each padded sequence at its last step."""
        return self.build(getitem, self.flipped(every), [WHOLE, 0, WHOLE])  # type: ignore[no-any-return]

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
        from_its_end = backwards and self.order is not None  # a sequence is flipped within its length, and its padding comes last again
        if from_its_end:
            projected, backwards = self.flipped(projected), False
        shape, count = build.fact(projected).shape, build.size(projected, self.axis)
        layer = _Layer(build, weights[1], bias_hh, projection, known_size(shape[-1]) // gates, bounded=state[0] is None)
        begin = build(getitem, projected, [(-1 if backwards else 0) if dim == self.axis else WHOLE for dim in range(3)])
        first = step(layer, begin, state)  # it has no state, as a rule, and so less to compute than the others
        if count == 1:
            return _with(build, first[0], self.axis), first
        frame = build.control(loops.begin, count)
        item = build(loop_item, projected, frame, self.axis, backwards)
        places = {each: index for index, each in enumerate(dict.fromkeys(first))}
        states = {each: build(loop_state, each, frame, index) for each, index in places.items()}
        for index, each in enumerate(dict.fromkeys(step(layer, item, tuple(states[each] for each in first)))):
            build(loop_carry, each, frame, index)
        build.control(loops.end, frame)
        for nodes in layer.tied.values():
            build.tie(*nodes)
        every = build(loop_stack, first[0], frame, 0, self.axis, count, backwards)
        if self.order is None:
            ends = {each: build(loop_last, each, frame, index) for each, index in places.items()}
        else:
            stacks = [every, *(build(loop_stack, first[index], frame, index, self.axis, count, False) for index in range(1, len(places)))]
            ends = {each: self.at_end(stacks[index]) for each, index in places.items()}
        return self.flipped(every) if from_its_end else every, tuple(ends[each] for each in first)

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


def listed(value: Any) -> list[Any]:
    """Return the states that are given: one, several, or none."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def expand_layers(build: Builder, kind: str, input: fx.Node, hx: Any, layers: Layers, order: fx.Node | None = None) -> list[fx.Node]:
    """Return the results of a recurrent layer: its outputs at all steps, then its last states, one tensor for each kind (h, c)."""
    shape = build.fact(input).shape
    state = None if all(map(_is_zero, listed(hx))) else listed(hx)
    axis = 1 if layers.batch_first else 0
    batched = len(shape) == 3
    if not batched:
        input = build(reshape, input, [1, *shape] if layers.batch_first else [shape[0], 1, shape[1]])
        state = None if state is None else [_with(build, each, 1) for each in state]
    output, last = _Sequence(build, kind, axis, order).layers(input, state, layers)
    results = [output]
    for at, states in enumerate(list(zip(*last, strict=True))[: 2 if kind == "lstm" else 1]):
        results.append(build(stack, list(states), 0, demand=Same() if len(states) == 1 else INNER if at else Own()))
    return results if batched else [_without(build, value, 1 - axis if at == 0 else 1) for at, value in enumerate(results)]


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
    layer = _Layer(build, weights[1], weights[3], None, known_size(build.fact(projected).shape[-1]) // gates, bounded=state is None)
    results = step(layer, projected, _filled(state or [None], kind))[: 2 if kind == "lstm" else 1]
    return list(results) if len(sizes) == 2 else [build(reshape, value, [-1]) for value in results]


# ---- Recurrent layers and their cells: composites, of a first step and a loop over the other steps --------------------
#
# With a_t = W x_t + b, formed for all steps as one linear layer, u_t = U h_{t-1} + b', and σ the sigmoid:
#
#     RNN    h_t = tanh(a_t + u_t), or relu
#     LSTM   i, f, g, o = σ, σ, tanh, σ of the four parts of a_t + u_t;   c_t = f·c_{t-1} + i·g;   h_t = o·tanh(c_t), projected by W_r
#     GRU    r, z = σ of the first two parts of a_t + u_t;   n = tanh(a_t + r·u_t), of the third;   h_t = (1 - z)·n + z·h_{t-1}
#
# 1 - σ(x) is σ(-x), with a separate table. Tensors within (-1, 1) have a constant scale; any other state has one scale for all steps.
def lstm(
    input: Tensor, hx: Sequence[Tensor] | None = None, parameters: Sequence[Tensor] = (), biases: bool = True, num_layers: int = 1,
    bidirectional: bool = False, batch_first: bool = False, dropout: float = 0.0, nested: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """PyTorch's LSTM: the states of the last layer at all steps, and the last ones of every layer and direction, with their cells.

    The last two are a tuple if `nested`, as nn.LSTM returns them; torch.lstm returns three results.
    """
    with _without_onednn():
        output, hidden, cell = _layer(torch.lstm, input, hx, parameters, biases, num_layers, bidirectional, batch_first)
    return (output, (hidden, cell)) if nested else (output, hidden, cell)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Turn off oneDNN, which PyTorch's LSTM uses only without gradients: inside, it gives the same bits with gradients and without."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)  # type: ignore[no-untyped-call]


def gru(
    input: Tensor, hx: Tensor | None = None, parameters: Sequence[Tensor] = (), biases: bool = True, num_layers: int = 1,
    bidirectional: bool = False, batch_first: bool = False, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyTorch's GRU: the states of the last layer at all steps, and the last ones of every layer and direction."""
    return _layer(torch.gru, input, hx, parameters, biases, num_layers, bidirectional, batch_first)  # type: ignore[return-value]


def rnn(
    input: Tensor, hx: Tensor | None = None, parameters: Sequence[Tensor] = (), biases: bool = True, num_layers: int = 1,
    bidirectional: bool = False, batch_first: bool = False, dropout: float = 0.0, nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyTorch's RNN: the states of the last layer at all steps, and the last ones of every layer and direction."""
    function = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    return _layer(function, input, hx, parameters, biases, num_layers, bidirectional, batch_first)  # type: ignore[return-value]


def _layer(
    function: Callable[..., Any], input: Tensor, hx: Any, parameters: Sequence[Tensor], biases: bool, num_layers: int, bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Call PyTorch's function with a batch, which `input` and the states may lack, and with states of zeros where none are given."""
    axis = 0 if batch_first else 1
    lacks = input.dim() != 3
    sequence = input.unsqueeze(axis) if lacks else input
    if hx is None:  # the states are smaller than the cells where they are projected
        sizes, layers = (parameters[1].shape[1], parameters[0].shape[0] // 4), num_layers * (2 if bidirectional else 1)
        state = [sequence.new_zeros(layers, sequence.shape[axis], size) for size in sizes[: 2 if function is torch.lstm else 1]]
    else:
        state = [each.unsqueeze(1) if lacks else each for each in listed(hx)]
    initial = state if function is torch.lstm else state[0]
    result = function(sequence, initial, list(parameters), biases, num_layers, 0.0, False, bidirectional, batch_first)
    return (result[0].squeeze(axis), *(each.squeeze(1) for each in result[1:])) if lacks else tuple(result)


def lstm_cell(
    input: Tensor, hx: Sequence[Tensor] | None = None, weight_ih: Any = None, weight_hh: Any = None, bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute one step of an LSTM: the state and the cell."""
    return _cell(torch.lstm_cell, input, hx, weight_ih, weight_hh, bias_ih, bias_hh)  # type: ignore[return-value]


def gru_cell(
    input: Tensor, hx: Tensor | None = None, weight_ih: Any = None, weight_hh: Any = None, bias_ih: Any = None, bias_hh: Any = None
) -> Tensor:
    """Compute one step of a GRU: the state."""
    return _cell(torch.gru_cell, input, hx, weight_ih, weight_hh, bias_ih, bias_hh)[0]


def rnn_cell(
    input: Tensor, hx: Tensor | None = None, weight_ih: Any = None, weight_hh: Any = None, bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None, nonlinearity: str = "tanh",
) -> Tensor:  # fmt: skip
    """Compute one step of an RNN: the state."""
    function = torch.rnn_tanh_cell if nonlinearity == "tanh" else torch.rnn_relu_cell
    return _cell(function, input, hx, weight_ih, weight_hh, bias_ih, bias_hh)[0]


def _cell(function: Callable[..., Any], input: Tensor, hx: Any, *parameters: Any) -> tuple[Tensor, ...]:
    """Call PyTorch's function with rows, and with a state of zeros where none is given."""
    one = input.dim() != 2
    rows = input.unsqueeze(0) if one else input
    zeros = [] if hx is not None else [rows.new_zeros(rows.shape[0], parameters[1].shape[1])] * 2
    state = zeros or [each.unsqueeze(0) if one else each for each in listed(hx)]
    results = listed(function(rows, state if function is torch.lstm_cell else state[0], *parameters))
    return tuple(each.squeeze(0) if one else each for each in results)


WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of a cell
PACKED = "its input is a packed sequence, whose number of steps is known at run time only: pad it and mask the padded steps"


def _weights(module: Any) -> list[Parameter]:
    """Return the parameters of a layer, in the order in which PyTorch's functions take them."""
    kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else []), *(["weight_hr"] if module.proj_size else [])]
    ends = [f"_l{layer}{end}" for layer in range(module.num_layers) for end in ("", "_reverse")[: 2 if module.bidirectional else 1]]
    return [Parameter(kind + end) for end in ends for kind in kinds]


def _layer_of(module: Any) -> dict[str, Any]:
    settings = {name: getattr(module, name) for name in ("num_layers", "bidirectional", "batch_first", "dropout")}
    return {"parameters": _weights(module), "biases": module.bias, **settings}


def _called(**more: Any) -> Callable[..., dict[str, Any] | str]:
    """torch.gru(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)"""
    names = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")

    def adapt(input: Any, hx: Any, *rest: Any, **named: Any) -> dict[str, Any] | str:
        named = {**dict(zip(names, rest, strict=False)), **named}
        if not isinstance(named.get("params"), list | tuple) or len(named) != len(names):
            return PACKED
        settings = {name: named[name] for name in ("num_layers", "bidirectional", "batch_first")}
        return {"input": input, "hx": hx, "parameters": named["params"], "biases": named["has_biases"], **settings, "dropout": 0.0, **more}

    return adapt


def _cell_called(**more: Any) -> Callable[..., dict[str, Any]]:
    def adapt(*args: Any, **named: Any) -> dict[str, Any]:
        renamed = {{"w_": "weight_", "b_": "bias_"}.get(name[:2], name[:2]) + name[2:]: value for name, value in named.items()}
        return {**dict(zip(("input", "hx", *WEIGHTS), args, strict=False)), **renamed, **more}

    return adapt


def _plain(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return the arguments, or why a layer or a cell cannot be expanded."""
    operands = [arguments["input"], *listed(arguments["hx"])]
    facts = [fact(operand) if isinstance(operand, fx.Node) else None for operand in operands]
    if not all(isinstance(entry, TensorFact) for entry in facts):
        return PACKED if len(operands) == 1 else "its state is not a tensor"
    if any(is_parameter(operand) for operand in operands[1:]):
        return "its initial state is a parameter or a constant"
    weights = arguments.get("parameters") or [arguments.get(name) for name in WEIGHTS]
    computed = [weight for weight in weights if isinstance(weight, fx.Node) and not is_parameter(weight)]
    if computed:
        return f"one of its weights is computed by %{computed[0].name} from more than parameters"
    because = _refuses(node, arguments)
    return because if because is not None and arguments.get("dropout") else arguments  # the module drops while training


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why a layer cannot be expanded; None if it can."""
    if "parameters" not in arguments:
        return None
    sizes = Builder.fact(arguments["input"]).shape
    steps = sizes[1 if arguments.get("batch_first", True) and len(sizes) == 3 else 0]
    if largest_size(steps) is None:
        return f"the number of its steps, {steps}, depends on the batch size: the batch is dimension 0 unless dynamic_shapes differs"
    return None if steps else "it has no steps"


def _declare(
    function: Callable[..., Any], expand: Callable[..., Any], modules: Mapping[type, Callable[[Any], dict[str, Any] | str | Instead]],
    functions: Mapping[Callable[..., Any], Adapt], *texts: str, **shapes: Any,
) -> None:  # fmt: skip
    settings: dict[str, Any] = {"modules": modules, "calls": functions, "normalize": _plain, "refuses": _refuses, "recurs": True}
    settings["samples"] = written(*texts, within=RECURRENT, **shapes)
    register(function.__name__, function, ("input", "hx"), expand=expand, **settings)


def _expand_lstm(build: Builder, input: fx.Node, hx: Any, nested: bool, **settings: Any) -> Any:
    output, hidden, cell = expand_layers(build, "lstm", input, hx, Layers(**settings))
    return (output, (hidden, cell)) if nested else (output, hidden, cell)


def _expand_rnn(build: Builder, input: fx.Node, hx: Any, **settings: Any) -> Any:
    kind = settings.pop("nonlinearity", "gru")
    return tuple(expand_layers(build, kind, input, hx, Layers(**settings)))


def _expand_over_lengths(build: Builder, input: fx.Node, hx: Any, order: fx.Node, kind: str, **settings: Any) -> Any:
    biases = len(settings["parameters"]) >= 4 * settings["num_layers"] * (1 + settings["bidirectional"])
    return tuple(expand_layers(build, kind, input, hx, Layers(**settings, biases=biases, batch_first=True), order))


def _expand_cell(build: Builder, input: fx.Node, hx: Any, **weights: Any) -> Any:
    kind = weights.pop("nonlinearity", "gru")
    return expand_cell(build, kind, input, hx, list(weights.values()))[0]


_BENT = ("tanh", "relu")
_STATE = {"x": (4,), "y": (3,)}
_PACKED = "q = nn.utils.rnn.pack_padded_sequence(x, (x > 9).sum(1)[:, 0] + 2, True)"
_GIVEN = "True, 1, 0.0, False, False, True)[0]"  # the settings of a layer that is called as a function, and its result
_declare(
    lstm,
    _expand_lstm,
    {nn.LSTM: _layer_of},
    {torch.lstm: _called(nested=False)},
    "{nn.LSTM(4, 3, batch_first=True)}(x)[0]",
    "{nn.LSTM(4, 3, 2, bidirectional=True, dropout=0.2, batch_first=True)}(x)[0]",
    "{nn.LSTM(4, 3, proj_size=2, bias=False, batch_first=True)}(x)[1][0]",
    f"h = x.new_zeros(1, x.shape[0], 3); return torch.lstm(x, (h, h), [{{P(12, 4)}}, {{P(12, 3)}}, {{P(12)}}, {{P(12)}}], {_GIVEN}",
    x=(2, 4),
)
_declare(
    gru,
    _expand_rnn,
    {nn.GRU: _layer_of},
    {torch.gru: _called()},
    "{nn.GRU(4, 3, batch_first=True)}(x)[0]",
    "{nn.GRU(4, 3, 2, bidirectional=True, bias=False, batch_first=True)}(x)[1]",
    f"torch.gru(x, x.new_zeros(1, x.shape[0], 3), [{{P(9, 4)}}, {{P(9, 3)}}, {{P(9)}}, {{P(9)}}], {_GIVEN}",
    x=(2, 4),
)
_declare(
    rnn,
    _expand_rnn,
    {nn.RNN: lambda m: {**_layer_of(m), "nonlinearity": m.nonlinearity}},
    {torch.rnn_tanh: _called(nonlinearity="tanh"), torch.rnn_relu: _called(nonlinearity="relu")},
    "{nn.RNN(4, 3, batch_first=True)}(x)[0]",
    "{nn.RNN(4, 3, nonlinearity='relu', batch_first=True)}(x)[0]",
    *(f"torch.rnn_{each}(x, x.new_zeros(1, x.shape[0], 3), [{{P(3, 4)}}, {{P(3, 3)}}, {{P(3)}}, {{P(3)}}], {_GIVEN}" for each in _BENT),
    x=(2, 4),
)
_declare(
    functional.over_lengths,
    _expand_over_lengths,
    {},
    {},
    f"{_PACKED}; return nn.utils.rnn.pad_packed_sequence({{nn.LSTM(4, 3, bidirectional=True)}}(q)[0], True)[0]",
    f"{_PACKED}; return {{nn.GRU(4, 3)}}(q)[1][0]",
    x=(2, 4),
)
_declare(
    lstm_cell,
    lambda build, input, hx, **weights: tuple(expand_cell(build, "lstm", input, hx, list(weights.values()))),
    {nn.LSTMCell: settings_of(WEIGHTS)},
    {torch.lstm_cell: _cell_called()},
    "{nn.LSTMCell(4, 3)}(x, (y, y))[0]",
    "{nn.LSTMCell(4, 3)}(x, (y, y))[1]",
    "torch.lstm_cell(x, (y, y), {P(12, 4)}, {P(12, 3)}, {P(12)}, {P(12)})[0]",
    **_STATE,
)
_declare(
    gru_cell,
    _expand_cell,
    {nn.GRUCell: settings_of(WEIGHTS)},
    {torch.gru_cell: _cell_called()},
    "nn.GRUCell(4, 3)",
    "torch.gru_cell(x, y, {P(9, 4)}, {P(9, 3)}, {P(9)}, {P(9)})",
    **_STATE,
)
_declare(
    rnn_cell,
    _expand_cell,
    {nn.RNNCell: settings_of((*WEIGHTS, "nonlinearity"))},
    {torch.rnn_tanh_cell: _cell_called(nonlinearity="tanh"), torch.rnn_relu_cell: _cell_called(nonlinearity="relu")},
    *("nn.RNNCell(4, 3)", "nn.RNNCell(4, 3, nonlinearity='relu')"),
    *(f"torch.rnn_{each}_cell(x, y, {{P(3, 4)}}, {{P(3, 3)}}, {{P(3)}}, {{P(3)}})" for each in _BENT),
    **_STATE,
)

"""Recurrent layers and their cells: composites, unrolled over the steps of a sequence, 16 bits wide inside where the target has them.

With a_t = W x_t + b, formed for all steps as one linear layer, u_t = U h_{t-1} + b', and σ the sigmoid:

    RNN    h_t = tanh(a_t + u_t), or relu
    LSTM   i, f, g, o = σ, σ, tanh, σ of the four parts of a_t + u_t;   c_t = f·c_{t-1} + i·g;   h_t = o·tanh(c_t), projected by W_r
    GRU    r, z = σ of the first two parts of a_t + u_t;   n = tanh(a_t + r·u_t), of the third;   h_t = (1 - z)·n + z·h_{t-1}

1 - σ(x) is σ(-x), a table of its own. What lies in (-1, 1) has a grid that is given; any other state is on one grid for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.facts import TensorFact
from fxquant.graph import fact, is_parameter
from fxquant.ops.activation import clamp
from fxquant.ops.arithmetic import add, mul
from fxquant.ops.boundary import requantize
from fxquant.ops.composite import Builder
from fxquant.ops.dropout import dropout
from fxquant.ops.index import WHOLE, getitem
from fxquant.ops.join import cat, stack
from fxquant.ops.linear import linear
from fxquant.ops.record import Demand, Fixed, Operator, Own, Parameter, Same, operator_of, register
from fxquant.ops.shape import numbers, reshape
from fxquant.ops.unary import shifted

WIDE = Own("int16", otherwise="int8")
WITHIN_ONE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))
GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-8, "uint8", 0, otherwise=Fixed(2.0**-7, "int8")))  # from 0 to 1
BENT = Fixed(2.0**-12, "int16", otherwise=Own("int8"))  # before a sigmoid or a tanh, which do not change any more beyond 8

# ---- the float functions --------------------------------------------------------------------------------------------


def lstm(
    input: Tensor,
    hx: Sequence[Tensor] | None = None,
    parameters: Sequence[Tensor] = (),
    biases: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    nested: bool = True,
) -> tuple[Any, ...]:
    """PyTorch's LSTM: the states of the last layer at all steps, and the last ones of every layer and direction, with their cells.

    The last two are a tuple if `nested`, as they are of nn.LSTM; those of torch.lstm are not.
    """
    sequence, state, rank = _batched(input, hx, batch_first)
    if state is None:
        state = _zeros(sequence, parameters, num_layers, bidirectional, batch_first, 2)
    with _without_onednn():
        result = torch.lstm(sequence, list(state), list(parameters), biases, num_layers, 0.0, False, bidirectional, batch_first)
    output, hidden, cell = _as_given(result, rank, batch_first)
    return (output, (hidden, cell)) if nested else (output, hidden, cell)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Inside, PyTorch's LSTM gives the same bits with gradients and without: oneDNN, which it uses only without, is off."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def gru(
    input: Tensor,
    hx: Tensor | None = None,
    parameters: Sequence[Tensor] = (),
    biases: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """PyTorch's GRU: the states of the last layer at all steps, and the last ones of every layer and direction."""
    return _simple(torch.gru, input, hx, parameters, biases, num_layers, bidirectional, batch_first)


def rnn(
    input: Tensor,
    hx: Tensor | None = None,
    parameters: Sequence[Tensor] = (),
    biases: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    dropout: float = 0.0,
    nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """PyTorch's RNN: the states of the last layer at all steps, and the last ones of every layer and direction."""
    function = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    return _simple(function, input, hx, parameters, biases, num_layers, bidirectional, batch_first)


def _simple(
    function: Callable[..., Any],
    input: Tensor,
    hx: Tensor | None,
    parameters: Sequence[Tensor],
    biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    sequence, state, rank = _batched(input, None if hx is None else [hx], batch_first)
    if state is None:
        state = _zeros(sequence, parameters, num_layers, bidirectional, batch_first, 1)
    result = function(sequence, state[0], list(parameters), biases, num_layers, 0.0, False, bidirectional, batch_first)
    return _as_given(result, rank, batch_first)  # type: ignore[return-value]


def _batched(input: Tensor, hx: Sequence[Tensor] | None, batch_first: bool) -> tuple[Tensor, list[Tensor] | None, int]:
    """The sequence and its states with a batch, and the rank of what was given."""
    if input.dim() == 3:
        return input, None if hx is None else list(hx), 3
    return input.unsqueeze(0 if batch_first else 1), None if hx is None else [state.unsqueeze(1) for state in hx], 2


def _as_given(result: Sequence[Tensor], rank: int, batch_first: bool) -> tuple[Tensor, ...]:
    """The results without the batch, where none was given."""
    if rank == 3:
        return tuple(result)
    return result[0].squeeze(0 if batch_first else 1), *(state.squeeze(1) for state in result[1:])


def _zeros(
    input: Tensor, parameters: Sequence[Tensor], num_layers: int, bidirectional: bool, batch_first: bool, count: int
) -> list[Tensor]:
    batch = input.shape[0 if batch_first else 1]
    layers = num_layers * (2 if bidirectional else 1)
    hidden = parameters[1].shape[1]  # of U; smaller than that of the cells where states are projected
    cells = parameters[0].shape[0] // 4
    return [input.new_zeros(layers, batch, size) for size in (hidden, cells)[:count]]


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor] | None = None,
    weight_ih: Any = None,
    weight_hh: Any = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of an LSTM: the state and the cell."""
    rows, state = _row(input, hx)
    if state is None:
        state = [rows.new_zeros(rows.shape[0], weight_hh.shape[1])] * 2
    hidden, cell = torch.lstm_cell(rows, state, weight_ih, weight_hh, bias_ih, bias_hh)
    return (hidden, cell) if input.dim() == 2 else (hidden.squeeze(0), cell.squeeze(0))


def gru_cell(
    input: Tensor, hx: Tensor | None = None, weight_ih: Any = None, weight_hh: Any = None, bias_ih: Any = None, bias_hh: Any = None
) -> Tensor:
    """One step of a GRU: the state."""
    return _simple_cell(torch.gru_cell, input, hx, weight_ih, weight_hh, bias_ih, bias_hh)


def rnn_cell(
    input: Tensor,
    hx: Tensor | None = None,
    weight_ih: Any = None,
    weight_hh: Any = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    nonlinearity: str = "tanh",
) -> Tensor:
    """One step of an RNN: the state."""
    function = torch.rnn_tanh_cell if nonlinearity == "tanh" else torch.rnn_relu_cell
    return _simple_cell(function, input, hx, weight_ih, weight_hh, bias_ih, bias_hh)


def _simple_cell(function: Callable[..., Tensor], input: Tensor, hx: Tensor | None, *parameters: Any) -> Tensor:
    rows, state = _row(input, None if hx is None else [hx])
    hidden = function(rows, rows.new_zeros(rows.shape[0], parameters[1].shape[1]) if state is None else state[0], *parameters)
    return hidden if input.dim() == 2 else hidden.squeeze(0)


def _row(input: Tensor, hx: Sequence[Tensor] | None) -> tuple[Tensor, list[Tensor] | None]:
    if input.dim() == 2:
        return input, None if hx is None else list(hx)
    return input.unsqueeze(0), None if hx is None else [state.unsqueeze(0) for state in hx]


# ---- one step -------------------------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """One direction of one layer while it is being written.

    build       writes its parts
    weight      U, what the state is multiplied by; bias is what is added to that; projection is W_r, or None
    size        how many numbers a gate has
    bounded     whether the state begins at zero, so that that of a GRU never leaves (-1, 1)
    tied        what is on one grid at all steps, by what it is
    """

    build: Builder
    weight: fx.Node
    bias: fx.Node | None
    projection: fx.Node | None
    size: int
    bounded: bool
    tied: dict[str, list[fx.Node]] = field(default_factory=dict)

    def made(self, tie: str, function: Callable[..., Any], *args: Any, demand: Demand) -> fx.Node:
        """A part that is on one grid at all steps with all others of this name."""
        node: fx.Node = self.build(function, *args, demand=demand)
        self.tied.setdefault(tie, []).append(node)
        return node

    def recurrent(self, hidden: fx.Node | None) -> fx.Node | None:
        """U h + b'; the bias alone where there is no state yet, and that may be None, too."""
        return self.bias if hidden is None else self.made("recurrent", linear, hidden, self.weight, self.bias, demand=WIDE)

    def sum(self, given: fx.Node, recurrent: fx.Node | None, demand: Demand = BENT) -> fx.Node:
        """What the two give together."""
        if recurrent is None:
            return self.made("sum", requantize, given, demand=demand)
        return self.made("sum", add, given, recurrent, demand=demand)

    def gate(self, value: fx.Node | None, number: int, count: int = 1) -> fx.Node | None:
        """So many of the parts that a value holds for each gate, from this one on."""
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


def _lstm_step(layer: _Layer, given: fx.Node, state: State) -> tuple[fx.Node, ...]:
    build, (hidden, before) = layer.build, state
    bent = layer.sum(given, layer.recurrent(hidden))
    entering, forgetting, candidate, leaving = (layer.gate(bent, number) for number in range(4))
    entered = build(torch.sigmoid, entering, demand=GATE), build(torch.tanh, candidate, demand=WITHIN_ONE)
    if before is None:
        cell = layer.made("cell", mul, *entered, demand=WIDE)
    else:
        kept = layer.made("cell", mul, build(torch.sigmoid, forgetting, demand=GATE), before, demand=WIDE)
        cell = layer.made("cell", add, kept, build(mul, *entered, demand=WITHIN_ONE), demand=WIDE)
    value = layer.made("value", mul, build(torch.sigmoid, leaving, demand=GATE), build(torch.tanh, cell, demand=WITHIN_ONE), demand=Own())
    return value if layer.projection is None else layer.made("state", linear, value, layer.projection, None, demand=Own()), cell


def _gru_step(layer: _Layer, given: fx.Node, state: State) -> tuple[fx.Node, ...]:
    build, (hidden, before) = layer.build, state
    recurrent = layer.recurrent(hidden)
    gates = layer.sum(layer.gate(given, 0, 2), layer.gate(recurrent, 0, 2))  # type: ignore[arg-type]
    update, inner = layer.gate(gates, 1), layer.gate(recurrent, 2)
    if inner is not None:
        reset = build(torch.sigmoid, layer.gate(gates, 0), demand=GATE)
        inner = layer.made("reset", mul, reset, inner, demand=WIDE)
    candidate = build(torch.tanh, layer.sum(layer.gate(given, 2), inner), demand=WITHIN_ONE)  # type: ignore[arg-type]
    share = build(shifted, update, "sigmoid", -1.0, 0.0, {}, demand=GATE)
    wide = "int16" in build.activations
    remembered = Own() if not wide else WITHIN_ONE if layer.bounded else WIDE
    after = layer.made("state", mul, share, candidate, demand=remembered)
    if before is not None:
        kept = layer.made("state", mul, build(torch.sigmoid, update, demand=GATE), before, demand=remembered)
        after = layer.made("state", add, after, kept, demand=remembered)
    return layer.made("shown", requantize, after, demand=Own()) if wide else after, after


def _tanh_step(layer: _Layer, given: fx.Node, state: State) -> tuple[fx.Node, ...]:
    return (layer.made("state", torch.tanh, layer.sum(given, layer.recurrent(state[0])), demand=Own()),)


def _relu_step(layer: _Layer, given: fx.Node, state: State) -> tuple[fx.Node, ...]:
    return (layer.build(clamp, layer.sum(given, layer.recurrent(state[0]), Own()), 0.0, None, demand=Same()),)


# Of each kind: its step, how many gates it has, and how many tensors its state.
STEPS: dict[str, tuple[Step, int, int]] = {
    "lstm": (_lstm_step, 4, 2),
    "gru": (_gru_step, 3, 2),
    "tanh": (_tanh_step, 1, 1),
    "relu": (_relu_step, 1, 1),
}


# ---- all steps ------------------------------------------------------------------------------------------------------


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
        """One direction of one layer: what it shows at all steps, in the order of the input, and its state after the last one."""
        build, (step, gates, _) = self.build, STEPS[self.kind]
        bias_ih, bias_hh = weights[2:4] if biases else (None, None)
        projection = weights[-1] if len(weights) in (3, 5) else None
        given = build(linear, input, weights[0], bias_ih, demand=WIDE)
        shape = build.fact(given).shape
        layer = _Layer(build, weights[1], bias_hh, projection, _whole(shape[-1]) // gates, bounded=state[0] is None)
        steps = range(_whole(shape[self.axis]))
        shown: dict[int, fx.Node] = {}
        after: tuple[fx.Node, ...] = ()
        for number, position in enumerate(reversed(steps) if backwards else steps):
            build.step = number
            state = after = step(layer, build(getitem, given, _along(self.axis, position)), state)
            shown[position] = build(reshape, after[0], _with(_numbers(build, after[0]), self.axis))
        build.step = None
        for nodes in layer.tied.values():
            build.tie(*nodes)
        return build(cat, [shown[position] for position in steps], self.axis, demand=Same()), after

    def layers(
        self,
        input: fx.Node,
        state: Sequence[fx.Node] | None,
        parameters: Sequence[fx.Node],
        biases: bool,
        num_layers: int,
        bidirectional: bool,
        chance: float,
    ) -> tuple[fx.Node, list[tuple[fx.Node, ...]]]:
        """What the last layer shows at all steps, and the states of every layer and direction after the last one."""
        build, directions = self.build, 2 if bidirectional else 1
        count = len(parameters) // (num_layers * directions)
        last: list[tuple[fx.Node, ...]] = []
        for index in range(num_layers):
            found = []
            for backwards in (False, True)[:directions]:
                begin = len(last)
                weights = parameters[begin * count : (begin + 1) * count]
                shown, after = self.direction(input, weights, biases, self._first(state, begin), backwards)
                last.append(after)
                found.append(shown)
            input = found[0] if directions == 1 else build(cat, found, 2)
            if chance and index < num_layers - 1:
                input = build(dropout, input, chance, "dropout")
        return input, last

    def _first(self, state: Sequence[fx.Node] | None, number: int) -> State:
        """The state before the first step of one direction of one layer."""
        return _filled([self.build(getitem, held, [number, WHOLE, WHOLE]) for held in state] if state else [None], self.kind)


def _filled(state: Sequence[fx.Node | None], kind: str) -> State:
    """As many tensors as the step takes: what is remembered of a GRU is what was given."""
    return tuple(state) if len(state) == STEPS[kind][2] else (state[0],) * STEPS[kind][2]


def _along(axis: int, position: int) -> list[Any]:
    index: list[Any] = [WHOLE] * 3
    index[axis] = position
    return index


def _whole(size: Any) -> int:
    assert isinstance(size, int)
    return size


def _expand_layers(
    build: Builder,
    kind: str,
    input: fx.Node,
    hx: Sequence[fx.Node] | None,
    parameters: Sequence[fx.Node],
    biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    dropout: float,
) -> list[fx.Node]:
    """The results of a layer: its states at all steps, and those after the last step, one tensor for each kind of state."""
    known = build.fact(input).shape
    state = None if hx is None or all(map(_is_zero, hx)) else list(hx)
    axis = 1 if batch_first else 0
    batched = len(known) == 3
    if not batched:
        input = build(reshape, input, [1, *known] if batch_first else [known[0], 1, known[1]])
        state = None if state is None else [build(reshape, held, _with(_numbers(build, held), 1)) for held in state]
    output, last = _Sequence(build, kind, axis).layers(input, state, parameters, biases, num_layers, bidirectional, dropout)
    results = [output]
    for at, states in enumerate(list(zip(*last, strict=True))[: 2 if kind == "lstm" else 1]):
        results.append(build(stack, list(states), 0, demand=Same() if len(states) == 1 else WIDE if at else Own()))
    if batched:
        return results
    return [build(reshape, value, _without(_numbers(build, value), 1 - axis if at == 0 else 1)) for at, value in enumerate(results)]


def _numbers(build: Builder, value: fx.Node) -> list[int]:
    """A shape for `reshape`, with -1 for the batch."""
    return numbers(build.fact(value).shape)


def _with(shape: Sequence[Any], dim: int) -> list[Any]:
    return [*shape[:dim], 1, *shape[dim:]]


def _without(shape: Sequence[Any], dim: int) -> list[Any]:
    return [*shape[:dim], *shape[dim + 1 :]]


MOVING = ("identity", "reshape", "expand", "getitem", "permute", "repeat")


def _is_zero(value: Any) -> bool:
    """Whether it is made as zeros, so that the first step needs no state."""
    while isinstance(value, fx.Node) and (operator := operator_of(value)) is not None and operator.name in MOVING:
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.op not in ("call_function", "call_method"):
        return False
    return value.target in (torch.zeros, torch.zeros_like, "new_zeros")


def _expand_lstm(build: Builder, input: fx.Node, hx: Any, nested: bool, **settings: Any) -> Any:
    output, hidden, cell = _expand_layers(build, "lstm", input, hx, **settings)
    return (output, (hidden, cell)) if nested else (output, hidden, cell)


def _expand_gru(build: Builder, input: fx.Node, hx: Any, **settings: Any) -> Any:
    return tuple(_expand_layers(build, "gru", input, None if hx is None else [hx], **settings))


def _expand_rnn(build: Builder, input: fx.Node, hx: Any, nonlinearity: str, **settings: Any) -> Any:
    return tuple(_expand_layers(build, nonlinearity, input, None if hx is None else [hx], **settings))


# ---- cells ----------------------------------------------------------------------------------------------------------


def _expand_cell(
    build: Builder, kind: str, input: fx.Node, hx: Sequence[fx.Node] | None, weights: Sequence[fx.Node | None]
) -> list[fx.Node]:
    """The states after one step, each on a grid of its own: the cell's as wide as it can be, since the next step adds to it."""
    state = None if hx is None or all(map(_is_zero, hx)) else list(hx)
    sizes = build.fact(input).shape
    if len(sizes) == 1:
        input = build(reshape, input, [1, *sizes])
        state = None if state is None else [build(reshape, held, [1, *build.fact(held).shape]) for held in state]
    step, gates, _ = STEPS[kind]
    given = build(linear, input, weights[0], weights[2], demand=WIDE)
    assert weights[1] is not None
    layer = _Layer(build, weights[1], weights[3], None, _whole(build.fact(given).shape[-1]) // gates, bounded=state is None)
    results = step(layer, given, _filled(state or [None], kind))[: 2 if kind == "lstm" else 1]
    return list(results) if len(sizes) == 2 else [build(reshape, value, [-1]) for value in results]


def _expand_lstm_cell(build: Builder, input: fx.Node, hx: Any, **weights: Any) -> Any:
    return tuple(_expand_cell(build, "lstm", input, hx, list(weights.values())))


def _expand_gru_cell(build: Builder, input: fx.Node, hx: Any, **weights: Any) -> Any:
    return _expand_cell(build, "gru", input, None if hx is None else [hx], list(weights.values()))[0]


def _expand_rnn_cell(build: Builder, input: fx.Node, hx: Any, nonlinearity: str, **weights: Any) -> Any:
    return _expand_cell(build, nonlinearity, input, None if hx is None else [hx], list(weights.values()))[0]


# ---- spellings ------------------------------------------------------------------------------------------------------

PACKED = "its input is a packed sequence, whose number of steps is known only when it runs: pad it, and mask what is behind its end"


def _weights(module: Any) -> list[Parameter]:
    """The parameters of a layer, in the order in which PyTorch's functions take them."""
    kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else []), *(["weight_hr"] if module.proj_size else [])]
    ends = [f"_l{layer}{end}" for layer in range(module.num_layers) for end in ("", "_reverse")[: 2 if module.bidirectional else 1]]
    return [Parameter(kind + end) for end in ends for kind in kinds]


def _layer_of(module: Any) -> dict[str, Any]:
    settings = {name: getattr(module, name) for name in ("num_layers", "bidirectional", "batch_first", "dropout")}
    return {"parameters": _weights(module), "biases": module.bias, **settings}


def _cell_of(module: Any) -> dict[str, Any]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return {name: None if getattr(module, name) is None else Parameter(name) for name in names}


def _called(input: Any, hx: Any, *rest: Any, **named: Any) -> dict[str, Any] | str:
    """torch.gru(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)"""
    names = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    given = {**dict(zip(names, rest, strict=False)), **named}
    if not isinstance(given.get("params"), list | tuple) or len(given) != len(names):
        return PACKED
    settings = {name: given[name] for name in ("num_layers", "bidirectional", "batch_first")}
    return {"input": input, "hx": hx, "parameters": given["params"], "biases": given["has_biases"], **settings, "dropout": 0.0}


def _called_with(**more: Any) -> Callable[..., dict[str, Any] | str]:
    def adapt(*args: Any, **named: Any) -> dict[str, Any] | str:
        found = _called(*args, **named)
        return found if isinstance(found, str) else {**found, **more}

    return adapt


def _cell_with(**more: Any) -> Callable[..., dict[str, Any]]:
    names = ("input", "hx", "weight_ih", "weight_hh", "bias_ih", "bias_hh")

    def adapt(*args: Any, **named: Any) -> dict[str, Any]:
        given = {
            **dict(zip(names, args, strict=False)),
            **{{"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}.get(k, k): v for k, v in named.items()},
        }
        return {**given, **more}

    return adapt


def _plain(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """The arguments, or why a layer or a cell cannot be unrolled."""
    operands = [arguments["input"], *_listed(arguments["hx"])]
    known = [fact(operand) if isinstance(operand, fx.Node) else None for operand in operands]
    if not all(isinstance(entry, TensorFact) for entry in known):
        return PACKED if len(operands) == 1 else "its state is no tensor"
    if any(is_parameter(operand) for operand in operands[1:]):
        return "its initial state is a parameter or a constant"
    weights = arguments.get("parameters") or [arguments.get(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    computed = [weight for weight in weights if isinstance(weight, fx.Node) and not is_parameter(weight)]
    if computed:
        return f"one of its weights is computed by %{computed[0].name} from more than parameters"
    because = _refuses(node, arguments)
    return because if because is not None and arguments.get("dropout") else arguments  # the module drops while training


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Why a layer cannot be unrolled; None if it can."""
    if "parameters" not in arguments:
        return None
    sizes = Builder.fact(arguments["input"]).shape
    steps = sizes[1 if arguments["batch_first"] and len(sizes) == 3 else 0]
    if not isinstance(steps, int):
        return f"the number of its steps, {steps}, depends on the batch size: the batch is dimension 0 unless dynamic_shapes says otherwise"
    return None if steps else "it has no steps"


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


for _name, _function, _expand, _modules, _functions in (
    ("lstm", lstm, _expand_lstm, {nn.LSTM: _layer_of}, {torch.lstm: _called_with(nested=False)}),
    ("gru", gru, _expand_gru, {nn.GRU: _layer_of}, {torch.gru: _called}),
    (
        "rnn",
        rnn,
        _expand_rnn,
        {nn.RNN: lambda m: {**_layer_of(m), "nonlinearity": m.nonlinearity}},
        {torch.rnn_tanh: _called_with(nonlinearity="tanh"), torch.rnn_relu: _called_with(nonlinearity="relu")},
    ),
    ("lstm_cell", lstm_cell, _expand_lstm_cell, {nn.LSTMCell: _cell_of}, {torch.lstm_cell: _cell_with()}),
    ("gru_cell", gru_cell, _expand_gru_cell, {nn.GRUCell: _cell_of}, {torch.gru_cell: _cell_with()}),
    (
        "rnn_cell",
        rnn_cell,
        _expand_rnn_cell,
        {nn.RNNCell: lambda m: {**_cell_of(m), "nonlinearity": m.nonlinearity}},
        {torch.rnn_tanh_cell: _cell_with(nonlinearity="tanh"), torch.rnn_relu_cell: _cell_with(nonlinearity="relu")},
    ),
):
    register(
        Operator(
            _name, _function, ("input", "hx"), expand=_expand, modules=_modules, functions=_functions, normalize=_plain, refuses=_refuses
        )
    )

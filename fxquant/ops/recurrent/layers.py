"""Recurrent layers and their cells: composites, unrolled over the steps of a sequence, 16 bits wide inside where the target has them.

With a_t = W x_t + b, formed for all steps as one linear layer, u_t = U h_{t-1} + b', and σ the sigmoid:

    RNN    h_t = tanh(a_t + u_t), or relu
    LSTM   i, f, g, o = σ, σ, tanh, σ of the four parts of a_t + u_t;   c_t = f·c_{t-1} + i·g;   h_t = o·tanh(c_t), projected by W_r
    GRU    r, z = σ of the first two parts of a_t + u_t;   n = tanh(a_t + r·u_t), of the third;   h_t = (1 - z)·n + z·h_{t-1}

1 - σ(x) is σ(-x), a table of its own. What lies in (-1, 1) has a grid that is given; any other state is on one grid for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.record import Adapt, Operator, Parameter, register
from fxquant.ops.recurrent.recurrence import Layers, expand_cell, expand_layers

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
    """Turn off oneDNN, which PyTorch's LSTM uses only without gradients: inside, it gives the same bits with gradients and without."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)  # type: ignore[no-untyped-call]


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
    """Return the sequence and its states with a batch, and the rank of what was given."""
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
    """Compute one step of an LSTM: the state and the cell."""
    rows, state = _row(input, hx)
    if state is None:
        state = [rows.new_zeros(rows.shape[0], weight_hh.shape[1])] * 2
    hidden, cell = torch.lstm_cell(rows, state, weight_ih, weight_hh, bias_ih, bias_hh)
    return (hidden, cell) if input.dim() == 2 else (hidden.squeeze(0), cell.squeeze(0))


def gru_cell(
    input: Tensor, hx: Tensor | None = None, weight_ih: Any = None, weight_hh: Any = None, bias_ih: Any = None, bias_hh: Any = None
) -> Tensor:
    """Compute one step of a GRU: the state."""
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
    """Compute one step of an RNN: the state."""
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


# ---- the calls that they are made of -----------------------------------------------------------------------------------


def _expand_lstm(build: Builder, input: fx.Node, hx: Any, nested: bool, **settings: Any) -> Any:
    output, hidden, cell = expand_layers(build, "lstm", input, hx, Layers(**settings))
    return (output, (hidden, cell)) if nested else (output, hidden, cell)


def _expand_gru(build: Builder, input: fx.Node, hx: Any, **settings: Any) -> Any:
    return tuple(expand_layers(build, "gru", input, None if hx is None else [hx], Layers(**settings)))


def _expand_rnn(build: Builder, input: fx.Node, hx: Any, nonlinearity: str, **settings: Any) -> Any:
    return tuple(expand_layers(build, nonlinearity, input, None if hx is None else [hx], Layers(**settings)))


def _expand_lstm_cell(build: Builder, input: fx.Node, hx: Any, **weights: Any) -> Any:
    return tuple(expand_cell(build, "lstm", input, hx, list(weights.values())))


def _expand_gru_cell(build: Builder, input: fx.Node, hx: Any, **weights: Any) -> Any:
    return expand_cell(build, "gru", input, None if hx is None else [hx], list(weights.values()))[0]


def _expand_rnn_cell(build: Builder, input: fx.Node, hx: Any, nonlinearity: str, **weights: Any) -> Any:
    return expand_cell(build, nonlinearity, input, None if hx is None else [hx], list(weights.values()))[0]


# ---- spellings ------------------------------------------------------------------------------------------------------

PACKED = "its input is a packed sequence, whose number of steps is known at run time only: pad it and mask the padded steps"


def _weights(module: Any) -> list[Parameter]:
    """Return the parameters of a layer, in the order in which PyTorch's functions take them."""
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
    """Return the arguments, or why a layer or a cell cannot be unrolled."""
    operands = [arguments["input"], *_listed(arguments["hx"])]
    known = [fact(operand) if isinstance(operand, fx.Node) else None for operand in operands]
    if not all(isinstance(entry, TensorFact) for entry in known):
        return PACKED if len(operands) == 1 else "its state is not a tensor"
    if any(is_parameter(operand) for operand in operands[1:]):
        return "its initial state is a parameter or a constant"
    weights = arguments.get("parameters") or [arguments.get(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    computed = [weight for weight in weights if isinstance(weight, fx.Node) and not is_parameter(weight)]
    if computed:
        return f"one of its weights is computed by %{computed[0].name} from more than parameters"
    because = _refuses(node, arguments)
    return because if because is not None and arguments.get("dropout") else arguments  # the module drops while training


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why a layer cannot be unrolled; None if it can."""
    if "parameters" not in arguments:
        return None
    sizes = Builder.fact(arguments["input"]).shape
    steps = sizes[1 if arguments["batch_first"] and len(sizes) == 3 else 0]
    if not isinstance(steps, int):
        return f"the number of its steps, {steps}, depends on the batch size: the batch is dimension 0 unless dynamic_shapes differs"
    return None if steps else "it has no steps"


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _declare(
    function: Callable[..., Any],
    expand: Callable[..., Any],
    modules: Mapping[type, Callable[[Any], dict[str, Any] | str]],
    functions: Mapping[Callable[..., Any], Adapt],
) -> None:
    operands = ("input", "hx")
    settings: dict[str, Any] = {"modules": modules, "functions": functions, "normalize": _plain, "refuses": _refuses}
    register(Operator(function.__name__, function, operands, expand=expand, **settings))


_declare(lstm, _expand_lstm, {nn.LSTM: _layer_of}, {torch.lstm: _called_with(nested=False)})
_declare(gru, _expand_gru, {nn.GRU: _layer_of}, {torch.gru: _called})
_declare(
    rnn,
    _expand_rnn,
    {nn.RNN: lambda m: {**_layer_of(m), "nonlinearity": m.nonlinearity}},
    {torch.rnn_tanh: _called_with(nonlinearity="tanh"), torch.rnn_relu: _called_with(nonlinearity="relu")},
)
_declare(lstm_cell, _expand_lstm_cell, {nn.LSTMCell: _cell_of}, {torch.lstm_cell: _cell_with()})
_declare(gru_cell, _expand_gru_cell, {nn.GRUCell: _cell_of}, {torch.gru_cell: _cell_with()})
_declare(
    rnn_cell,
    _expand_rnn_cell,
    {nn.RNNCell: lambda m: {**_cell_of(m), "nonlinearity": m.nonlinearity}},
    {torch.rnn_tanh_cell: _cell_with(nonlinearity="tanh"), torch.rnn_relu_cell: _cell_with(nonlinearity="relu")},
)

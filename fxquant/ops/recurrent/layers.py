"""Recurrent layers and their cells: composites, unrolled over the steps of a sequence, 16 bits wide inside where the target has them.

With a_t = W x_t + b, formed for all steps as one linear layer, u_t = U h_{t-1} + b', and σ the sigmoid:

    RNN    h_t = tanh(a_t + u_t), or relu
    LSTM   i, f, g, o = σ, σ, tanh, σ of the four parts of a_t + u_t;   c_t = f·c_{t-1} + i·g;   h_t = o·tanh(c_t), projected by W_r
    GRU    r, z = σ of the first two parts of a_t + u_t;   n = tanh(a_t + r·u_t), of the third;   h_t = (1 - z)·n + z·h_{t-1}

1 - σ(x) is σ(-x), with a separate table. Tensors within (-1, 1) have a constant scale; any other state has one scale for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ops.core.operators import Builder, Instead, Operator, TensorFact, fact, is_parameter, register, settings_of
from fxquant.ops.core.record import Adapt, Parameter
from fxquant.ops.core.samples import RECURRENT, written
from fxquant.ops.recurrent.recurrence import Layers, expand_cell, expand_layers, listed


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
    hidden, cell = _cell(torch.lstm_cell, input, hx, weight_ih, weight_hh, bias_ih, bias_hh)
    return hidden, cell


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
    """Return the arguments, or why a layer or a cell cannot be unrolled."""
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
    """Return why a layer cannot be unrolled; None if it can."""
    if "parameters" not in arguments:
        return None
    sizes = Builder.fact(arguments["input"]).shape
    steps = sizes[1 if arguments["batch_first"] and len(sizes) == 3 else 0]
    if not isinstance(steps, int):
        return f"the number of its steps, {steps}, depends on the batch size: the batch is dimension 0 unless dynamic_shapes differs"
    return None if steps else "it has no steps"


def _declare(
    function: Callable[..., Any], expand: Callable[..., Any], modules: Mapping[type, Callable[[Any], dict[str, Any] | str | Instead]],
    functions: Mapping[Callable[..., Any], Adapt], *texts: str, **shapes: Any,
) -> None:  # fmt: skip
    settings: dict[str, Any] = {"modules": modules, "calls": functions, "normalize": _plain, "refuses": _refuses, "recurs": True}
    settings["samples"] = written(*texts, within=RECURRENT, **shapes)
    register(Operator(function.__name__, function, ("input", "hx"), expand=expand, **settings))


def _expand_lstm(build: Builder, input: fx.Node, hx: Any, nested: bool, **settings: Any) -> Any:
    output, hidden, cell = expand_layers(build, "lstm", input, hx, Layers(**settings))
    return (output, (hidden, cell)) if nested else (output, hidden, cell)


def _expand_rnn(build: Builder, input: fx.Node, hx: Any, **settings: Any) -> Any:
    kind = settings.pop("nonlinearity", "gru")
    return tuple(expand_layers(build, kind, input, hx, Layers(**settings)))


def _expand_cell(build: Builder, input: fx.Node, hx: Any, **weights: Any) -> Any:
    kind = weights.pop("nonlinearity", "gru")
    return expand_cell(build, kind, input, hx, list(weights.values()))[0]


_BENT = ("tanh", "relu")
_STATE = {"x": (4,), "y": (3,)}
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

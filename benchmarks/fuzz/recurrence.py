"""A recurrent layer as an operator of the table, for as long as it is asked for: what shows that grids can be tied.

The table has no recurrent layers; this one unrolls `nn.RNN` over a number of steps that is fixed, from a state of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ops import record
from fxquant.ops.arithmetic import add
from fxquant.ops.composite import Builder
from fxquant.ops.index import getitem
from fxquant.ops.join import stack
from fxquant.ops.linear import linear
from fxquant.ops.record import Operator, Parameter, register
from fxquant.ops.shape import reshape

PARAMETERS = {"weight": "weight_ih_l0", "hidden_weight": "weight_hh_l0", "bias": "bias_ih_l0", "hidden_bias": "bias_hh_l0"}


def recurrence(input: Tensor, weight: Tensor, hidden_weight: Tensor, bias: Tensor, hidden_bias: Tensor) -> tuple[Tensor, Tensor]:
    """h = tanh(W x + b + U h + c) at every step, for all steps, and for the last; of a batch of sequences, or of one."""
    if input.dim() == 2:
        steps, last = recurrence(input.unsqueeze(0), weight, hidden_weight, bias, hidden_bias)
        return steps.squeeze(0), last.squeeze(1)
    states: list[Tensor] = []
    for step in range(input.shape[1]):
        before = hidden_bias if not states else F.linear(states[-1], hidden_weight, hidden_bias)
        states.append(torch.tanh(F.linear(input[:, step], weight, bias) + before))
    return torch.stack(states, 1), states[-1].unsqueeze(0)


def _expand(build: Builder, input: fx.Node, **parameters: fx.Node) -> tuple[fx.Node, fx.Node]:
    steps = build.fact(input).shape[1]
    assert isinstance(steps, int)
    states: list[fx.Node] = []
    for step in range(steps):
        before = parameters["hidden_bias"]
        if states:
            before = build(linear, states[-1], parameters["hidden_weight"], parameters["hidden_bias"])
        value = build(linear, build(getitem, input, [slice(None), step, slice(None)]), parameters["weight"], parameters["bias"])
        states.append(build(torch.tanh, build(add, value, before)))
    build.tie(*states)
    return build(stack, states, 1), build(reshape, states[-1], [1, -1, build.fact(states[-1]).shape[1]])


def _module(module: Any) -> dict[str, Any] | str:
    plain = module.num_layers == 1 and not module.bidirectional and module.nonlinearity == "tanh" and module.bias and module.batch_first
    return {name: Parameter(path) for name, path in PARAMETERS.items()} if plain else "it is no plain layer"


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = Builder.fact(arguments["input"]).shape
    return None if len(known) == 3 and isinstance(known[1], int) else "its input is no batch of sequences of one length"


@contextmanager
def registered() -> Iterator[None]:
    """Inside, `nn.RNN` is an operator of the table."""
    tables: tuple[dict[Any, Any], ...] = (record.OPERATORS, record.FUNCTIONS, record.METHODS, record.MODULES, record._SIGNATURES)
    before = [dict(table) for table in tables]
    register(Operator("recurrence", recurrence, ("input",), expand=_expand, modules={nn.RNN: _module}, refuses=_refuses))
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)

"""Tensors that a model makes anew, with one number everywhere: `zeros_like`, `new_ones`, `full` of a size that depends on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant import functional
from fxquant.facts import TensorFact
from fxquant.graph import fact, is_parameter, parameter_value
from fxquant.ops.record import Operator, operand_nodes

# The number of each, from the arguments; None where that is no number.
_FILLS: dict[Any, Callable[..., Any]] = {
    # What is not filled yet holds any number.
    **dict.fromkeys(
        (torch.zeros, torch.zeros_like, "new_zeros", torch.empty, torch.empty_like, "new_empty", functional.zero), lambda *_, **__: 0.0
    ),
    **dict.fromkeys((torch.ones, torch.ones_like, "new_ones"), lambda *_, **__: 1.0),
    **dict.fromkeys(
        (torch.full, torch.full_like, "new_full"), lambda input, *given, fill_value=None, **_: given[-1] if given else fill_value
    ),
    functional.fill: lambda tensor, value: value,
    "new_tensor": lambda input, data=None, **_: data,
}
MADE = "made"  # where the constants stand that the model makes at every run
_JOINING = ("cat", "stack")
_FILLED = ("setitem", "write", "scatter", "scatter_add", "scatter_extremum", "index_add")  # the others into this one
_STATES = ("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell")  # whose first step needs no state where that is made as zeros
_BROADCASTING = ("add", "sub", "mul", "div", "maximum", "minimum", "where")


def made_anew(node: fx.Node) -> Tensor | None:
    """The float32 values of a tensor that a node makes with one number everywhere, its batch of size 1; None of any other node."""
    known = fact(node)
    if node.op not in ("call_function", "call_method") or node.target not in _FILLS or not isinstance(known, TensorFact):
        return None
    fill = _FILLS[node.target](*node.args, **node.kwargs)
    if known.dtype != torch.float32 or isinstance(fill, bool) or not isinstance(fill, int | float):
        return None
    return torch.full([size if isinstance(size, int) else 1 for size in known.shape], float(fill), device="cpu", dtype=torch.float32)


def made_number(node: Any) -> float | None:
    """The number that a constant holds everywhere which is made anew for the batch; None of anything else."""
    while isinstance(node, fx.Node) and not is_parameter(node) and getattr(node.target, "__name__", "") == "expand":
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    value = made_anew(node)
    if value is None and node.op == "get_attr" and str(node.target).startswith(f"{MADE}.") and node.graph.owning_module is not None:
        value = parameter_value(node.graph.owning_module, node)
    return None if value is None or not value.numel() else float(value.flatten()[0])


def sizes_of(node: fx.Node) -> list[Any] | None:
    """The sizes of what a node makes anew, as an `expand` takes them: numbers, and the nodes of those that depend on the batch.

    None where no node gives such a size: a tensor that is made like another one has none, and needs `Tensor.size`.
    """
    known = fact(node)
    assert isinstance(known, TensorFact)
    numbers = [operand for operand in node.all_input_nodes if not isinstance(fact(operand), TensorFact)]
    found = [size if isinstance(size, int) else next((n for n in numbers if fact(n) == size), None) for size in known.shape]
    return None if None in found else found


def is_joined(node: fx.Node, value: Tensor, reader: fx.Node, operator: Operator | None, arguments: dict[str, Any]) -> bool:
    """Whether a constant needs the batch of the others where `reader` calls this operator: a layer, a composite, what joins tensors."""
    if operator is None or (operator.name in _STATES and not value.any()):
        return False
    calculates = (operator.sums or operator.expand is not None) and operator.name not in _BROADCASTING
    calculates = calculates and node in operand_nodes(operator, arguments)
    return calculates or operator.name in (*_JOINING, *_FILLED) or reader.target is functional.setitem


def is_broadcast(node: fx.Node, reader: fx.Node, operator: Operator | None) -> bool:
    """Whether a constant with a batch of 1 does for `node` where `reader` calls this operator: an activation has the result's shape."""
    if operator is None or operator.name not in _BROADCASTING:
        return False
    others = [operand for operand in reader.all_input_nodes if operand is not node and not is_parameter(operand)]
    shapes = [known.shape for other in others if isinstance(known := fact(other), TensorFact)]
    result = fact(reader)
    return isinstance(result, TensorFact) and result.dtype == torch.float32 and result.shape in shapes

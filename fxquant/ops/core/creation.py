"""Tensors that a model creates with one number everywhere: `zeros_like`, `new_ones`, `full` of a size that depends on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter, parameter_value, refusal
from fxquant.ops.core.record import Operator, operand_nodes

# The fill value of each, from the arguments; None where that is not a number.
_FILLS: dict[Any, Callable[..., Any]] = {
    # An uninitialized tensor may hold any number.
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
MADE = "made"  # the prefix of constants that the model creates at every run
_JOINING = ("cat", "stack")
_FILLED = ("setitem", "write", "scatter", "scatter_add", "scatter_extremum", "index_add")  # write the other operands into this one
_STATES = ("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell")  # need no state for the first step where it is created as zeros
_CALCULATING = ("add", "sub", "mul", "truediv", "div", "neg")  # functions and methods that leave one number everywhere
_BROADCASTING = ("add", "sub", "mul", "div", "maximum", "minimum", "where")


def _number(node: fx.Node) -> float | None:
    """Return the number that a node fills a float32 tensor with, or computes from such a tensor and numbers; None for any other node."""
    known = fact(node)
    if node.op not in ("call_function", "call_method") or not isinstance(known, TensorFact) or known.dtype != torch.float32:
        return None
    if node.target in _FILLS:
        fill = _FILLS[node.target](*node.args, **node.kwargs)
        return float(fill) if isinstance(fill, int | float) and not isinstance(fill, bool) else None
    maker = _maker(node)
    if maker is None or (fill := _number(maker)) is None:
        return None
    read = torch.tensor(fill, dtype=torch.float32, device="cpu")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: read)
    target: Any = node.target
    result: Tensor = target(*args, **kwargs) if node.op == "call_function" else getattr(args[0], target)(*args[1:], **kwargs)
    return float(result) if result.dtype == torch.float32 else None


def _maker(node: fx.Node) -> fx.Node | None:
    """Return the tensor, of the same shape, that a node adds a number to, multiplies by one, and the like; None for any other node."""
    operands = node.all_input_nodes
    name = getattr(node.target, "__name__", node.target)
    if (
        name not in _CALCULATING
        or refusal(node) is not None
        or len(operands) != 1
        or not all(isinstance(each, fx.Node | int | float) for each in node.args)
    ):
        return None
    known, read = fact(node), fact(operands[0])
    return operands[0] if isinstance(known, TensorFact) and isinstance(read, TensorFact) and read == known else None


def made_anew(node: fx.Node) -> Tensor | None:
    """Return the float32 values of a tensor that a node creates with one number everywhere, at batch size 1; None for any other node."""
    fill, known = _number(node), fact(node)
    if fill is None:
        return None
    return torch.full([size if isinstance(size, int) else 1 for size in known.shape], fill, device="cpu", dtype=torch.float32)


def made_number(node: Any) -> float | None:
    """Return the number that a constant created for each batch holds everywhere; None for anything else."""
    while isinstance(node, fx.Node) and not is_parameter(node) and getattr(node.target, "__name__", "") == "expand":
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    value = made_anew(node)
    if value is None and node.op == "get_attr" and str(node.target).startswith(f"{MADE}.") and node.graph.owning_module is not None:
        value = parameter_value(node.graph.owning_module, node)
    return None if value is None or not value.numel() else float(value.flatten()[0])


def filled(node: fx.Node) -> fx.Node:
    """Return the node that fills the tensor which this one computes with numbers; itself where it fills one."""
    while node.target not in _FILLS and (maker := _maker(node)) is not None:
        node = maker
    return node


def sizes_of(node: fx.Node) -> list[Any] | None:
    """Return the sizes of the tensor that a node creates, as an `expand` takes them: numbers, or nodes where they depend on the batch.

    None where no node gives such a size: a tensor that is created like another one has none, and needs `Tensor.size`.
    """
    node = filled(node)
    known = fact(node)
    assert isinstance(known, TensorFact)
    numbers = [operand for operand in node.all_input_nodes if not isinstance(fact(operand), TensorFact)]
    found = [size if isinstance(size, int) else next((n for n in numbers if fact(n) == size), None) for size in known.shape]
    return None if None in found else found


def is_joined(node: fx.Node, value: Tensor, reader: fx.Node, record: Operator | None, arguments: dict[str, Any]) -> bool:
    """Return whether a constant needs the others' batch size as an operand of `reader`: a layer, a composite, a concatenation."""
    if record is None or (record.name in _STATES and not value.any()):
        return False
    calculates = (record.sums or record.expand is not None) and record.name not in _BROADCASTING
    calculates = calculates and node in operand_nodes(record, arguments)
    return calculates or record.name in (*_JOINING, *_FILLED) or reader.target is functional.setitem


def is_broadcast(node: fx.Node, reader: fx.Node, record: Operator | None) -> bool:
    """Return whether a batch of 1 is enough for the constant `node` as an operand of `reader`: an activation has the result's shape."""
    if record is None or record.name not in _BROADCASTING:
        return False
    others = [operand for operand in reader.all_input_nodes if operand is not node and not is_parameter(operand)]
    shapes = [known.shape for other in others if isinstance(known := fact(other), TensorFact)]
    result = fact(reader)
    return isinstance(result, TensorFact) and result.dtype == torch.float32 and result.shape in shapes

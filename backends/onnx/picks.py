"""Selection of one index of a dimension, in float, from the result of a primitive, as ONNX: one step of a sequence.

The steps of a recurrence differ only in this index. The selections are left out of float regions, so that the regions of all steps are
equal, and exported once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.primitives import PRIMITIVES


def is_pick(node: fx.Node) -> bool:
    """Return whether a node selects one index of one dimension from the result of a primitive, or from an input."""
    if node.op != "call_function" or node.target is not getitem or node.kwargs or len(node.args) != 2:
        return False
    operand, index = node.args
    if not isinstance(operand, fx.Node) or not isinstance(index, list | tuple):
        return False
    given = operand.op == "placeholder" or (operand.op == "call_function" and operand.target in PRIMITIVES)
    numbers = [each for each in index if type(each) is int]
    return given and len(numbers) == 1 and all(each == WHOLE for each in index if type(each) is not int)


def emit_pick(node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> None:
    """Append the selection under the node's name, unless it exists."""
    if node in values:
        return
    operand, index = node.args
    axis = next(position for position, each in enumerate(index) if type(each) is int)  # type: ignore[arg-type]
    read = str(values[operand])  # type: ignore[index]
    number = emitter.constant(torch.tensor(index[axis], dtype=torch.int64, device="cpu"))  # type: ignore[index]
    values[node] = emitter.named(emitter.node("Gather", read, number, axis=axis), node.name)

"""Sizes that depend on the batch, and what is computed of them, as ONNX: whole numbers, of which primitives make shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxquant.facts import BatchDim
from fxquant.graph import fact
from fxquant.primitives import PRIMITIVES

# Of sizes, which are never negative, ONNX's integer division is Python's.
_ARITHMETIC: dict[Callable[..., Any], str] = {operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul", operator.floordiv: "Div"}


def sizes_for_primitives(graph: fx.Graph) -> set[fx.Node]:
    """The sizes, and sums and products of sizes, that primitives read and no float operator does."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        readers = node.users
        if _is_size(node) and readers and all(reader in found or reader.target in PRIMITIVES for reader in readers):
            found.add(node)
    return found


def _is_size(node: fx.Node) -> bool:
    if not isinstance(fact(node), int | BatchDim) or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 2 and isinstance(node.args[1], int)
    return node.op == "call_function" and node.target in _ARITHMETIC


def emit_size(node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> str:
    """Append what computes a size; returns the name of its value, an int64 without dimensions."""

    def whole(value: Any) -> str:
        return str(values[value]) if isinstance(value, fx.Node) else constant(value)

    def constant(value: int) -> str:
        return str(emitter.constant(torch.tensor(value, dtype=torch.int64, device="cpu")))

    if node.op == "call_method":
        tensor: Any = node.args[0]
        return str(emitter.node("Gather", emitter.node("Shape", values[tensor]), constant(node.args[1]), axis=0))  # type: ignore[arg-type]
    return str(emitter.node(_ARITHMETIC[node.target], *map(whole, node.args)))  # type: ignore[index]

"""Sizes that depend on the batch, and their arithmetic, as ONNX: int64 values, from which primitives make shapes.

Float intermediate values are doubles, as in Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxquant.ir.facts import BatchDim
from fxquant.ir.graph import fact
from fxquant.primitives import PRIMITIVES

# For sizes, which are never negative, ONNX's integer division equals Python's.
_ARITHMETIC: dict[Callable[..., Any], str] = {operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul", operator.floordiv: "Div"}
_REAL: dict[Callable[..., Any], str] = {operator.truediv: "Div", math.sqrt: "Sqrt", float: "Identity"}
_ROUNDED: dict[Callable[..., Any], str] = {int: "", math.trunc: "", round: "Round", math.floor: "Floor", math.ceil: "Ceil"}


def sizes_for_primitives(graph: fx.Graph) -> set[fx.Node]:
    """Return the sizes, and sums and products of sizes, that only primitives read, and no float operator."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        readers = node.users
        if _is_size(node) and readers and all(reader in found or reader.target in PRIMITIVES for reader in readers):
            found.add(node)
    return found


def _is_size(node: fx.Node) -> bool:
    known = fact(node)
    if node.kwargs or not (known is None or isinstance(known, int | BatchDim)):
        return False
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 2 and isinstance(node.args[1], int)
    if node.op != "call_function" or not all(isinstance(each, fx.Node | int | float) for each in node.args):
        return False
    if known is None and not all(fact(each) is None or isinstance(fact(each), int | BatchDim) for each in node.all_input_nodes):
        return False
    known_form = node.target in _ARITHMETIC or node.target in _REAL or (node.target in _ROUNDED and len(node.args) == 1)
    return known_form and (known is not None or node.target is not operator.floordiv)


def emit_size(node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> str:
    """Append the nodes that compute a size; return the name of its value, a scalar of int64, or of double for an intermediate value."""
    if node.op == "call_method":
        tensor: Any = node.args[0]
        sizes = emitter.node("Shape", values[tensor])
        return str(emitter.node("Gather", sizes, emitter.constant(node.args[1], torch.int64), axis=0))

    def named(value: Any) -> str:
        if isinstance(value, fx.Node):
            return str(values[value])
        return str(emitter.constant(value, torch.float64 if isinstance(value, float) else torch.int64))

    def as_dtype(value: str, dtype: torch.dtype) -> str:
        return value if emitter.dtype(value) == dtype else str(emitter.node("Cast", value, to=dtype))

    target: Any = node.target
    operands = [named(value) for value in node.args]
    if target in _ROUNDED:
        real = emitter.dtype(operands[0]) == torch.float64 and _ROUNDED[target]
        return as_dtype(emitter.node(_ROUNDED[target], *operands) if real else operands[0], torch.int64)
    if target in _REAL or any(emitter.dtype(value) == torch.float64 for value in operands):
        operands = [as_dtype(value, torch.float64) for value in operands]
    return str(emitter.node((_REAL if target in _REAL else _ARITHMETIC)[target], *operands))

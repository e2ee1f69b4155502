"""Sizes and bounds that a model computes from its constants as tensors of one integer: they are replaced by that integer."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter, parameter_value

SIZED = frozenset((
    "pad", "_pad", "constant_pad_nd", "narrow", "view", "reshape", "expand", "repeat", "unflatten", "split",
    "new_zeros", "new_ones", "new_full",
))  # fmt: skip


def settle(node: fx.Node) -> None:
    """Replace bounds of slices, and sizes next to the operand, that are computed from constants alone by numbers."""
    if node.op not in ("call_function", "call_method"):
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not any(map(is_parameter, node.all_input_nodes)):
        return
    arguments: Any = (_bounds(tuple(node.args[1:])), _bounds(dict(node.kwargs)))
    if name in SIZED:
        arguments = fx.map_arg(arguments, _number)
    node.args, node.kwargs = (*node.args[:1], *arguments[0]), dict(arguments[1])


def _bounds(value: Any) -> Any:
    """Return a nest with numbers for the bounds of its slices."""
    if isinstance(value, slice):
        return fx.map_arg(value, _number)
    if isinstance(value, list | tuple):
        items = [_bounds(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return {key: _bounds(item) for key, item in value.items()} if isinstance(value, dict) else value


def _number(value: fx.Node) -> Any:
    """Return the number that a node holds, where it is one integer that follows from constants; otherwise the node."""
    known, model = fact(value), value.graph.owning_module
    if not is_parameter(value) or model is None or not isinstance(known, TensorFact) or known.shape:
        return value
    if known.dtype.is_floating_point or known.dtype.is_complex or known.dtype == torch.bool:
        return value
    return int(parameter_value(model, value))

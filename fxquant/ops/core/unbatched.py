"""A layer that is called on one sample, without a batch, is called on a batch of one; a pool on a batch of its channels.

%y = conv2d(%x)        [3, 8, 8]       →     %y_batch = reshape(%x, [1, 3, 8, 8])
                                             %y = conv2d(%y_batch)
                                             %y_sample = reshape(%y, [4, 6, 6])
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from fxquant.ir.graph import TensorFact, fact, inherit, is_parameter, parameter_value, reads_shape_only, set_fact
from fxquant.ops.core.record import FUNCTIONS, METHODS, MODULES, Operator
from fxquant.ops.movement.shape import numbers, reshape

LAYERS = re.compile(r"(conv|conv_transpose)(\d)d")  # which join the channels of a sample
POOLS = re.compile(r"(max_pool|avg_pool|lp_pool|adaptive_max_pool|adaptive_avg_pool)(\d)d")  # which do not
NORMS: dict[type, int] = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


def give_batch(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a layer or pool of the table read a tensor without a batch dimension; it reads one with it now."""
    place = _missing(node, modules)
    if place is None:
        return False
    operand, known = node.args[0], fact(node)
    assert isinstance(operand, fx.Node)
    given = fact(operand)
    before = TensorFact((*given.shape[:place], 1, *given.shape[place:]), given.dtype)
    with node.graph.inserting_before(node):
        batch = _reshaped(node, operand, before, "batch")
    with node.graph.inserting_after(node):
        sample = _reshaped(node, node, known, "sample")
    node.replace_all_uses_with(sample, lambda reader: reader is not sample)
    node.args = (batch, *node.args[1:])
    set_fact(node, TensorFact((*known.shape[:place], 1, *known.shape[place:]), known.dtype))
    return True


def _reshaped(node: fx.Node, operand: fx.Node, to: TensorFact, name: str) -> fx.Node:
    made = node.graph.create_node("call_function", reshape, (operand, numbers(to.shape)), {}, name=f"{node.name}_{name}")
    set_fact(inherit(made, node, "canonical.rewrite"), to)
    return made


def _missing(node: fx.Node, modules: Mapping[str, nn.Module]) -> int | None:
    """Return where a node's operand lacks a dimension; None where it does not."""
    rank, place = _rank(node, modules)
    operand = node.args[0] if node.args else None
    if not rank or not isinstance(operand, fx.Node) or is_parameter(operand):
        return None
    known, result = fact(operand), fact(node)
    if not isinstance(known, TensorFact) or not isinstance(result, TensorFact):
        return None
    depending = sum(not isinstance(size, int) for size in known.shape)
    fits = len(known.shape) == rank + 1 == len(result.shape) and not reads_shape_only(node)
    return place if fits and depending <= place and all(isinstance(size, int) for size in known.shape[place:]) else None


def _rank(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Return the dimensions of its windows, 0 where it has none, and where one sample lacks a dimension."""
    if node.op == "call_module" and type(modules[str(node.target)]) in NORMS:
        return NORMS[type(modules[str(node.target)])], 0
    operator = _operator(node, modules)
    for place, pattern in enumerate((LAYERS, POOLS)):
        found = None if operator is None else pattern.fullmatch(operator.name)
        if found is not None:
            return int(found[2]), place
    return 0, 0


def _operator(node: fx.Node, modules: Mapping[str, nn.Module]) -> Operator | None:
    tables: dict[str, Any] = {"call_module": MODULES, "call_function": FUNCTIONS, "call_method": METHODS}
    key = type(modules[str(node.target)]) if node.op == "call_module" else node.target
    found: tuple[Operator, Any] | None = tables[node.op].get(key) if node.op in tables else None
    return None if found is None else found[0]


# ---- Sizes and bounds that a model computes from its constants as tensors of one integer: they are replaced by that integer ----


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

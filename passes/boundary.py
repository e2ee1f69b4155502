"""Quantize and dequantize stand where the integer part of the graph begins and ends.

%y = conv2d(%x, %w)                    →    %x_quantize = quantize(%x)
return %y                                   %y = conv2d(%x_quantize, %w)
                                            %y_dequantize = dequantize(%y)
                                            return %y_dequantize
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fxquant.graph import Annotation, annotate, annotation, fact, inherit, reads_shape_only, set_fact
from fxquant.numerics import EVERYTHING, Interval
from fxquant.ops import matters, operand_nodes, operator_of
from fxquant.ops.boundary import DEQUANTIZE, QUANTIZE
from fxquant.ops.record import Operator
from fxquant.pipeline import Context
from fxquant.stage import is_integer

Made = dict[tuple[fx.Node, Interval], fx.Node]  # by the value, and which of it matters


def insert(gm: fx.GraphModule, context: Context) -> int:
    """Every value crosses between float and integer through one quantize or one dequantize.

    A reader that limits it on both sides has a quantize of its own, so that others do not make its scale coarse.
    """
    quantized: Made = {}
    dequantized: Made = {}
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        activations = set(operand_nodes(operator, operator.arguments(node))) if operator is not None and is_integer(node) else set()

        def cross(
            operand: fx.Node, node: fx.Node = node, operator: Operator | None = operator, activations: set[fx.Node] = activations
        ) -> fx.Node:
            if is_integer(operand) and operand not in activations:
                if reads_shape_only(node) or operator is DEQUANTIZE:
                    return operand
                return _boundary(gm, operand, DEQUANTIZE, dequantized, operand)
            if operand in activations and not is_integer(operand):
                return _boundary(gm, operand, QUANTIZE, quantized, node)
            return operand

        _map_inputs(node, cross)
    return len(quantized) + len(dequantized)


def _map_inputs(node: fx.Node, function: Any) -> None:
    args, kwargs = fx.map_arg(node.args, function), fx.map_arg(node.kwargs, function)
    if args != node.args:
        node.args = args
    if kwargs != node.kwargs:
        node.kwargs = kwargs


def _boundary(gm: fx.GraphModule, value: fx.Node, operator: Operator, made: Made, reader: fx.Node) -> fx.Node:
    """The one quantize or dequantize of this value for this reader and those alike, made behind it if there is none yet."""
    limits = matters(reader, EVERYTHING, False) if operator is QUANTIZE else EVERYTHING
    key = value, limits if all(map(math.isfinite, limits)) else EVERYTHING
    known = made.get(key)
    if known is not None:
        return known
    with gm.graph.inserting_after(_last_placeholder(gm) if value.op == "placeholder" else value):
        created = gm.graph.create_node("call_function", operator.function, (value,), {}, name=f"{value.name}_{operator.name}")
    node: fx.Node = inherit(created, value, "boundary.insert")
    made[key] = node
    set_fact(node, fact(value))
    spec = annotation(reader)
    assert spec is not None
    if operator is QUANTIZE:
        dtype = (spec.config.input or spec.config.output).dtype
        dtype = "int8" if dtype == "int32" else dtype  # that is asked of a last layer's output, not of its input
        annotate(node, Annotation(dtype, f"the input of %{reader.name}", spec.config))
    else:
        annotate(node, Annotation(None, "the end of the integer part", spec.config, spec.group))
    return node


def _last_placeholder(gm: fx.GraphModule) -> fx.Node:
    placeholders: list[fx.Node] = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return placeholders[-1]

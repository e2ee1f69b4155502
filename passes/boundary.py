"""Quantize and dequantize stand where the integer part of the graph begins and ends.

%y = conv2d(%x, %w)                    →    %x_quantize = quantize(%x)
return %y                                   %y = conv2d(%x_quantize, %w)
                                            %y_dequantize = dequantize(%y)
                                            return %y_dequantize
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fxquant.ir.graph import Annotation, annotate, annotation, fact, inherit, reads_shape_only, set_fact
from fxquant.numerics.grids import EVERYTHING, Interval
from fxquant.ops import matters, operands_of, operator_of, preferred_by, preferred_dtypes
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE
from fxquant.ops.core.record import Operator
from fxquant.passes.rewriting import decide
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer, is_quantized
from fxquant.quantization.spec import DEFAULT, ActivationConfig

# The boundary nodes of a value, by config and by the interval of its values that matters. The config None is that of readers for whose
# input no rule asks.
Made = dict[fx.Node, dict[tuple[ActivationConfig | None, Interval], fx.Node]]


def insert(gm: fx.GraphModule, context: Context) -> int:
    """Insert one dequantize where a value crosses from integer to float, and one quantize where it crosses from float to integer.

    Readers of a float value have separate quantizes where they ask for different inputs (`QConfig.input`). So has a reader that
    limits the value on both sides, since the others would make its scale coarser.
    """
    preferred = preferred_dtypes(gm.graph, context.target.activations)
    quantized: Made = {}
    dequantized: Made = {}
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        activations = set(operands_of(node)) if is_integer(node) else set()

        def cross(
            operand: fx.Node, node: fx.Node = node, operator: Operator | None = operator, activations: set[fx.Node] = activations
        ) -> fx.Node:
            if is_quantized(operand) and operand not in activations:
                if reads_shape_only(node) or operator is DEQUANTIZE:
                    return operand
                return _boundary(gm, operand, DEQUANTIZE, dequantized, operand, context, preferred)
            if operand in activations and not is_integer(operand):
                return _boundary(gm, operand, QUANTIZE, quantized, node, context, preferred)
            return operand

        args, kwargs = fx.map_arg(node.args, cross), fx.map_arg(node.kwargs, cross)
        if args != node.args:
            node.args = args
        if kwargs != node.kwargs:
            node.kwargs = kwargs
    return sum(len(set(there.values())) for there in (*quantized.values(), *dequantized.values()))


def _boundary(
    gm: fx.GraphModule, value: fx.Node, operator: Operator, nodes: Made, reader: fx.Node, context: Context, preferred: Mapping[fx.Node, str]
) -> fx.Node:
    """Return the quantize or dequantize of this value for its reader; insert it after the value if there is none yet."""
    spec = annotation(reader)
    assert spec is not None
    asked = spec.config.input if operator is QUANTIZE else None
    config = asked or spec.config.output
    if config.dtype == "int32":  # that is asked of a last layer's output, not of its input
        config = replace(config, dtype=context.target.default_activation)
    dtype: str | None = None
    # A rule about the input of the reader takes precedence over the dtype that the reader prefers.
    if operator is QUANTIZE and not decide(reader).asked and (asked is None or decide(reader).layer == DEFAULT):
        dtype = preferred_by(reader, value, preferred)
    if dtype is not None and dtype in context.target.activations and dtype != config.dtype:
        asked = config = config.of(dtype)
    limits = matters(reader, EVERYTHING, False) if operator is QUANTIZE else EVERYTHING
    if not all(map(math.isfinite, limits)):
        limits = EVERYTHING
    there = nodes.setdefault(value, {})
    existing = there.get((config, limits)) if asked is not None or (None, limits) not in there else there[None, limits]
    if existing is not None:
        return existing
    other = [fact(value).dtype] if operator is DEQUANTIZE and fact(value).dtype != torch.float32 else []
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value):
        name = f"{value.name}_{operator.name}" + (f"_{reader.name}" if there else "")
        created = gm.graph.create_node("call_function", operator.function, (value, *other), {}, name=name)
    node: fx.Node = inherit(created, value, "boundary.insert")
    there[config, limits] = node
    if asked is None or (dtype is None and decide(reader).layer == DEFAULT):
        there.setdefault((None, limits), node)
    set_fact(node, fact(value))
    if operator is QUANTIZE:
        annotate(node, Annotation(config.dtype, f"the input of %{reader.name}", spec.config))
    else:
        annotate(node, Annotation(None, "the end of the integer part", spec.config, spec.group))
    return node

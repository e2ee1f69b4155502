"""Give the concatenated parts of an output separate scales: concatenate the dequantized tensors, on the host.

%y = cat([%boxes, %scores], 1)         →    %y = cat([%boxes_dequantize, %scores_dequantize], 1)      in float
return %y                                   return %y

With one scale for boxes in pixels and scores below 1, all scores are rounded to 0. Operators that copy elements, and whose results only
such operators and outputs read, are exact in float. Operators that copy elements of a single tensor stay integer, since one scale suits
them. So do operators named by a rule of the qconfig.

Integers that leave the model only as float tensors need no scale either.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from fxquant.ir.graph import computes_tensor, is_parameter, parameter_value, reads_shape_only, ties
from fxquant.ops import Fixed, Operator, carried, copies, demand, operands_of, operator_of, read_nodes, shares
from fxquant.passes.rewriting import decide, is_named, keep_in_float, result_config
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer, is_quantized


def separate(gm: fx.GraphModule, context: Context) -> int:
    """Keep operators in float that put parts of different tensors on one grid for an output alone."""
    leaving = _leaving(gm.graph)
    separated: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node not in leaving:
            continue
        operator = operator_of(node)
        assert operator is not None
        before = [operand for operand in operands_of(node) if operand in separated]
        because = f"it only passes on the values of %{before[0].name}, which is in float" if before else _why(gm, node, operator)
        if because is not None:
            keep_in_float(node, because, context, on_host=True)
            separated.add(node)
    return len(separated)


def _leaving(graph: fx.Graph) -> set[fx.Node]:
    """Return the integer nodes that only copy elements, and whose elements only leave the model, unchanged or through the host."""
    ends: set[fx.Node] = set()
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or reads_shape_only(node):
            ends.add(node)
            continue
        if not all(user in ends for user in node.users):
            continue
        if is_quantized(node) and copies(node) and not is_named(node):
            if not decide(node).asked or result_config(node).fixed_scale is None:  # else it has the grid that a rule gives it
                nodes.add(node)
                ends.add(node)
        elif computes_tensor(node) and not is_integer(node):
            ends.add(node)
    return nodes


def _why(gm: fx.GraphModule, node: fx.Node, operator: Operator) -> str | None:
    """Return why a node whose result only outputs read stays in float; None if one scale suits all its operands."""
    if shares(node):
        return None
    if not operator.operands:
        return "it converts integers to float, and only outputs of the model read the result"
    ranges = len(set(_ranges(gm, node)))
    if ranges and not operands_of(node) and not read_nodes(operator, operator.arguments(node)):
        return "it copies constants, and only outputs of the model read them"
    return "only outputs of the model read its parts, each on a different grid" if ranges > 1 else None


def _ranges(gm: fx.GraphModule, node: fx.Node) -> Iterator[object]:
    """Yield the sources of the grids of the elements that a node copies: tensors, constants and numbers. Zero is on every grid."""
    operator = operator_of(node)
    assert operator is not None
    arguments = operator.arguments(node)
    for name in carried(operator):
        value = arguments.get(name)
        for part in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(part, fx.Node):
                yield from [float(part)] if part else []
            elif is_parameter(part):
                constant = parameter_value(gm, part)
                yield from [part] if not isinstance(constant, Tensor) or bool(constant.any()) else []
            else:
                yield from _origins(gm, part)


def _origins(gm: fx.GraphModule, node: fx.Node) -> Iterator[object]:
    """Yield the sources of a node's scale: nodes whose range determines it, names of ties, or a constant scale."""
    demanded = demand(node)
    if copies(node) and is_quantized(node):
        yield from _ranges(gm, node)
    elif isinstance(demanded, Fixed):
        yield demanded
    else:
        yield min(ties(node), default=node)

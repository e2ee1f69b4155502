"""Integers between float operators that gain nothing by being integers stay in float: values then cross once less each way.

%a = fft(%x)                           %a = fft(%x)
%b = reshape(%a)   (integer)     →     %b = reshape(%a)   (float)
%c = fft(%b)                           %c = fft(%b)

An island is a set of integer operators that are connected with each other and with no other integer operators. It stays in float if
three conditions hold. Every operand is computed by a float operator, or is an input that the island only moves. Every reader is a
float operator. The island computes no sums of products. Operators that a rule of the qconfig makes integer are left unchanged.
"""

from __future__ import annotations

import networkx as nx
from torch import fx

from fxquant.ir.graph import computes_tensor, is_parameter, part, reads_shape_only
from fxquant.ops import has_weights, operands_of, operator_of, shares
from fxquant.passes.rewriting import decide, keep_in_float
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer


def sink(gm: fx.GraphModule, context: Context) -> int:
    """Keep islands in float whose values would cross from float to integer and back without a gain."""
    connected = nx.Graph()
    for node in gm.graph.nodes:
        if operator_of(node) is not None and is_integer(node):
            connected.add_node(node)
            connected.add_edges_from((node, operand) for operand in operands_of(node) if is_integer(operand))
    changes = 0
    for island in nx.connected_components(connected):
        because = _why(island)
        if because is None:
            continue
        for node in island:
            keep_in_float(node, because, context)
        changes += len(island)
    return changes


def _why(island: set[fx.Node]) -> str | None:
    """Return why an island stays in float; None if it is worth its quantize and dequantize."""
    if any(has_weights(node) or decide(node).asked for node in island):
        return None
    readers = {user for node in island for user in node.users if user not in island and not reads_shape_only(user)}
    if not readers or not all(_computes_in_float(user) for user in readers):
        return None
    moves = all(shares(node) and part(node) is None for node in island)
    read = {operand for node in island for operand in operands_of(node) if operand not in island}
    if not all(_computes_in_float(operand) or (moves and operand.op == "placeholder") for operand in read):
        return None
    names = " and ".join(sorted(f"%{user.name}" for user in readers)[:2])
    return f"it lies between operators in float, and is read only by {names}"


def _computes_in_float(node: fx.Node) -> bool:
    return computes_tensor(node) and not is_parameter(node) and not is_integer(node)

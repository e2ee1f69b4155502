"""A clamp (relu, relu6, hardtanh) becomes the limits of the operator before it.

%conv = conv2d(%x, %w)
%y    = clamp(%conv, 0, 6)             →    %conv = conv2d(%x, %w, clamp=(0, 6))
"""

from __future__ import annotations

from torch import fx

from fxquant.graph import absorb
from fxquant.ops import operator_of
from fxquant.pipeline import Context
from fxquant.rules import apart


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """No clamp is left behind an operator that can absorb it: a fused clamp needs no scale and no step of its own."""
    changes = 0
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        if operator is None or operator.name != "clamp" or operator.refuses(node, operator.arguments(node)) is not None:
            continue
        producer = node.args[0]
        assert isinstance(producer, fx.Node)
        reason = _why_not(producer) or apart(producer, node)
        if reason is not None:
            context.say(f"%{node.name} is not fused: {reason}")
            continue
        producer.kwargs = {**producer.kwargs, "clamp": (node.args[1], node.args[2])}
        node.replace_all_uses_with(producer)
        absorb(producer, node)
        gm.graph.erase_node(node)
        context.say(f"%{node.name} fused into %{producer.name}")
        changes += 1
    return changes


def _why_not(producer: fx.Node) -> str | None:
    operator = operator_of(producer)
    if operator is None or "clamp" not in operator.absorbs:
        return f"%{producer.name} ends in no requantization"
    if len(producer.users) > 1:
        return f"%{producer.name} has {len(producer.users)} users"
    return f"%{producer.name} already ends in a clamp" if "clamp" in producer.kwargs else None

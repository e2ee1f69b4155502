"""A batch norm becomes part of the convolution or linear layer before it.

    %conv = conv2d(%x, %w)                      %conv = conv2d(%x, %w, batch_norm=%bn)
    %y    = batch_norm(%conv, %bn)         →

The weights are not touched: folding is a function of weight and batch norm, evaluated in every state, so a
layer that is shared by two batch norms is simply folded twice.
"""

from __future__ import annotations

from torch import fx

from fxquant.graph import absorb, shape_of
from fxquant.ops import operator_of
from fxquant.pipeline import Context


def fold(gm: fx.GraphModule, context: Context) -> int:
    """No batch norm is left behind a layer that can absorb it."""
    changes = 0
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        if operator is None or operator.name != "batch_norm":
            continue
        layer, batch_norm = node.args
        assert isinstance(layer, fx.Node)
        reason = _why_not(layer)
        if reason is not None:
            context.say(f"%{node.name} is not folded: {reason}")
            continue
        # The layer moves down to the batch norm, whose statistics may be read from nodes in between.
        node.prepend(layer)
        layer.kwargs = {**layer.kwargs, "batch_norm": batch_norm}
        node.replace_all_uses_with(layer)
        absorb(layer, node)
        gm.graph.erase_node(node)
        context.say(f"%{node.name} folded into %{layer.name}")
        changes += 1
    return changes


def _why_not(layer: fx.Node) -> str | None:
    operator = operator_of(layer)
    if operator is None or "batch_norm" not in operator.absorbs:
        return f"%{layer.name} is no layer with weights"
    if len(layer.users) > 1:
        return f"%{layer.name} has {len(layer.users)} users"
    if operator.name == "linear" and len(shape_of(layer)) != 2:
        return f"the channels of %{layer.name} are its last dimension, and a batch norm's are dimension 1"
    return f"%{layer.name} already has fused parts" if layer.kwargs else None

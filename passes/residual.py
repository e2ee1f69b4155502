"""An addition becomes part of the layer that feeds it, and is done in its accumulator.

%conv = conv2d(%x, %w)
%y    = add(%conv, %r)                 →    %conv = conv2d(%x, %w, residual=%r)
"""

from __future__ import annotations

from torch import fx

from fxquant.facts import TensorFact
from fxquant.graph import absorb, fact, is_parameter, set_unfused, stated_demand, ties
from fxquant.ops import operator_of
from fxquant.ops.arithmetic import add
from fxquant.ops.floating import in_front_of_softmax, masks
from fxquant.pipeline import Context
from fxquant.quantization.rules import apart


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """No addition is left whose operand is a layer that can absorb it."""
    masked = masks(gm, in_front_of_softmax(gm))
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    changes = 0
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        if operator is None or operator.function is not add or operator.refuses(node, operator.arguments(node)) is not None:
            continue
        if node in masked:
            context.say(f"%{node.name} is not fused: it adds an attention mask in front of a softmax")
            continue
        # The later layer absorbs: the other operand is then computed already.
        candidates = sorted((a for a in node.args[:2] if isinstance(a, fx.Node)), key=position.__getitem__, reverse=True)
        reasons = [_why_not(layer, node) or apart(layer, node) for layer in candidates]
        if None not in reasons:
            set_unfused(node, "; ".join(map(str, reasons)))
            context.say(f"%{node.name} is not fused: {'; '.join(str(r) for r in reasons)}")
            continue
        layer = candidates[reasons.index(None)]
        residual = node.args[1] if node.args[0] is layer else node.args[0]
        node.prepend(layer)
        position[layer] = position[node]
        layer.kwargs = {**layer.kwargs, "residual": residual}
        node.replace_all_uses_with(layer)
        absorb(layer, node)
        gm.graph.erase_node(node)
        context.say(f"%{node.name} fused into %{layer.name}")
        changes += 1
    return changes


def _why_not(layer: fx.Node, addition: fx.Node) -> str | None:
    operator = operator_of(layer)
    if operator is None or "residual" not in operator.absorbs:
        return f"%{layer.name} is no layer with weights"
    if stated_demand(layer) is not None or ties(layer):
        return f"its composite says what grid %{layer.name} is on"
    if len(layer.users) > 1 or addition.args[0] is addition.args[1]:
        return f"%{layer.name} has other users"
    if set(layer.kwargs) - {"batch_norm"}:
        return f"%{layer.name} already ends in {', '.join(set(layer.kwargs) - {'batch_norm'})}"
    if operator_of(addition).arguments(addition)["alpha"] != 1:  # type: ignore[union-attr]
        return "its second operand is multiplied by alpha"
    if not all(isinstance(a, fx.Node) and not is_parameter(a) and isinstance(fact(a), TensorFact) for a in addition.args[:2]):
        return "its other operand is no activation"
    if any(fact(a) != fact(addition) for a in addition.args[:2] if isinstance(a, fx.Node)):
        return "its operands differ in shape"
    return None

"""Where an operator that works on its operand's grid is to have another dtype than its operand, a requantization stands between them.

%p = max_pool2d(%x, 2)  (int16, of an int8 %x)     →     %p_requantize = requantize(%x)
                                                         %p = max_pool2d(%p_requantize, 2)
"""

from __future__ import annotations

from torch import fx

from fxquant.graph import Annotation, Part, annotate, annotation, fact, inherit, part, set_fact, set_part
from fxquant.ops import sharing_operands
from fxquant.ops.boundary import REQUANTIZE
from fxquant.pipeline import Context
from fxquant.stage import is_integer


def insert(gm: fx.GraphModule, context: Context) -> int:
    """No operator that must share its operands' grid has another dtype than these."""
    changes = 0
    for node in list(gm.graph.nodes):
        if not is_integer(node):
            continue
        spec = annotation(node)
        assert spec is not None
        for operand in dict.fromkeys(sharing_operands(node, context.target.arithmetic)):
            known = annotation(operand)
            if known is None or known.dtype in (None, spec.dtype):
                continue
            because = f"%{operand.name} is {known.dtype}, and %{node.name}, which would be on its scale, {spec.dtype}"
            node.replace_input_with(operand, _made(node, operand, Annotation(spec.dtype, because, spec.config)))
            context.say(f"%{operand.name} is requantized for %{node.name}: {because}")
            changes += 1
    return changes


def _made(node: fx.Node, operand: fx.Node, spec: Annotation) -> fx.Node:
    with node.graph.inserting_before(node):
        name = f"{node.name}_{REQUANTIZE.name}"
        made = inherit(node.graph.create_node("call_function", REQUANTIZE.function, (operand,), {}, name=name), node, "requantize.insert")
    set_fact(made, fact(operand))
    annotate(made, spec)
    whole = part(node)
    if whole is not None:
        set_part(made, Part(whole.composite, f"{whole.role}, {REQUANTIZE.name}d"))
    return made

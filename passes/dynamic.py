"""Dynamic quantization: linear layers that the qconfig selects are quantized at run time, between float tensors.

%y = linear(%x, %w, %b)      →     %y = dynamic_linear(%x, %w, %b)
%y = matmul(%x, %w)          →     %w_permute = permute(%w, [1, 0])        (a parameter)
                                   %y = dynamic_linear(%x, %w_permute)
"""

from __future__ import annotations

from torch import fx

from fxquant.ir.graph import TensorFact, inherit, mark_parameter, refusal, refuse, set_fact
from fxquant.ops import operator_of
from fxquant.ops.core.weighted import shape_of
from fxquant.ops.layers.dynamic import dynamic_linear, may_be_dynamic, why_not_dynamic
from fxquant.ops.layers.linear import matmul
from fxquant.ops.movement.shape import permute
from fxquant.passes.rewriting import decide
from fxquant.pipeline import Context


def choose(gm: fx.GraphModule, context: Context) -> int:
    """Make every layer whose QConfig is dynamic a dynamic one, or record why it stays in float."""
    changes = 0
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        if operator is None or operator.expand is not None or not may_be_dynamic(node):
            continue
        config = decide(node).config
        if config is None or not config.dynamic or refusal(node) is not None:
            continue
        arguments = operator.arguments(node)
        product = operator.function is matmul
        input, weight, bias = arguments["input"], arguments["other" if product else "weight"], arguments.get("bias")
        because = why_not_dynamic(node, input, weight, bias)
        if because is not None:
            refuse(node, because)
            context.say(f"%{node.name} stays in float: {because}")
            continue
        node.target, node.args, node.kwargs = dynamic_linear, (input, _transposed(node, weight) if product else weight, bias), {}
        changes += 1
    return changes


def _transposed(node: fx.Node, weight: fx.Node) -> fx.Node:
    """Return the matrix of a product in the form of a layer's weight."""
    shape, dtype = shape_of(weight), node.meta["fact"].dtype
    assert shape is not None
    with node.graph.inserting_before(node):
        transposed: fx.Node = inherit(node.graph.call_function(permute, (weight, [1, 0])), node, "dynamic.choose")
    mark_parameter(transposed)
    set_fact(transposed, TensorFact(tuple(reversed(shape)), dtype))
    return transposed

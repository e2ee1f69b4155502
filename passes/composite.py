"""A composite operator is written as calls of the operators that it is made of.

%y = softmax(%x, dim=1)      →    %y_amax = amax(%x, [1], True)
                                  %y_sub = sub(%x, %y_amax)
                                  …
                                  %y = mul(%y_exp, %y_reciprocal)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxquant.ir import graph as facts
from fxquant.ir.graph import TensorFact
from fxquant.numerics.grids import INT32_MAX
from fxquant.ops import Fixed, Operator, Own, Same, Trait, demand, operands_of, operator_of, supported_demand
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.weighted import shape_of
from fxquant.ops.layers.linear import dynamic_linear, matmul
from fxquant.ops.movement.shape import MANY_SIZES, ManySizes, permute
from fxquant.passes.floating import needed_in_float, reads_no_activation
from fxquant.passes.rewriting import decide, eliminate_dead, may_be_dynamic, substitute
from fxquant.pipeline import Context
from fxquant.primitives.runtime_scales import MAGNITUDE


def expand(gm: fx.GraphModule, context: Context) -> int:
    """Expand every composite into its parts; one that could not be completely integer stays in float, with the reason."""
    composites = [node for node in gm.graph.nodes if (record := operator_of(node)) is not None and record.expand is not None]
    if not composites:
        return 0
    needed = needed_in_float(gm, context.target.activations)
    changes = 0
    for node in composites:
        composite = operator_of(node)
        assert composite is not None
        assert composite.expand is not None
        config = decide(node).config
        if config is None or facts.refusal(node) is not None:
            continue
        arguments = composite.arguments(node)
        because = _why_whole(node, composite, arguments) or (None if config.dynamic else needed.get(node))
        if not because:
            activations = (*context.target.activations, *(context.target.recurrent if composite.recurs else ()))
            target = context.target
            by_items, segments = target.normalizes_items, target.arithmetic.segments
            build = Builder(composite.name, node, activations, real=config.dynamic, normalizes_items=by_items, segments=segments)
            result: Any = None
            because = None
            try:
                result = composite.expand(build, **arguments)
            except ManySizes:
                because = MANY_SIZES
            for inner in build.parts:
                part_demand = demand(inner)
                if config.dynamic:
                    _leave_in_float(inner)
                elif part_demand is not None and supported_demand(part_demand, activations) != part_demand:
                    facts.state_demand(inner, supported_demand(part_demand, activations))
            if not config.dynamic:
                because = because or next(
                    (reason for each in build.parts if (reason := _why_float(each, context.target.name, activations)) is not None), None
                )
            if because is None:
                read = node.all_input_nodes
                _replace(node, result)
                build.discard(*([result] if isinstance(result, fx.Node) else []))
                eliminate_dead(read, lambda each: not each.is_impure())
                context.say(f"%{node.name} is expanded into {len(build.parts)} parts")
                changes += 1
                continue
            build.discard(effects=True)
        facts.refuse(node, because)
        context.say(f"%{node.name} is not expanded: {because}")
    return changes


def _why_whole(node: fx.Node, composite: Operator, arguments: dict[str, Any]) -> str | None:
    """Return why a composite cannot be integer as a whole; None if its parts decide."""
    because = reads_no_activation(composite, arguments) or composite.refuses(node, arguments)
    if because is not None:
        return because
    config = decide(node).config
    if config is not None and config.output.dtype == "int32":
        return f"{composite.name} has no 32-bit output: it forms no sum of products"
    for operand in operands_of(node):
        source = operator_of(operand)
        chosen = decide(operand).config if source is not None and Trait.SUMS in source.traits else None
        if chosen is not None and chosen.output.dtype == "int32":
            return f"the 32-bit output of %{operand.name} is not read by another integer operator"
    return None


def _leave_in_float(node: fx.Node) -> None:
    """Keep a part of a dynamically quantized composite in float if it is not a layer; a layer's result is not quantized."""
    facts.state_demand(node, None)
    if not may_be_dynamic(node):
        facts.set_matched_rules(node, *(tuple((rule, None) for rule, _ in rules) for rules in facts.matched_rules(node)))
        facts.refuse(node, f"a part of {facts.part(node).composite}, between layers that are quantized at run time")  # type: ignore[union-attr]


def _why_float(node: fx.Node, target: str, activations: Sequence[str]) -> str | None:
    """Return why a part cannot be integer on the target, which has the dtypes `activations` in the composite; None if it can."""
    if facts.is_parameter(node):
        return None
    record, demanded, node_part = operator_of(node), demand(node), facts.part(node)
    assert record is not None
    because = record.refuses(node, record.arguments(node))
    if because is not None:
        return f"{node_part}: {because}"
    dtype = demanded.dtype if isinstance(demanded, Own | Fixed) else None
    if dtype is not None and dtype not in activations:
        return f"{node_part}: {target} computes with {', '.join(activations)} activations, and it needs {dtype}"
    return None


def _replace(node: fx.Node, result: Any) -> None:
    """Replace the node by the result; a result that is one part takes the node's position and name."""
    if isinstance(result, fx.Node) and facts.part(result) is not None:
        _pass_on(node, result)
        node.target, node.args, node.kwargs = result.target, result.args, result.kwargs
        node.meta.update(result.meta)
        facts.set_inner(node, False)
        result.replace_all_uses_with(node)
        result.graph.erase_node(result)
        return
    fx.map_arg(result, lambda each: None if facts.part(each) is None else facts.set_inner(each, False))
    substitute(node, result)


def _pass_on(node: fx.Node, result: fx.Node) -> None:
    """Pass the demand on the composite on to its last part, or, where that only moves values, to the part that computes them."""
    node_demand, source = facts.stated_demand(node), result
    while node_demand is not None and facts.stated_demand(source) is None and isinstance(demand(source), Same):
        operands = operands_of(source)
        facts.state_demand(node, None)
        if len(operands) != 1 or facts.part(operands[0]) is None:
            return
        source = operands[0]
    if node_demand is not None and source is not result and facts.stated_demand(source) is None:
        facts.state_demand(source, node_demand)


# ---- Dynamic quantization -------------------------------------------------------------------------------------------
#
# Dynamic quantization: linear layers that the qconfig selects are quantized at run time, between float tensors.
#
# %y = linear(%x, %w, %b)      →     %y = dynamic_linear(%x, %w, %b)
# %y = matmul(%x, %w)          →     %w_permute = permute(%w, [1, 0])        (a parameter)
#                                    %y = dynamic_linear(%x, %w_permute)
MOST_INPUTS = INT32_MAX // (MAGNITUDE * 127)  # of a layer whose sum fits 32 bits whatever its weight


def choose_dynamic(gm: fx.GraphModule, context: Context) -> int:
    """Make every layer whose QConfig is dynamic a dynamic one, or record why it stays in float."""
    changes = 0
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        if operator is None or operator.expand is not None or not may_be_dynamic(node):
            continue
        config = decide(node).config
        if config is None or not config.dynamic or facts.refusal(node) is not None:
            continue
        arguments = operator.arguments(node)
        product = operator.function is matmul
        input, weight, bias = arguments["input"], arguments["other" if product else "weight"], arguments.get("bias")
        because = _why_not_dynamic(node, input, weight, bias)
        if because is not None:
            facts.refuse(node, because)
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
        transposed: fx.Node = facts.inherit(node.graph.call_function(permute, (weight, [1, 0])), node, "composite.choose_dynamic")
    facts.mark_parameter(transposed)
    facts.set_fact(transposed, TensorFact(tuple(reversed(shape)), dtype))
    return transposed


def _why_not_dynamic(node: fx.Node, input: Any, weight: Any, bias: Any) -> str | None:
    """Return why a layer or a product stays in float; None if it can be a dynamic layer. `weight` is the matrix, either way round."""
    for name, value in (("matrix", weight), ("bias", bias)):
        if isinstance(value, fx.Node) and not facts.is_parameter(value):
            return f"dynamic quantization needs a constant matrix and bias, and its {name}, %{value.name}, is computed"
    input_fact, sizes = facts.fact(input) if isinstance(input, fx.Node) else None, shape_of(weight)
    if not isinstance(input_fact, TensorFact) or facts.is_parameter(input):
        return "its operand is not an activation"
    if input_fact.dtype != torch.float32 or not isinstance(facts.fact(node), TensorFact) or facts.fact(node).dtype != torch.float32:
        return f"it is computed in {str(input_fact.dtype).removeprefix('torch.')}, and dynamic quantization needs float32"
    if sizes is None or len(sizes) != 2 or len(input_fact.shape) < 2:
        return "dynamic quantization needs a weight of two dimensions and an input of two or more"
    inputs = input_fact.shape[-1]
    if not isinstance(inputs, int) or inputs > MOST_INPUTS:
        return f"its sum of {inputs} products may exceed 32 bits: at most {MOST_INPUTS} fit"
    return None

"""Give the concatenated parts of an output separate scales: concatenate the dequantized tensors, on the host.

%y = cat([%boxes, %scores], 1)         →    %y = cat([%boxes_dequantize, %scores_dequantize], 1)      in float
return %y                                   return %y

With one scale for boxes in pixels and scores below 1, all scores are rounded to 0. Operators that copy elements, and whose results only
such operators and outputs read, are exact in float. Operators that copy elements of a single tensor stay integer, since one scale suits
them. So do operators named by a rule of the qconfig.

Integers that leave the model only as float tensors need no scale either.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from fxquant import ops
from fxquant.analysis.explain import Limits
from fxquant.analysis.measures import Site
from fxquant.ir import graph as facts
from fxquant.ir.graph import TensorFact, at_point
from fxquant.numerics.grids import EVERYTHING
from fxquant.ops import Fixed, Operator, Own, Trait
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.reduction.moments import batch_norm
from fxquant.passes.rewriting import decide, is_named, keep_in_float, result_config
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer, is_quantized


def separate(gm: fx.GraphModule, context: Context) -> int:
    """Keep in float the operators that only copy elements for outputs and would need one grid, or a cast, for it; return their number."""
    leaving = _leaving(gm.graph)
    separated: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node not in leaving:
            continue
        operator = ops.operator_of(node)
        assert operator is not None
        before = [operand for operand in ops.operands_of(node) if operand in separated]
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
        if node.op == "output" or facts.reads_shape_only(node):
            ends.add(node)
            continue
        if not all(user in ends for user in node.users):
            continue
        if is_quantized(node) and ops.copies(node) and not is_named(node):
            if not decide(node).asked or result_config(node).fixed_scale is None:  # else it has the grid that a rule gives it
                nodes.add(node)
                ends.add(node)
        elif facts.computes_tensor(node) and not is_integer(node):
            ends.add(node)
    return nodes


def _why(gm: fx.GraphModule, node: fx.Node, operator: Operator) -> str | None:
    """Return why a node whose result only outputs read stays in float; None if one scale suits all its operands."""
    if ops.shares(node):
        return None
    if not operator.operands:
        return "it converts integers to float, and only outputs of the model read the result"
    ranges = len(set(_ranges(gm, node)))
    if ranges and not ops.operands_of(node) and not ops.read_nodes(operator, operator.arguments(node)):
        return "it copies constants, and only outputs of the model read them"
    return "only outputs of the model read its parts, each on a different grid" if ranges > 1 else None


def _ranges(gm: fx.GraphModule, node: fx.Node) -> Iterator[object]:
    """Yield the sources of the grids of the elements that a node copies: tensors, constants and numbers. Zero is on every grid."""
    operator = ops.operator_of(node)
    assert operator is not None
    arguments = operator.arguments(node)
    for name in ops.carried(operator):
        value = arguments.get(name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, fx.Node):
                yield from [float(each)] if each else []
            elif facts.is_parameter(each):
                constant = facts.parameter_value(gm, each)
                yield from [each] if not isinstance(constant, Tensor) or bool(constant.any()) else []
            else:
                yield from _origins(gm, each)


def _origins(gm: fx.GraphModule, node: fx.Node) -> Iterator[object]:
    """Yield the sources of a node's scale: nodes whose range determines it, names of ties, or a constant scale."""
    demanded = ops.demand(node)
    if ops.copies(node) and is_quantized(node):
        yield from _ranges(gm, node)
    elif isinstance(demanded, Fixed):
        yield demanded
    else:
        yield min(facts.ties(node), default=node)


# ---- Sums of last layers --------------------------------------------------------------------------------------------
#
# Layers whose results only dequantizations read return their sums: 32 bits, with a scale for each channel, not rounded, not clipped.
#
# %x_quantize = quantize(%x)                     %x_quantize = quantize(%x)
# %y = conv2d(%x_quantize, %w)   (int8)    →     %y = conv2d(%x_quantize, %w)   (int32)
# %y_dequantize = dequantize(%y)                 %y_dequantize = dequantize(%y)
# %z = softmax(%y)               (int8)          %z = softmax(%y_dequantize)    in float
#
# Operators that move the elements on to outputs stay in float. So do a softmax and a function that saturates, whose operand and result
# would have 8 bits for an output alone, and functions of one tensor after them. On a chip, where bytes cost time, a result of more
# elements than the model's inputs has 16 bits instead, if the chip has them, and functions of many elements stay integer. A layer with a
# fused clamp, and one whose dtype or scale a rule of the qconfig gives, keep their grids.
SUM, LARGE = "int32", "int16"
READ_ONCE = "only a dequantization reads it"
MOST_ELEMENTS = 2**16  # elements for each item of a batch; the processor beside a chip takes about a millisecond for functions of so many
IN_FLOAT = "only outputs read it, so it is a float function of a last layer's sum; the option integer_tail=True keeps it integer"


def keep_float(gm: fx.GraphModule, context: Context) -> int:
    """Keep functions that saturate in float where they read last layers and lead to outputs, with the functions that follow them."""
    leaving, integer = set[fx.Node](), context.options.integer_tail
    if integer is None:
        integer = context.target.roofline is not None  # a chip computes them itself; elsewhere one processor computes everything
    if integer:
        return 0
    for node in reversed(gm.graph.nodes):
        passes = ops.copies(node) or _is_function(node, context)
        if node.op == "output" or facts.reads_shape_only(node) or (passes and leaving.issuperset(node.users)):
            leaving.add(node)
    sums, in_float = set[fx.Node](), set[fx.Node]()
    for node in gm.graph.nodes:
        read = set(ops.operands_of(node))
        if _is_sum_of(node, read, sums, context):
            sums.add(node)
        if node in leaving and not (in_float | sums if _saturates(node) else in_float).isdisjoint(read):
            in_float.add(node)
            if not ops.copies(node):
                facts.refuse(node, IN_FLOAT, on_host=True)
                context.say(f"%{node.name} stays in float: {IN_FLOAT}")
    return len(in_float)


def keep_sums(gm: fx.GraphModule, context: Context) -> int:
    """Give the sums of layers that only outputs and float operators read 32 bits, or 16 bits where they are large on a chip."""
    leaving, limits = _leaving_sums(gm.graph, context), Limits(context.target)
    inputs = sum(map(_elements, gm.graph.find_nodes(op="placeholder")))
    wide: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        if node not in leaving:
            continue
        if _is_sum(node):
            large = context.target.roofline is not None and _elements(node) > inputs
            dtype = _widened(node, LARGE if large else SUM, large, limits, context)
        else:
            moved = ops.operands_of(node)[0]
            dtype = wide.get(moved)
            if dtype == SUM:
                keep_in_float(node, f"it only passes on the 32-bit sum of %{moved.name}", context, on_host=True)
            elif dtype is not None:
                facts.annotate(node, replace(facts.annotation(node), dtype=dtype))  # type: ignore[arg-type, type-var]
        if dtype is not None:
            wide[node] = dtype
    return len(wide)


def _widened(node: fx.Node, dtype: str, large: bool, limits: Limits, context: Context) -> str | None:
    """Annotate a layer with a dtype, and return it; or with the reason against it, and return None."""
    operator, before = ops.operator_of(node), facts.annotation(node)
    assert operator is not None
    assert before is not None
    site = Site(node, operator, operator.arguments(node))
    broken = limits.broken(site)
    size = ", and it has more elements than the inputs" if large else ""
    because = f"{'with its own scale, 16 bits wide' if large else 'its sum, with a scale for each channel'}: {READ_ONCE}{size}"
    facts.annotate(node, replace(before, dtype=dtype, because=because))
    against = [each.sentence for each in limits.broken(site) if each not in broken]
    if dtype in context.target.activations and not against:
        context.say(f"%{node.name} is {dtype}: {READ_ONCE}{size}")
        return dtype
    against = against or ["it has more elements than the inputs" if large else f"{context.target.name} has no {dtype}"]
    facts.annotate(node, replace(before, because=f"{before.because}; its sum is not returned: {against[0]}"))
    return None


def _leaving_sums(graph: fx.Graph, context: Context) -> set[fx.Node]:
    """Return the layers whose sums only float operators read, with the operators that only move such a sum to its readers."""
    layers: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not is_quantized(node) or facts.part(node) is not None or not node.users or decide(node).output not in context.open:
            continue
        if all((user in layers and not _is_sum(user)) or not is_integer(user) for user in node.users) and (_is_sum(node) or _moves(node)):
            layers.add(node)
    return layers


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node is a layer's sum without a clamp, whose scale no other tensor shares."""
    return Trait.SUMS in ops.traits_of(node) and ops.demand(node) == Own() and not facts.ties(node) and node.kwargs.get("clamp") is None


def _moves(node: fx.Node) -> bool:
    return ops.shares(node) and ops.copies(node) and len(ops.operands_of(node)) == 1 and not is_named(node)


def _elements(node: fx.Node) -> int:
    """Return the product of a tensor's sizes in the example, without sizes of the batch: elements per sample, 0 if no tensor."""
    node_fact = facts.fact(node)
    sizes = node_fact.shape if isinstance(node_fact, TensorFact) else (0,)
    return math.prod(at_point(size, 0) for size in sizes if isinstance(size, int) or not size.coefficient)


def _is_function(node: fx.Node, context: Context) -> bool:
    """Return whether a node is a function of one tensor, without a rule that gives it a grid, and small enough for the host."""
    tensor = facts.fact(node)
    real = isinstance(tensor, TensorFact) and tensor.dtype == torch.float32
    if facts.refusal(node) is not None or not real or len(ops.operands_of(node)) != 1:
        return False
    if ops.traits_of(node).isdisjoint({Trait.ELEMENTWISE, Trait.SOFTMAX, Trait.AFFINE}) or decide(node).output not in context.open:
        return False
    return context.target.roofline is None or _elements(node) <= MOST_ELEMENTS


def _saturates(node: fx.Node) -> bool:
    """Return whether a node is a softmax, or a function, other than a clamp, with a limit at both ends."""
    return Trait.SOFTMAX in ops.traits_of(node) or (
        not ops.calls(node, clamp) and all(map(math.isfinite, ops.matters(node, EVERYTHING, False, 8)))
    )


def _is_sum_of(node: fx.Node, read: set[fx.Node], sums: set[fx.Node], context: Context) -> bool:
    """Return whether a node's result is a layer's sum: a layer, a movement of such sums, or a batch norm or addition fused into it."""
    if ops.copies(node):
        return bool(read) and sums.issuperset(read)
    if Trait.SUMS in ops.traits_of(node):
        return decide(node).output in context.open
    return (ops.calls(node, batch_norm) or Trait.ADDS in ops.traits_of(node)) and not sums.isdisjoint(read)

"""Fuse operators that together compute a function of one tensor into one operator: one range, one table, one rounding.

%a = sigmoid(%x)                     →    %y = curve(%x, ("mul", "input", ("sigmoid", "input")))
%y = mul(%x, %a)

As several operators, each intermediate tensor has a separate scale, whose rounding adds to the result's; the range of %x does not end
where the whole function saturates; and the ranges of both operands of a `where` include values that are not chosen: these may be large,
as 1 / x near 0, or NaN, as the root of a negative number.

Operators are fused if they read a tensor several times, or if one table follows another. A single table after sums or products is left
unchanged, and a clamp that is fused into the layer before it stays there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, absorb, detached_arguments, fact, gradient_changes, is_detached, is_parameter, refusal, resolve
from fxquant.ops import Trait, calls, operator_of, traits_of
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.table import INPUT, Steps, chosen_settings, curve, hashable, is_pointwise, is_table, same_as, steep
from fxquant.passes.rewriting import apart, decide, eliminate_dead
from fxquant.pipeline import Context
from fxquant.target import Target

MOST_PARTS = 64  # parts of a function


def to_table(gm: fx.GraphModule, context: Context) -> int:
    """Replace operators that together compute a function of one tensor by a `curve` of that tensor, the longest such functions first."""
    changes, places = 0, {node: place for place, node in enumerate(gm.graph.nodes)}
    for node in reversed(list(gm.graph.nodes)):
        region = None if node._erased else _region(gm, node, places, context.target)
        if region is None:
            continue
        source, inner, steps = region
        context.say(f"%{node.name} is a function of %{source.name}, with {', '.join(f'%{each.name}' for each in reversed(inner[1:]))}")
        gone = {node}
        for each in inner[1:]:  # readers first
            if gone.issuperset(each.users):
                gone.add(each)
        for each in reversed(inner[1:]):
            if each in gone:
                absorb(node, each)
        before = node.all_input_nodes
        node.target, node.args = curve, (source, steps)
        eliminate_dead(before, lambda each: each.op != "get_attr")
        changes += 1
    return changes


def _region(
    gm: fx.GraphModule, root: fx.Node, places: Mapping[fx.Node, int], target: Target
) -> tuple[fx.Node, list[fx.Node], Steps] | None:
    """Return (source, inner nodes, function): the earliest single tensor that determines `root`, and the nodes between; None if none."""
    open_, inner, region = {root}, list[fx.Node](), None
    while open_ and len(inner) < MOST_PARTS:
        last = max(open_, key=places.__getitem__)
        if len(open_) == 1 and last is not root:
            if _may_read(inner, last) and _is_worth(inner) and _size(inner) <= MOST_PARTS:
                steps = _steps(gm, root, last)
                region = (last, list(inner), steps) if _has_table(target, inner, steps) else region
            if not _goes_on(root, last, inner):
                break
        if not _fits(last, root):
            break
        open_.remove(last)
        inner.append(last)
        constants = [operand for operand in last.all_input_nodes if is_parameter(operand)]
        if any(_number(gm, constant) is None for constant in constants):
            break
        open_.update(operand for operand in last.all_input_nodes if operand not in constants)
    return region


def _may_read(inner: Sequence[fx.Node], source: fx.Node) -> bool:
    """Return whether operators may be a function of a node: float32 tensors of one shape, and no clamp that is fused into the node."""
    tensor, result, layer = fact(source), fact(inner[0]), operator_of(source)
    fuses = calls(inner[-1], clamp) and layer is not None and "clamp" in layer.absorbs and len(source.users) == 1
    return isinstance(tensor, TensorFact) and tensor.dtype == torch.float32 == result.dtype and tensor.shape == result.shape and not fuses


def _has_table(target: Target, inner: Sequence[fx.Node], steps: Steps) -> bool:
    """Return whether the target's compiler has a table for the function: some know PyTorch's, by default, and run others on the processor.

    A choice is one operator all the same: its sides may have no grid.
    """
    if not target.arithmetic.float32_tables or any(Trait.CHOOSES in traits_of(node) for node in inner):
        return True
    same = same_as(steps)
    if same is None or same[1] != chosen_settings(same[0]):
        return False
    return not any(limit.measure is None and same[0] in limit.operators for limit in target.limits)


def _is_worth(inner: Sequence[fx.Node]) -> bool:
    """Return whether operators are better as one: several read a tensor, or there are two tables, or a clamp and a table."""
    reads = [operand for node in inner for operand in node.all_input_nodes if not is_parameter(operand)]
    squares = [node for node in inner if len(node.args) > 1 and node.args[0] is node.args[1]]
    tables = sum(is_table(node) or node in squares or Trait.CHOOSES in traits_of(node) for node in inner)
    return len(inner) > 1 and (len(set(reads)) < len(reads) or tables + (tables and sum(calls(node, clamp) for node in inner)) > 1)


def _goes_on(root: fx.Node, last: fx.Node, inner: Sequence[fx.Node]) -> bool:
    """Return whether the function may include the operator that computes the only tensor which the operators so far read.

    Where others read the tensor, it is computed anyway, unless a choice is there to hide its pole.
    """
    record = operator_of(last)
    if record is None or not _fits(last, root):
        return False
    hides = any(Trait.CHOOSES in traits_of(node) for node in inner) and steep(record.name, record.arguments(last))
    return hides or set(inner).issuperset(last.users)


def _size(inner: Sequence[fx.Node]) -> int:
    """Return the number of calls in the nested expression of `inner`, whose first node is the outermost call; shared nodes count again."""
    sizes: dict[fx.Node, int] = {}
    for node in reversed(inner):
        sizes[node] = 1 + sum(sizes.get(argument, 1) for argument in node.args if isinstance(argument, fx.Node))
    return sizes[inner[0]]


def _fits(node: fx.Node, root: fx.Node) -> bool:
    """Return whether an operator may be a part of the function that ends with the root."""
    record, node_fact = operator_of(node), fact(node)
    if record is None or not is_pointwise(record.name) or refusal(node) is not None or node.kwargs or detached_arguments(node):
        return False
    if not isinstance(node_fact, TensorFact) or node_fact.shape != fact(root).shape or decide(node).config is None:
        return False
    if node is not root and (is_detached(node) != is_detached(root) or gradient_changes(node) or apart(node, root) is not None):
        return False
    return node_fact.dtype in (torch.float32, torch.bool)


def _number(gm: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the number that all elements of a constant equal; None where they differ, or can be trained."""
    value = resolve(gm, str(node.target)) if node.op == "get_attr" else None
    if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter) or not value.is_floating_point() or not value.numel():
        return None
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) else None


def _steps(gm: fx.GraphModule, node: Any, source: fx.Node) -> Steps:
    """Return a node as a function of the source."""
    if not isinstance(node, fx.Node):
        return hashable(node)
    if node is source:
        return INPUT
    if is_parameter(node):
        return _number(gm, node)
    record = operator_of(node)
    assert record is not None
    return (record.name, *(_steps(gm, argument, source) for argument in node.args))

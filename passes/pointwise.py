"""A choice between functions of one tensor is one function of it, by one table.

%a = le(%x, 0.0031308)
%b = mul(12.92, %x)                  →    %y = curve(%x, ("where", ("le", "input", 0.0031308), …))
%c = pow(%x, 0.4166666666666667)
%y = where(%a, %b, %c)

As several operators, each side has a grid of its own, which is about values that are not chosen: they may be large where the other side
is chosen, as 1 / x near 0 is, or be none at all, as the root of a negative number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, absorb, fact, is_parameter, refusal, resolve
from fxquant.ops import Trait, operator_of
from fxquant.ops.elementwise.curve import INPUT, Steps, curve, is_pointwise, written
from fxquant.ops.elementwise.table import steep
from fxquant.passes.rewriting import apart, decide, eliminate_dead
from fxquant.pipeline import Context

MOST = 64  # parts of a function


def join(gm: fx.GraphModule, context: Context) -> int:
    """Replace every integer choice between functions of one and the same tensor by a `curve` of that tensor."""
    changes, places = 0, {node: place for place, node in enumerate(gm.graph.nodes)}
    for node in reversed(list(gm.graph.nodes)):  # the last choice first: those before it are parts of it
        record = None if node._erased else operator_of(node)
        if record is None or Trait.CHOOSES not in record.traits:
            continue
        found = _source(gm, node, places)
        if found is None:
            continue
        source, inner = found
        steps = _steps(gm, node, source)
        context.say(f"%{node.name} is a function of %{source.name}, with {', '.join(f'%{each.name}' for each in inner)}")
        for each in inner:
            absorb(node, each)
        before = node.all_input_nodes
        node.target, node.args = curve, (source, steps)
        eliminate_dead(before, lambda each: each.op != "get_attr")
        changes += 1
    return changes


def _source(gm: fx.GraphModule, choice: fx.Node, places: Mapping[fx.Node, int]) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the nearest tensor that determines a choice element by element, and the nodes between, in order; None if there is none."""
    open_, inner = {choice}, list[fx.Node]()
    while True:
        last = max(open_, key=places.__getitem__)
        record = operator_of(last)
        has_poles = record is not None and steep(record.name, record.arguments(last))  # a choice may be there to hide a pole
        if last is not choice and len(open_) == 1 and not (has_poles and _fits(last, choice)):
            break
        if not _fits(last, choice) or len(inner) == MOST:
            return None
        open_.remove(last)
        inner.append(last)
        for operand in last.all_input_nodes:
            if not is_parameter(operand):
                open_.add(operand)
            elif _number(gm, operand) is None:
                return None
        if not open_:
            return None
    (source,) = open_
    known = fact(source)
    same = isinstance(known, TensorFact) and known.dtype == torch.float32 and known.shape == fact(choice).shape
    inner.reverse()
    sizes = {source: 1}
    for node in inner:
        sizes[node] = 1 + sum(sizes.get(argument, 1) for argument in node.args if isinstance(argument, fx.Node))
    return (source, inner[:-1]) if same and len(inner) > 1 and sizes[choice] <= MOST else None


def _fits(node: fx.Node, choice: fx.Node) -> bool:
    """Whether an operator may be a part of the function that ends with this choice."""
    record, known = operator_of(node), fact(node)
    if record is None or not is_pointwise(record.name) or refusal(node) is not None or node.kwargs:
        return False
    if not isinstance(known, TensorFact) or known.shape != fact(choice).shape or decide(node).config is None:
        return False
    return known.dtype in (torch.float32, torch.bool) and (node is choice or apart(node, choice) is None)


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
        return written(node)
    if node is source:
        return INPUT
    if is_parameter(node):
        return _number(gm, node)
    record = operator_of(node)
    assert record is not None
    return (record.name, *(_steps(gm, argument, source) for argument in node.args))

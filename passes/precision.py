"""Sums of squares, differences from a mean, divisors, and scores of a softmax are 16 bits wide, where the target supports int16.

%p = mean(square(%x), -1)            →    the square, the mean and the root on int16 grids, as in a layer norm;
%y = mul(%x, rsqrt(%p + 1e-6))            the product as the qconfig says

An 8-bit square keeps four bits of the number that was squared, so a normalization written by hand would lose precision that a layer
norm keeps. Near a pole, as of 1 / x or log(x), one step of the operand is most of the result's range, so operators that lead there
alone are wide as well. A rule of the qconfig for one of these operators takes precedence.
"""

from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import refusal, state_demand, stated_demand
from fxquant.ops import WIDE, Own, Trait, calls, demand, has_weights, operator_of, shares, traits_of
from fxquant.ops.core.composite import quantize
from fxquant.ops.elementwise.arithmetic import mul, sub, true_divide
from fxquant.ops.elementwise.table import steep
from fxquant.ops.layers.linear import matmul
from fxquant.ops.pooling.totals import mean
from fxquant.passes.floating import leading_to
from fxquant.passes.rewriting import decide
from fxquant.pipeline import Context


def widen(gm: fx.GraphModule, context: Context) -> int:
    """Widen nodes to 16 bits: nodes between squares and a factor or divisor, and nodes that lead only to a softmax or to poles."""
    if "int16" not in context.target.activations:
        return 0
    changes = 0
    for node in [*_centred(gm), *_squares(gm), *_scores(gm), *_before_poles(gm)]:
        decision = decide(node)
        if decision.config is None or decision.asked or refusal(node) is not None or stated_demand(node) is not None or shares(node):
            continue
        state_demand(node, WIDE)
        context.say(f"%{node.name} is 16 bits wide")
        changes += 1
    return changes


def _arguments(node: fx.Node) -> dict[str, Any]:
    record = operator_of(node)
    return {} if record is None else record.arguments(node)


def _is_square(node: fx.Node) -> bool:
    arguments = _arguments(node)
    if calls(node, mul):
        return arguments["input"] is arguments["other"]
    return calls(node, torch.square) or (calls(node, torch.pow) and arguments["exponent"] == 2)


def _centred(gm: fx.GraphModule) -> list[fx.Node]:
    """Return differences of tensors and their mean that are only squared, multiplied or divided, and means that only they read."""
    nodes: list[fx.Node] = []
    for node in gm.graph.nodes:
        average = _arguments(node)["other"] if calls(node, sub) else None
        if not isinstance(average, fx.Node) or not calls(average, mean) or average.args[0] is not node.args[0]:
            continue
        if all(
            calls(user, mul) or calls(user, true_divide) or Trait.STATISTIC in traits_of(user) or _is_square(user) for user in node.users
        ):
            nodes += [average, node] if len(average.users) == 1 else [node]
    return nodes


def _squares(gm: fx.GraphModule) -> list[fx.Node]:
    """Return squares that are summed, their sums, statistics, and nodes that lead from sums and statistics only to a factor or divisor."""
    nodes: list[fx.Node] = []
    beginning = {node for node in gm.graph.nodes if Trait.STATISTIC in traits_of(node) or _is_square(node)}
    if not beginning:
        return nodes
    after: dict[fx.Node, bool] = {}  # what is computed from squares: whether it is wide
    for node in reversed(gm.graph.nodes):
        readers = list(node.users)
        if not traits_of(node).isdisjoint({Trait.SUMMATION, Trait.STATISTIC}) or _follows(node):
            after[node] = bool(readers) and all(after.get(reader, False) or _scales(reader) for reader in readers)
        elif _is_square(node):
            after[node] = bool(readers) and all(Trait.SUMMATION in traits_of(reader) for reader in readers)
    of_squares: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if (node in beginning or any(operand in of_squares for operand in node.all_input_nodes)) and node in after:
            of_squares.add(node)
            if after[node]:
                nodes.append(node)
    return nodes


def _follows(node: fx.Node) -> bool:
    """Return whether a node is a function of one tensor: a table, a reshape, or a sum, product or quotient with a number."""
    arguments, traits = _arguments(node), traits_of(node)
    if Trait.AFFINE in traits:
        return any(isinstance(arguments[name], int | float) for name in ("input", "other"))
    return not traits.isdisjoint({Trait.ELEMENTWISE, Trait.RESHAPES})


def _scales(reader: fx.Node) -> bool:
    arguments = _arguments(reader)
    scales = calls(reader, mul) or Trait.DIVIDES in traits_of(reader)
    return scales and arguments["input"] is not arguments["other"] and arguments["other"] is not None


def _scores(gm: fx.GraphModule) -> list[fx.Node]:
    """Return matrix products that are scores of a softmax, and the nodes between."""
    passing = {Trait.REARRANGES, Trait.MATRIX_PRODUCT, Trait.AFFINE}
    passes_on = {node for node in gm.graph.nodes if not passing.isdisjoint(traits_of(node))}
    leading = leading_to(gm, lambda reader, _: Trait.SOFTMAX in traits_of(reader), passes_on.__contains__)
    of_products: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node in leading and (calls(node, matmul) or any(operand in of_products for operand in node.all_input_nodes)):
            of_products.add(node)
    return [node for node in gm.graph.nodes if node in of_products]


def _before_poles(gm: fx.GraphModule) -> list[fx.Node]:
    """Return nodes that only divisors and operands of steep functions are computed from, back to layers and composites."""
    leading: dict[fx.Node, bool] = {}  # whether the operands of such a node lead there as well
    for node in reversed(gm.graph.nodes):
        record = operator_of(node)
        if record is not None and node.users and all(_divides(reader, node) or leading.get(reader, False) for reader in node.users):
            leading[node] = record.expand is None and not has_weights(node)
    return [node for node in leading if demand(node) == Own() and not calls(node, quantize)]


def _divides(reader: fx.Node, node: fx.Node) -> bool:
    record, arguments = operator_of(reader), _arguments(reader)
    if Trait.DIVIDES in traits_of(reader):
        return arguments["other"] is node and arguments["input"] is not node
    return record is not None and steep(record.name, arguments)

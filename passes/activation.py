"""A clamp (relu, relu6, hardtanh) becomes the limits of the operator before it, or of the clamp that stands there already.

%conv = conv2d(%x, %w)
%y    = clamp(%conv, 0, 6)             →    %conv = conv2d(%x, %w, clamp=(0, 6))
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fxquant.ir.graph import absorb
from fxquant.ops import operator_of
from fxquant.ops.elementwise.activation import both, clamp
from fxquant.ops.elementwise.dropout import SCALING, dropout
from fxquant.passes.rewriting import Fusion
from fxquant.pipeline import Context


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """Fuse every clamp into the operator before it, where that can absorb it: a fused clamp needs no scale and no step of its own."""
    return Fusion(_match, _why_not, _merge).run(gm, context)


def _match(node: fx.Node) -> list[fx.Node] | None:
    operator = operator_of(node)
    if operator is None or operator.function is not clamp or operator.refuses(node, operator.arguments(node)) is not None:
        return None
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return [_limited(operand, node.args[1:3])]


def _merge(producer: fx.Node, node: fx.Node) -> fx.Node:
    operand, low, high = node.args
    bounds: tuple[Any, Any] = (low, high)
    assert isinstance(operand, fx.Node)
    if operator_of(producer) is operator_of(node):
        first: Any = producer.args[1:3]
        producer.args = (producer.args[0], *both(first, bounds))
    else:
        before: Any = producer.kwargs.get("clamp")
        producer.kwargs = {**producer.kwargs, "clamp": bounds if before is None else both(before, bounds)}
    absorb(producer, node)
    return operand


def _limited(operand: fx.Node, bounds: tuple[Any, ...]) -> fx.Node:
    """The operator whose result is limited: what dropout reads, where the limit is 0 alone, which its positive factor does not move."""
    operator = operator_of(operand)
    if operator is None or operator.function is not dropout or operator.arguments(operand)["kind"] not in SCALING or len(operand.users) > 1:
        return operand
    before = operand.args[0]
    return before if bounds in ((0, None), (0, math.inf)) and isinstance(before, fx.Node) else operand


def _why_not(producer: fx.Node, node: fx.Node) -> str | None:
    operator = operator_of(producer)
    if operator is None or ("clamp" not in operator.absorbs and operator.function is not clamp):
        return f"%{producer.name} does not end in a requantization"
    if operator.function is clamp and operator.refuses(producer, operator.arguments(producer)) is not None:
        return f"the limits of %{producer.name} are computed"
    return f"%{producer.name} has {len(producer.users)} users" if len(producer.users) > 1 else None

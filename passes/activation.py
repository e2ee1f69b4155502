"""A clamp (relu, relu6, hardtanh) becomes the limits of the operator before it, or of another clamp that stands there."""

import math
from typing import Any

from torch import fx

from fxquant.ir.graph import absorb
from fxquant.ops import calls, operator_of
from fxquant.ops.elementwise.activation import SCALING, both, clamp, dropout
from fxquant.passes.rewriting import Fusion
from fxquant.pipeline import Context


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """Fuse every clamp into the operator before it, if that can absorb it: a fused clamp needs no separate scale and rounding."""
    return Clamp(gm, context).run()


class Clamp(Fusion):
    """A clamp becomes the limits of the operator before it."""

    before = """
        %conv = conv2d(%x, %w)
        %y = clamp(%conv, 0, 6)
        return %y
    """
    after = """
        %conv = conv2d(%x, %w, clamp=(0, 6))
        return %conv
    """

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        if not calls(node, clamp) or _has_computed_limits(node):
            return None
        operand = node.all_input_nodes[0]
        # The positive factor of a dropout does not move a limit of 0.
        scales = calls(operand, dropout) and operand.args[2] in SCALING and len(operand.users) == 1
        if scales and node.args[1:3] in ((0, None), (0, math.inf)) and isinstance(operand.args[0], fx.Node):
            operand = operand.args[0]
        return [operand]

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        operator = operator_of(layer)
        if operator is None or ("clamp" not in operator.absorbs and operator.function is not clamp):
            return f"%{layer.name} does not end in a requantization"
        if operator.function is clamp and _has_computed_limits(layer):
            return f"the limits of %{layer.name} are computed"
        return f"%{layer.name} has {len(layer.users)} users" if len(layer.users) > 1 else None

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        operand, *bounds = node.args
        limits: Any = tuple(bounds)
        assert isinstance(operand, fx.Node)
        if calls(layer, clamp):
            first: Any = layer.args[1:3]
            layer.args = (layer.args[0], *both(first, limits))
        else:
            inner: Any = layer.kwargs.get("clamp")
            layer.kwargs = {**layer.kwargs, "clamp": limits if inner is None else both(inner, limits)}
        absorb(layer, node)
        return operand


def _has_computed_limits(node: fx.Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.refuses(node, operator.arguments(node)) is not None

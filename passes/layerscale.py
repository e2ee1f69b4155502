"""Fold a factor per channel, such as LayerScale of a transformer's branch, into the layer before it.

A permutation may stand between the two: the channels are those of the layer. The parameters are not changed: the products are computed
from them in every state, and all of them are trained. The result is rounded once instead of twice, and an addition after it can be done
in the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from fxquant.ir.graph import (
    absorb,
    detach_arguments,
    fact,
    inherit,
    is_detached,
    is_parameter,
    mark_parameter,
    parameter_value,
    part,
    set_fact,
    shape_of,
    stated_demand,
    ties,
)
from fxquant.ops import Trait, calls, operator_of
from fxquant.ops.core.parameters import multiplied_bias, multiplied_weight
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.movement.shape import permute
from fxquant.passes.rewriting import Fusion
from fxquant.pipeline import Context


def fold(gm: fx.GraphModule, context: Context) -> int:
    """Fold every factor for each channel into the layer before it, where the layer's weight can absorb it."""
    return LayerScale(gm, context).run()


class LayerScale(Fusion):
    """A factor for each channel is multiplied into the weight and the bias of the layer before it."""

    before = """
        %l = linear(%x, %w, %b)
        %y = mul(%l, %g)
        return %y
    """
    after = """
        %weight = multiplied_weight(%w, %g)
        %bias = multiplied_bias(%b, %g)
        %l = linear(%x, %weight, %bias)
        return %l
    """
    verb = "folded"

    def __init__(self, gm: fx.GraphModule, context: Context) -> None:
        super().__init__(gm, context)
        self.ways: dict[fx.Node, tuple[list[fx.Node], fx.Node]] = {}  # by the product: the layer, permutations after it, and the factors

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        if not calls(node, mul) or part(node) is not None:
            return None
        for operand, factors in (node.args[:2], node.args[1::-1]):
            if not isinstance(operand, fx.Node) or not isinstance(factors, fx.Node) or is_parameter(operand) or not is_parameter(factors):
                continue
            way = _way_from_layer(operand)
            if not way or shape_of(operand) != shape_of(node):
                continue
            shape, value = shape_of(node), parameter_value(self.gm, factors)
            channels = _channels(way) - len(shape)
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < -channels:
                continue
            if value.shape[channels] == shape[channels] == value.numel():
                self.ways[node] = way, factors
                return way[:1]
        return None

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        way, _ = self.ways[node]
        several = next((node for node in way if len(node.users) > 1), None)
        if several is not None:
            return f"%{several.name} has {len(several.users)} users"
        if layer.kwargs:
            return f"%{layer.name} already has fused parts"
        if stated_demand(layer) is not None or ties(layer):
            return f"its composite defines the grid of %{layer.name}"
        reads = [operand for operand in layer.args[1:3] if isinstance(operand, fx.Node)]
        return None if all(map(is_parameter, reads)) else f"the parameters of %{layer.name} are computed from more than parameters"

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        way, factors = self.ways[node]
        # The layer moves down to the product, whose factors may be computed in between.
        for moved in way:
            node.prepend(moved)
        input, weight, bias, *others = layer.args
        weight = _multiplied(layer, multiplied_weight, weight, factors)
        bias = None if bias is None else _multiplied(layer, multiplied_bias, bias, factors)
        layer.args = (input, weight, bias, *others)
        stopped = is_detached(layer) and not is_detached(node)
        for passed in way:  # none of them has the values any more that it had before
            absorb(passed, node)
            if stopped:
                detach_arguments(passed, *([0] if passed is layer else []))
        return way[-1]


def _way_from_layer(node: fx.Node) -> list[fx.Node]:
    """Return a layer and the permutations that lead from it to the node; empty where they do not start at a layer."""
    way = [node]
    while (record := operator_of(way[0])) is not None and record.function is permute:
        way.insert(0, record.arguments(way[0])["input"])
    return way if record is not None and Trait.OUTPUTS_FIRST in record.traits and record.layer.channels is not None else []


def _channels(way: list[fx.Node]) -> int:
    """Return the dimension of the layer's channels at the end of the way."""
    layer, *permutations = way
    record, rank = operator_of(layer), len(shape_of(layer))
    place = record.layer.channels(record.arguments(layer)) % rank  # type: ignore[union-attr,misc]
    for permutation in permutations:
        place = [dim % rank for dim in permutation.args[1]].index(place)  # type: ignore[union-attr,operator]
    return place


def _multiplied(layer: fx.Node, function: Callable[[Tensor, Tensor], Tensor], parameter: object, factors: fx.Node) -> fx.Node:
    """Return a parameter of a layer that is computed from this one and the factors, of its shape."""
    assert isinstance(parameter, fx.Node)
    parameter_fact = fact(parameter)
    steps: list[tuple[Callable[..., Tensor], tuple[fx.Node, ...]]] = [(function, (factors,))]
    if is_detached(layer):  # the factors may have gradients all the same
        steps.insert(0, (torch.detach, ()))
    for function, others in steps:
        with layer.graph.inserting_before(layer):
            parameter = inherit(layer.graph.call_function(function, (parameter, *others)), layer, "layerscale.fold")
        set_fact(parameter, parameter_fact)
        mark_parameter(parameter)
    return parameter

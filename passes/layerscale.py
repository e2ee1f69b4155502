"""Fold a factor or a term per channel, such as that of a LayerScale, into the layer before it; a norm's into the layers after it.

A quotient by a constant is a product by now. A permutation may stand between the two: the channels are those of the layer. The parameters
are not changed: products and sums are computed from them in every state, and all of them are trained. The result is rounded once instead
of twice, and an addition after it can be done in the accumulator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import graph as facts
from fxquant.ir.graph import TensorFact
from fxquant.ops import Trait, calls, operator_of
from fxquant.ops.core.weighted import bias_of_inputs, increased_bias, multiplied_bias, multiplied_inputs, multiplied_weight
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.layers.linear import linear
from fxquant.ops.movement.shape import permute
from fxquant.ops.reduction.moments import scale_channels
from fxquant.passes.rewriting import Fusion, apart, decide
from fxquant.pipeline import Context


def fold(gm: fx.GraphModule, context: Context) -> int:
    """Fold every factor and term for each channel into the layer before it, or the linear layers after it, where layers can absorb it."""
    return LayerScale(gm, context).run() + NormScale(gm, context).run()


class LayerScale(Fusion):
    """A factor for each channel is multiplied into the weight and the bias of the layer before it; a term is added to the bias."""

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
        # By the product or sum: the layer, permutations after it, and the constant.
        self.ways: dict[fx.Node, tuple[list[fx.Node], fx.Node]] = {}
        self.took: set[fx.Node] = set()  # layers whose result's grid is that of a product or sum which they took in

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        if not any(calls(node, each) for each in (mul, add, sub)) or facts.ties(node):
            return None
        for operand, factors in (node.args[:2], node.args[1::-1]):
            if operand is not node.args[0] and not calls(node, mul) and _times(node) != 1:
                continue  # the layer's result is multiplied before it is added or subtracted
            if not isinstance(operand, fx.Node) or not isinstance(factors, fx.Node):
                continue
            if facts.is_parameter(operand) or not facts.is_parameter(factors):
                continue
            way = _way_from_layer(operand)
            if not way or facts.shape_of(operand) != facts.shape_of(node):
                continue
            shape, value = facts.shape_of(node), facts.parameter_value(self.gm, factors)
            channels = _channels(way) - len(shape)
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < -channels or not value.isfinite().all():
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
        if (facts.stated_demand(layer) is not None and layer not in self.took) or facts.ties(layer):
            return f"its composite defines the grid of %{layer.name}"
        reads = [operand for operand in layer.args[1:3] if isinstance(operand, fx.Node)]
        return None if all(map(facts.is_parameter, reads)) else f"the parameters of %{layer.name} are computed from more than parameters"

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        way, factors = self.ways[node]
        # The layer moves down to the product, whose factors may be computed in between.
        for moved in way:
            node.prepend(moved)
        input, weight, bias, *others = layer.args
        if calls(node, mul):
            weight = _computed(layer, multiplied_weight, weight, factors)
            bias = None if bias is None else _computed(layer, multiplied_bias, bias, factors)
        else:
            bias = _computed(layer, increased_bias, bias, factors, _times(node))
        layer.args = (input, weight, bias, *others)
        if facts.stated_demand(node) is not None or layer in self.took:
            facts.state_demand(layer, facts.stated_demand(node))
            self.took.add(layer)
        stopped = facts.is_detached(layer) and not facts.is_detached(node)
        for passed in way:  # none of them has the values any more that it had before
            facts.absorb(passed, node)
            if stopped:
                facts.detach_arguments(passed, *([0] if passed is layer else []))
        return way[-1]


class NormScale(Fusion):
    """The factors and terms of a norm are multiplied into the weights of the linear layers that read it, and added to their biases.

    Its result has no channel then that is larger than the others by its factor alone, and is rounded once instead of twice.
    """

    before = """
        %n = mul(%x, %r)
        %y = scale_channels(%n, %g, %t)
        %l = linear(%y, %w, %b)
        return %l
    """
    after = """
        %y = mul(%x, %r)
        %weight = multiplied_inputs(%w, %g)
        %bias = bias_of_inputs(%b, %w, %t)
        %l = linear(%y, %weight, %bias)
        return %l
    """
    verb = "folded"

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        (norm, *others) = node.users or [node]
        if not calls(node, mul) or node.kwargs or others or not calls(norm, scale_channels) or norm.kwargs or norm.args[3]:
            return None
        return [norm] if any(calls(reader, linear) and decide(reader).config is not None for reader in norm.users) else None

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        for reader in layer.users:
            if not calls(reader, linear) or reader.args[0] is not layer:
                return f"%{reader.name} reads it as well, and is not a linear layer"
            if reader.kwargs or not all(facts.is_parameter(each) for each in reader.args[1:3] if isinstance(each, fx.Node)):
                return f"%{reader.name} already has fused parts"
            if facts.is_detached(reader) or facts.is_detached(layer):
                return f"the parameters of %{reader.name} or of the norm have no gradient"
            if (because := apart(reader, layer)) is not None:
                return because
        return None

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        _, factors, terms, _ = layer.args
        for reader in list(layer.users):
            input, weight, bias, *others = reader.args
            if terms is not None:
                bias = _computed(reader, bias_of_inputs, bias, weight, terms)
            reader.args = (input, _computed(reader, multiplied_inputs, weight, factors), bias, *others)
        layer.target, layer.args = node.target, node.args
        facts.absorb(layer, node)
        return layer


def _way_from_layer(node: fx.Node) -> list[fx.Node]:
    """Return a layer and the permutations that lead from it to the node; empty where they do not start at a layer."""
    way = [node]
    while (record := operator_of(way[0])) is not None and record.function is permute:
        way.insert(0, record.arguments(way[0])["input"])
    return way if record is not None and Trait.OUTPUTS_FIRST in record.traits and record.layer.channels is not None else []


def _channels(way: list[fx.Node]) -> int:
    """Return the dimension of the layer's channels at the end of the way."""
    layer, *permutations = way
    record, rank = operator_of(layer), len(facts.shape_of(layer))
    place = record.layer.channels(record.arguments(layer)) % rank  # type: ignore[union-attr,misc]
    for permutation in permutations:
        place = [dim % rank for dim in permutation.args[1]].index(place)  # type: ignore[union-attr,operator]
    return place


def _times(node: fx.Node) -> float:
    """Return the factor of the second operand of a sum or a difference."""
    alpha = node.args[2] if len(node.args) > 2 else 1
    return -alpha if calls(node, sub) else alpha  # type: ignore[operator,return-value]


def _computed(layer: fx.Node, function: Callable[..., Tensor], parameter: Any, *terms: Any) -> fx.Node:
    """Insert a call of `function` with a layer's parameter, tensors and numbers; return its node, the new parameter."""
    channels = facts.shape_of(layer.args[1])[:1]  # type: ignore[arg-type]
    parameter_fact = facts.fact(parameter) if isinstance(parameter, fx.Node) else TensorFact(channels, torch.float32)
    steps: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = [(function, terms)]
    if facts.is_detached(layer) and parameter is not None:  # the terms may have gradients all the same
        steps.insert(0, (torch.detach, ()))
    for function, others in steps:
        with layer.graph.inserting_before(layer):
            parameter = facts.inherit(layer.graph.call_function(function, (parameter, *others)), layer, "layerscale.fold")
        facts.set_fact(parameter, parameter_fact)
        facts.mark_parameter(parameter)
    return parameter  # type: ignore[no-any-return]

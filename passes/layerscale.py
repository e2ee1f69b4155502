"""A factor for each channel, as that of a transformer's branch, becomes part of the layer before it.

    %l = linear(%x, %w, %b)                     %l = linear(%x, multiplied_weight(%w, %g), multiplied_bias(%b, %g))
    %y = mul(%l, %g)                       →

The parameters are not touched: the products are computed from them in every state, and all of them are trained. The result is rounded
once instead of twice, and an addition behind it can be done in the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from fxquant.facts import TensorFact
from fxquant.graph import (
    absorb,
    fact,
    inherit,
    is_parameter,
    mark_parameter,
    parameter_value,
    part,
    set_fact,
    set_unfused,
    shape_of,
    stated_demand,
    ties,
)
from fxquant.ops import operator_of
from fxquant.ops.parameters import multiplied_bias, multiplied_weight
from fxquant.pipeline import Context
from fxquant.quantization.rules import apart

LAYERS = ("linear", "conv1d", "conv2d", "conv3d")  # the output channels of their weights are dimension 0


def fold(gm: fx.GraphModule, context: Context) -> int:
    """No factor for each channel is left behind a layer whose weight can have it."""
    changes = 0
    for node in list(gm.graph.nodes):
        layer, factors = _parts(gm, node)
        if layer is None or factors is None:
            continue
        reason = _why_not(layer) or apart(layer, node)
        if reason is not None:
            set_unfused(node, reason)
            context.say(f"%{node.name} is not folded: {reason}")
            continue
        # The layer moves down to the product, whose factors may be computed in between.
        node.prepend(layer)
        input, weight, bias, *others = layer.args
        weight = _multiplied(layer, multiplied_weight, weight, factors)
        bias = None if bias is None else _multiplied(layer, multiplied_bias, bias, factors)
        layer.args = (input, weight, bias, *others)
        node.replace_all_uses_with(layer)
        absorb(layer, node)
        gm.graph.erase_node(node)
        context.say(f"%{node.name} folded into %{layer.name}")
        changes += 1
    return changes


def _parts(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The layer and the factors of its channels, of which a node is the product; None where it is none."""
    operator = operator_of(node)
    if operator is None or operator.name != "mul" or part(node) is not None:
        return None, None
    for layer, factors in (node.args[:2], node.args[1::-1]):
        if not isinstance(layer, fx.Node) or not isinstance(factors, fx.Node) or is_parameter(layer) or not is_parameter(factors):
            continue
        record = operator_of(layer)
        if record is None or record.name not in LAYERS or record.channels is None or shape_of(layer) != shape_of(node):
            continue
        shape, value = shape_of(layer), parameter_value(gm, factors)
        channels = record.channels(record.arguments(layer)) % len(shape) - len(shape)
        if isinstance(value, Tensor) and value.is_floating_point() and _one_for_each(value, channels, shape):
            return layer, factors
    return None, None


def _one_for_each(factors: Tensor, channels: int, shape: tuple[object, ...]) -> bool:
    """Whether a tensor has a number for each index of this dimension, counted from the last, and is the same along all others."""
    return factors.dim() >= -channels and factors.shape[channels] == shape[channels] == factors.numel()


def _why_not(layer: fx.Node) -> str | None:
    if len(layer.users) > 1:
        return f"%{layer.name} has {len(layer.users)} users"
    if layer.kwargs:
        return f"%{layer.name} already has fused parts"
    if stated_demand(layer) is not None or ties(layer):
        return f"its composite says what grid %{layer.name} is on"
    reads = [operand for operand in layer.args[1:3] if isinstance(operand, fx.Node)]
    return None if all(map(is_parameter, reads)) else f"the parameters of %{layer.name} are computed from more than parameters"


def _multiplied(layer: fx.Node, function: Callable[[Tensor, Tensor], Tensor], parameter: object, factors: fx.Node) -> fx.Node:
    assert isinstance(parameter, fx.Node)
    with layer.graph.inserting_before(layer):
        made = inherit(layer.graph.call_function(function, (parameter, factors)), layer, "layerscale.fold")
    known = fact(parameter)
    assert isinstance(known, TensorFact)
    set_fact(made, known)
    mark_parameter(made)
    return made

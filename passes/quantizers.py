"""Operators become modules that observe, train and validate.

%y = conv2d(%x, %w)      →      %y = operators.y(%x, %w)      a QuantizedOperator
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import graph as facts
from fxquant.ir.graph import Annotation, BatchDim
from fxquant.ir.model import FROZEN_NORMS, KEPT_IN_EVAL, free_name
from fxquant.lowering.lowering import cannot_be_integers, first_not_finite, named_parameters
from fxquant.numerics.grids import EVERYTHING, WEIGHT_INT8, IntType
from fxquant.ops import Operator, Own, Trait, demand, map_operands, operator_of, read_nodes, shares
from fxquant.ops.core.composite import DEQUANTIZE
from fxquant.passes.rewriting import decide, result_config
from fxquant.pipeline import Context
from fxquant.prepared.operators import QuantizedOperator, Quantizers, link, quantized_operators
from fxquant.prepared.stage import is_integer, is_plain
from fxquant.quantization.learning import METHODS
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import ActivationConfig, WeightConfig
from fxquant.quantization.weights import BatchNormTensors, ChannelFactors, WeightQuantizer, WeightScale

CONTAINER = "quantized"  # the path of the operators in the prepared model


def insert(gm: fx.GraphModule, context: Context) -> int:
    """Replace every integer operator by a QuantizedOperator, and give every group one quantizer."""
    quantizers = _quantizers(gm, context)
    container = free_name(gm, CONTAINER)
    changes = 0
    for node in gm.graph.nodes:
        operator = operator_of(node)
        spec = facts.annotation(node)
        if operator is None or spec is None or not (is_integer(node) or Trait.DYNAMIC in operator.traits):
            continue
        arguments = operator.arguments(node)
        _require_finite(gm, node, operator, arguments)
        plain = is_plain(node) or Trait.DYNAMIC in operator.traits
        own = not shares(node) and not plain
        norm = arguments.get("batch_norm")
        mean: Any = norm.running_mean if isinstance(norm, BatchNormTensors) else None
        # The model calls this function of batch norm with training=False in train mode, too.
        frozen = isinstance(mean, fx.Node) and mean.target in gm.meta.get(FROZEN_NORMS, ())
        module = QuantizedOperator(
            node.name,
            operator,
            context.target.arithmetic,
            Quantizers(
                _inputs(operator, arguments, quantizers),
                None if plain else quantizers[spec.group],  # type: ignore[index]
                own,
                _intermediate(node, arguments, spec, context) if "residual" in arguments else None,
                _weight_quantizer(gm, operator, arguments, spec.config.weight, context),
                _factors(node, operator, arguments),
                facts.observed(node) or EVERYTHING,
            ),
            live_batch_norm=context.options.batch_norm == "live" and not frozen,
            path=facts.module_path(node),
            detached=_detached(node, operator),
        )
        target = f"{container}.{node.name}"
        facts.attach(gm, target, module)
        node.op, node.target = "call_module", target
        changes += 1
    link(gm, gm.graph)
    in_eval = {facts.resolve(gm, path) for path in gm.meta.get(KEPT_IN_EVAL, ())}
    owners = {owner for operator in quantized_operators(gm).values() for owner in operator.owners if owner is not None}
    for owner in owners - in_eval:  # in the model's own mode: those of the float model were traced in eval mode
        owner.training = gm.training
    return changes


def _detached(node: fx.Node, operator: Operator) -> bool | tuple[str, ...]:
    """Return True if an operator is computed without gradients, else the names of its arguments that have none."""
    if facts.is_detached(node) or (node.all_input_nodes and all(map(facts.is_detached, node.all_input_nodes))):
        return True
    return tuple(operator.parameter_names[each] if isinstance(each, int) else each for each in facts.detached_arguments(node))


def _require_finite(gm: fx.GraphModule, node: fx.Node, operator: Operator, arguments: dict[str, Any]) -> None:
    """Raise NotFinite for NaN and infinite weights, biases and batch norms, and for NaN in any other constant."""

    def value(name: str) -> Any:
        return fx.map_arg(arguments.get(name), lambda operand: facts.parameter_value(gm, operand) if facts.is_parameter(operand) else None)

    because = first_not_finite(named_parameters(value("weight"), value("bias"), value("batch_norm")))
    for name in operator.operands:
        constant = value(name)
        if isinstance(constant, Tensor) and bool(torch.isnan(constant).any()):
            because = f"its constant {name!r} holds NaN"
    if because is not None:
        raise cannot_be_integers(node.name, because, facts.source(node), facts.module_path(node))


def _quantizers(gm: fx.GraphModule, context: Context) -> dict[int, Quantizer]:
    """Return the quantizer of each group, configured by its first member that does not share its operands' scale, or has a constant one."""
    chosen: dict[int, tuple[fx.Node, ActivationConfig]] = {}
    members: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        operator, spec = operator_of(node), facts.annotation(node)
        if operator is None or spec is None or spec.group is None or spec.dtype is None:
            continue
        members.setdefault(spec.group, []).append(node)
        config = result_config(node)
        if shares(node) and (config.fixed_scale is None or not decide(node).asked):
            continue
        if spec.group not in chosen or (config.fixed_scale is not None and chosen[spec.group][1].fixed_scale is None):
            chosen[spec.group] = (node, config)
    return {group: _quantizer(node, config, context, members[group]) for group, (node, config) in chosen.items()}


def _intermediate(node: fx.Node, arguments: dict[str, Any], spec: Annotation, context: Context) -> Quantizer:
    """Return the quantizer of a layer's result before the residual is added: with the output's dtype, or the residual's for int32.

    Never int4, which is stored as int8 anyway: a sum that is rounded to 16 values before and after the residual loses twice.
    It has separate statistics, so setting the output's scale does not change it; `freeze` stops both.
    """
    config: ActivationConfig = result_config(node)
    decision, layer = decide(node), facts.matched_rules(node)[0][0][1]
    if decision.layer != decision.output and layer is not None and layer.output.fixed_scale is not None:
        config = layer.output  # the scale that was given for the layer alone
    if config.dtype == "int32":
        residual = facts.annotation(arguments["residual"])
        assert residual is not None
        assert residual.dtype is not None
        config = replace(config, dtype=residual.dtype)
    quantizer = _quantizer(node, replace(config, dtype="int8") if config.dtype == "int4" else config, context, [node])
    quantizer.name = f"{node.name}.intermediate"
    return quantizer


def _weight_quantizer(
    gm: fx.GraphModule, operator: Operator, arguments: dict[str, Any], config: WeightConfig, context: Context
) -> WeightQuantizer:
    """Return the weight quantizer, with scales per layer or powers of two if the target requires it; only a layer's scale is learned."""
    weight = operator.layer.weight(
        **fx.map_arg(arguments, lambda operand: facts.parameter_value(gm, operand) if facts.is_parameter(operand) else operand)
    )
    per_channel = config.per_channel and context.target.per_channel_weights
    method = METHODS.get(config.training)
    return WeightQuantizer(
        config.type,
        per_channel=per_channel,
        power_of_two=config.power_of_two or context.target.arithmetic.power_of_two_weights or (method is not None and method.power_of_two),
        learned=WeightScale(len(weight) if per_channel else 1, method) if weight is not None and method is not None else None,
        rounding=None if weight is None else config.rounding(tuple(weight.shape)),
        p=None if weight is None else config.p,
        pairs=bool(context.options.without_vnni) and weight is not None and _pairs(operator, weight, arguments, config.type),
    )


# `fxquant.backends.onnx.writer` says which kernels add products in pairs: none for a depthwise convolution, or a transposed one.
_IN_PAIRS = frozenset({Trait.OUTPUTS_FIRST, Trait.MATRIX_PRODUCT, Trait.DYNAMIC})


def _pairs(operator: Operator, weight: Tensor, arguments: dict[str, Any], dtype: IntType) -> bool:
    """Return whether onnxruntime's kernels may add products of a weight (C, …) in pairs."""
    depthwise = weight.dim() > 2 and weight.shape[1] == 1 and arguments["groups"] == len(weight)
    return dtype == WEIGHT_INT8 and bool(operator.traits & _IN_PAIRS) and weight.dim() > 1 and weight.numel() > 0 and not depthwise


def _factors(node: fx.Node, operator: Operator, arguments: dict[str, Any]) -> ChannelFactors | None:
    """Return factors of 1 for the operator's input and output channels; None if their numbers are not fixed."""
    if operator.layer.channels is None:
        return None
    dim = operator.layer.channels(arguments)
    read, outputs = (facts.shape_of(each)[dim] for each in (arguments["input"], node))
    return ChannelFactors(read, outputs) if isinstance(read, int) and isinstance(outputs, int) else None


def _quantizer(node: fx.Node, config: ActivationConfig, context: Context, members: list[fx.Node]) -> Quantizer:
    demanded = demand(node)
    return Quantizer(
        config.type,
        config.new_observer() if config.fixed_scale is None and config.dtype != "int32" else None,
        scale=config.fixed_scale,
        zero_point=config.fixed_zero_point,
        training=config.training,
        power_of_two=context.target.arithmetic.power_of_two_scales or config.power_of_two,
        headroom=demanded.headroom if isinstance(demanded, Own) and config.dtype == demanded.dtype else 1.0,
        items=all(facts.shape_of(member)[:1] == (BatchDim(),) for member in members),
        is_output=any(user.op == "output" or operator_of(user) is DEQUANTIZE for member in members for user in member.users),
        name=node.name,
        source=facts.source(node),
        module=facts.module_path(node),
    )


def _inputs(operator: Operator, arguments: dict[str, Any], quantizers: dict[int, Quantizer]) -> dict[str, Any]:
    """Return the quantizers of the operands, by parameter; None for an operand that is a constant."""

    def quantizer(name: str, operand: fx.Node) -> Quantizer | None:
        if facts.is_parameter(operand) or operand in read_nodes(operator, arguments):
            return None
        return quantizers[facts.annotation(operand).group]  # type: ignore[union-attr,index]

    mapped = map_operands(operator, arguments, quantizer)
    names = (*operator.operands, "residual")
    return {name: mapped[name] for name in names if isinstance(mapped.get(name, 0), Quantizer | list | None)}  # a number has none

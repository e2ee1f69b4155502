"""Every operator learns whether it becomes integer, with which dtype, and why."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.facts import TensorFact
from fxquant.graph import Annotation, annotation, computes_tensor, fact, is_parameter, parameter_value, refusal, resolve, wishes
from fxquant.graph import annotate as set_annotation
from fxquant.ops import Operator, Scale, demand, operand_nodes, operator_of
from fxquant.ops.floating import divisors, in_front_of_softmax, masks
from fxquant.pipeline import Context
from fxquant.quantization.rules import decide
from fxquant.quantization.spec import DEFAULT, QConfig, Rule


def annotate(gm: fx.GraphModule, context: Context) -> int:
    """Every node that computes a tensor is annotated; those that stay in float say why."""
    changes = 0
    heard: set[Rule] = set()
    needed = _needed_in_float(gm)
    for node in gm.graph.nodes:
        if not computes_tensor(node):
            continue
        operator = operator_of(node)
        decision = decide(node)
        heard |= {decision.output, decision.layer}
        qconfig = decision.config
        reason = _why_float(gm, node, operator, qconfig, context, needed)
        if reason is not None:
            set_annotation(node, Annotation(None, reason, qconfig))
            context.say(f"%{node.name} stays in float: {reason}")
            continue
        assert operator is not None
        assert qconfig is not None
        dtype = _dtype(node, operator, qconfig)
        if decision.asked and dtype != qconfig.output.dtype:
            wanted = f"{qconfig.output.dtype} as the qconfig's {decision.output} says"
            context.unheard(gm, f"%{node.name} is {dtype} as its operand is, whose scale it shares, and not {wanted}")
        set_annotation(node, Annotation(dtype, _why_integer(node), qconfig))
        changes += 1
    asked = dict.fromkeys(rule for node in gm.graph.nodes for wish in wishes(node) for rule, _ in wish)
    for rule in asked:
        if rule not in heard and rule != DEFAULT:
            context.unheard(gm, f"this rule of the qconfig decides nothing, since others go before it wherever it matches: {rule}")
    return changes


def _needed_in_float(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """What stays in float for the sake of a float operator that reads it, and why; "" where that depends on what the node itself reads."""
    leading = in_front_of_softmax(gm)
    return {
        **dict.fromkeys(leading, ""),
        **dict.fromkeys(masks(gm, leading), "it adds an attention mask in front of a softmax, which is in float"),
        **dict.fromkeys(divisors(gm), "it leads to a divisor or a logarithm in float, and must not be rounded to 0"),
    }


def _why_float(
    gm: fx.GraphModule, node: fx.Node, operator: Operator | None, qconfig: QConfig | None, context: Context, needed: dict[fx.Node, str]
) -> str | None:
    """Why the node must stay in float; None if it becomes integer."""
    because = refusal(node)
    if because is not None:
        return because
    if operator is None:
        return f"no operator of the table recognises {_written(gm, node)}"
    if qconfig is None:
        return "the qconfig says so"
    arguments = operator.arguments(node)
    operands = operand_nodes(operator, arguments)
    if not operands:
        return _reads_none(arguments)
    for operand in operands:
        because = _no_real_numbers(operand)
        if because is not None:
            return because
    because = operator.refuses(node, arguments) or needed.get(node) or None
    if because is not None:
        return because
    # A mask may hold -inf; the matrix of a product is a weight, which is refused where it is prepared.
    given = [value for name in operator.operands for value in _listed(arguments.get(name)) if not operator.sums]
    if any(not _finite(parameter_value(gm, value)) for value in given if isinstance(value, fx.Node) and is_parameter(value)):
        return "its constant holds values that are not finite"
    masked = [operand for operand in operands if node in needed and operand.op != "placeholder" and not _integer(operand)]
    if masked:
        return f"it stands between %{masked[0].name} and a softmax, which are in float"
    for operand in operands:
        if (annotation(operand) or Annotation(None, "")).dtype == "int32":
            return f"the 32-bit output of %{operand.name} is not computed with any further"
    if demand(node) is Scale.SAME and operands[0].op != "placeholder" and (annotation(operands[0]) or Annotation(None, "")).dtype is None:
        return f"it only passes on the values of %{operands[0].name}, which is in float"
    if qconfig.output.dtype == "int32" and demand(node) is Scale.OWN and not operator.sums:
        return f"{operator.name} has no 32-bit output: it forms no sum of products"
    return None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())


def _integer(node: fx.Node) -> bool:
    spec = annotation(node)
    return spec is not None and spec.dtype is not None


def _reads_none(arguments: dict[str, Any]) -> str:
    """Why an operator none of whose operands is an activation stays in float."""
    for name, value in arguments.items():
        if isinstance(value, fx.Node) and isinstance(fact(value), TensorFact) and not is_parameter(value):
            return f"its {name!r}, %{value.name}, is an activation, where an integer form takes a constant"
    return "none of its operands is an activation"


def _no_real_numbers(operand: fx.Node) -> str | None:
    """Why an operand cannot be quantized; None if it can."""
    known = fact(operand)
    if not isinstance(known, TensorFact):
        return f"its operand %{operand.name} is no tensor"
    if known.dtype == torch.float32:
        return None
    remedy = "; convert it to float32" if known.dtype.is_floating_point else ""
    return f"its operand %{operand.name} is {str(known.dtype).removeprefix('torch.')}, and only float32 tensors are quantized{remedy}"


def _written(gm: fx.GraphModule, node: fx.Node) -> str:
    """What the user wrote: the module's class, or the function's name."""
    if node.op == "call_module":
        return type(resolve(gm, str(node.target))).__name__
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.lstrip("_") or name  # PyTorch's functions are called by private ones


def _dtype(node: fx.Node, operator: Operator, qconfig: QConfig) -> str:
    """An operator on its operand's scale has its operand's dtype; any other the configured one."""
    if demand(node) is Scale.SAME:
        operand = operand_nodes(operator, operator.arguments(node))[0]
        spec = annotation(operand)
        if spec is not None and spec.dtype is not None:
            return spec.dtype
    assert qconfig.output.dtype is not None  # `rules.match` has put the target's default there
    return qconfig.output.dtype


def _why_integer(node: fx.Node) -> str:
    return "on its operand's scale" if demand(node) is Scale.SAME else "with a scale of its own"

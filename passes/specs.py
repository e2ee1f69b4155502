"""Every operator learns whether it becomes integer, with which dtype, and why."""

from __future__ import annotations

import torch
from torch import fx

from fxquant.graph import Annotation, TensorFact, annotation, attached_qconfig, fact, is_parameter, module_path, refusal, resolve, spelling
from fxquant.graph import annotate as set_annotation
from fxquant.ops import Operator, Scale, operand_nodes, operator_of
from fxquant.pipeline import Context
from fxquant.spec import QConfig, nearest

MISSING = object()


def annotate(gm: fx.GraphModule, context: Context) -> int:
    """Every node that computes a tensor is annotated; those that stay in float say why."""
    changes = 0
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or is_parameter(node) or not isinstance(fact(node), TensorFact | list | tuple | dict):
            continue
        operator = operator_of(node)
        qconfig = context.qconfig.choose(node.name, module_path(node), spelling(node))
        own = nearest(context.attached, module_path(node), attached_qconfig(node, MISSING))
        if own is not MISSING:
            context.say(f"%{node.name}: the qconfig of its module goes before any rule")
            qconfig = own
        reason = _why_float(gm, node, operator, qconfig, context)
        if reason is not None:
            set_annotation(node, Annotation(None, reason, qconfig))
            context.say(f"%{node.name} stays in float: {reason}")
            continue
        assert operator is not None
        assert qconfig is not None
        set_annotation(node, Annotation(_dtype(node, operator, qconfig), _why_integer(operator), qconfig))
        changes += 1
    return changes


def _why_float(gm: fx.GraphModule, node: fx.Node, operator: Operator | None, qconfig: QConfig | None, context: Context) -> str | None:
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
        return "it reads no activation"
    dtypes = [fact(o).dtype if isinstance(fact(o), TensorFact) else None for o in operands]
    if any(dtype is None or not dtype.is_floating_point for dtype in dtypes):
        return "its operands are not floating-point tensors"
    other = next((dtype for dtype in dtypes if dtype is not torch.float32), None)
    if other is not None:
        return f"its operands are {str(other).removeprefix('torch.')}, and only float32 operators become integer: .float() converts them"
    because = operator.refuses(node, arguments)
    if because is not None:
        return because
    for operand in operands:
        if (annotation(operand) or Annotation(None, "")).dtype == "int32":
            return f"the 32-bit output of %{operand.name} is not computed with any further"
    if operator.scale is Scale.SAME and operands[0].op != "placeholder" and (annotation(operands[0]) or Annotation(None, "")).dtype is None:
        return f"it only passes on the values of %{operands[0].name}, which is in float"
    target = context.target
    if qconfig.output.dtype == "int32" and operator.scale is Scale.OWN and not operator.sums:
        return f"{operator.name} has no 32-bit output: it forms no sum of products"
    if qconfig.output.dtype not in target.activations:
        return f"{target.name} has no {qconfig.output.dtype} activations"
    if "weight" in arguments and qconfig.weight.dtype not in target.weights:
        return f"{target.name} has no {qconfig.weight.dtype} weights"
    return None


def _written(gm: fx.GraphModule, node: fx.Node) -> str:
    """What the user wrote: the module's class, or the function's name."""
    if node.op == "call_module":
        return type(resolve(gm, str(node.target))).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _dtype(node: fx.Node, operator: Operator, qconfig: QConfig) -> str:
    """An operator on its operand's scale has its operand's dtype; any other the configured one."""
    if operator.scale is Scale.SAME:
        operand = operand_nodes(operator, operator.arguments(node))[0]
        spec = annotation(operand)
        if spec is not None and spec.dtype is not None:
            return spec.dtype
    return qconfig.output.dtype


def _why_integer(operator: Operator) -> str:
    return "on its operand's scale" if operator.scale is Scale.SAME else "with a scale of its own"

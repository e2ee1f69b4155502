"""Every operator learns whether it becomes integer, with which dtype, and why."""

import torch
from torch import fx

from fxquant.ir import graph as facts
from fxquant.ir.graph import Annotation, TensorFact
from fxquant.numerics.grids import PLAIN_TYPES
from fxquant.ops import Fixed, Operator, Own, Plain, Trait, demand, operands_of, operator_of, preferred_dtypes, shares, sharing_operands
from fxquant.ops.core.casting import IN_DTYPE
from fxquant.ops.core.composite import QUANTIZE
from fxquant.passes.floating import needed_in_float, reads_no_activation, reason_of
from fxquant.passes.rewriting import Decision, decide
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.spec import DEFAULT, QConfig, Rule

AT_RUN_TIME = "its input is quantized at run time, its weight is integers, and its result is float"


def annotate(gm: fx.GraphModule, context: Context) -> int:
    """Annotate every node that computes a tensor with its dtype, or with the reason why it stays in float."""
    changes = 0
    effective: set[Rule] = set()
    needed = needed_in_float(gm, context.target.activations)
    preferred = preferred_dtypes(gm.graph, context.target.activations)
    for node in gm.graph.nodes:
        if not facts.computes_tensor(node):
            continue
        operator = operator_of(node)
        decision = decide(node)
        effective |= {decision.output, decision.layer}
        qconfig = decision.config
        dynamic = operator is not None and Trait.DYNAMIC in operator.traits
        reason = AT_RUN_TIME if dynamic else _why_float(gm, node, operator, qconfig, needed)
        if reason is not None:
            facts.annotate(node, Annotation(None, reason, qconfig, on_host=facts.is_on_host(node)))
            context.say(f"%{node.name} stays in float: {reason}")
            continue
        assert operator is not None
        assert qconfig is not None
        dtype = _dtype(node, decision, context.target.default_activation, preferred.get(node))
        if decision.asked and dtype != qconfig.output.dtype and not facts.is_inner_part(node) and dtype not in PLAIN_TYPES:
            configured = f"{qconfig.output.dtype} as the qconfig's {decision.output} says"
            context.not_done(gm, f"%{node.name} is {dtype}, as the graph requires, and not {configured}")
        facts.annotate(node, Annotation(dtype, _why_integer(node, dtype, context.target.arithmetic), qconfig))
        changes += 1
    asked = dict.fromkeys(rule for node in gm.graph.nodes for rules in facts.matched_rules(node) for rule, _ in rules)
    for rule in asked:
        if rule not in effective and rule != DEFAULT:
            context.not_done(gm, f"this rule of the qconfig has no effect, since other rules override it wherever it matches: {rule}")
    return changes


def _why_float(
    gm: fx.GraphModule, node: fx.Node, operator: Operator | None, qconfig: QConfig | None, needed: dict[fx.Node, str]
) -> str | None:
    """Return why the node must stay in float; None if it becomes integer."""
    because = facts.refusal(node)
    if because is not None:
        return because
    if operator is None:
        written = _written(gm, node)
        because = reason_of(written)
        return f"no registered operator matches {written}" + ("" if because is None else f": {because}")
    if qconfig is None or operator is QUANTIZE:  # which a stub with a scale is
        return "the qconfig keeps it in float" if qconfig is None else None
    arguments = operator.arguments(node)
    operands = operands_of(node)
    because = reads_no_activation(operator, arguments) or _of_another_dtype(node) or operator.refuses(node, arguments) or needed.get(node)
    if because:  # "" says that it depends on the operands
        return because
    # A mask may hold -inf; the matrix of a product is a weight, which is refused where it is prepared.
    values = facts.nodes_in([] if Trait.SUMS in operator.traits else [arguments.get(name) for name in operator.operands])
    constants = [facts.parameter_value(gm, value) for value in values if facts.is_parameter(value)]
    if not all(bool(torch.isfinite(value).all()) for value in constants if isinstance(value, torch.Tensor) and value.is_floating_point()):
        return "its constant holds values that are not finite"
    masked = [operand for operand in operands if node in needed and operand.op != "placeholder" and not is_integer(operand)]
    if masked:
        return f"it lies between %{masked[0].name} and a softmax, which are in float"
    for operand in operands:
        if (facts.annotation(operand) or Annotation(None, "")).dtype == "int32":
            return f"the 32-bit output of %{operand.name} is not read by another integer operator"
    if operator.expand is not None:
        return "it was not expanded into its operators"
    because = _why_beside_float(node, operands)
    if because is not None:
        return because
    rounded = Trait.SUMS not in operator.traits and not shares(node) and not isinstance(demand(node), Plain)
    if qconfig.output.dtype == "int32" and rounded and not facts.is_inner_part(node):
        return f"{operator.name} has no 32-bit output: it forms no sum of products"
    return None


def _why_beside_float(node: fx.Node, operands: list[fx.Node]) -> str | None:
    """Return why the node stays in float where its operands do: quantizing it alone would add a boundary and save nothing."""
    if not operands and shares(node):
        return "it moves the values of a parameter, which have no grid"
    read = [operand for operand in operands if operand.op != "placeholder" and not is_integer(operand)]
    if not read or facts.part(node) is not None:
        return None
    if isinstance(demand(node), Plain):
        return f"it compares or orders the values of %{read[0].name}, which is in float"
    if shares(node) and operands[0] is read[0]:
        return f"it only passes on the values of %{operands[0].name}, which is in float"
    return None


def _of_another_dtype(node: fx.Node) -> str | None:
    """Return why a node's result cannot be quantized: it is not float32, because of a float64 or complex constant; None if it can."""
    value = facts.fact(node)
    if operator_of(node) is IN_DTYPE:
        return None
    if not isinstance(value, TensorFact) or value.dtype == torch.float32 or not (value.dtype.is_complex or value.dtype.is_floating_point):
        return None
    return f"its result is {str(value.dtype).removeprefix('torch.')}, and only float32 tensors are quantized"


def _written(gm: fx.GraphModule, node: fx.Node) -> str:
    """Return the name of a node as it was written: the module's class, or the function's name."""
    if node.op == "call_module":
        return type(facts.resolve(gm, str(node.target))).__name__
    name = facts.target_name(node)
    return name.lstrip("_") or name  # PyTorch's functions are called by private ones


def _dtype(node: fx.Node, decision: Decision, default: str, preferred: str | None) -> str:
    """Return the dtype of the result: the demanded one, else the configured one, or that `preferred` by a reader where no rule chose one.

    An operator on its operand's grid has its operand's dtype, unless a rule chose another. `default` is the target's for activations.
    """
    qconfig = decision.config
    assert qconfig is not None
    demanded = demand(node)
    if isinstance(demanded, Fixed | Plain) or (isinstance(demanded, Own) and demanded.dtype is not None):
        assert demanded.dtype is not None
        return demanded.dtype
    dtype = qconfig.output.dtype
    assert dtype is not None  # `rules.match` has put the target's default there
    if preferred is not None and not decision.asked and dtype != "int32":
        dtype = preferred
    if not shares(node):
        return dtype
    spec = facts.annotation(operands_of(node)[0])
    inner = facts.is_inner_part(node)
    if spec is not None and spec.dtype is not None:
        return dtype if decision.asked and not inner and dtype != "int32" else spec.dtype
    read = (qconfig.input or qconfig.output).dtype if inner else dtype  # what its operand will be quantized to
    assert read is not None
    return default if read == "int32" else read


def _why_integer(node: fx.Node, dtype: str, arithmetic: Arithmetic) -> str:
    demanded, node_part, sharing = demand(node), facts.part(node), sharing_operands(node, arithmetic)
    if isinstance(demanded, Fixed):
        grid = f"on a scale of {demanded.scale:g}"
    elif isinstance(demanded, Plain):
        grid = "as it is, without a scale"
    elif shares(node) or len(sharing) == 1:
        grid = "on its operand's scale"
    else:
        grid = "with its own scale" if not facts.ties(node) and not sharing else "on the scale that it shares"
    if node_part is None and dtype == "int16" and facts.stated_demand(node) is not None:
        return f"{grid}, 16 bits wide for its readers"
    return grid if node_part is None else f"{node_part}, {grid}"

"""Stages: which nodes a graph may hold, and when. Checked after every pass."""

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxquant.errors import ConfigurationError, ExportError, StageViolation
from fxquant.ir import loops
from fxquant.ir.graph import TensorFact, annotation, fact, is_deployed, is_parameter, model_meta, reads_shape_only, resolve, target_name
from fxquant.ir.integer import QParams, kernel, kernel_results, qparams
from fxquant.numerics.grids import PLAIN_TYPES, is_scale
from fxquant.ops import Operator, Trait, on_grid_of, operator_of
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE
from fxquant.ops.core.weighted import FUSED
from fxquant.prepared.operators import QuantizedOperator
from fxquant.primitives import PRIMITIVES, quantization
from fxquant.primitives.proof import unproved
from fxquant.primitives.quantization import quantize
from fxquant.primitives.record import Primitive


class Stage(enum.IntEnum):
    """The stage of a graph between trace and conversion."""

    TRACED = 0  # the model as it was written
    CANONICAL = 1  # one call form per operator
    ANNOTATED = 2  # every operator knows whether it becomes integer, and its dtype
    BOUNDED = 3  # quantize and dequantize are where the integer part begins and ends
    PREPARED = 4  # operators observe, train and validate
    INTEGER = 5  # integer primitives between the boundary nodes
    FUSED = 6  # the same, and which of them a kernel computes together


@dataclass(frozen=True)
class Violation:
    """A node that is not allowed in a graph of this stage, and why."""

    node: fx.Node
    because: str


Rule = Callable[[fx.GraphModule], Iterator[Violation]]


def canonical_spelling(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that no module or function of the operator table is left in another call form."""
    for node in gm.graph.nodes:
        operator = operator_of(node)
        if operator is not None:
            try:
                operator.bind(node.args, {k: v for k, v in node.kwargs.items() if k not in FUSED})
            except TypeError as error:
                yield Violation(node, f"its arguments are not canonical: {error}")


def tensors_have_facts(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require a known shape and dtype of every operator's result."""
    for node in gm.graph.nodes:
        if operator_of(node) is not None and fact(node) is None:
            yield Violation(node, "its shape is unknown")


def annotated(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that every operator is annotated with whether it becomes integer."""
    for node in gm.graph.nodes:
        if operator_of(node) is not None and annotation(node) is None:
            yield Violation(node, "it is not annotated as integer or float")


def bounded(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that activations of integer operators come from integer operators, and that float nodes never read integers."""
    for node in gm.graph.nodes:
        operator = operator_of(node)
        integer = is_integer(node)
        if reads_shape_only(node) or (integer and operator is QUANTIZE):
            continue
        for operand in node.all_input_nodes:
            if is_parameter(operand) or not isinstance(fact(operand), TensorFact):
                continue
            if integer and not is_integer(operand) and fact(operand).dtype.is_floating_point:
                yield Violation(node, f"it is integer but reads the float %{operand.name}")
            if not integer and is_quantized(operand) and operator is not DEQUANTIZE:
                yield Violation(node, f"it is float but reads the integer %{operand.name}")


def is_integer(node: fx.Node) -> bool:
    """Return whether the annotated node is computed on integers: its result is a quantized tensor, or plain."""
    spec = annotation(node)
    return spec is not None and spec.dtype is not None


def is_plain(node: fx.Node) -> bool:
    """Return whether the annotated node's result is booleans or integers, computed on integers: it has no grid, and is read as it is."""
    spec = annotation(node)
    return spec is not None and spec.dtype in PLAIN_TYPES


def is_quantized(node: fx.Node) -> bool:
    """Return whether the annotated node's result is a quantized tensor."""
    return is_integer(node) and not is_plain(node)


def one_scale_per_group(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that operators which must share a scale do."""
    for node in gm.graph.nodes:
        operator = operator_of(node)
        if operator is None or not is_integer(node):
            continue
        spec = annotation(node)
        for operand in on_grid_of(node):
            if is_quantized(operand) and spec is not None and annotation(operand).group != spec.group:  # type: ignore[union-attr]
                yield Violation(node, f"its scale must be that of %{operand.name}, but they are in different groups")


def prepared_operators(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require a QuantizedOperator for every integer operator, positive finite float32 scales, and zero points of their dtypes."""
    for node in gm.graph.nodes:
        if is_integer(node) and operator_of(node) is not None:  # a stop between two operators is annotated, and is none
            yield Violation(node, "it is annotated as integer but has no quantizer")
        if (module := quantized_operator(gm, node)) is not None:
            output = None if module.plain else module.output
            for trained in (output, module.intermediate, module.weight_quantizer.learned):
                scales = [] if trained is None else trained.base_scale.flatten().tolist()
                wrong = [scale for scale in scales if not math.isnan(scale) and not is_scale(scale)]
                if wrong:
                    yield Violation(node, f"its scale is {wrong[0]}")
            for quantizer in (output, module.intermediate):
                if quantizer is not None and not quantizer.grid.low <= 0 <= quantizer.grid.high:
                    yield Violation(node, f"its zero point is {quantizer.grid.zero_point}")


def only_primitives(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require integer primitives on integers between quantize and dequantize, and floats only outside."""
    for node in gm.graph.nodes:
        if quantized_operator(gm, node) is not None:
            yield Violation(node, "it was not lowered")
        record = primitive_of(node)
        if record is None:
            continue
        result = fact(node)
        if not isinstance(result, TensorFact):
            yield Violation(node, "its dtype is unknown")
        elif (record.kind in ("float", "dynamic")) != result.dtype.is_floating_point:
            yield Violation(node, f"its kind is {record.kind} but its dtype is {result.dtype}")
        for operand in node.all_input_nodes:
            value = fact(operand)
            is_real = operand.op != "get_attr" and isinstance(value, TensorFact) and value.dtype.is_floating_point
            if is_real and record.function is not quantize and record.kind != "dynamic":
                yield Violation(node, f"it reads the float %{operand.name}")


def proved(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that shapes, grids and the range of every value and accumulator hold for every input, by the constants of the graph."""
    for node, because in unproved(gm, gm.meta["target"].arithmetic):
        yield Violation(node, because)


def whole_loops(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that each loop ends, holds no other one, and has as many steps as the sequences that it runs along."""
    bodies = loops.bodies(gm.graph)
    for start, nodes in bodies.items():
        inside, count = {*nodes}, fact(start.args[0]) if isinstance(start.args[0], fx.Node) else start.args[0]
        if not nodes or nodes[-1].target is not loops.end or any(node.target in (loops.begin, loops.end) for node in nodes[:-1]):
            yield Violation(start, "its loop does not end, or is not the only one there")
            continue
        for user in start.users:
            name = called(gm, user).removeprefix("loop_")
            if (user in inside) != (name not in ("last", "stack")):
                yield Violation(user, f"it is not where a {name} of a loop is")
            arguments: tuple[Any, ...] = user.args
            sequence, dim = (arguments[0], arguments[2]) if name == "item" else (user, arguments[3]) if name == "stack" else (None, 0)
            if sequence is not None and fact(sequence).shape[dim] != count:
                yield Violation(user, f"its sequence has {fact(sequence).shape[dim]} steps, and the loop {count}")


def kernels_of_their_own(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that a kernel covers primitives of the graph, and that nodes outside of the kernel read its results alone."""
    nodes = {node.name: node for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        _, covers = kernel(node) or ("", ())
        for name in covers:
            covered = nodes.get(name)
            if covered is None or covered.target not in PRIMITIVES:
                yield Violation(node, f"its kernel covers %{name}, which is not a primitive of this graph")
            elif name not in (node.name, *kernel_results(node)) and any(user.name not in covers for user in covered.users):
                yield Violation(node, f"its kernel covers %{name}, which other nodes read")


def consistent(gm: fx.GraphModule) -> Iterator[Violation]:
    """Require that targets exist, every value is defined before it is used, and computed parameters read parameters only."""
    visited: set[fx.Node] = set()
    for node in gm.graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in visited:
                yield Violation(node, f"it uses %{operand.name} before its definition")
        if is_parameter(node) and node.op != "get_attr":
            others = [operand.name for operand in node.all_input_nodes if not is_parameter(operand)]
            if others or not node.all_input_nodes:
                read = f"reads %{others[0]}" if others else "reads none"
                yield Violation(node, f"it is annotated as computed from parameters only but {read}")
        if node.op in ("call_module", "get_attr"):
            try:
                resolved = resolve(gm, str(node.target))
            except AttributeError:
                yield Violation(node, f"{node.target!r} does not exist")
            else:
                if node.op == "call_module" and not isinstance(resolved, nn.Module):
                    yield Violation(node, f"{node.target!r} is not a module")
        visited.add(node)


SPECS: dict[Stage, tuple[Rule, ...]] = {
    Stage.TRACED: (consistent,),
    Stage.CANONICAL: (consistent, canonical_spelling, tensors_have_facts),
    Stage.ANNOTATED: (consistent, canonical_spelling, tensors_have_facts, annotated),
    Stage.BOUNDED: (consistent, canonical_spelling, tensors_have_facts, annotated, bounded, one_scale_per_group),
    Stage.PREPARED: (consistent, whole_loops, prepared_operators),
    Stage.INTEGER: (consistent, only_primitives, whole_loops, proved),
    Stage.FUSED: (consistent, only_primitives, kernels_of_their_own),
}


def violations(gm: fx.GraphModule, stage: Stage) -> list[Violation]:
    """Return everything in the graph that its stage does not allow."""
    return [violation for rule in SPECS[stage] for violation in rule(gm)]


def require_integer(model: Any) -> None:
    """Raise ConfigurationError unless the model is an integer model, and ExportError if it was changed so that its stage refuses it."""
    if not isinstance(model, fx.GraphModule) or not is_deployed(model):
        because, remedy = "only the result of fxq.convert can be exported", "call fxq.convert(prepared) first"
        raise ConfigurationError(f"{type(model).__name__} is not an integer model", because=because, remedy=remedy)
    for violation in violations(model, Stage.INTEGER)[:1]:
        because = f"%{violation.node.name}: {violation.because}"
        remedy = "undo the change that was made to this model (a constant, .double(), .half()), or call fxq.convert(prepared) again"
        raise ExportError("the integer model cannot be exported", node=violation.node, because=because, remedy=remedy)


def verify_stage(gm: fx.GraphModule, stage: Stage, made_by: str) -> None:
    """Raise StageViolation, with every offending node, if the graph breaks a rule of its stage."""
    broken = violations(gm, stage)
    if broken:
        lines = "\n".join(f"%{violation.node.name}: {violation.because}" for violation in broken[:20])
        more = f"\nand {len(broken) - 20} more" if len(broken) > 20 else ""
        what = f"the graph is not a valid {stage.name.lower()} graph after {made_by}"
        remedy = f"this is a defect of {made_by}; run with options=fxq.Options(dump='dir') and compare the graphs before and after it"
        raise StageViolation(what, node=broken[0].node, because=lines + more, remedy=remedy)


# ---- The facts of one node, at whatever stage its graph is: what it calls, and the scale and dtype of its result -----
def called(model: fx.GraphModule, node: fx.Node) -> str:
    """Return the name of the operator, primitive, function, method or class of module that a node calls."""
    operator = record_of(model, node)
    if operator is not None:
        return operator.name
    if node.op == "call_module":
        return type(resolve(model, str(node.target))).__name__
    return target_name(node)


def dtype_of(model: fx.GraphModule, node: fx.Node) -> str | None:
    """Return the integer dtype of a node's result, with a grid or plain ("bool", "int64"); None if it is float, or not decided yet."""
    grid, primitive = grid_of(model, node), primitive_of(node)
    # Primitives of the kind "quantized" that move elements move booleans and integers too.
    kind = None if primitive is None else primitive.kind
    if kind == "plain" or (kind == "quantized" and fact(node).dtype in PLAIN_TYPES.values()):
        return str(fact(node).dtype).removeprefix("torch.")
    spec = annotation(node)
    return grid.dtype if grid is not None else None if spec is None else spec.dtype


def in_float16(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node that holds no quantized tensor is one that the model's target computes itself, in float16."""
    target = model_meta(model).get("target")
    return target is not None and bool(target.float16) and target.computes_in_float16(called(model, node))


def record_of(model: fx.GraphModule, node: fx.Node) -> Operator | None:
    """Return the operator at a node, before or after it became a module; None if the table has none, or it has been lowered."""
    module = quantized_operator(model, node)
    return operator_of(node) if module is None else module.operator


def quantized_operator(model: fx.GraphModule, node: fx.Node) -> QuantizedOperator | None:
    """Return the quantized operator that a node of a prepared model calls; None if it calls none."""
    module = resolve(model, str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, QuantizedOperator) else None


def primitive_of(node: fx.Node) -> Primitive | None:
    """Return the primitive that a node of an integer graph calls; None if it calls none."""
    return PRIMITIVES.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]


def is_quantize(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node is a quantization, in a prepared or an integer graph."""
    return node.target is quantization.quantize or record_of(model, node) is QUANTIZE


def is_dequantize(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node is a dequantization, in a prepared or an integer graph."""
    return node.target is quantization.dequantize or record_of(model, node) is DEQUANTIZE


def is_dynamic(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node, at any stage, is a dynamically quantized layer: float operand and result, scale computed at run time."""
    primitive, operator = primitive_of(node), record_of(model, node)
    return (primitive is not None and primitive.kind == "dynamic") or (operator is not None and Trait.DYNAMIC in operator.traits)


def grid_of(model: fx.GraphModule, node: fx.Node) -> QParams | None:
    """Return the scale and dtype of the quantized tensor at a node; None for other nodes, or before they have a quantizer.

    A prepared model's scale is NaN until it is calibrated, and () where the tensor is a sum, whose scale only the integer model knows.
    """
    module = quantized_operator(model, node)
    if module is None:
        return qparams(node)
    if module.plain:
        return None
    if module.output.follows_sum:
        return QParams((), module.output.dtype.name)
    grid = module.output.grid
    return QParams(float(grid.scale), grid.type.name, zero_point=grid.zero_point)

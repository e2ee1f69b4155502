"""Quantize and dequantize stand where the integer part of the graph begins and ends.

%y = conv2d(%x, %w)                    →    %x_quantize = quantize(%x)
return %y                                   %y = conv2d(%x_quantize, %w)
                                            %y_dequantize = dequantize(%y)
                                            return %y_dequantize
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fxquant.ir.graph import Annotation, Part, annotate, annotation, fact, inherit, part, reads_shape_only, set_fact, set_part
from fxquant.numerics.grids import EVERYTHING, PLAIN_TYPES, Interval
from fxquant.ops import matters, operands_of, operator_of, preferred_by, preferred_dtypes, shares, sharing_operands
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE, REQUANTIZE
from fxquant.ops.core.record import Operator
from fxquant.passes.rewriting import decide, result_config
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer, is_quantized
from fxquant.quantization.spec import DEFAULT, ActivationConfig, Rule

# The boundary nodes of a value, by config and by the interval of its values that matters. The config None is that of readers for whose
# input no rule asks.
Made = dict[fx.Node, dict[tuple[ActivationConfig | None, Interval], fx.Node]]


def insert(gm: fx.GraphModule, context: Context) -> int:
    """Insert one dequantize where a value crosses from integer to float, and one quantize where it crosses from float to integer.

    Readers of a float value have separate quantizes where they ask for different inputs (`QConfig.input`). So has a reader that
    limits the value on both sides, since the others would make its scale coarser.
    """
    preferred = preferred_dtypes(gm.graph, context.target.activations)
    quantized: Made = {}
    dequantized: Made = {}
    for node in list(gm.graph.nodes):
        operator = operator_of(node)
        activations = set(operands_of(node)) if is_integer(node) else set()

        def cross(
            operand: fx.Node, node: fx.Node = node, operator: Operator | None = operator, activations: set[fx.Node] = activations
        ) -> fx.Node:
            if is_quantized(operand) and operand not in activations:
                if reads_shape_only(node) or operator is DEQUANTIZE:
                    return operand
                return _boundary(gm, operand, DEQUANTIZE, dequantized, operand, context, preferred)
            if operand in activations and not is_integer(operand):
                return _boundary(gm, operand, QUANTIZE, quantized, node, context, preferred)
            return operand

        args, kwargs = fx.map_arg(node.args, cross), fx.map_arg(node.kwargs, cross)
        if args != node.args:
            node.args = args
        if kwargs != node.kwargs:
            node.kwargs = kwargs
    return sum(len(set(there.values())) for there in (*quantized.values(), *dequantized.values()))


def _boundary(
    gm: fx.GraphModule, value: fx.Node, operator: Operator, nodes: Made, reader: fx.Node, context: Context, preferred: Mapping[fx.Node, str]
) -> fx.Node:
    """Return the quantize or dequantize of this value for its reader; insert it after the value if there is none yet."""
    spec = annotation(reader)
    assert spec is not None
    asked = spec.config.input if operator is QUANTIZE else None
    config = asked or spec.config.output
    if config.dtype == "int32":  # that is asked of a last layer's output, not of its input
        config = replace(config, dtype=context.target.default_activation)
    dtype: str | None = None
    # A rule about the input of the reader takes precedence over the dtype that the reader prefers.
    if operator is QUANTIZE and not decide(reader).asked and (asked is None or decide(reader).layer == DEFAULT):
        dtype = preferred_by(reader, value, preferred)
    if dtype is not None and dtype in context.target.activations and dtype != config.dtype:
        asked = config = config.of(dtype)
    limits = matters(reader, EVERYTHING, False) if operator is QUANTIZE else EVERYTHING
    if not all(map(math.isfinite, limits)):
        limits = EVERYTHING
    there = nodes.setdefault(value, {})
    existing = there.get((config, limits)) if asked is not None or (None, limits) not in there else there[None, limits]
    if existing is not None:
        return existing
    other = [fact(value).dtype] if operator is DEQUANTIZE and fact(value).dtype != torch.float32 else []
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value):
        name = f"{value.name}_{operator.name}" + (f"_{reader.name}" if there else "")
        created = gm.graph.create_node("call_function", operator.function, (value, *other), {}, name=name)
    node: fx.Node = inherit(created, value, "boundary.insert")
    there[config, limits] = node
    if asked is None or (dtype is None and decide(reader).layer == DEFAULT):
        there.setdefault((None, limits), node)
    set_fact(node, fact(value))
    if operator is QUANTIZE:
        annotate(node, Annotation(config.dtype, f"the input of %{reader.name}", spec.config))
    else:
        annotate(node, Annotation(None, "the end of the integer part", spec.config, spec.group))
    return node


# ---- Requantizations ------------------------------------------------------------------------------------------------
#
# Where an operator is to read another grid than its operand has, a requantization stands between them.
#
# %p = max_pool2d(%x, 2)  (int16, of an int8 %x)     →     %p_requantize = requantize(%x)
#                                                          %p = max_pool2d(%p_requantize, 2)
# %y = conv2d(%x, %w)     (input=int8, %x int16)     →     %x_requantize = requantize(%x)
#                                                          %y = conv2d(%x_requantize, %w)
LISTED = 8  # names in a message: a recurrent layer has hundreds of operators


def requantize(gm: fx.GraphModule, context: Context) -> int:
    """Insert requantize nodes where an operator shares a grid with an operand of another dtype, and where a rule sets the input dtype."""
    changes = _read_as_asked(gm, context)
    for node in list(gm.graph.nodes):
        if not is_integer(node):
            continue
        spec = annotation(node)
        assert spec is not None
        for operand in dict.fromkeys(sharing_operands(node, context.target.arithmetic)):
            operand_spec = annotation(operand)
            if operand_spec is None or operand_spec.dtype in (None, spec.dtype):
                continue
            because = f"%{operand.name} is {operand_spec.dtype}, and %{node.name}, which would be on its scale, {spec.dtype}"
            node.replace_input_with(operand, _made(node, operand, Annotation(spec.dtype, because, spec.config)))
            context.say(f"%{operand.name} is requantized for %{node.name}: {because}")
            changes += 1
    return changes


def _read_as_asked(gm: fx.GraphModule, context: Context) -> int:
    """Requantize operands to the config `input` of an operator's rule, for operators that do not share their operands' scale."""
    requantized: dict[tuple[fx.Node, ActivationConfig], fx.Node] = {}
    unused: dict[Rule, list[str]] = {}
    for node in list(gm.graph.nodes):
        spec = annotation(node)
        asked = None if spec is None or spec.config is None else spec.config.input
        if asked is None or spec is None or not is_integer(node) or node.target is QUANTIZE.function:
            continue
        rule = decide(node).layer
        read = [operand for operand in operands_of(node) if not _is_on(operand, asked)]
        if rule == DEFAULT or not read:  # the default's input is the model's, and no operator's in particular
            continue
        if shares(node) or part(node) is not None:
            unused.setdefault(rule, []).append(f"%{node.name}")
            continue
        for operand in dict.fromkeys(read):
            key = operand, asked
            if key not in requantized:
                because = f"it is {asked.dtype} for %{node.name}, as the input= of the qconfig's {rule} says"
                requantized[key] = _made(operand, operand, Annotation(asked.dtype, because, replace(spec.config, output=asked, input=None)))
            node.replace_input_with(operand, requantized[key])
            context.say(f"%{operand.name} is requantized for %{node.name}: the input= of the qconfig's {rule}")
    for rule, names in unused.items():
        readers = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
        context.not_done(gm, f"the input= of the qconfig's {rule} is not used by {readers}: what is read there is quantized already")
    return len(requantized)


def _is_on(operand: fx.Node, asked: ActivationConfig) -> bool:
    """Return whether an operand has the dtype and scale that `asked` requires; True for an operand without a scale."""
    operand_spec = annotation(operand)
    if operand_spec is None or operand_spec.dtype is None or operand_spec.dtype in PLAIN_TYPES or operand_spec.dtype == "int32":
        return True
    grid = asked.fixed_grid
    return operand_spec.dtype == asked.dtype and (grid is None or result_config(operand).fixed_grid == grid)


def _made(node: fx.Node, operand: fx.Node, spec: Annotation) -> fx.Node:
    """Insert a requantization of the operand, named after `node`: before `node`, its reader, or after it if `node` is the operand."""
    with node.graph.inserting_after(node) if node is operand else node.graph.inserting_before(node):
        name = f"{node.name}_{REQUANTIZE.name}"
        created = node.graph.create_node("call_function", REQUANTIZE.function, (operand,), {}, name=name)
    added: fx.Node = inherit(created, node, "boundary.requantize")
    set_fact(added, fact(operand))
    annotate(added, spec)
    whole = part(node)
    if whole is not None:
        set_part(added, Part(whole.composite, f"{whole.role}, {REQUANTIZE.name}d"))
    return added

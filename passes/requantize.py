"""Where an operator is to read another grid than its operand has, a requantization stands between them.

%p = max_pool2d(%x, 2)  (int16, of an int8 %x)     →     %p_requantize = requantize(%x)
                                                         %p = max_pool2d(%p_requantize, 2)
%y = conv2d(%x, %w)     (input=int8, %x int16)     →     %x_requantize = requantize(%x)
                                                         %y = conv2d(%x_requantize, %w)
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxquant.ir.graph import Annotation, Part, annotate, annotation, fact, inherit, part, set_fact, set_part
from fxquant.numerics.grids import PLAIN_TYPES
from fxquant.ops import operands_of, shares, sharing_operands
from fxquant.ops.core.composite import QUANTIZE, REQUANTIZE
from fxquant.passes.rewriting import decide, result_config
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer
from fxquant.quantization.spec import DEFAULT, ActivationConfig, Rule

LISTED = 8  # names in a message: a recurrent layer has hundreds of operators


def insert(gm: fx.GraphModule, context: Context) -> int:
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
    if operand_spec.dtype != asked.dtype:
        return False
    return asked.fixed_grid is None or result_config(operand).fixed_grid == asked.fixed_grid


def _made(node: fx.Node, operand: fx.Node, spec: Annotation) -> fx.Node:
    """Insert a requantization of the operand, named after `node`: before `node`, its reader, or after it if `node` is the operand."""
    with node.graph.inserting_after(node) if node is operand else node.graph.inserting_before(node):
        name = f"{node.name}_{REQUANTIZE.name}"
        added = inherit(node.graph.create_node("call_function", REQUANTIZE.function, (operand,), {}, name=name), node, "requantize.insert")
    set_fact(added, fact(operand))
    annotate(added, spec)
    whole = part(node)
    if whole is not None:
        set_part(added, Part(whole.composite, f"{whole.role}, {REQUANTIZE.name}d"))
    return added

"""The rules of the qconfig are matched with every operator, before operators are fused.

A rule is about the model as it was written: a ReLU that becomes the limits of a convolution has its own name, type and module before.
"""

import difflib
from collections import Counter
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fxquant.errors import ConfigurationError
from fxquant.ir import graph as facts
from fxquant.ir.functional import is_stub
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops.core.record import is_meant
from fxquant.passes.rewriting import attributes, bypass, covering, decide, is_named, may_be_dynamic
from fxquant.pipeline import Context
from fxquant.quantization.spec import DEFAULT, Call, Chosen, Rule, is_dynamic

NOT_DYNAMIC = "the qconfig is dynamic, and only linear and recurrent layers are quantized dynamically"


def _check_target(gm: fx.GraphModule, context: Context) -> None:
    """Raise ConfigurationError if the qconfig asks for dynamic quantization, and the target does not have it."""
    if context.target.dynamic:
        return
    for rule, chosen in (*context.qconfig.rules(), *attributes(gm, context.attached), (DEFAULT, context.qconfig.default)):
        if is_dynamic(chosen):
            what = f"{context.target.name} has no dynamic quantization, which the qconfig's {rule} asks for"
            because = "its operators compute with scales that are constants of the model"
            remedy = "leave dynamic=True out and calibrate, or compile for a target that finds scales at run time: x86 or qnnpack"
            raise ConfigurationError(what, because=because, remedy=remedy)


def match(gm: fx.GraphModule, context: Context) -> int:
    """Record at every node that computes a tensor the rules that cover it, and at the model the rules without any node."""
    changes, default = 0, context.target.default_activation
    _check_target(gm, context)
    resolved: dict[int, Chosen] = {}  # by identity: the user gives a few configs, which are those of many nodes

    def resolve_config(chosen: Chosen) -> Chosen:
        if chosen is not None and id(chosen) not in resolved:
            resolved[id(chosen)] = chosen.resolved(default)
        return None if chosen is None else resolved[id(chosen)]

    counts: Counter[tuple[str, Any]] = Counter()
    for node in gm.graph.nodes:
        if facts.computes_tensor(node):
            # A node that no operator of the table recognises is matched by its module's type, or its function.
            written = facts.spelling(node) or (type(facts.resolve(gm, str(node.target))) if node.op == "call_module" else node.target,)
            alike = [kind for kind in context.qconfig.types if any(is_meant(kind, one) for one in written)]
            rules = covering(node, (*written, *alike), _calls(node, written, counts), context.qconfig, context.attached)
            context.open |= {rule for rule, chosen in rules if chosen is not None and chosen.output.is_open}
            chosen = [(rule, resolve_config(chosen)) for rule, chosen in rules]
            if not may_be_dynamic(node):
                if is_dynamic(chosen[0][1]):
                    facts.refuse(node, NOT_DYNAMIC)
                chosen = [(rule, None if is_dynamic(config) else config) for rule, config in chosen]
            facts.set_matched_rules(node, tuple(chosen))
            changes += 1
    matched = {rule for node in gm.graph.nodes for rules in facts.matched_rules(node) for rule, _ in rules}
    paths = {facts.module_path(node) for node in gm.graph.nodes}
    attributes = dict.fromkeys((*gm.meta.get("qconfigs", ()), *context.attached))
    asked = [*(rule for rule, _ in context.qconfig.rules()), *(Rule("attribute", path) for path in attributes)]
    for rule in asked:
        if rule not in matched:
            near = difflib.get_close_matches(rule.key, paths, n=1) if rule.kind == "name" else []
            hint = "".join(f"; did you mean {name!r}?" for name in near)
            context.not_done(gm, f"this rule of the qconfig matched nothing: {rule}{hint}")
    return changes


def _calls(node: fx.Node, written: tuple[Any, ...], counts: Counter[tuple[str, Any]]) -> list[Call]:
    """Which call of each type it is in the forward of a module; a layer's calls are counted in the module that calls it."""
    calls = []
    for kind in dict.fromkeys(written):
        path = facts.module_path(node)
        home = path.rpartition(".")[0] if isinstance(kind, type) and issubclass(kind, nn.Module) else path
        calls.append(Call(home, kind, counts[home, kind]))
        counts[home, kind] += 1
    return calls


# ---- QuantStubs -----------------------------------------------------------------------------------------------------
#
# Quantize a QuantStub by its rules, or remove it if it has neither a scale nor a rule: its readers then quantize their operand.
#
# %q = quantize(%x)  (a stub)          →    %y = conv2d(%x, %w)          without a scale or a rule for the stub
# %y = conv2d(%q, %w)
#
# %q = quantize(%x)  (a stub)          →    %q = quantize(%x)            with its scale, in the dtype that the rules give it
# %y = conv2d(%q, %w)                       %y = conv2d(%q, %w)
def quantize_stubs(gm: fx.GraphModule, context: Context) -> int:
    """Turn QuantStubs with a fixed scale or a rule into quantize nodes, and remove the others."""
    changes = 0
    for node in list(gm.graph.nodes):
        if not is_stub(node):
            continue
        changes += 1
        (rules,) = facts.matched_rules(node)
        facts.set_matched_rules(node, tuple((rule, _of_output(chosen, context.target.default_activation)) for rule, chosen in rules))
        demanded, config = facts.stated_demand(node), decide(node).config
        nearest = rules[0][0]
        # A rule is about this stub alone where it names the stub, its class or its node, or stands on it.
        stands_on_it = nearest.kind in ("name", "attribute") and nearest.key == facts.module_path(node)
        own = is_named(node) or stands_on_it or nearest.kind == "pattern"
        if demanded is None and not (own and config is not None and not config.dynamic):
            operand = node.all_input_nodes[0]
            if operand.op == "placeholder" and not facts.module_path(operand):
                operand.meta["module"] = facts.module_path(node)  # whose quantize, if there is one, is this stub's
            context.say(f"%{node.name} marks where the integer part begins")
            bypass(node)
            continue
        if demanded is not None and config is not None and config.output.dtype is not None:
            if own and config.output.fixed_scale is not None:
                facts.state_demand(node, None)  # what its rule gives is said of this stub alone, as its scale is, and later
            elif not ACTIVATION_TYPES[config.output.dtype].affine:
                facts.state_demand(node, replace(demanded, dtype=config.output.dtype))
    return changes


def _of_output(chosen: Chosen, default: str) -> Chosen:
    """Return the config of a rule for a stub: a stub has only an output, and only a layer's sum can be a 32-bit output."""
    if chosen is None or chosen.dynamic:
        return chosen
    output = replace(chosen.output, dtype=default) if chosen.output.dtype == "int32" else chosen.output
    return replace(chosen, output=output, input=None)

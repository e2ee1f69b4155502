"""The rules of the qconfig are matched with every operator, before operators are fused.

A rule is about the model as it was written: a ReLU that becomes the limits of a convolution has its own name, type and module before.
"""

from __future__ import annotations

import difflib
from collections import Counter
from typing import Any

from torch import fx, nn

from fxquant.errors import ConfigurationError
from fxquant.ir.graph import computes_tensor, matched_rules, module_path, refuse, resolve, set_matched_rules, spelling
from fxquant.ops.core.record import is_meant
from fxquant.ops.layers.dynamic import NOT_DYNAMIC, may_be_dynamic
from fxquant.passes.rewriting import attributes, covering
from fxquant.pipeline import Context
from fxquant.quantization.spec import DEFAULT, Call, Chosen, Rule, is_dynamic


def _check_target(gm: fx.GraphModule, context: Context) -> None:
    """Raise ConfigurationError if the qconfig asks for dynamic quantization, and the target does not have it."""
    if context.target.dynamic:
        return
    asked = [*(pair for pair in context.qconfig.rules()), *attributes(gm, context.attached), (DEFAULT, context.qconfig.default)]
    for rule, chosen in asked:
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
        if computes_tensor(node):
            # A node that no operator of the table recognises is matched by its module's type, or its function.
            written = spelling(node) or (type(resolve(gm, str(node.target))) if node.op == "call_module" else node.target,)
            alike = [kind for kind in context.qconfig.types if any(is_meant(kind, one) for one in written)]
            rules = covering(node, (*written, *alike), _calls(node, written, counts), context.qconfig, context.attached)
            context.open |= {rule for rule, chosen in rules if chosen is not None and chosen.output.is_open}
            chosen = [(rule, resolve_config(chosen)) for rule, chosen in rules]
            if not may_be_dynamic(node):
                if is_dynamic(chosen[0][1]):
                    refuse(node, NOT_DYNAMIC)
                chosen = [(rule, None if is_dynamic(config) else config) for rule, config in chosen]
            set_matched_rules(node, tuple(chosen))
            changes += 1
    matched = {rule for node in gm.graph.nodes for rules in matched_rules(node) for rule, _ in rules}
    paths = {module_path(node) for node in gm.graph.nodes}
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
        path = module_path(node)
        home = path.rpartition(".")[0] if isinstance(kind, type) and issubclass(kind, nn.Module) else path
        calls.append(Call(home, kind, counts[home, kind]))
        counts[home, kind] += 1
    return calls

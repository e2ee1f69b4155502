"""What the user asks of every operator, by the rules of the qconfig, before operators are fused.

A rule is about what the user wrote: a ReLU that becomes the limits of a convolution has a name, a type and a module of its own until then.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxquant.graph import computes_tensor, matched_rules, resolve, set_matched_rules, spelling
from fxquant.pipeline import Context
from fxquant.quantization.mapping import Chosen, Rule
from fxquant.quantization.rules import covering


def match(gm: fx.GraphModule, context: Context) -> int:
    """Every node that computes a tensor knows the rules that cover it, and the model those that cover none."""
    changes, default = 0, context.target.default_activation
    resolved: dict[int, Chosen] = {}  # by identity: the user gives a few configs, which are those of many nodes

    def resolve_config(chosen: Chosen) -> Chosen:
        if chosen is not None and id(chosen) not in resolved:
            resolved[id(chosen)] = chosen.resolved(default)
        return None if chosen is None else resolved[id(chosen)]

    for node in gm.graph.nodes:
        if computes_tensor(node):
            rules = covering(node, spelling(node) or _written(gm, node), context.qconfig, context.attached)
            set_matched_rules(node, tuple([(rule, resolve_config(chosen)) for rule, chosen in rules]))
            changes += 1
    matched = {rule for node in gm.graph.nodes for rules in matched_rules(node) for rule, _ in rules}
    attributes = dict.fromkeys((*gm.meta.get("qconfigs", ()), *context.attached))
    asked = [*(rule for rule, _ in context.qconfig.rules()), *(Rule("attribute", path) for path in attributes)]
    for rule in asked:
        if rule not in matched:
            context.not_done(gm, f"this rule of the qconfig matched nothing: {rule}")
    return changes


def _written(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """What the user wrote where no operator of the table recognises it."""
    return (type(resolve(gm, str(node.target))),) if node.op == "call_module" else (node.target,)

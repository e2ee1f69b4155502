"""Resolution of the user's rules where several operators of the model were fused into one.

Each of the user's operators is covered by rules, the nearest of which is its own: an attribute of a module, a name, a pattern,
a type, or the default. The rules of a fused operator are compared by this alone:

    a rule gives way to another that is the own rule of some part it covers as well

So the default gives way to every rule, and a rule for a block to one for a layer in it. Of the rules that do not give way, that of
the last part determines how the result is quantized: it is that part's output. The first part's own rule determines how weight and
input are quantized. Where one part is to be integer and another to stay in float, and no rule gives way, they are not fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxquant.ir.graph import annotation, attached_qconfigs, matched_rules, module_path
from fxquant.ir.parts import is_inner_part
from fxquant.ops import Fixed, demand
from fxquant.ops.core.boundary import QUANTIZE
from fxquant.quantization.mapping import DEFAULT, Call, Chosen, MatchedRules, QConfigMapping, Rule, prefixes
from fxquant.quantization.spec import ActivationConfig, QConfig


def covering(
    node: fx.Node, written: tuple[Any, ...], calls: Sequence[Call], mapping: QConfigMapping, attached: Mapping[str, Chosen]
) -> MatchedRules:
    """Return every rule that covers a node that the user wrote as one of these types or functions, the nearest first.

    calls      which calls of these in the module's forward it is
    attached   the QConfigs that stand on modules of the traced model itself; they go before those of the model it came from
    """
    path = module_path(node)
    around = [(name, attached[name]) for name in (*prefixes(path), "") if name in attached]
    attributes = [(Rule("attribute", name), chosen) for name, chosen in (*around, *attached_qconfigs(node))]
    return *attributes, *mapping.covering(node.name, path, written, calls)


def is_overridden(rule: Rule, others: tuple[MatchedRules, ...]) -> bool:
    """Whether another rule is the own one of an operator that this one covers as well."""
    return any(rules[0][0] != rule and any(rule == covers for covers, _ in rules) for rules in others)


def apart(layer: fx.Node, part: fx.Node) -> str | None:
    """Why the rules keep a node from being fused into the one before it: one is to be integer, and the other not."""
    first, other = matched_rules(layer)[0], matched_rules(part)[0]
    (_, chosen), (rule, wanted) = first[0], other[0]
    if (chosen is None) == (wanted is None) or is_overridden(rule, (first,)):
        return None
    return f"the qconfig keeps %{(layer if chosen is None else part).name} in float, and not %{(part if chosen is None else layer).name}"


@dataclass(frozen=True)
class Decision:
    """The rules that apply to an operator and all operators that were fused into it.

    config   its QConfig; None keeps it in float
    output   the rule that determines how its result is quantized
    layer    the rule that determines how its weight and its input are quantized
    """

    config: Chosen
    output: Rule
    layer: Rule

    @property
    def asked(self) -> bool:
        """Whether a rule other than the default chose the config of its result."""
        return self.output != DEFAULT


def is_named(node: fx.Node) -> bool:
    """Whether a rule names this operator itself: its function, its call or its node, rather than a module around it."""
    own = [rules[0][0] for rules in matched_rules(node)]
    around = prefixes(module_path(node))
    return any(rule.kind in ("type", "call") or (rule.kind == "name" and rule.key not in around) for rule in own)


def decide(node: fx.Node) -> Decision:
    """Resolve the rules for a node and all operators that were fused into it."""
    parts = matched_rules(node)
    layer, config = parts[0][0]
    output, last = next(rules[0] for rules in reversed(parts) if not is_overridden(rules[0][0], parts))
    if isinstance(config, QConfig) and isinstance(last, QConfig) and last.output != config.output:
        config = replace(config, output=last.output)
    return Decision(config, output, layer)


def result_config(node: fx.Node) -> ActivationConfig:
    """How the grid of an integer node's result is found: as the qconfig says, as far as nothing is demanded of it.

    What is fixed for the result of an operator says nothing about the inner tensors of a composite.
    """
    spec, demanded = annotation(node), demand(node)
    assert spec is not None
    chosen: ActivationConfig = spec.config.input if node.target is QUANTIZE.function and spec.config.input else spec.config.output
    if isinstance(demanded, Fixed):
        return replace(chosen, dtype=demanded.dtype, scale=demanded.scale, threshold=None, zero_point=demanded.zero_point)
    if is_inner_part(node):
        return replace(chosen, dtype=spec.dtype, scale=None, threshold=None, zero_point=None)
    assert spec.dtype is not None
    return chosen if chosen.dtype == spec.dtype else chosen.of(spec.dtype)


def attributes(gm: fx.GraphModule, attached: Mapping[str, Chosen]) -> list[tuple[Rule, Chosen]]:
    """The QConfigs that stand on modules as an attribute, as far as a traced graph has calls inside of them."""
    around = {path: chosen for node in gm.graph.nodes for path, chosen in attached_qconfigs(node)}
    return [(Rule("attribute", path), chosen) for path, chosen in {**around, **attached}.items()]

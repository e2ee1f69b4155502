"""Changes of a graph by passes: fuse one node into another, erase nodes that are no longer read, and query the matched rules."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxquant.ir.graph import annotate, annotation, attached_qconfigs, is_inner_part, matched_rules, module_path, pass_on, set_unfused
from fxquant.ops import Fixed, demand, operator_of
from fxquant.ops.attention.attention import multi_head_attention
from fxquant.ops.core.composite import QUANTIZE
from fxquant.ops.layers.linear import linear, matmul
from fxquant.pipeline import Context
from fxquant.quantization.spec import DEFAULT, ActivationConfig, Call, Chosen, MatchedRules, QConfig, QConfigMapping, Rule, prefixes


# ---- Resolution of the user's rules where several operators of the model were fused into one -------------------------
#
# Each of the user's operators is covered by rules; the nearest one applies: an attribute of a module, a name, a pattern,
# a type, or the default. The rules of a fused operator are compared by this alone:
#
#     a rule gives way to another that is the own rule of some part it covers as well
#
# So the default gives way to every rule, and a rule for a block to one for a layer in it. Of the rules that do not give way, that of
# the last part determines how the result is quantized: it is that part's output. The first part's own rule determines how weight and
# input are quantized. Where one part is to be integer and another to stay in float, and no rule gives way, they are not fused.
def covering(
    node: fx.Node, written: tuple[Any, ...], calls: Sequence[Call], mapping: QConfigMapping, attached: Mapping[str, Chosen]
) -> MatchedRules:
    """Return every rule that covers a node of the user's, the nearest first; `attached` QConfigs of the traced model come before all."""
    path = module_path(node)
    around = [(name, attached[name]) for name in (*prefixes(path), "") if name in attached]
    attributes = [(Rule("attribute", name), chosen) for name, chosen in (*around, *attached_qconfigs(node))]
    return *attributes, *mapping.covering(node.name, path, written, calls)


def is_overridden(rule: Rule, others: tuple[MatchedRules, ...]) -> bool:
    """Return whether a more specific rule takes the place of `rule` for one of the operators that it covers."""
    return any(rules[0][0] != rule and any(rule == covers for covers, _ in rules) for rules in others)


def apart(layer: fx.Node, part: fx.Node) -> str | None:
    """Return why the qconfig's rules prevent fusing `part` into `layer` (they keep one in float and not the other), or None."""
    first, other = matched_rules(layer)[0], matched_rules(part)[0]
    (_, chosen), (rule, part_config) = first[0], other[0]
    if (chosen is None) == (part_config is None) or is_overridden(rule, (first,)):
        return None
    return f"the qconfig keeps %{(layer if chosen is None else part).name} in float, and not %{(part if chosen is None else layer).name}"


@dataclass(frozen=True)
class Decision:
    """The rules that apply to an operator and all operators that were fused into it."""

    config: Chosen  # its QConfig; None keeps it in float
    output: Rule  # the rule that determines how its result is quantized
    layer: Rule  # the rule that determines how its weight and its input are quantized

    @property
    def asked(self) -> bool:
        """Whether a rule other than the default chose the config of its result."""
        return self.output != DEFAULT


def may_be_dynamic(node: fx.Node) -> bool:
    """Return whether a node is of the kind that dynamic quantization is about: a linear layer, a product, or made of such."""
    operator = operator_of(node)
    return operator is not None and (operator.function in (linear, matmul, multi_head_attention) or "hx" in operator.operands)


def is_named(node: fx.Node) -> bool:
    """Return whether a rule names this operator itself, by its function, call or node, rather than a module around it."""
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
    """Return the config of an integer node's result: the qconfig's, except for a dtype or scale that the operator demands.

    A constant scale for the result of a composite does not apply to its inner tensors.
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
    """Return the rules of QConfigs attached to modules, for modules with calls in the graph, and of `attached`."""
    around = {path: chosen for node in gm.graph.nodes for path, chosen in attached_qconfigs(node)}
    return [(Rule("attribute", path), chosen) for path, chosen in {**around, **attached}.items()]


def eliminate_dead(nodes: Iterable[fx.Node], may_go: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Erase the nodes without readers, and operands that they alone read, where `may_go` is true of each; return the erased nodes."""
    unseen, gone = list(nodes), list[fx.Node]()
    while unseen:
        node = unseen.pop()
        if node._erased or node.users or node.op in ("placeholder", "output") or not may_go(node):
            continue
        unseen += node.all_input_nodes
        node.graph.erase_node(node)
        gone.append(node)
    return gone


def substitute(node: fx.Node, result: Any) -> None:
    """Replace the node by a nest of nodes, also where a reader picks an element of it, and erase it."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    for reader in list(node.users):
        if reader.target is operator.getitem and reader.args[0] is node:
            substitute(reader, result[reader.args[1]])
        else:
            reader.args = fx.map_arg(reader.args, lambda operand: result if operand is node else operand)
            reader.kwargs = fx.map_arg(reader.kwargs, lambda operand: result if operand is node else operand)
    node.graph.erase_node(node)


def bypass(node: fx.Node) -> None:
    """Let the readers of a node read its only operand, and erase it."""
    (operand,) = node.all_input_nodes
    pass_on(operand, node)
    substitute(node, operand)


def keep_in_float(node: fx.Node, because: str, context: Context, **changes: Any) -> None:
    """Annotate an integer node as one that stays in float, with the reason and these other changes of its annotation."""
    spec = annotation(node)
    assert spec is not None
    annotate(node, replace(spec, dtype=None, because=because, **changes))
    context.say(f"%{node.name} stays in float: {because}")


class Fusion:
    """A rewrite that fuses a node into an earlier or a later one.

    before, after  a graph that it rewrites, and the result; a test runs these
    verb           the verb for the node in messages: "fused", …
    """

    before = after = ""
    verb = "fused"

    def __init__(self, gm: fx.GraphModule, context: Context) -> None:
        self.gm, self.context = gm, context

    def match(self, node: fx.Node) -> Sequence[fx.Node] | None:
        """Return the nodes that `node` may be fused into, the preferred node first; None if the rewrite does not apply to `node`."""
        raise NotImplementedError

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        """Return why a layer cannot take the node in; None where it can."""
        raise NotImplementedError

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        """Fuse the node into the layer; return the node that replaces it for its readers: of a pad before the layer its operand."""
        raise NotImplementedError

    def run(self) -> int:
        """Rewrite every node that can be; of any other, the reason is written on it."""
        changes = 0
        for node in list(self.gm.graph.nodes):
            candidates = self.match(node)
            if candidates is None:
                continue
            reasons = [self.reject(layer, node) or apart(layer, node) for layer in candidates]
            if None not in reasons:
                because = "; ".join(map(str, reasons))
                set_unfused(node, because)
                self.context.say(f"%{node.name} is not {self.verb}: {because}")
                continue
            layer = candidates[reasons.index(None)]
            node.replace_all_uses_with(self.merge(layer, node))
            self.gm.graph.erase_node(node)
            self.context.say(f"%{node.name} {self.verb} into %{layer.name}")
            changes += 1
        return changes

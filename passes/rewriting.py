"""How passes change a graph: by making a node part of one before it, and by erasing what nothing reads any more."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxquant.ir.graph import annotate, annotation, pass_on, set_unfused
from fxquant.passes.matching import apart
from fxquant.pipeline import Context


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
        if reader.target is operator.getitem:
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
    """A rewrite that makes a node part of one before it.

    before, after  a graph that it rewrites, and the result; a test runs these
    verb           what is said of a node that was taken in
    """

    before = after = ""
    verb = "fused"

    def __init__(self, gm: fx.GraphModule, context: Context) -> None:
        self.gm, self.context = gm, context

    def match(self, node: fx.Node) -> Sequence[fx.Node] | None:
        """Return the nodes that may take this one in, the one to prefer first; None where the rewrite is not about this node."""
        raise NotImplementedError

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        """Return why a layer cannot take the node in; None where it can."""
        raise NotImplementedError

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        """Let the layer take the node in, and absorb it; return what the node's readers read from now on."""
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

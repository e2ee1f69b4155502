"""How passes change a graph: by making a node part of one before it, and by erasing what nothing reads any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fxquant.ir.graph import set_unfused
from fxquant.passes.matching import apart
from fxquant.pipeline import Context


def eliminate_dead(nodes: Iterable[fx.Node], may_go: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Erase those of the nodes that nothing reads, and what led to them alone, as far as each may go; returns what is gone."""
    unseen, gone = list(nodes), list[fx.Node]()
    while unseen:
        node = unseen.pop()
        if node._erased or node.users or node.op in ("placeholder", "output") or not may_go(node):
            continue
        unseen += node.all_input_nodes
        node.graph.erase_node(node)
        gone.append(node)
    return gone


@dataclass(frozen=True)
class Fusion:
    """A rewrite that makes a node part of one before it.

    match   the nodes that may take it in, the one to prefer first; None where the rewrite is not about this node
    reject  why one of these cannot take it in; None where it can
    merge   has one take it in, and absorb it; returns what the node's readers read from now on
    verb    what is said of a node that was taken in
    """

    match: Callable[[fx.Node], Sequence[fx.Node] | None]
    reject: Callable[[fx.Node, fx.Node], str | None]
    merge: Callable[[fx.Node, fx.Node], fx.Node]
    verb: str = "fused"

    def run(self, gm: fx.GraphModule, context: Context) -> int:
        """Rewrite every node that can be; of any other, the reason is written on it."""
        changes = 0
        for node in list(gm.graph.nodes):
            candidates = self.match(node)
            if candidates is None:
                continue
            reasons = [self.reject(layer, node) or apart(layer, node) for layer in candidates]
            if None not in reasons:
                because = "; ".join(map(str, reasons))
                set_unfused(node, because)
                context.say(f"%{node.name} is not {self.verb}: {because}")
                continue
            layer = candidates[reasons.index(None)]
            node.replace_all_uses_with(self.merge(layer, node))
            gm.graph.erase_node(node)
            context.say(f"%{node.name} {self.verb} into %{layer.name}")
            changes += 1
        return changes

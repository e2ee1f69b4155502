"""Zeros around the operand of a convolution become its padding.

A pad is part of every convolution that reads it, or of none: while another operator reads it, it is computed.
"""

from torch import fx

from fxquant.analysis.explain import Limits
from fxquant.analysis.measures import Site
from fxquant.ir.graph import absorb, detach_arguments, is_detached, matched_rules, shape_of, stated_demand, ties
from fxquant.ops import Trait, calls, operator_of, traits_of
from fxquant.ops.core.weighted import sizes
from fxquant.ops.layers.convolution import padding_of
from fxquant.ops.movement.pad import margins_of, pad
from fxquant.passes.rewriting import Fusion, decide
from fxquant.pipeline import Context
from fxquant.primitives.accumulate import sides


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """Fuse every pad of zeros into the convolutions that read it, where they are its only readers."""
    return Padding(gm, context).run()


class Padding(Fusion):
    """A pad of zeros becomes the padding of the convolutions that read it."""

    before = """
        %p = pad(%x, [0, 1, 2, 3])
        %conv = conv2d(%p, %w, padding=[1, 0])
        return %conv
    """
    after = """
        %conv = conv2d(%x, %w, padding=[3, 0, 4, 1])
        return %conv
    """

    def __init__(self, gm: fx.GraphModule, context: Context) -> None:
        super().__init__(gm, context)
        self.limits = Limits(context.target)

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        if not calls(node, pad) or node.args[2:] != ("constant", 0) or not all(isinstance(size, int) for size in node.args[1]):  # type: ignore[union-attr]
            return None
        return [user for user in node.users if Trait.PADS_ZEROS in traits_of(user) and decide(user).config is not None][:1] or None

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        margins = margins_of(node.args[1], len(shape_of(node)))  # type: ignore[arg-type]
        if any(map(any, margins[:2])) or min(map(min, margins)) < 0:
            return "it pads channels or the batch, or crops"
        if stated_demand(node) is not None or ties(node):
            return "its composite defines its grid"
        return next((because for reader in node.users if (because := self._why(reader, node)) is not None), None)

    def _why(self, reader: fx.Node, node: fx.Node) -> str | None:
        """Return why a reader of the pad cannot take it in; None if it can."""
        operator, rule = operator_of(reader), matched_rules(node)[0][0][0]
        if operator is None or Trait.PADS_ZEROS not in operator.traits:
            return f"%{reader.name} reads it as well, and has no padding of zeros"
        if all(rule != own for own, _ in matched_rules(reader)[0]):
            return f"the qconfig has a rule for it that is not about %{reader.name}"
        site = Site(reader, operator, {**operator.arguments(reader), "padding": _padding(reader, node)})
        return next((each.sentence for each in self.limits.broken(site) if "padding" in str(each.limit.measure)), None)

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        for reader in list(node.users):
            reader.update_arg(operator_of(reader).parameter_names.index("padding"), _padding(reader, node))  # type: ignore[union-attr]
            absorb(reader, node)
            if is_detached(node) and not is_detached(reader):
                detach_arguments(reader, 0)
        return node.all_input_nodes[0]


def _padding(layer: fx.Node, node: fx.Node) -> list[int]:
    """Return the padding of a layer together with that of the pad that it reads."""
    operator, rank = operator_of(layer), len(shape_of(node)) - 2
    own = zip(*sides(sizes(operator.arguments(layer)["padding"], rank), rank), strict=True)  # type: ignore[union-attr]
    more = margins_of(node.args[1], rank)  # type: ignore[arg-type]
    return padding_of([(before + first, after + last) for (before, after), (first, last) in zip(own, more, strict=True)])

"""An addition becomes part of the layer that feeds it, and is done in its accumulator.

A module of the user's between the two that draws noise in train mode, as a stochastic depth does, becomes the layer's.
"""

from torch import fx

from fxquant.ir.graph import TensorFact, absorb, fact, is_parameter, noise, set_noise, stated_demand, ties
from fxquant.ops import calls, operator_of
from fxquant.ops.elementwise.activation import dropout
from fxquant.ops.elementwise.arithmetic import add
from fxquant.passes.floating import in_front_of_softmax, masks
from fxquant.passes.rewriting import Fusion
from fxquant.pipeline import Context


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """Fuse every addition into a layer that is its operand, where the layer can absorb it."""
    return Residual(gm, context).run()


class Residual(Fusion):
    """An addition becomes the residual of the later of its operands."""

    before = """
        %conv = conv2d(%x, %w)
        %y = add(%conv, %r)
        return %y
    """
    after = """
        %conv = conv2d(%x, %w, residual=%r)
        return %conv
    """

    def __init__(self, gm: fx.GraphModule, context: Context) -> None:
        super().__init__(gm, context)
        self.masked = masks(gm, in_front_of_softmax(gm))
        self.position = {node: index for index, node in enumerate(gm.graph.nodes)}

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        operator = operator_of(node)
        if operator is None or operator.function is not add or operator.refuses(node, operator.arguments(node)) is not None:
            return None
        if node in self.masked:
            self.context.say(f"%{node.name} is not fused: it adds an attention mask in front of a softmax")
            return None
        # The later layer absorbs: the other operand is then computed already.
        return sorted((_before_noise(a) for a in node.args[:2] if isinstance(a, fx.Node)), key=self.position.__getitem__, reverse=True)

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        operator = operator_of(layer)
        if operator is None or "residual" not in operator.absorbs:
            return f"%{layer.name} is not a layer with weights"
        if stated_demand(layer) is not None or ties(layer):
            return f"its composite defines the grid of %{layer.name}"
        if len(layer.users) > 1 or node.args[0] is node.args[1]:
            return f"%{layer.name} has other users"
        if set(layer.kwargs) - {"batch_norm"}:
            return f"%{layer.name} already ends in {', '.join(set(layer.kwargs) - {'batch_norm'})}"
        if operator_of(node).arguments(node)["alpha"] != 1:  # type: ignore[union-attr]
            return "its second operand is multiplied by alpha"
        if not all(isinstance(a, fx.Node) and not is_parameter(a) and isinstance(fact(a), TensorFact) for a in node.args[:2]):
            return "its other operand is not an activation"
        if any(fact(a) != fact(node) for a in node.args[:2] if isinstance(a, fx.Node)):
            return "its operands differ in shape"
        return None

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        for operand in node.all_input_nodes:
            if operand is not layer and _before_noise(operand) is layer:
                set_noise(layer, str(noise(operand)))
                absorb(layer, operand)
                operand.replace_all_uses_with(layer)
                self.gm.graph.erase_node(operand)
        residual = node.args[1] if node.args[0] is layer else node.args[0]
        node.prepend(layer)
        self.position[layer] = self.position[node]
        layer.kwargs = {**layer.kwargs, "residual": residual}
        absorb(layer, node)
        return layer


def _before_noise(operand: fx.Node) -> fx.Node:
    """Return the node for whose result a module of the user's draws noise, if that module alone reads it; any other operand itself."""
    if not calls(operand, dropout) or noise(operand) is None or len(operand.users) > 1:
        return operand
    source = operand.args[0]
    return source if isinstance(source, fx.Node) and noise(source) is None else operand

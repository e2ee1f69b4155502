"""A batch norm becomes part of the convolution or linear layer before it.

The weights are not touched: folding is a function of weight and batch norm, evaluated in every state, so a
layer that is shared by two batch norms is simply folded twice. With batch_norm="folded" it is evaluated here,
once, and the result takes the place of the parameters:

    %conv = conv2d(%x, %w, batch_norm=%bn)  →   %conv = conv2d(%x, %w, %b)
"""

import torch
from torch import fx, nn

from fxquant.ir.graph import absorb, attach, inherit, is_parameter, module_path, parameter_value, resolve, set_batch_norm_path, shape_of
from fxquant.ir.model import free_name
from fxquant.ops import calls, operator_of
from fxquant.ops.reduction.moments import batch_norm
from fxquant.passes.rewriting import Fusion, eliminate_dead
from fxquant.pipeline import Context


def fold(gm: fx.GraphModule, context: Context) -> int:
    """Fold every batch norm into the layer before it, where the layer can absorb it."""
    changes = BatchNorm(gm, context).run()
    if context.options.batch_norm == "folded":
        _evaluate(gm, [node for node in gm.graph.nodes if node.kwargs.get("batch_norm") is not None])
    return changes


class BatchNorm(Fusion):
    """A batch norm becomes part of the layer before it, whose parameters are not touched."""

    before = """
        %conv = conv2d(%x, %w)
        %y = batch_norm(%conv, %bn)
        return %y
    """
    after = """
        %conv = conv2d(%x, %w, batch_norm=%bn)
        return %conv
    """
    verb = "folded"

    def match(self, node: fx.Node) -> list[fx.Node] | None:
        return [node.args[0]] if calls(node, batch_norm) and isinstance(node.args[0], fx.Node) else None

    def reject(self, layer: fx.Node, node: fx.Node) -> str | None:
        operator = operator_of(layer)
        if operator is None or "batch_norm" not in operator.absorbs:
            return f"%{layer.name} is not a layer with weights"
        if len(layer.users) > 1:
            return f"%{layer.name} has {len(layer.users)} users"
        assert operator.layer.channels is not None
        if operator.layer.channels(operator.arguments(layer)) % len(shape_of(layer)) != 1:
            return f"the channels of %{layer.name} are its last dimension, and a batch norm's are dimension 1"
        reads = [operand for operand in layer.args[1:3] if isinstance(operand, fx.Node)]
        if not all(map(is_parameter, reads)):
            return f"the parameters of %{layer.name} are computed from more than parameters"
        return f"%{layer.name} already has fused parts" if layer.kwargs else None

    def merge(self, layer: fx.Node, node: fx.Node) -> fx.Node:
        # The layer moves down to the batch norm, whose statistics may be read from nodes in between.
        node.prepend(layer)
        statistics = node.args[1]
        layer.kwargs = {**layer.kwargs, "batch_norm": statistics}
        if not isinstance(statistics, fx.Node):  # a function's, whose tensors do not say where it was called
            set_batch_norm_path(layer, module_path(node))
        absorb(layer, node)
        return layer


@torch.no_grad()
def _evaluate(gm: fx.GraphModule, layers: list[fx.Node]) -> None:
    """Replace weight and bias of these layers by the folded ones, and remove parameters and batch norms that nothing else reads."""
    folded = {layer: _folded(gm, layer) for layer in layers}  # all of them before any parameter changes: one may be read by several
    for layer, parameters in folded.items():
        nodes: list[fx.Node] = []
        for path, value in parameters.items():
            parent, _, own = path.rpartition(".")
            holder = resolve(gm, parent) if parent else gm
            if hasattr(holder, own) and (own in holder._parameters) != isinstance(value, nn.Parameter):
                delattr(holder, own)  # a bias may have been a buffer, and is a parameter now, or the reverse
            attach(gm, path, value)
            with gm.graph.inserting_before(layer):
                name = f"{layer.name}_folded_{'bias' if nodes else 'weight'}"
                nodes.append(inherit(gm.graph.create_node("get_attr", path, name=name), layer, "batchnorm.fold"))
        layer.args = (layer.args[0], *nodes, *layer.args[3:])
        layer.kwargs = {name: value for name, value in layer.kwargs.items() if name != "batch_norm"}
    gone = [str(node.target) for node in eliminate_dead(gm.graph.nodes, is_parameter) if node.op == "get_attr"]
    read = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for path in gone:
        if not any(other == path or other.startswith(path + ".") for other in read):
            parent, _, name = path.rpartition(".")
            delattr(resolve(gm, parent) if parent else gm, name)


def _folded(gm: fx.GraphModule, layer: fx.Node) -> dict[str, torch.Tensor]:
    """Return the folded weight and bias, by the paths at which they are registered."""
    operator = operator_of(layer)
    assert operator is not None
    assert operator.layer.folded is not None
    arguments = operator.arguments(layer)
    values = {name: fx.map_arg(value, lambda node: parameter_value(gm, node)) for name, value in arguments.items() if name != "input"}
    paths = _paths(gm, layer, arguments["weight"], arguments["bias"])
    origins = _made_of(gm, arguments["weight"])
    trained = any(tensor.requires_grad for tensor in origins)
    parameter = any(isinstance(tensor, nn.Parameter) for tensor in origins)  # a weight that is a buffer stays one
    return {
        path: nn.Parameter(value, trained) if parameter else value
        for path, value in zip(paths, operator.layer.folded(**values), strict=True)
    }


def _made_of(gm: fx.GraphModule, node: fx.Node) -> list[torch.Tensor]:
    """Return the parameters and buffers that a parameter is computed from; itself if it is not computed."""
    if node.op == "get_attr":
        return [resolve(gm, str(node.target))]
    return [tensor for operand in node.all_input_nodes for tensor in _made_of(gm, operand)]


def _paths(gm: fx.GraphModule, layer: fx.Node, weight: fx.Node, bias: fx.Node | None) -> list[str]:
    """Return the paths for the folded weight and bias: the layer's own parameters, or new paths if other nodes read the parameters too."""
    if weight.op != "get_attr" or (bias is not None and bias.op != "get_attr"):
        return [free_name(gm, f"{layer.name}_{role}") for role in ("weight", "bias")]
    path = str(weight.target)
    beside = path[: -len("weight")] + "bias" if path.rpartition(".")[2] == "weight" else f"{path}_bias"
    paths = [path, beside if bias is None else str(bias.target)]
    alone = len(weight.users) == 1 and (bias is None or len(bias.users) == 1)
    return paths if alone else [f"{path}_{layer.name}" for path in paths]

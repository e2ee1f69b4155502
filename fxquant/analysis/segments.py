"""The boundaries between float operators on the host and the integer segments of a model."""

from __future__ import annotations

from torch import fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import computes_tensor, fact, nodes_in
from fxquant.numerics.grids import PLAIN_TYPES
from fxquant.prepared.nodes import is_dequantize, is_dynamic, is_quantize, primitive_of, quantized_operator


def crossings(model: fx.GraphModule) -> list[str]:
    """Return the names of the tensors that float operators pass to an integer segment: quantized tensors, booleans and integers.

    A dynamic layer gets the float values, which it quantizes itself.
    """
    return [node.name for node in model.graph.nodes if _is_handed(model, node)]


def _is_handed(model: fx.GraphModule, node: fx.Node) -> bool:
    if any(is_dynamic(model, user) for user in node.users):
        return computes_tensor(node) and not _is_integer(model, node)
    if is_quantize(model, node):
        return bool(node.args[0].op != "placeholder")  # type: ignore[union-attr]
    known = fact(node)
    plain = isinstance(known, TensorFact) and known.dtype in PLAIN_TYPES.values()
    return plain and computes_tensor(node) and not _is_integer(model, node) and any(_is_integer(model, user) for user in node.users)


def _is_integer(model: fx.GraphModule, node: fx.Node) -> bool:
    return primitive_of(node) is not None or quantized_operator(model, node) is not None


def returned(model: fx.GraphModule, everything: bool = False) -> list[fx.Node]:
    """Return the nodes of the tensors that a model returns, in order; with `everything` those of all that it computes."""
    (output,) = model.graph.find_nodes(op="output")
    return [
        node
        for node in nodes_in(output.args)
        if isinstance(fact(node), TensorFact) or node.op == "get_attr" or (everything and fact(node) is None)
    ]


def float_outputs(model: fx.GraphModule) -> set[str]:
    """Return the outputs, "output 0", …, that are not the end of an integer segment, a dynamic layer's result, an input or a constant."""
    return {
        f"output {index}"
        for index, node in enumerate(returned(model))
        if node.op not in ("placeholder", "get_attr") and not is_dequantize(model, node) and not is_dynamic(model, node)
    }

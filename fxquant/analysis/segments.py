"""Where float operators on the host meet the integer segments of a model."""

from __future__ import annotations

from torch import fx

from fxquant.analysis.node import is_dequantize, is_quantize
from fxquant.facts import TensorFact
from fxquant.graph import fact


def crossings(model: fx.GraphModule) -> list[str]:
    """The quantized tensors, by name, that are made of what float operators computed: where these hand over to an integer segment."""
    return [node.name for node in model.graph.nodes if is_quantize(model, node) and node.args[0].op != "placeholder"]


def returned(model: fx.GraphModule) -> list[fx.Node]:
    """The nodes of the tensors that a model returns, in order."""
    found: list[fx.Node] = []
    fx.map_arg(next(node for node in reversed(model.graph.nodes) if node.op == "output").args, found.append)
    return [node for node in found if isinstance(fact(node), TensorFact) or node.op == "get_attr"]


def float_outputs(model: fx.GraphModule) -> set[str]:
    """The outputs, "output 0", …, that are neither the end of an integer segment nor an input nor a constant."""
    return {
        f"output {index}"
        for index, node in enumerate(returned(model))
        if node.op not in ("placeholder", "get_attr") and not is_dequantize(model, node)
    }

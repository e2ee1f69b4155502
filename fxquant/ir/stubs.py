"""The stubs that models written for eager mode have: where the user says that the integer part begins, and where it ends.

PyTorch's and Horizon's `QuantStub` and `DeQuantStub` are recognised by name; nothing of either is imported. Other modules of theirs,
`FloatFunctional` among them, are what they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fxquant.ir.graph import TensorFact, computes_tensor, fact, is_parameter
from fxquant.ir.integer import marks, reads

_HOMES = ("torch.ao.quantization", "torch.quantization", "torch.ao.nn.quantized", "horizon", "fxquant.compat.horizon")


def quant_stub(input: Tensor, scale: float | None = None) -> Tensor:
    """Return the input itself; the integer part begins here, on this scale if one is given."""
    return input.view_as(input)


def dequant_stub(input: Tensor) -> Tensor:
    """Return the input itself; the integer part ends here."""
    return input.view_as(input)


FUNCTIONS = (quant_stub, dequant_stub)


# Whether the node is a user's QuantStub, which is an operator of its own for the rules.
is_stub, mark_stub = reads("quant_stub", False), marks("quant_stub")


def stub_of(module: nn.Module) -> tuple[object, ...] | None:
    """Return the function that replaces a stub, with its further arguments; None for any other module."""
    kind = type(module)
    if kind.__name__ not in ("QuantStub", "DeQuantStub") or not kind.__module__.startswith(_HOMES):
        return None
    if kind.__name__ == "DeQuantStub":
        return (dequant_stub,)
    scale = getattr(module, "scale", None)
    if isinstance(scale, Tensor):
        scale = scale.item() if scale.numel() == 1 else None
    return (quant_stub, float(scale)) if isinstance(scale, float | int) and scale > 0 else (quant_stub,)


def outside(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the nodes that stubs keep in float, and why; none in a model without stubs.

    A node is inside if it reads a tensor that has passed a QuantStub, and no DeQuantStub since. Without a QuantStub, inputs are inside.
    """
    targets = {node.target for node in gm.graph.nodes}
    if targets.isdisjoint(FUNCTIONS):
        return {}
    begins = quant_stub in targets
    inside: set[fx.Node] = set()
    found: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        read = [operand for operand in node.all_input_nodes if not is_parameter(operand) and _is_real(operand)]
        if node.op == "placeholder":
            within = not begins
        elif node.target is dequant_stub:
            within = False
        else:
            within = node.target is quant_stub or not inside.isdisjoint(read)
        if within:
            inside.add(node)
        elif computes_tensor(node) and read and node.target is not dequant_stub:
            found[node] = "it lies outside of QuantStub and DeQuantStub"
    return found


def _is_real(node: fx.Node) -> bool:
    known = fact(node)
    return not isinstance(known, TensorFact) or known.dtype not in (torch.bool, torch.int64, torch.int32)

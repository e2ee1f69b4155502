"""Functions that graphs call: out-of-place forms of in-place operations, and the stubs of models written for eager mode."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from fxquant.ir.graph import TensorFact, computes_tensor, fact, is_parameter
from fxquant.ir.integer import marks, reads


def stopped(value: Any) -> Any:
    """Return a tensor, or a nest of tensors, detached."""
    return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, value)


def setitem(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Return a copy of `tensor` in which `tensor[index]` is `value`."""
    result = tensor.clone()
    result[index] = value
    return result


def copy(tensor: Tensor, source: Tensor) -> Tensor:
    """Return `source`, broadcast to the shape of `tensor` and converted to its dtype."""
    return source.to(tensor.dtype).expand_as(tensor)


def fill(tensor: Tensor, value: Any) -> Tensor:
    """Return a tensor like `tensor` that holds `value` everywhere."""
    return torch.full_like(tensor, value)


def zero(tensor: Tensor) -> Tensor:
    """Return a tensor like `tensor` that holds zeros."""
    return torch.zeros_like(tensor)


def over_lengths(
    input: Tensor, hx: Any, order: Tensor, parameters: Sequence[Tensor], kind: str, num_layers: int, bidirectional: bool, dropout: float
) -> tuple[Tensor, ...]:
    """Return the outputs (batch, steps, features) and the last states of a recurrent layer over padded sequences.

    `order` (batch, steps, 1) is |length - 1 - step|: where to find each step of a sequence from its end on.
    `kind` is "lstm", "gru", "tanh" or "relu"; `parameters` and `hx` are those of PyTorch's function, `dropout` is for training alone.
    A direction that runs backwards begins at the last step of each sequence. Outputs beyond it are 0.
    """
    directions, biases = 1 + bidirectional, len(parameters) >= 4 * num_layers * (1 + bidirectional)
    sizes = (parameters[1].shape[1], parameters[0].shape[0] // 4)[: 2 if kind == "lstm" else 1]
    first = [input.new_zeros(num_layers * directions, len(input), size) for size in sizes]
    if isinstance(input, FakeTensor) or input.is_meta:  # its shape alone is known, which packing does not keep
        return input.new_zeros(*input.shape[:2], directions * sizes[0]), *first
    packed = pack_padded_sequence(input, order[:, 0, 0].cpu() + 1, batch_first=True, enforce_sorted=False)
    if hx is not None:
        first = [each.index_select(1, packed.sorted_indices) for each in (hx if isinstance(hx, tuple | list) else [hx])]
    function: Any = getattr(torch, f"rnn_{kind}", None) or getattr(torch, kind)
    state = first if kind == "lstm" else first[0]
    output, *last = function(packed.data, packed.batch_sizes, state, list(parameters), biases, num_layers, 0.0, False, bidirectional)
    padded, _ = pad_packed_sequence(packed._replace(data=output), batch_first=True, total_length=input.shape[1])
    return padded, *(each.index_select(1, packed.unsorted_indices) for each in last)


def write(tensor: Tensor, value: Tensor, way: Any) -> Tensor:
    """Return a copy of `tensor` in which a view of it holds `value`.

    `way` leads there: (name, arguments, keyword arguments) of one method after the other, each one of VIEWS. Raises ValueError for
    another method.
    """
    result = tensor.clone()
    view_of(result, way).copy_(value)
    return result


def view_of(tensor: Tensor, way: Any) -> Any:
    """Return the view of `tensor` that `way` leads to, as in `write`. Raises ValueError for a method that makes no view."""
    view: Any = tensor
    for name, args, kwargs in way:
        if name == "getattr" and args in (("T",), ("mT",)):
            view = getattr(view, args[0])
        elif name in VIEWS and name != "getattr":
            view = getattr(view, name)(*args, **kwargs) if isinstance(view, Tensor) else view[args[0]]
        else:
            raise ValueError(f"{name} does not make a view")
    return view


# Methods whose results are views of the tensor, and share its elements out among the items of a sequence.
PARTITIONS = frozenset(("chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind"))
# All methods that `write` can follow.
VIEWS = PARTITIONS | frozenset((
    "__getitem__", "diagonal", "expand", "expand_as", "flatten", "getattr", "movedim", "moveaxis", "narrow", "permute", "ravel",
    "reshape", "reshape_as", "select", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unflatten", "unsqueeze", "view", "view_as",
))  # fmt: skip


# ---- stubs, where the user says that the integer part begins, and where it ends ------------------------------------------
#
# PyTorch's and Horizon's `QuantStub` and `DeQuantStub` are recognised by name; nothing of either is imported. Other modules of theirs,
# `FloatFunctional` among them, are what they compute.
_HOMES = ("torch.ao.quantization", "torch.quantization", "torch.ao.nn.quantized", "horizon", "fxquant.compat.horizon", "fxquant.frontend")


def quant_stub(input: Tensor, scale: float | None = None) -> Tensor:
    """Return a view of the input, and mark where the integer part begins, with a constant scale if `scale` is not None."""
    return input.view_as(input)


def dequant_stub(input: Tensor) -> Tensor:
    """Return the input itself; the integer part ends here."""
    return input.view_as(input)


STUBS = (quant_stub, dequant_stub)

# Whether the node is a user's QuantStub, which rules match as a separate operator.
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
    if targets.isdisjoint(STUBS):
        return {}
    begins = quant_stub in targets
    inside: set[fx.Node] = set()
    reasons: dict[fx.Node, str] = {}
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
            reasons[node] = "it lies outside of QuantStub and DeQuantStub"
    return reasons


def _is_real(node: fx.Node) -> bool:
    node_fact = fact(node)
    return not isinstance(node_fact, TensorFact) or node_fact.dtype not in (torch.bool, torch.int64, torch.int32)

"""Operators that move values about and leave them as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.graph import TensorFact, fact
from fxquant.lowering import Lowering, Quantized
from fxquant.ops.record import Operator, Scale, register
from fxquant.primitives import shape

# ---- reshape --------------------------------------------------------------------------------------------------------


def reshape(input: Tensor, shape: Any) -> Tensor:
    """The same elements in another shape."""
    return input.reshape(shape)


def _lower_reshape(lowering: Lowering, input: Quantized, shape: Any) -> Quantized:
    return input.with_value(lowering.call(_shape.reshape, input.value, list(shape)))


def _any_sizes(input: Any, *sizes: Any, **keywords: Any) -> dict[str, Any] | str:
    """x.view(2, -1), x.view((2, -1)), torch.flatten(x, 1), …: the shape is read off the result."""
    if any(isinstance(size, torch.dtype) for size in sizes):
        return "it reinterprets the bytes as another dtype"
    return {"input": input, "shape": list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else list(sizes)}


def _plain_shape(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """The shape as numbers, with -1 for the one size that depends on the batch."""
    result = fact(node)
    if isinstance(result, TensorFact):
        shape = [size if isinstance(size, int) else -1 for size in result.shape]
        if shape.count(-1) <= 1:
            return {**arguments, "shape": shape}
    return arguments


_shape = shape
register(
    Operator(
        "reshape",
        reshape,
        ("input",),
        _lower_reshape,
        Scale.SAME,
        functions=dict.fromkeys((torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze), _any_sizes),
        methods=dict.fromkeys(("reshape", "view", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), _any_sizes),
        modules={nn.Flatten: lambda m: {"shape": []}},
        normalize=_plain_shape,
    )
)


# ---- nothing at all -------------------------------------------------------------------------------------------------


def identity(input: Tensor) -> Tensor:
    """The input itself."""
    return input


def _lower_identity(lowering: Lowering, input: Quantized) -> Quantized:
    return input


register(
    Operator(
        "identity",
        identity,
        ("input",),
        _lower_identity,
        Scale.SAME,
        functions={torch.clone: lambda input, **_: {"input": input}},
        methods={
            "contiguous": lambda input, **_: {"input": input},
            "clone": lambda input, **_: {"input": input},
            "detach": lambda input: {"input": input},
        },
        modules={nn.Identity: lambda m: {}},
    )
)


# ---- dropout --------------------------------------------------------------------------------------------------------


def dropout(input: Tensor, p: float = 0.5) -> Tensor:
    """The input itself; in state TRAIN, in train mode, elements are dropped with probability p."""
    return input


def _lower_dropout(lowering: Lowering, input: Quantized, p: float) -> Quantized:
    return input.with_value(F.dropout(input.value, p)) if lowering.training else input


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> dict[str, Any]:
    return {"input": input, "p": p}


register(
    Operator(
        "dropout",
        dropout,
        ("input",),
        _lower_dropout,
        Scale.SAME,
        functions={F.dropout: _dropout, torch.dropout: lambda input, p, train: {"input": input, "p": p}},
        modules={nn.Dropout: lambda m: {"p": m.p}},
    )
)


# ---- concatenation --------------------------------------------------------------------------------------------------


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """The tensors one after another along `dim`."""
    return torch.cat(tensors, dim)


def _lower_cat(lowering: Lowering, tensors: list[Quantized], dim: int) -> Quantized:
    """Each operand requantized to the output's scale, then joined."""

    def join() -> Any:
        parts = [lowering.rescale(tensor, lowering.output, f"operand{index}_") for index, tensor in enumerate(tensors)]
        return lowering.call(shape.concatenate, parts, dim)

    return lowering.result(join, lambda: torch.cat([tensor.real() for tensor in tensors], dim))


def _refuses_cat(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return "one of its operands is a parameter or constant" if any(t.op == "get_attr" for t in arguments["tensors"]) else None


register(
    Operator(
        "cat", cat, ("tensors",), _lower_cat, functions={torch.cat: None, torch.concat: None, torch.concatenate: None}, refuses=_refuses_cat
    )
)

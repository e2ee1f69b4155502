"""Tensors one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.graph import fact, is_parameter
from fxquant.lowering import Lowering, Quantized
from fxquant.ops.form import Call
from fxquant.ops.record import Operator, Own, register
from fxquant.ops.shape import MANY_SIZES, many_sizes, numbers
from fxquant.ops.weighted import shape_of
from fxquant.primitives import shape

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
    return "one of its operands is a parameter or constant" if any(is_parameter(t) for t in arguments["tensors"]) else None


def _along(dim: int, rank: int) -> Callable[..., dict[str, Any] | str]:
    """A join along `dim` of tensors that have `rank` dimensions at least; those with fewer get new ones first."""

    def adapt(tensors: Sequence[Any]) -> dict[str, Any] | str:
        shapes = [shape_of(tensor) for tensor in tensors]
        if any(known is None or len(known) < rank for known in shapes):
            return f"one of its operands has fewer than {rank} dimensions"
        return {"tensors": list(tensors), "dim": dim}

    return adapt


def _onnx_cat(c: Call) -> str:
    return c.do("Concat", *c["tensors"], axis=c["dim"])


register(
    Operator(
        "cat",
        cat,
        ("tensors",),
        _lower_cat,
        functions={
            **dict.fromkeys((torch.cat, torch.concat, torch.concatenate)),
            **dict.fromkeys((torch.hstack, torch.column_stack), _along(1, 2)),
            **dict.fromkeys((torch.vstack, torch.row_stack), _along(0, 2)),
            torch.dstack: _along(2, 3),
        },
        demand=Own(shared_where="share_concat"),
        refuses=_refuses_cat,
        idle=lambda arguments: len(arguments["tensors"]) == 1,
        onnx=_onnx_cat,
    )
)


def stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """The tensors one after another along a new dimension."""
    return torch.stack(tensors, dim)


def _lower_stack(lowering: Lowering, tensors: list[Quantized], dim: int) -> Quantized:
    """Each operand requantized to the output's scale, given the new dimension, then joined."""
    position = dim % (len(tensors[0].shape) + 1)
    sizes = numbers(tensors[0].shape)
    sizes.insert(position, 1)

    def join() -> Any:
        parts = [lowering.rescale(tensor, lowering.output, f"operand{index}_") for index, tensor in enumerate(tensors)]
        return lowering.call(shape.concatenate, [lowering.call(shape.reshape, part, sizes) for part in parts], position)

    return lowering.result(join, lambda: torch.stack([tensor.real() for tensor in tensors], dim))


def _refuses_stack(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return _refuses_cat(node, arguments) or (MANY_SIZES if many_sizes(node) else None)


def _onnx_stack(c: Call) -> str:
    axis = c["dim"] % len(fact(c.node).shape)
    # Each part is on the result's scale already: onnxruntime cannot move QuantizeLinear of opset 21 behind Unsqueeze by itself.
    return c.do("Concat", *(c.rounded(c.unsqueezed(tensor, axis)) for tensor in c["tensors"]), axis=axis)


register(
    Operator(
        "stack",
        stack,
        ("tensors",),
        _lower_stack,
        demand=Own(shared_where="share_concat"),
        functions={torch.stack: None},
        refuses=_refuses_stack,
        onnx=_onnx_stack,
    )
)

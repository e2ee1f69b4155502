"""Tensors one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxquant.ops.core.declare import Branch, on_the_output, real
from fxquant.ops.core.operators import Call, Lowering, Own, Quantized, TensorFact, Trait, fact, is_parameter, lowered, sampled
from fxquant.ops.core.weighted import shape_of
from fxquant.ops.movement.shape import numbers, result_varying
from fxquant.primitives import shape

DEMAND = Own(shared_where="share_concat")


def _concatenated(lowering: Lowering, tensors: list[Branch], dim: int, shaped: Callable[[Any], Any], function: Any) -> Any:
    """Concatenate the tensors along `dim`, after `shaped`; bool and integer tensors unchanged, others requantized to the output's scale."""

    def placed(role: str, tensor: Any) -> Any:
        if not lowering.plain:
            return on_the_output(lowering, tensor, role)
        return tensor.value if isinstance(tensor, Quantized) else lowering.given(role, tensor, tensor.dtype)

    def exact() -> Any:
        parts = [placed(f"operand{index}", tensor) for index, tensor in enumerate(tensors)]
        return lowering.call(shape.concatenate, list(map(shaped, parts)), dim)

    return exact() if lowering.plain else lowering.result(exact, lambda: function([real(tensor) for tensor in tensors], dim))


def _refuses_cat(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for tensor in arguments["tensors"]:
        tensor_fact = fact(tensor)
        if is_parameter(tensor) and isinstance(tensor_fact, TensorFact) and tensor_fact.dtype not in (torch.float32, fact(node).dtype):
            return f"its operand %{tensor.name} is {str(tensor_fact.dtype).removeprefix('torch.')}, and only float32 tensors are quantized"
    return None


def _along(dim: int, rank: int) -> Callable[..., dict[str, Any] | str]:
    """Concatenate along `dim` tensors that have `rank` dimensions at least; those with fewer get new ones first."""

    def adapt(tensors: Sequence[Any]) -> dict[str, Any] | str:
        shapes = [shape_of(tensor) for tensor in tensors]
        if any(each is None or len(each) < rank for each in shapes):
            return f"one of its operands has fewer than {rank} dimensions"
        return {"tensors": list(tensors), "dim": dim}

    return adapt


def _without_nothing(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop empty tensors from a concatenation, unless all are empty; PyTorch ignores an empty 1-d tensor, the initial value of a cache."""
    nonempty = [tensor for tensor in arguments["tensors"] if not isinstance(fact(tensor), TensorFact) or 0 not in fact(tensor).shape]
    return {**arguments, "tensors": nonempty or arguments["tensors"]}


def _joined(c: Call) -> list[str]:
    """Return the names of the concatenated float values; parameters are written as constants."""
    return [c.operand(f"operand{index}") if value is None else value for index, value in enumerate(c["tensors"])]


@lowered(
    operands=("tensors",),
    calls={
        **dict.fromkeys((torch.cat, torch.concat, torch.concatenate)),
        **dict.fromkeys((torch.hstack, torch.column_stack), _along(1, 2)),
        **dict.fromkeys((torch.vstack, torch.row_stack), _along(0, 2)),
        torch.dstack: _along(2, 3),
    },
    demand=lambda node, arguments: DEMAND,
    traits=frozenset({Trait.COLLECTS}),
    moves=True,
    refuses=_refuses_cat,
    normalize=_without_nothing,
    idle=lambda arguments: len(arguments["tensors"]) == 1,
    onnx=lambda c: c.do("Concat", *_joined(c), axis=c["dim"]),
)
@sampled("torch.cat([x, y], 1)", "torch.cat((y, x, y), dim=-1)", "torch.concat([x, y], dim=2)", "torch.concatenate((x, y), 1)")
@sampled("torch.hstack([x, y])", "torch.column_stack((x, y))", "torch.vstack((x, y))", "torch.row_stack((x, y))", "torch.dstack([x, y])")
@sampled("torch.cat([{P(1, 3, 6, 2)}.expand(x.shape[0], -1, -1, -1), x], -1)", "torch.cat([{P(3, 6, 6)}, x.flatten(0, 1)])[1:]")
def cat(lowering: Lowering, tensors: list[Branch], dim: int = 0) -> Any:
    """Return the tensors one after another along `dim`.

    Requantize each operand to the output's scale, round a parameter to it, and concatenate them.
    """
    return _concatenated(lowering, tensors, dim, lambda part: part, torch.cat)


def _onnx_stack(c: Call) -> str:
    axis = c["dim"] % len(fact(c.node).shape)
    # Each part is on the result's scale already: onnxruntime cannot move QuantizeLinear of opset 21 after Unsqueeze by itself.
    return c.do("Concat", *(c.rounded(c.unsqueezed(tensor, axis)) for tensor in _joined(c)), axis=axis)


@lowered(
    operands=("tensors",),
    demand=lambda node, arguments: DEMAND,
    traits=frozenset({Trait.COLLECTS}),
    moves=True,
    refuses=(_refuses_cat, result_varying),
    onnx=_onnx_stack,
)
@sampled("stack([x, y], 1)", "stack((y, x, y), dim=-1)")
def stack(lowering: Lowering, tensors: list[Branch], dim: int = 0) -> Any:
    """Return the tensors one after another along a new dimension.

    Requantize each operand to the output's scale, insert the new dimension, and concatenate them.
    """
    first = next(tensor for tensor in tensors if isinstance(tensor, Quantized))
    position = dim % (len(first.shape) + 1)
    sizes = numbers(first.shape)
    sizes.insert(position, 1)
    return _concatenated(lowering, tensors, position, lambda part: lowering.call(shape.reshape, part, sizes), torch.stack)

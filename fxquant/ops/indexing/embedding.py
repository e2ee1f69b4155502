"""Rows of a table, chosen by integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ops.core.operators import Lowering, Quantized, TensorFact, bound, fact, is_parameter, lowered, on_the_output, settings_of
from fxquant.ops.core.samples import sampled
from fxquant.primitives import shape

CHANGES = "it changes its weight while it runs (max_norm)"


def _function(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    """Adapt F.embedding; arguments for gradients alone do not change its result."""
    given = bound(F.embedding, *args, **kwargs)
    return CHANGES if given["max_norm"] is not None else {"input": given["input"], "weight": given["weight"]}


def _aten(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> dict[str, Any]:
    """Adapt torch.embedding, and that of an exported program, which take the weight first."""
    return {"input": indices, "weight": weight}


def refuses_embedding(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why rows of its table cannot be taken as integers."""
    weight, known = arguments["weight"], fact(arguments["input"])
    if not isinstance(weight, fx.Node) or not is_parameter(weight):
        return "its table is an activation, where an integer form takes a constant"
    table = fact(weight)
    if isinstance(table, TensorFact) and table.dtype != torch.float32:
        return f"its table is {str(table.dtype).removeprefix('torch.')}, and only float32 tensors are quantized"
    return None if isinstance(known, TensorFact) and not known.dtype.is_floating_point else "its indices are not an integer tensor"


@lowered(
    function=lambda input, weight: F.embedding(input, weight),
    adapt=_function,
    calls={torch.embedding: _aten},
    modules={nn.Embedding: lambda module: CHANGES if module.max_norm is not None else settings_of(("weight",))(module)},
    reads=("input",),
    refuses=refuses_embedding,
    observes=lambda arguments: arguments["weight"],
    onnx=lambda c: c.do("Gather", c.e.constant(c.real("weight")), c.operand("input"), axis=0),
)
@sampled("torch.embedding({P(6, 5)}, x.argmax(-1))", "F.embedding(x.argmax(-1), {P(6, 5)}, padding_idx=2)")
@sampled("{nn.Embedding(6, 5)}(x.argmin(-1))")
def embedding(lowering: Lowering, input: Any, weight: Tensor) -> Quantized:
    """For each index in `input`, int64 or int32 of any shape, the row of `weight` [rows, features] there.

    Take rows of the table, which is on the output's grid.
    """
    indices = lowering.given("input", input, torch.int64)
    return lowering.result(
        lambda: lowering.call(shape.rows, on_the_output(lowering, weight, "weight"), indices), lambda: embedding(input, weight)
    )

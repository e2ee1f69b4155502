"""Selection between two tensors, element by element, by a boolean mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core.declare import Branch, on_the_output, real
from fxquant.ops.core.operators import ALIGNED, Lowering, Quantized, TensorFact, Trait, fact, lowered, sampled
from fxquant.primitives import comparison


def _where(condition: Tensor, input: Tensor | float, other: Tensor | float) -> Tensor:
    result = torch.where(condition, input, other)
    return result if result.is_floating_point() else result.float()


def _refuses_where(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    condition = fact(arguments["condition"]) if isinstance(arguments["condition"], fx.Node) else None
    if not isinstance(condition, TensorFact) or condition.dtype != torch.bool:
        return "its condition is not a boolean tensor"
    for name in ("input", "other"):
        value = arguments[name]
        if isinstance(value, fx.Node):
            if not isinstance(fact(value), TensorFact):
                return f"its {name!r} is a number that is computed"
        elif not isinstance(value, int | float) or not math.isfinite(value):
            return f"its {name!r} is {value!r}"
    return None


def _function(condition: Any, input: Any = None, other: Any = None, **named: Any) -> dict[str, Any] | str:
    input = named.get("self", input)
    if input is None or other is None:
        return "the size of its result depends on the data"
    return {"condition": condition, "input": input, "other": other}


@lowered(
    "masked_fill",
    operands=("input", "other"),
    function=_where,
    adapt=lambda input, mask, value: {"condition": mask, "input": value, "other": input},
    calls={torch.where: _function, "where": lambda input, condition, other: {"condition": condition, "input": input, "other": other}},
    carries=("input", "other"),
    reads=("condition",),
    refuses=_refuses_where,
    traits=frozenset({Trait.CHOOSES, Trait.REARRANGES, Trait.POINTWISE}),
    onnx=lambda c: c.do("Where", c.operand("condition"), c.operand("input"), c.operand("other")),
)
@sampled("torch.where(x > 0, x, y)", "torch.where(x > y, x, y)", "x.where(y < 0.7, 0.2)", "masked_fill(x, y > 0.5, -0.7)")
@sampled("x.masked_fill((y > 0.5)[:, :1], 0.3)", "torch.where((x > 0)[:, :1].expand(-1, 3, -1, -1).flip(2), x, y)", within=ALIGNED)
@sampled("(x > 0).float() * y + x * (y > 0.5)", within=ALIGNED)
def where(lowering: Lowering, condition: Any, input: Branch, other: Branch) -> Quantized:
    """Return `input` where the condition holds, else `other`; each is a tensor or a number.

    Bring each branch to the output's scale, then choose.
    """
    chosen = lowering.given("condition", condition, torch.bool)
    return lowering.result(
        lambda: lowering.call(comparison.choose, on_the_output(lowering, input, "input"), on_the_output(lowering, other, "other"), chosen),
        lambda: where(condition, real(input), real(other)),
    )

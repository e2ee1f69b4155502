"""Division: by a number, of a number, and of two tensors, which is a composite.

x / y = x · (1 / y)     with the reciprocal by a table, 16 bits wide
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import absorb, is_parameter
from fxquant.lowering.epilogue import Clamp
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.clamping import clamped
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite, lowered
from fxquant.ops.core.demands import WIDE
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import OPERATORS, Instead
from fxquant.ops.core.traits import Trait
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.functions import floor_divided, floor_quotient, is_tensor, quotient_of, trunc_divided, trunc_quotient
from fxquant.ops.elementwise.table import SHIFTED, of_inverse, with_offset
from fxquant.primitives import elementwise


def _div(input: Tensor, other: float, *, clamp: Clamp | None = None) -> Tensor:
    value = input / other
    return value if clamp is None else clamped(value, *clamp)


def _refuses_div(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    other = arguments["other"]
    if isinstance(other, fx.Node):
        return "it divides by a number that is computed"
    return None if isinstance(other, int | float) and math.isfinite(other) and other != 0 else f"it divides by {other}"


def _onnx_div(c: Call) -> str:
    return c.epilogue(c.do("Div", c.operand("input"), c.operand("other")))


# ---- of two tensors -------------------------------------------------------------------------------------------------


def _true_divide(input: Tensor, other: Tensor) -> Tensor:
    return torch.true_divide(input, other)


def reciprocal_of(build: Builder, divisor: fx.Node) -> fx.Node:
    """Compute 1 / divisor, 16 bits wide; of a sum with a number, the ε in a divisor, one table, so that this is not lost."""
    made: fx.Node
    if is_parameter(divisor):
        return build.host(torch.reciprocal, divisor)
    record = OPERATORS[torch.reciprocal]
    inverse = of_inverse(divisor)
    if isinstance(inverse, Instead):
        made = build(inverse.function, *inverse.arguments.values(), demand=WIDE)
        return made
    shifted = with_offset(record, {"input": divisor}, divisor)
    if shifted is None:
        made = build(torch.reciprocal, divisor, demand=WIDE)
    else:
        absorb(build.node, divisor)
        made = build(SHIFTED.function, *shifted.values(), demand=WIDE)
    return made


ROUNDED = {"floor": (floor_quotient, floor_divided), "trunc": (trunc_quotient, trunc_divided)}  # by a tensor, and by a number


def _divided(input: Any, other: Any, rounding_mode: str | None = None) -> dict[str, Any] | str | Instead:
    """Adapt a division: which of several operators it is depends on its operands."""
    if rounding_mode is not None:
        by_a_tensor, by_a_number = ROUNDED[rounding_mode]
        return Instead(by_a_tensor if is_tensor(other) else by_a_number, {"input": input, "other": other})
    if not is_tensor(other):
        return {"input": input, "other": other}
    if is_tensor(input):
        return Instead(true_divide, {"input": input, "other": other})
    if isinstance(input, fx.Node):
        return "it divides a number that is computed"
    inverse = of_inverse(other) if input == 1 else None
    return inverse if isinstance(inverse, Instead) else Instead(quotient_of, {"input": other, "numerator": input})


def _reversed(input: Any, other: Any) -> dict[str, Any] | str | Instead:
    return _divided(other, input)


_FUNCTIONS = (torch.div, torch.divide, torch.true_divide, operator.truediv, operator.itruediv)
_METHODS = ("div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__truediv__", "__div__", "__itruediv__", "__idiv__")


@lowered(
    function=_div,
    calls={**dict.fromkeys(_FUNCTIONS, _divided), **dict.fromkeys(_METHODS, _divided), "__rtruediv__": _reversed, "__rdiv__": _reversed},
    idle=lambda arguments: isinstance(arguments["other"], int | float) and arguments["other"] == 1,
    traits=frozenset({Trait.AFFINE}),
    absorbs=frozenset({"clamp"}),
    refuses=_refuses_div,
    onnx=_onnx_div,
)
def div(lowering: Lowering, input: Quantized, other: float, *, clamp: Clamp | None = None) -> Quantized:
    """Compute input / other for a number, and a fused clamp."""
    step = Ratio((input.scale,), (torch.tensor(abs(float(other)), dtype=torch.float64, device=input.scale.device),))
    return lowering.requantize(lowering.call(elementwise.widen if other > 0 else elementwise.negate, input.value), step, clamp)


@composite(function=_true_divide, by_name=False, traits=frozenset({Trait.DIVIDES}))
def true_divide(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute input / other for two tensors."""
    return build(mul, input, reciprocal_of(build, other))

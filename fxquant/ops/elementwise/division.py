"""Division: by a number, of a number, and of two tensors, which is a composite.

x / y = x · (1 / y)     with the reciprocal by a table, 16 bits wide
"""

import operator
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import absorb, is_parameter
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import to_float32
from fxquant.ops.core import OPERATORS, WIDE, Builder, Clamp, Instead, Ratio, Trait, composite, is_tensor, lowered
from fxquant.ops.core.declare import is_finite, meets, needs
from fxquant.ops.core.samples import POSITIVE, sample, sampled
from fxquant.ops.elementwise.arithmetic import limited, mul
from fxquant.ops.elementwise.functions import floor_divided, floor_quotient, quotient_of, trunc_divided, trunc_quotient
from fxquant.ops.elementwise.table import SHIFTED, of_inverse, with_offset
from fxquant.primitives import elementwise


def reciprocal_of(build: Builder, divisor: fx.Node) -> Any:
    """Compute 1 / divisor, 16 bits wide; a divisor x + ε becomes one table of x, so that rounding does not lose ε."""
    if is_parameter(divisor):
        return build.host(torch.reciprocal, divisor)
    inverse = of_inverse(divisor)
    if isinstance(inverse, Instead):
        return build(inverse.function, *inverse.arguments.values(), demand=WIDE)
    shifted = with_offset(OPERATORS[torch.reciprocal], {"input": divisor}, divisor)
    if shifted is None:
        return build(torch.reciprocal, divisor, demand=WIDE)
    absorb(build.node, divisor)
    return build(SHIFTED.function, *shifted.values(), demand=WIDE)


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


@lowered(
    *("divide", "true_divide", operator.truediv, operator.itruediv, "__truediv__", "__div__", "__itruediv__", "__idiv__"),
    function=lambda input, other, *, clamp=None: limited(input / other, clamp),
    adapt=_divided,
    calls=dict.fromkeys(("__rtruediv__", "__rdiv__"), lambda input, other: _divided(other, input)),
    idle=lambda arguments: isinstance(arguments["other"], int | float) and arguments["other"] == 1,
    traits=frozenset({Trait.AFFINE, Trait.POINTWISE}),
    absorbs=frozenset({"clamp"}),
    refuses=(
        needs("it divides by a number that is computed", lambda arguments: not isinstance(arguments["other"], fx.Node)),
        meets("other", lambda other: is_finite(to_float32(other)) and to_float32(other) != 0, lambda other: f"it divides by {other}"),
    ),
    onnx=lambda c: c.epilogue(c.do("Div", c.operand("input"), c.operand("other"))),
    samples=(sample(input=(3, 6), other=3), sample(input=(3, 6), other=-0.7)),
)
def div(lowering: Lowering, input: Quantized, other: float, *, clamp: Clamp | None = None) -> Quantized:
    """Compute input / other, where `other` is a number, and then a fused clamp."""
    step = Ratio((input.scale,), (torch.tensor(abs(to_float32(other)), dtype=torch.float64, device=input.scale.device),))
    return lowering.requantize(lowering.call(elementwise.widen if other > 0 else elementwise.negate, input.value), step, clamp)


@composite(function=lambda input, other: torch.true_divide(input, other), by_name=False, traits=frozenset({Trait.DIVIDES, Trait.POINTWISE}))
@sampled("divide(x, y)", "true_divide(x, y)", "x / y", "x.__div__(y)", "x.clone().__idiv__(y)", over=POSITIVE)
@sampled("operator.itruediv(x.clone(), y)", "x.clone().__itruediv__(y)", over=POSITIVE)
def true_divide(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute input / other for two tensors."""
    return build(mul, input, reciprocal_of(build, other))

"""Functions of two tensors, element by element: composites, 16 bits wide inside.

    x ** y = exp(y · log x)                 for x > 0; a constant exponent of few values is a table for each
    x ** n = ± exp(n · log |x|)             for integers n, negative where x is and n is odd
    ⌊x / y⌋, x - y · ⌊x / y⌋                of the quotient, which is rounded to 16 bits: near an integer it may fall on the other side

A power of a negative number has a value for integer exponents alone. Values on a grid do not show which these are: calibration refuses it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ops.core import INNER, WIDE, Builder, Plain, Trait, is_parameter, register
from fxquant.ops.core.casting import to_real
from fxquant.ops.core.declare import composite, dtype_of, needs, numbers
from fxquant.ops.core.places import constant_value
from fxquant.ops.core.samples import COMPOSED, JUMPS, NORMED, POSITIVE, sampled, written
from fxquant.ops.elementwise.arithmetic import add, mul, sub, true_divide
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.functions import floor_quotient, floor_remainder, quotient_of, trunc_quotient, trunc_remainder
from fxquant.ops.elementwise.table import tabled
from fxquant.ops.elementwise.unary import power
from fxquant.ops.elementwise.whole import WHOLE, alike

SMALLEST = 2.0**-20  # stands for 0 as a base, whose logarithm is not finite
FEW = 8  # largest number of distinct values of a constant exponent: each value needs a table


def _whole_power(build: Builder, input: fx.Node, exponent: fx.Node) -> Any:
    """Compute input ** exponent for an integer exponent, an int64 tensor before quantization: exp(exponent · log|input|), signed if odd."""
    logarithm = build(log_of_base, build(torch.abs, input), demand=WIDE)
    magnitude = build(torch.exp, build(mul, logarithm, exponent, demand=WIDE))
    odd = build(WHOLE["ne"], build(WHOLE["remainder"], exponent.args[0], 2), 0)
    return build(where, build(torch.logical_and, odd, build(torch.lt, input, 0.0)), build(torch.neg, magnitude), magnitude)


def _values(exponent: fx.Node) -> tuple[list[float], Tensor] | None:
    """Return the distinct values of a constant exponent, and the constant; None if they are too many, or the exponent is trained."""
    constant = constant_value(exponent) if exponent.op == "get_attr" else None
    if constant is None or (isinstance(constant, nn.Parameter) and constant.requires_grad):
        return None
    values = sorted({float(value) for value in constant.detach().float().flatten().tolist()})
    return (values, constant.detach().float()) if 0 < len(values) <= FEW and all(map(math.isfinite, values)) else None


@tabled(lambda x: math.log(x or SMALLEST) if x >= 0 else math.nan)
@sampled("x ** y", over=POSITIVE, within=JUMPS)
def log_of_base(input: Tensor) -> Tensor:
    """Compute log(input), and of 0 a number so small that a positive power of 0 is 0, nearly."""
    return torch.log(torch.where(input == 0, SMALLEST, input))


def _expand_power(build: Builder, input: fx.Node, exponent: fx.Node) -> Any:
    few = _values(exponent)
    if few is None and exponent.target is to_real:
        return _whole_power(build, input, exponent)
    if few is None:
        logarithm = build(log_of_base, input, demand=WIDE)
        return build(torch.exp, build(mul, logarithm, exponent, demand=WIDE))
    values, constant = few
    result = build(torch.pow, input, values[0])
    for value in values[1:]:
        result = build(where, build.constant(constant == value), build(torch.pow, input, value), result)
    return result


register(
    "power",
    power,
    ("input", "exponent"),
    expand=_expand_power,
    refuses=needs(
        "its base, a constant, is not positive",
        lambda arguments: (base := constant_value(arguments["input"])) is None or bool((base > 0).all()),
    ),
    samples=(*written("y**x", over=POSITIVE, within=JUMPS), *written("x ** torch.tensor([1.0, 2, 3, 2, 1, 2])", within=NORMED)),
)


def _rounded_quotient(build: Builder, input: Any, other: fx.Node, rounding: Callable[..., Tensor], **demand: Any) -> Any:
    quotient = (true_divide, input, other) if isinstance(input, fx.Node) else (quotient_of, other, float(input))
    return build(rounding, build(*quotient, demand=WIDE), **demand)


def _rounded_remainder(build: Builder, input: Any, other: fx.Node, rounding: Callable[..., Tensor]) -> Any:
    whole = _rounded_quotient(build, input, other, rounding, demand=WIDE)
    return build(sub, input, build(mul, whole, other, demand=WIDE))


def _rounded(
    function: Callable[..., Tensor], expand: Callable[..., Any], rounding: Callable[..., Tensor], *texts: str, **fields: Any
) -> None:
    """Register a rounded quotient or a remainder by a tensor; the one by a number is a table of `functions`."""
    fields |= {"traits": frozenset({Trait.DIVIDES}), "samples": written(*texts, over=POSITIVE, within=COMPOSED, share=0.05)}
    fields["expand"] = lambda build, input, other: expand(build, input, other, rounding)
    register(function.__name__, function, ("input", "other"), **fields)


_rounded(floor_quotient, _rounded_quotient, torch.floor, "x // y", "2 // y", "y.__rfloordiv__(2.0)", integers=alike("floor_divide"))
_rounded(trunc_quotient, _rounded_quotient, torch.trunc, "torch.div(x, y, rounding_mode='trunc')", integers=alike("trunc_divide"))
_rounded(floor_remainder, _rounded_remainder, torch.floor, "remainder(x, y)", "x % y", "y.__rmod__(2.0)", integers=alike("remainder"))
_rounded(trunc_remainder, _rounded_remainder, torch.trunc, "fmod(x, y)")


# ---- Whether two numbers are close to each other: a composite of a difference and a comparison -----------------------
#
# isclose(x, y)   →   |x - y| <= rtol · |y| + atol
@composite(
    takes="input other rtol atol equal_nan",  # no grid has a NaN
    demand=Plain("bool"),
    refuses=(
        needs(
            "its operands are not float32 tensors: compare integers by ==",
            lambda arguments: dtype_of(arguments["input"]) == dtype_of(arguments["other"]) == torch.float32,
        ),
        numbers("rtol", "atol", because="rtol or atol is computed", finite=True),
    ),
)
@sampled("isclose(x, y, atol=0.2)", "isclose(x, y[:, :1], rtol=0, atol=0.3)", share=0.02)
def isclose(build: Builder, input: fx.Node, other: fx.Node, rtol: float = 1e-05, atol: float = 1e-08) -> Any:
    """Return whether |input - other| <= rtol · |other| + atol."""
    if is_parameter(input) and rtol == 0:
        input, other = other, input
    distance = build(torch.abs, build(sub, input, other, demand=INNER), demand=INNER)
    if rtol == 0:
        return build(torch.le, distance, float(atol))
    share = build(mul, build(torch.abs, other, demand=INNER), float(rtol), demand=INNER)
    return build(torch.le, distance, build(add, share, float(atol), demand=INNER))

"""Functions of two tensors, element by element: composites, 16 bits wide inside.

    x ** y = exp(y · log x)                 for x > 0
    ⌊x / y⌋, x - y · ⌊x / y⌋                of the quotient, which is rounded to 16 bits: near an integer it may fall on the other side

A power of a negative number has a value for integer exponents alone: it is float where the exponent is a tensor of integers or of several
constants. Any other of a negative number is refused by calibration.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core import INNER, WIDE, Builder, Plain, Trait, is_parameter, register
from fxquant.ops.core.casting import to_real
from fxquant.ops.core.declare import composite, dtype_of, first_reason, needs, numbers
from fxquant.ops.core.places import constant_value
from fxquant.ops.core.samples import COMPOSED, JUMPS, POSITIVE, sampled, written
from fxquant.ops.elementwise.arithmetic import add, mul, sub, true_divide
from fxquant.ops.elementwise.functions import floor_quotient, floor_remainder, quotient_of, trunc_quotient, trunc_remainder
from fxquant.ops.elementwise.table import tabled
from fxquant.ops.elementwise.unary import power
from fxquant.ops.elementwise.whole import alike

SMALLEST = 2.0**-20  # stands for 0 as a base, whose logarithm is not finite


@tabled(lambda x: math.log(x or SMALLEST) if x >= 0 else math.nan)
@sampled("x ** y", over=POSITIVE, within=JUMPS)
def log_of_base(input: Tensor) -> Tensor:
    """Compute log(input), and of 0 a number so small that a positive power of 0 is 0, nearly."""
    return torch.log(torch.where(input == 0, SMALLEST, input))


def _held(exponent: fx.Node) -> list[float]:
    """Return the distinct values of a constant exponent that is not trained; none of any other."""
    constant = constant_value(exponent) if exponent.op == "get_attr" else None
    return [] if constant is None or constant.requires_grad else sorted(set(constant.float().flatten().tolist()))


def _expand_power(build: Builder, input: fx.Node, exponent: fx.Node) -> Any:
    if held := _held(exponent):
        return build(torch.pow, input, held[0])
    logarithm = build(log_of_base, input, demand=WIDE)
    return build(torch.exp, build(mul, logarithm, exponent, demand=WIDE))


register(
    "power",
    power,
    ("input", "exponent"),
    expand=_expand_power,
    refuses=first_reason(
        needs(
            "its base, a constant, is not positive",
            lambda arguments: (base := constant_value(arguments["input"])) is None or bool((base > 0).all()),
        ),
        needs("its exponent holds integers", lambda arguments: arguments["exponent"].target is not to_real),
        needs("its exponent, a constant, holds several numbers", lambda arguments: len(_held(arguments["exponent"])) < 2),
    ),
    samples=written("y**x", over=POSITIVE, within=JUMPS),
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

"""Composites of sums, products and quotients: fused arithmetic, distances, similarity, angles, gates, powers. They are 16 bits wide inside.

Where an inner tensor is a sum of squares or of products, 8 bits will do on a target that has no more.

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

from fxquant.ops.core import INNER, WIDE, Builder, Fixed, Plain, Trait, are_fixed, fact, is_parameter, register
from fxquant.ops.core.casting import to_real
from fxquant.ops.core.declare import composite, dtype_of, first_reason, fixed, needs, nodes, numbers, one_of
from fxquant.ops.core.places import constant_value
from fxquant.ops.core.samples import COMPOSED, JUMPS, NORMED, POSITIVE, sample, sampled, written
from fxquant.ops.elementwise.arithmetic import add, mul, sub, true_divide
from fxquant.ops.elementwise.comparison import maximum, where
from fxquant.ops.elementwise.functions import floor_quotient, floor_remainder, quotient_of, trunc_quotient, trunc_remainder
from fxquant.ops.elementwise.table import SHIFTED, tabled
from fxquant.ops.elementwise.unary import power
from fxquant.ops.elementwise.whole import alike
from fxquant.ops.indexing.index import getitem
from fxquant.ops.movement.pad import pad
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.progression import along, length_of


@composite(samples=(sample(input=(3, 6), tensor1=(3, 6), tensor2=(3, 6), value=-0.7),))
def addcmul(build: Builder, input: fx.Node, tensor1: fx.Node, tensor2: fx.Node, value: float = 1) -> Any:
    """input + value · tensor1 · tensor2."""
    return build(add, input, build(mul, tensor1, tensor2, demand=INNER), value)


@composite(samples=(sample(over=POSITIVE, input=(3, 6), tensor1=(3, 6), tensor2=(3, 6), value=0.5),))
def addcdiv(build: Builder, input: fx.Node, tensor1: fx.Node, tensor2: fx.Node, value: float = 1) -> Any:
    """input + value · tensor1 / tensor2."""
    return build(add, input, build(true_divide, tensor1, tensor2, demand=INNER if is_parameter(tensor2) else WIDE), value)


@composite(operands=("input", "end", "weight"), samples=(sample(input=(3, 6), end=(3, 6), weight=0.3),))
def lerp(build: Builder, input: fx.Node, end: fx.Node, weight: Any) -> Any:
    """input + weight · (end - input)."""
    difference = build(sub, end, input, demand=INNER)
    if isinstance(weight, fx.Node):
        return build(add, input, build(mul, difference, weight, demand=INNER))
    return build(add, input, difference, weight)


TWO = (sample(input=(3, 6), other=(3, 6)),)


@composite(refuses=nodes("input", "other"), samples=TWO)
def hypot(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute √(input² + other²)."""
    squares = (build(torch.square, value, demand=WIDE) for value in (input, other))
    return build(torch.sqrt, build(add, *squares, demand=WIDE))


@tabled(lambda x: math.log1p(math.exp(-abs(x))))
@sampled("torch.logaddexp(x, y)", within=COMPOSED)
def log_of_one_and_exponential(input: Tensor) -> Tensor:
    """Compute log(1 + exp(-|input|))."""
    return torch.log1p(torch.exp(-input.abs()))


@composite(refuses=nodes("input", "other"), samples=TWO)
def logaddexp(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute log(exp(input) + exp(other))."""
    more = build(log_of_one_and_exponential, build(sub, input, other, demand=INNER), demand=INNER)
    return build(add, build(maximum, input, other, demand=INNER), more)


NOT_ZERO = 2.0**-24  # a divisor of 0, at the origin alone, whose angle is 0 then


@tabled(lambda x: math.atan2(x, 1 - abs(x)))
@sampled("torch.atan2(x, y)", within=NORMED, share=0.02)
def angle_of_share(input: Tensor) -> Tensor:
    """Return the angle in ±π/2 of a point whose ordinate is this share of |ordinate| + |abscissa|."""
    return torch.atan2(input, 1 - input.abs())


@composite("arctan2", refuses=nodes("input", "other"), samples=TWO)
def atan2(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Return the angle of the point (other, input).

    By the ordinate's share t of |y| + |x|, which is bounded; on the left it is mirrored: ±π minus the angle.
    """
    length = build(add, build(torch.abs, input, demand=WIDE), build(torch.abs, other, demand=WIDE), demand=WIDE)
    inverse = build(SHIFTED.function, length, "reciprocal", 1.0, NOT_ZERO, {}, demand=WIDE)
    angle = build(angle_of_share, build(mul, input, inverse, demand=WIDE), demand=WIDE)
    half_turn = build(where, build(torch.lt, input, 0.0), -math.pi, math.pi, demand=WIDE)
    return build(where, build(torch.lt, other, 0.0), build(sub, half_turn, angle, demand=WIDE), angle)


@composite(
    refuses=one_of("p", 1, 2, because=lambda p: f"its norm is the {p}-norm, and 1 and 2 are computed in integers"),
    samples=(sample(x1=(4, 6), x2=(3, 6)), sample(x1=(4, 6), x2=(3, 6), p=1.0)),
)
def cdist(build: Builder, x1: fx.Node, x2: fx.Node, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Any:
    """Return the distance of every row of x1 from every row of x2."""
    rows = build(getitem, x1, [*[slice(None)] * (len(build.fact(x1).shape) - 1), None, slice(None)])
    columns = build(getitem, x2, [*[slice(None)] * (len(build.fact(x2).shape) - 2), None, slice(None), slice(None)])
    difference = build(sub, rows, columns, demand=INNER)
    if p == 1:
        return build(sum, build(torch.abs, difference, demand=INNER), [-1], False)
    return build(torch.sqrt, build(sum, build(torch.square, difference, demand=WIDE), [-1], False, demand=WIDE))


def _repeats(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    one, other, dim = fact(arguments["x1"]).shape, fact(arguments["x2"]).shape, arguments["dim"]
    alike = (dim < 0 or len(one) == len(other)) and one[dim] == other[dim]
    return None if alike else "one of its operands is repeated along the dimension of its sums"


@composite(refuses=_repeats, samples=(sample(within=NORMED, x1=(3, 8), x2=(3, 8)), sample(within=NORMED, x1=(3, 8), x2=(3, 8), dim=-1)))
def cosine_similarity(build: Builder, x1: fx.Node, x2: fx.Node, dim: int = 1, eps: float = 1e-8) -> Any:
    """Compute Σ x1·x2 / (‖x1‖ ‖x2‖) along a dimension."""
    product = build(sum, build(mul, x1, x2, demand=WIDE), [dim], False, demand=WIDE)
    for operand in (x1, x2):
        total = build(sum, build(torch.square, operand, demand=WIDE), [dim], False, demand=WIDE)
        inverse = build(SHIFTED.function, total, "rsqrt", 1.0, max(float(eps), NOT_ZERO) ** 2, {}, demand=WIDE)
        product = build(mul, product, inverse, demand=WIDE if operand is x1 else None)
    return product


@composite(
    refuses=needs(
        "its operand has no channels of a fixed number",
        lambda arguments: len(fact(arguments["input"]).shape) > 2 and are_fixed(fact(arguments["input"]).shape[1:2]),
    ),
    samples=(sample(input=(4, 5, 5), size=3, alpha=0.5), sample(input=(4, 5, 5), size=2)),
)
def local_response_norm(build: Builder, input: fx.Node, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    """Compute input / (k + alpha · the mean of the squares of `size` neighbouring channels) ** beta."""
    channels = length_of(input, 1)
    squares = build(torch.square, input, demand=WIDE)
    around = [0, 0] * (len(build.fact(input).shape) - 2) + [size // 2, (size - 1) // 2]
    padded = build(pad, squares, around, "constant", 0.0)
    total: Any = None
    for first in range(size):
        window = along(build, padded, 1, slice(first, first + channels))
        total = window if total is None else build(add, total, window, demand=WIDE)
    factor = build(SHIFTED.function, total, "pow", float(alpha) / size, float(k), {"exponent": -float(beta)}, demand=WIDE)
    return build(mul, input, factor)


GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))  # from 0 to 1


@composite(refuses=fixed(because="it splits the batch, whose size is not fixed"), samples=(sample(within=NORMED, input=(3, 6, 6), dim=-2),))
def glu(build: Builder, input: fx.Node, dim: int = -1) -> Any:
    """Return the first half along a dimension times the sigmoid of the second."""
    half = length_of(input, dim) // 2
    first, second = (along(build, input, dim, slice(start, start + half)) for start in (0, half))
    return build(mul, first, build(torch.sigmoid, second, demand=GATE))


# ---- Powers, and rounded quotients and remainders by a tensor --------------------------------------------------------
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

"""More unary functions, each by a table: one line each, as in `unary`.

Where a function has no value, as the arcsine of 2, its table holds 0, as that of the logarithm does; calibration refuses values there.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.ops.core import Instead, Lowering, Quantized, Trait, is_tensor, spelled
from fxquant.ops.core.samples import ABOVE_ONE, JUMPS, LIMITED, NORMED, POSITIVE, SHARES, WITHIN_ONE, sample, sampled
from fxquant.ops.elementwise.table import POLE, by_table, by_torch, tabled, unary
from fxquant.ops.elementwise.whole import alike


def within_domain(function: Callable[..., float], **ends: float) -> Callable[..., float]:
    """Wrap a function of `math`: NaN where it raises ValueError, but for the value `pole` at the point `at`."""

    def on_numbers(x: float, **settings: Any) -> float:
        try:
            return function(x, **settings)
        except ValueError:
            return ends.get("pole", math.nan) if x == ends.get("at", math.nan) else math.nan

    return on_numbers


unary("asin", torch.asin, within_domain(math.asin), "arcsin", over=WITHIN_ONE, onnx="Asin")
unary("acos", torch.acos, within_domain(math.acos), "arccos", over=WITHIN_ONE, onnx="Acos")
unary("atan", torch.atan, math.atan, "arctan", onnx="Atan")
unary("tan", torch.tan, math.tan, over=(-1.2, 1.2), onnx="Tan")
unary("sinh", torch.sinh, math.sinh, onnx="Sinh")
unary("cosh", torch.cosh, math.cosh, onnx="Cosh")
unary("asinh", torch.asinh, math.asinh, "arcsinh", onnx="Asinh")
unary("acosh", torch.acosh, within_domain(math.acosh), "arccosh", over=ABOVE_ONE, onnx="Acosh")
unary("atanh", torch.atanh, by_torch(torch.atanh), "arctanh", over=WITHIN_ONE, onnx="Atanh")
unary("sinc", torch.sinc, by_torch(torch.sinc))
unary("deg2rad", torch.deg2rad, math.radians)
unary("rad2deg", torch.rad2deg, math.degrees)


@tabled(
    lambda x, decimals=0: float(round(x * 10**decimals) / 10**decimals),  # half to even, as PyTorch's
    name="round",
    onnx=lambda c: c.do("Round", c.input) if c["decimals"] == 0 else c.exported(),
    traits=frozenset({Trait.INTEGERS, Trait.LEAVES_INTEGERS}),
)
def _rounded(input: Tensor, decimals: int = 0) -> Tensor:
    """Compute torch.round with `decimals` as a keyword."""
    return torch.round(input, decimals=decimals)


unary("ceil", torch.ceil, lambda x: float(math.ceil(x)), onnx="Ceil", traits=frozenset({Trait.INTEGERS, Trait.LEAVES_INTEGERS}))
unary("floor", torch.floor, lambda x: float(math.floor(x)), onnx="Floor", traits=frozenset({Trait.INTEGERS, Trait.LEAVES_INTEGERS}))
unary("trunc", torch.trunc, lambda x: float(math.trunc(x)), "fix", traits=frozenset({Trait.INTEGERS, Trait.LEAVES_INTEGERS}))
unary("frac", torch.frac, lambda x: x - math.trunc(x))
unary("sign", torch.sign, lambda x: float((x > 0) - (x < 0)), "sgn", onnx="Sign", traits=frozenset({Trait.INTEGERS}))


def _logarithm(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: function(x) if x > 0 else -math.inf if x == 0 else math.nan


def _logit_number(x: float, eps: float | None = None) -> float:
    x = x if eps is None else min(max(x, eps), 1 - eps)
    return math.log(x / (1 - x)) if 0 < x < 1 else -math.inf if x == 0 else math.inf if x == 1 else math.nan


unary("logit", torch.logit, _logit_number, eps=None, over=SHARES)
unary("log2", torch.log2, _logarithm(math.log2), over=POSITIVE, traits=POLE)
unary("log10", torch.log10, _logarithm(math.log10), over=POSITIVE, traits=POLE)
unary("log1p", torch.log1p, within_domain(math.log1p, at=-1.0, pole=-math.inf), over=POSITIVE)
unary("expm1", torch.expm1, math.expm1)
unary("exp2", torch.exp2, lambda x: 2.0**x)

unary("erfc", torch.erfc, math.erfc)
unary("erfinv", torch.erfinv, by_torch(torch.erfinv), over=WITHIN_ONE)
unary("erfcx", torch.special.erfcx, by_torch(torch.special.erfcx))
unary("lgamma", torch.lgamma, by_torch(torch.lgamma), "gammaln", over=ABOVE_ONE)
unary("digamma", torch.digamma, by_torch(torch.digamma), "psi", over=ABOVE_ONE)
unary("i0", torch.i0, by_torch(torch.i0))
unary("i0e", torch.special.i0e, by_torch(torch.special.i0e), samples=(sample(within=NORMED, input=(3, 6, 6)),))
unary("i1", torch.special.i1, by_torch(torch.special.i1))
unary("i1e", torch.special.i1e, by_torch(torch.special.i1e))
unary("entr", torch.special.entr, by_torch(torch.special.entr), over=SHARES)
unary("ndtr", torch.special.ndtr, by_torch(torch.special.ndtr))
unary("ndtri", torch.special.ndtri, by_torch(torch.special.ndtri), over=SHARES)
unary("log_ndtr", torch.special.log_ndtr, by_torch(torch.special.log_ndtr))


def _drawn(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> dict[str, Any] | str:
    return "it draws its slopes" if training else {"input": input, "lower": lower, "upper": upper}


unary("celu", F.celu, lambda x, alpha=1.0: x if x > 0 else alpha * math.expm1(x / alpha), alpha=1.0, tried={"alpha": 0.7})
unary(
    "threshold",
    torch.threshold,
    lambda x, threshold, value: x if x > threshold else float(value),
    threshold=0.0,
    value=0.0,
    samples=(sample(input=(3, 6, 6), threshold=0.1, value=-0.3),),
)
unary("hardshrink", F.hardshrink, lambda x, lambd=0.5: 0.0 if -lambd <= x <= lambd else x, lambd=0.5)
unary("softshrink", F.softshrink, lambda x, lambd=0.5: math.copysign(max(abs(x) - lambd, 0.0), x), lambd=0.5)


def _lower_rrelu(lowering: Lowering, input: Quantized, lower: float, upper: float) -> Quantized:
    """Look up the leaky relu of the mean slope; in state TRAIN, in train mode, draw slopes as the module of the call does."""
    module = lowering.user_module
    if not lowering.training or not isinstance(module, nn.RReLU):
        return by_table(lowering, input, "leaky_relu", negative_slope=(lower + upper) / 2)
    real = F.rrelu(input.real(), module.lower, module.upper, True)
    return lowering.result(lambda: lowering.output.grid.quantize(real.detach()), lambda: real)


@tabled(
    lambda x, lower=1 / 8, upper=1 / 3: x if x >= 0 else x * (lower + upper) / 2,
    name="rrelu",
    onnx=lambda c: c.do("LeakyRelu", c.input, alpha=float((c["lower"] + c["upper"]) / 2)),
    samples=(sample(input=(3, 6, 6), lower=0.1, upper=0.3),),
    adapted={F.rrelu: _drawn, torch.rrelu: _drawn},
    lowered=_lower_rrelu,
    module=(nn.RReLU, lambda m: "it draws its slopes" if m.training else {"lower": m.lower, "upper": m.upper}),
)
def _rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3) -> Tensor:
    """rrelu as it is where the slope is not drawn: their mean."""
    return F.leaky_relu(input, (lower + upper) / 2)


def floor_quotient(input: Tensor | float, other: Tensor) -> Tensor:
    """Compute ⌊input / other⌋ for a divisor that is a tensor, with the gradient of a rounded number, which `torch.floor_divide` has not."""
    return torch.div(_as_tensor(input, other), other, rounding_mode="floor")


def trunc_quotient(input: Tensor | float, other: Tensor) -> Tensor:
    """Compute input / other for a divisor that is a tensor, rounded towards 0."""
    return torch.div(_as_tensor(input, other), other, rounding_mode="trunc")


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)


def floor_remainder(input: Tensor | float, other: Tensor) -> Tensor:
    """Compute input - other · ⌊input / other⌋ for a divisor that is a tensor."""
    return torch.remainder(input, other)


def trunc_remainder(input: Tensor, other: Tensor) -> Tensor:
    """Compute the remainder of input divided by a tensor, with the sign of input."""
    return torch.fmod(input, other)


def _by(composite: Callable[..., Tensor], *, reverse: bool = False) -> Callable[..., dict[str, Any] | Instead]:
    """Adapt a quotient or remainder: by a number it is a table, by a tensor a composite."""

    def adapt(input: Any, other: Any) -> dict[str, Any] | Instead:
        input, other = (other, input) if reverse else (input, other)
        arguments = {"input": input, "other": other}
        return Instead(composite, arguments) if is_tensor(other) else arguments

    return adapt


@tabled(lambda x, numerator=1.0: numerator / x if x else math.copysign(math.inf, numerator), traits=POLE)
@sampled("2 / x", "x.__rtruediv__(1.5)", "x.__rdiv__(1.5)", over=POSITIVE, within=LIMITED)
def quotient_of(input: Tensor, numerator: float = 1.0) -> Tensor:
    """Compute numerator / input."""
    return numerator / input


_FLOOR = (*spelled("floor_divide"), operator.floordiv, operator.ifloordiv)
_REMAINDER = (*spelled("remainder"), operator.mod, operator.imod, "__mod__", "__imod__")
_OF_A_REMAINDER = (sample(within=JUMPS, input=(3, 6, 6), other=0.4),)


@tabled(
    lambda x, other=1.0: float(x // other),
    name="floor_divide",
    samples=(sample(input=(3, 6, 6), other=0.4),),
    traits=frozenset({Trait.INTEGERS}),
    integers=alike("floor_divide"),
    adapted={
        **dict.fromkeys(_FLOOR, _by(floor_quotient)),
        **dict.fromkeys(("__floordiv__", "__ifloordiv__"), _by(floor_quotient)),
        "__rfloordiv__": _by(floor_quotient, reverse=True),
    },
)
def floor_divided(input: Tensor, other: float = 1.0) -> Tensor:
    """Compute ⌊input / other⌋."""
    return torch.div(input, other, rounding_mode="floor")


@tabled(
    lambda x, other=1.0: float(math.trunc(x / other)),
    name="trunc_divide",
    traits=frozenset({Trait.INTEGERS}),
    integers=alike("trunc_divide"),
)
@sampled("torch.div(x, 0.4, rounding_mode='trunc')", within=LIMITED)
def trunc_divided(input: Tensor, other: float = 1.0) -> Tensor:
    """Compute input / other, rounded towards 0."""
    return torch.div(input, other, rounding_mode="trunc")


@tabled(
    lambda x, other=1.0: x % other,
    integers=alike("remainder"),
    samples=_OF_A_REMAINDER,
    adapted={**dict.fromkeys(_REMAINDER, _by(floor_remainder)), "__rmod__": _by(floor_remainder, reverse=True)},
)
def remainder(input: Tensor, other: float = 1.0) -> Tensor:
    """Compute input - other · ⌊input / other⌋."""
    return torch.remainder(input, other)


@tabled(lambda x, other=1.0: math.fmod(x, other), samples=_OF_A_REMAINDER, adapted=dict.fromkeys(spelled("fmod"), _by(trunc_remainder)))
def fmod(input: Tensor, other: float = 1.0) -> Tensor:
    """Compute the remainder of input divided by other, with the sign of input."""
    return torch.fmod(input, other)

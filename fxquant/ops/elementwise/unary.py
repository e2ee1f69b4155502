"""Unary functions, each by a table: one line each."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ops.core.operators import POSITIVE, Call, Instead, Lowering, Own, Quantized, Trait, is_tensor, sample, spelled
from fxquant.ops.core.slope import by_whole_slope
from fxquant.ops.elementwise.table import by_table, for_positive, of_inverse, tabled, unary

# ---- the exact functions, on one Python float ------------------------------------------------------------------------


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float, beta: float = 1.0, threshold: float = 20.0) -> float:
    return x if x * beta > threshold else math.log1p(math.exp(x * beta)) / beta


def _gelu(x: float, approximate: str = "none") -> float:
    if approximate == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


@tabled(_gelu, saturates=True, tried={"approximate": "tanh"}, onnx=lambda c: _onnx_gelu(c))
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """PyTorch's gelu, whose setting is a keyword."""
    return F.gelu(input, approximate=approximate)


def _elu(x: float, alpha: float = 1.0) -> float:
    return x if x > 0 else alpha * math.expm1(x)


def _lower_leaky_relu(lowering: Lowering, input: Quantized, negative_slope: float) -> Quantized:
    """A table, or a whole slope on the operand's grid where the target multiplies by such."""
    if not lowering.arithmetic.slope_bits or input.dtype.bits > 8:
        return by_table(lowering, input, "leaky_relu", negative_slope=negative_slope)
    slope = torch.tensor(float(negative_slope), device=input.scale.device)
    return lowering.result(
        lambda: by_whole_slope(lowering, input, slope, None, added=False), lambda: F.leaky_relu(input.real(), negative_slope)
    )


def _hardsigmoid(x: float) -> float:
    return min(max(x + 3, 0), 6) / 6


def _power(x: float, exponent: float) -> float:
    return math.nan if x < 0 and exponent != int(exponent) else math.inf if x == 0 and exponent < 0 else x**exponent


# ---- as operators of ONNX --------------------------------------------------------------------------------------------

LARGEST_SOFTPLUS = 20.0  # beyond it, softplus equals its argument in float32


def _onnx_hardsigmoid(c: Call) -> str:
    return c.do("HardSigmoid", c.input, alpha=1 / 6, beta=0.5)


def _onnx_hardswish(c: Call) -> str:
    return c.do("HardSwish", c.input) if c.whole else c.do("Mul", c.input, _onnx_hardsigmoid(c))


def _onnx_softplus(c: Call) -> str:
    """Compute log(1 + exp(beta · x)) / beta, and x itself where beta · x is above the threshold."""
    x, beta, threshold = c.input, c["beta"], c["threshold"]
    inner = x if beta == 1 else c.do("Mul", x, c.number(beta))
    value = c.do("Softplus", inner)
    value = value if beta == 1 else c.do("Div", value, c.number(beta))
    if threshold >= LARGEST_SOFTPLUS:
        return value
    return c.do("Where", c.do("Greater", inner, c.number(threshold)), x, value)


def _onnx_gelu(c: Call) -> str:
    x = c.input
    if c.whole:
        return c.do("Gelu", x, approximate=c["approximate"])
    if c["approximate"] == "tanh":
        cube = c.do("Mul", c.do("Mul", x, x), x)
        inner = c.do("Mul", c.do("Add", x, c.do("Mul", cube, c.number(0.044715))), c.number(math.sqrt(2 / math.pi)))
        bent = c.do("Tanh", inner)
    else:
        bent = c.do("Erf", c.do("Div", x, c.number(math.sqrt(2))))
    return c.do("Mul", c.do("Mul", x, c.do("Add", bent, c.number(1))), c.number(0.5))


# ---- one line each --------------------------------------------------------------------------------------------------

unary("sigmoid", torch.sigmoid, _sigmoid, "expit", saturates=True, onnx="Sigmoid")
unary("tanh", torch.tanh, math.tanh, saturates=True, onnx="Tanh")
unary("silu", F.silu, lambda x: x * _sigmoid(x), saturates=True, onnx=lambda c: c.do("Mul", c.input, c.do("Sigmoid", c.input)))
unary("hardswish", F.hardswish, lambda x: x * _hardsigmoid(x), varies=(-3.0, math.inf), onnx=_onnx_hardswish)
unary("hardsigmoid", F.hardsigmoid, _hardsigmoid, varies=(-3.0, 3.0), onnx=_onnx_hardsigmoid)
unary(
    "mish",
    F.mish,
    lambda x: x * math.tanh(_softplus(x)),
    saturates=True,
    onnx=lambda c: c.do("Mul", c.input, c.do("Tanh", c.do("Softplus", c.input))),
)
unary("selu", F.selu, lambda x: 1.0507009873554804934193349852946 * _elu(x, 1.6732632423543772848170429916717), saturates=True, onnx="Selu")
unary("softsign", F.softsign, lambda x: x / (1 + abs(x)), onnx="Softsign")
unary("tanhshrink", F.tanhshrink, lambda x: x - math.tanh(x), onnx=lambda c: c.do("Sub", c.input, c.do("Tanh", c.input)))
unary(
    "logsigmoid",
    F.logsigmoid,
    lambda x: -_softplus(-x, threshold=math.inf if x > -700 else 0.0),
    onnx=lambda c: c.do("Neg", c.do("Softplus", c.do("Neg", c.input))),
)
unary("exp", torch.exp, math.exp, onnx="Exp")
unary("log", torch.log, for_positive(math.log, -math.inf), over=POSITIVE, onnx="Log")
unary("sqrt", torch.sqrt, for_positive(math.sqrt, 0.0), over=POSITIVE, onnx="Sqrt")
unary(
    "rsqrt",
    torch.rsqrt,
    for_positive(lambda x: 1 / math.sqrt(x), math.inf),
    over=POSITIVE,
    onnx=lambda c: c.do("Reciprocal", c.do("Sqrt", c.input)),
)
unary(
    "reciprocal",
    torch.reciprocal,
    lambda x: 1 / x if x else math.inf,
    over=POSITIVE,
    onnx="Reciprocal",
    adapted=dict.fromkeys(spelled("reciprocal"), lambda input: of_inverse(input)),
)
unary("erf", torch.erf, math.erf, saturates=True, onnx="Erf")
unary("abs", torch.abs, abs, operator.abs, "absolute", onnx="Abs", traits=frozenset({Trait.HOMOGENEOUS}))
unary("square", torch.square, lambda x: x * x, onnx=lambda c: c.do("Mul", c.input, c.input))
unary("sin", torch.sin, math.sin, onnx="Sin")
unary("cos", torch.cos, math.cos, onnx="Cos")
unary(
    "leaky_relu",
    F.leaky_relu,
    lambda x, negative_slope=0.01: x if x > 0 else x * negative_slope,
    negative_slope=0.01,
    tried={"negative_slope": 0.3},
    onnx=lambda c: c.do("LeakyRelu", c.input, alpha=float(c["negative_slope"])),
    lowered=_lower_leaky_relu,
    demand=Own(shared_where="slope_bits"),
    traits=frozenset({Trait.HOMOGENEOUS}),
)
unary("elu", F.elu, _elu, alpha=1.0, tried={"alpha": 0.7}, saturates=True, onnx=lambda c: c.do("Elu", c.input, alpha=float(c["alpha"])))
unary("softplus", F.softplus, _softplus, beta=1.0, threshold=20.0, tried={"beta": 2.0, "threshold": 3.0}, onnx=_onnx_softplus)


@tabled(
    lambda x, base=math.e: math.inf if base == 0 and x < 0 else math.nan if base < 0 and x != int(x) else base**x,
    "__rpow__",
    samples=(sample(input=(3, 6, 6), base=1.5),),
)
def power_of(input: Tensor, base: float = math.e) -> Tensor:
    """Compute base ** input."""
    return torch.pow(base, input)


def power(input: Tensor, exponent: Tensor) -> Tensor:
    """Compute input ** exponent for two tensors."""
    return torch.pow(input, exponent)


def raised(input: Any, exponent: Any) -> dict[str, Any] | Instead:
    """A number to the power of a tensor is a function of the tensor, and a tensor to the power of another a composite."""
    if not isinstance(input, fx.Node):
        return Instead(power_of, {"input": exponent, "base": input})
    given = {"input": input, "exponent": exponent}
    return Instead(power, given) if is_tensor(exponent) else given


unary(
    "pow",
    torch.pow,
    _power,
    exponent=2.0,
    samples=(
        sample(input=(3, 6, 6), exponent=3),
        sample(over=POSITIVE, input=(3, 6, 6), exponent=0.4),
        sample(over=POSITIVE, input=(3, 6, 6), exponent=-1.5),
    ),
    onnx=lambda c: c.do("Pow", c.input, c.number(c["exponent"])),
    adapted=dict.fromkeys((*spelled("pow"), operator.pow, operator.ipow, "__pow__", "__ipow__"), raised),
)

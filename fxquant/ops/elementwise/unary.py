"""Unary functions, each by a table: one line each."""

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.numerics.grids import FLOAT32_EXACT, INT32_MAX, SMALLEST_SCALE, WEIGHT_INT16, Ratio, Segments
from fxquant.numerics.rounding import straight_through
from fxquant.ops.core import Call, Clamp, Instead, Lowering, Own, Quantized, Trait, is_parameter, is_tensor, lowered, spelled
from fxquant.ops.core.samples import POSITIVE, sample, sampled
from fxquant.ops.core.weighted import by_whole_slope, shape_of
from fxquant.ops.elementwise.arithmetic import limited
from fxquant.ops.elementwise.table import POLE, SEGMENTS, by_table, for_positive, of_inverse, tabled, unary
from fxquant.ops.elementwise.whole import WHOLE, alike
from fxquant.primitives import elementwise, product
from fxquant.primitives.selection import choose, compare


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float, beta: float = 1.0, threshold: float = 20.0) -> float:
    return x if x * beta > threshold else math.log1p(math.exp(x * beta)) / beta


def _gelu(x: float, approximate: str = "none") -> float:
    if approximate == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _elu(x: float, alpha: float = 1.0) -> float:
    return x if x > 0 else alpha * math.expm1(x)


def _lower_leaky_relu(lowering: Lowering, input: Quantized, negative_slope: float) -> Quantized:
    """Lower to a table, or to a product with an integer slope if the target has integer slopes (`Arithmetic.slope_bits`)."""
    if not lowering.arithmetic.slope_bits or input.dtype.bits > 8:
        return by_table(lowering, input, "leaky_relu", negative_slope=negative_slope)
    slope = torch.tensor(float(negative_slope), device=input.scale.device)
    return lowering.result(
        lambda: by_whole_slope(lowering, input, slope, None, added=False), lambda: F.leaky_relu(input.real(), negative_slope)
    )


def _hardsigmoid(x: float) -> float:
    return min(max(x + 3, 0), 6) / 6


SELU, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
LARGEST_SOFTPLUS = 20.0  # beyond it, softplus equals its argument in float32


def _onnx_hardsigmoid(c: Call) -> str:
    return c.do("HardSigmoid", c.input, alpha=1 / 6, beta=0.5)


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


@tabled(_gelu, saturates=True, tried={"approximate": "tanh"}, onnx=_onnx_gelu)
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Compute F.gelu with `approximate` as a keyword."""
    return F.gelu(input, approximate=approximate)


unary("sigmoid", torch.sigmoid, _sigmoid, "expit", saturates=True, onnx="Sigmoid")
unary("tanh", torch.tanh, math.tanh, saturates=True, onnx="Tanh")
unary("silu", F.silu, lambda x: x * _sigmoid(x), saturates=True, onnx=lambda c: c.do("Mul", c.input, c.do("Sigmoid", c.input)))
unary(
    "hardswish",
    F.hardswish,
    lambda x: x * _hardsigmoid(x),
    varies=(-3.0, math.inf),
    onnx=lambda c: c.do("HardSwish", c.input) if c.whole else c.do("Mul", c.input, _onnx_hardsigmoid(c)),
)
unary("hardsigmoid", F.hardsigmoid, _hardsigmoid, varies=(-3.0, 3.0), onnx=_onnx_hardsigmoid)
unary(
    "mish",
    F.mish,
    lambda x: x * math.tanh(_softplus(x)),
    saturates=True,
    onnx=lambda c: c.do("Mul", c.input, c.do("Tanh", c.do("Softplus", c.input))),
)
unary("selu", F.selu, lambda x: SELU * _elu(x, SELU_ALPHA), saturates=True, onnx="Selu")
unary("softsign", F.softsign, lambda x: x / (1 + abs(x)), onnx="Softsign")
unary("tanhshrink", F.tanhshrink, lambda x: x - math.tanh(x), onnx=lambda c: c.do("Sub", c.input, c.do("Tanh", c.input)))
unary(
    "logsigmoid",
    F.logsigmoid,
    lambda x: -_softplus(-x, threshold=math.inf if x > -700 else 0.0),
    onnx=lambda c: c.do("Neg", c.do("Softplus", c.do("Neg", c.input))),
)
unary("exp", torch.exp, math.exp, onnx="Exp")
unary("log", torch.log, for_positive(math.log, -math.inf), over=POSITIVE, onnx="Log", traits=POLE)
unary("sqrt", torch.sqrt, for_positive(math.sqrt, 0.0), over=POSITIVE, onnx="Sqrt")
unary(
    "rsqrt",
    torch.rsqrt,
    for_positive(lambda x: 1 / math.sqrt(x), math.inf),
    over=POSITIVE,
    onnx=lambda c: c.do("Reciprocal", c.do("Sqrt", c.input)),
    traits=POLE,
)
unary(
    "reciprocal",
    torch.reciprocal,
    lambda x: 1 / x if x else math.inf,
    over=POSITIVE,
    onnx="Reciprocal",
    traits=POLE,
    adapted=dict.fromkeys(spelled("reciprocal"), lambda input: of_inverse(input)),
)
unary("erf", torch.erf, math.erf, saturates=True, onnx="Erf")
unary(
    "abs",
    torch.abs,
    abs,
    *(operator.abs, "absolute"),
    onnx="Abs",
    traits=frozenset({Trait.HOMOGENEOUS, Trait.KEEPS_INTEGERS}),
    integers=alike("abs"),
)
unary(
    "square",
    torch.square,
    lambda x: x * x,
    onnx=lambda c: c.do("Mul", c.input, c.input),
    integers=lambda arguments, operand: (WHOLE["mul"], {"input": arguments["input"], "other": arguments["input"]}),
)
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
    """Adapt torch.pow: number ** tensor to `power_of`, tensor ** tensor to the composite `power`; else return the arguments."""
    if not isinstance(input, fx.Node):
        return Instead(power_of, {"input": exponent, "base": input})
    arguments = {"input": input, "exponent": exponent}
    return Instead(power, arguments) if is_tensor(exponent) else arguments


unary(
    "pow",
    torch.pow,
    lambda x, exponent: math.nan if x < 0 and exponent != int(exponent) else math.inf if x == 0 and exponent < 0 else x**exponent,
    exponent=2.0,
    integers=alike("pow"),
    samples=(
        sample(input=(3, 6, 6), exponent=3),
        sample(over=POSITIVE, input=(3, 6, 6), exponent=0.4),
        sample(over=POSITIVE, input=(3, 6, 6), exponent=-1.5),
    ),
    onnx=lambda c: c.do("Pow", c.input, c.number(c["exponent"])),
    adapted=dict.fromkeys((*spelled("pow"), operator.pow, operator.ipow, "__pow__", "__ipow__"), raised),
)


# ---- Functions of 16 bits as a chip's compiler knows them: elementary ones are rounded once to float32, and sums and products too ----
def _once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of float32 tensors that is rounded once: it is computed in float64."""
    return lambda x: function(x.double()).float()


_exp, _log = _once(torch.exp), _once(torch.log)


def _sigmoid32(x: Tensor) -> Tensor:
    return 1 / (1 + _exp(-x))


def _tanh32(x: Tensor) -> Tensor:
    return (_exp(x) - _exp(-x)) / (_exp(x) + _exp(-x))


SEGMENTS.update(
    sigmoid=lambda: Segments(_sigmoid32),
    tanh=lambda: Segments(_tanh32, parity=-1),
    silu=lambda: Segments(lambda x: x * _sigmoid32(x), bends=(-13, 13)),
    mish=lambda: Segments(lambda x: x * _tanh32(_log(1 + _exp(x))), bends=(-10, 7)),
    gelu=lambda approximate: Segments(_once(F.gelu), bends=(-5, 5)) if approximate == "none" else None,
    erf=lambda: Segments(_once(torch.erf), parity=-1),
    exp=lambda: Segments(_exp, bends=(-math.inf, 20)),
    log=lambda: Segments(_log, pole=lambda y: _exp(-y)),
    sqrt=lambda: Segments(_once(torch.sqrt), bends=(0, math.inf)),
    rsqrt=lambda offset=0.0: Segments(lambda x: 1 / _once(torch.sqrt)(x + offset), pole=_once(lambda y: 1 / y.square() - offset)),
    reciprocal=lambda: Segments(torch.reciprocal, parity=-1, pole=torch.reciprocal),
    sin=lambda: Segments(_once(torch.sin), parity=-1),
    cos=lambda: Segments(_once(torch.cos), parity=1),
    abs=lambda: Segments(torch.abs, bends=(0, 0)),
    leaky_relu=lambda negative_slope: Segments(lambda x: torch.where(x > 0, x, x * negative_slope), bends=(0, 0)),
    selu=lambda: Segments(lambda x: torch.where(x > 0, SELU * x, SELU * SELU_ALPHA * _exp(x) - SELU * SELU_ALPHA), bends=(-math.inf, 0)),
    elu=lambda alpha: Segments(lambda x: torch.where(x > 0, x, _exp(x) - 1), bends=(-math.inf, 0)) if alpha == 1 else None,
    softplus=lambda beta, threshold: Segments(lambda x: _log(1 + _exp(x)), bends=(-math.inf, 20)) if (beta, threshold) == (1, 20) else None,
    pow=lambda exponent: (
        Segments(_once(lambda x: torch.pow(x, exponent)), (1, -1)[int(exponent) % 2]) if exponent > 0 and exponent % 1 == 0 else None
    ),
)


# ---- prelu: a learned slope below zero, for all channels or for each -------------------------------------------------
def _shaped(slopes: Tensor, input: Quantized) -> Tensor:
    """Return one slope, or one per channel, in a shape that broadcasts to the operand."""
    return slopes.reshape(-1, *[1] * (len(input.shape) - 2)) if slopes.numel() > 1 else slopes.reshape(())


def _by_sign(lowering: Lowering, input: Quantized, weight: Tensor, clamp: Clamp | None) -> Quantized:
    """Compute q where q ≥ 0, else q · A, both on the operand's grid and then brought to the output's.

    A = round_half_even(weight_c / σ), of 16 bits, σ = max |weight| / 32767.
    """
    slopes = _shaped(weight.detach(), input)
    scale = (slopes.abs().max().float() / WEIGHT_INT16.high).clamp_min(SMALLEST_SCALE)
    whole = torch.round(slopes.double() / scale.double()).clamp(WEIGHT_INT16.low, WEIGHT_INT16.high)
    lowering.describe("slope", scale)
    wide = input.dtype.bits > 8  # a product then reaches 2^30
    product = lowering.call(elementwise.multiply, input.value, lowering.constant("slope", whole, torch.int32), wide)
    ratio = Ratio(lowering.arithmetic.step(input.scale, scale), (input.scale,))
    below = lowering.arithmetic.requantize(lowering, product, ratio, *input.grid.bounds, input.grid, "negative_")
    below = lowering.holds(below, input.grid)
    zero = lowering.constant("zero", torch.zeros((), dtype=torch.float32, device=scale.device), torch.int8)
    chosen = lowering.call(choose, input.value, below, lowering.call(compare, input.value, zero, "ge"))

    def exact() -> Any:
        grid, limits = lowering.output.grid, lowering.bounds(clamp, lowering.output)
        steps = Ratio((input.scale,), (grid.scale,))
        return lowering.arithmetic.requantize(lowering, chosen, steps, *limits, grid, bits=input.dtype.bits)

    return lowering.result(exact, lambda: prelu(input.real(), weight, clamp=clamp))


def _refuses_prelu(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    weight = arguments["weight"]
    if not isinstance(weight, fx.Node) or not is_parameter(weight):
        return "its weight is computed, not a parameter"
    operand = shape_of(arguments["input"])
    return "its input has no channels" if operand is not None and len(operand) < 2 and shape_of(weight) != (1,) else None


def _onnx_prelu(c: Call) -> str:
    slope = c.real("slope")
    return c.epilogue(c.do("PRelu", c.input, c.e.constant(slope.reshape(1) if slope.dim() == 0 else slope)))


@lowered(
    function=lambda input, weight, *, clamp=None: limited(F.prelu(input, weight), clamp),
    element=lambda input, weight, *, clamp=None: limited(F.prelu(input, weight.square().mean().sqrt().reshape(1).to(input)), clamp),
    traits=frozenset({Trait.HOMOGENEOUS}),
    absorbs=frozenset({"clamp"}),
    refuses=_refuses_prelu,
    onnx=_onnx_prelu,
    demand=Own(shared_where="slope_bits"),
)
@sampled("F.prelu(x, {P(3)}).clamp(max=1)", "prelu(x, {P(1)})", "nn.PReLU()", "nn.PReLU(3)")
def prelu(lowering: Lowering, input: Quantized, weight: Tensor, *, clamp: Clamp | None = None) -> Quantized:
    """Compute max(x, 0) + weight · min(x, 0), with one weight or one per channel, and a fused clamp.

    y = requantize(2^n · max(q, 0) + a_c · min(q, 0), s_x · 2^-n / s_y),  a_c = round_half_even(weight_c · 2^n).

    n is the same for all channels: the largest for which no product reaches 2^23 (2^30 for int16, and where slopes are so steep
    that none but a negative one would do), 15 for int8 and slopes up to one. What is above zero is exact, so a slope of one is the
    identity.
    """
    lowering.parameters["its weight"] = weight
    if not bool(torch.isfinite(weight).all()):
        raise lowering.not_finite()
    if lowering.arithmetic.slope_bits and input.dtype.bits <= 8:
        whole = partial(by_whole_slope, lowering, input, _shaped(weight.detach(), input), clamp, added=True)
        return lowering.result(whole, lambda: prelu(input.real(), weight, clamp=clamp))
    if lowering.arithmetic.multiplies_by_layers:
        return _by_sign(lowering, input, weight, clamp)
    steepest = float(weight.detach().abs().max())
    largest = math.frexp(input.grid.magnitude * max(1.0, steepest))[1]
    wide = input.dtype.bits > 8 or largest > 23
    bits = max((30 if wide else 23) - largest, 0)  # the proof refuses what is steeper still
    real = weight * 2.0**bits
    exact = torch.round(real.detach())
    slopes = straight_through(real, exact) if real.requires_grad else exact
    reach = exact.double().abs().clamp_min(2.0**bits)
    lowering.prove(reach * input.grid.magnitude, "the product", INT32_MAX if wide else FLOAT32_EXACT - 1)
    unit = torch.tensor(2.0**bits, dtype=torch.float64, device=input.scale.device)
    lowering.describe("slope", 1 / unit)
    rectified = lowering.call(product.rectify, input.value, 2**bits, lowering.constant("slope", _shaped(slopes, input), torch.int32), wide)
    return lowering.requantize(rectified, Ratio((input.scale,), (unit,)), clamp)

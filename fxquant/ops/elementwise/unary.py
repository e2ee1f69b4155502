"""Unary functions, each by a table: one line each."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.clamping import clamped
from fxquant.numerics.grids import EVERYTHING, Grid, Interval, IntType, table
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import OPERATORS, Adapt, Instead, Operator, Own, operator_of, register
from fxquant.ops.core.slope import by_whole_slope
from fxquant.ops.core.traits import Trait

UNARY: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {}  # on tensors, and on one Python float
WITHOUT_NEGATIVE: set[str] = set()  # those of them that have no value below 0
SINGULAR: set[str] = set()  # those of them that have poles, or slopes without a bound
POLES = ("quotient_of", "reciprocal", "rsqrt", "log", "log2", "log10")  # at 0; and powers with negative exponents


def by_table(lowering: Lowering, input: Quantized, name: str, factor: float = 1.0, offset: float = 0.0, **settings: Any) -> Quantized:
    """Return the integers of a unary function of factor · input + offset, by a table on the operand's grid."""
    in_float32 = lowering.arithmetic.float32_tables and input.dtype.bits <= 8

    def entries(points: Tensor | None = None) -> Tensor:
        chosen = name, factor, offset, tuple(settings.items()), _plain(input.grid), _plain(lowering.output.grid), in_float32
        return (_entries(*chosen) if points is None else _made(*chosen, points)).to(input.scale.device)

    def function(x: Tensor) -> Tensor:
        return shifted(x, name, factor, offset, settings)

    return lowering.look_up(input, entries, function, lambda x: _tamed(function, x, name))


def _tamed(function: Callable[[Tensor], Tensor], x: Tensor, name: str) -> Tensor:
    """Compute function(x) without gradients where it has no finite slope.

    Infinite values become the most extreme of the other values, undefined ones become 0.
    A grid holds 0 where a float tensor rarely does: small values are rounded to it. There the root, the logarithm and the quotient have
    poles, whose gradient would dominate that of the whole layer; and the table has its last integer. A grid may reach a step beyond
    where the function has values, as that of a tanh reaches beyond 1; there the table has 0.
    """
    if name not in SINGULAR:
        return function(x)
    if x.requires_grad and torch.is_grad_enabled():
        inner = x.detach().requires_grad_()
        slope = torch.autograd.grad(function(inner).sum(), inner)[0]
        x = torch.where(torch.isfinite(slope), x, x.detach())
    value = function(x)
    infinite = torch.isinf(value)
    if bool(infinite.any()) and not bool(infinite.all()):
        finite = value.detach()[~infinite]
        value = clamped(value, float(finite.nan_to_num(math.inf).min()), float(finite.nan_to_num(-math.inf).max()))
    undefined = torch.isnan(value) & ~torch.isnan(x)
    return torch.where(undefined, 0.0, value) if bool(undefined.any()) else value


PlainGrid = tuple[IntType, float, int]  # type, scale and zero point, which can be a dictionary's key


def _plain(grid: Grid) -> PlainGrid:
    return grid.type, float(grid.scale), grid.zero_point


def _grid(kind: IntType, scale: float, zero_point: int) -> Grid:
    return Grid(kind, torch.tensor(scale, dtype=torch.float32, device="cpu"), zero_point)


Settings = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=256)  # 64 MiB of int16 tables: while scales do not change, the same ones are requested at every step
def _entries(name: str, factor: float, offset: float, settings: Settings, input: PlainGrid, output: PlainGrid, in_float32: bool) -> Tensor:
    """Return the table of a unary function of factor · x + offset from a cache; callers must not write into it."""
    return _made(name, factor, offset, settings, input, output, in_float32)


def _made(
    name: str,
    factor: float,
    offset: float,
    settings: Settings,
    input: PlainGrid,
    output: PlainGrid,
    in_float32: bool,
    points: Tensor | None = None,
) -> Tensor:
    """Compute the table of a unary function of factor · x + offset, or its entries at these points alone."""
    function, exact = UNARY[name]
    chosen = dict(settings)

    def on_tensors(x: Tensor) -> Tensor:
        return function(_moved(x, factor, offset), **chosen)

    def on_numbers(x: float) -> float:
        return exact(_moved(x, factor, offset), **chosen)

    def has_none(x: Tensor) -> Tensor:
        below: Tensor = _moved(x, factor, offset) < 0
        return below

    undefined = has_none if name in WITHOUT_NEGATIVE else None
    return table(on_numbers, _grid(*input), _grid(*output), on_tensors, undefined, points, in_float32)


def _moved(x: Any, factor: float, offset: float) -> Any:
    """factor · x + offset; x itself, -0.0 included, where these say nothing."""
    scaled = x if factor == 1 else x * factor
    return scaled + offset if offset else scaled


def unary(
    name: str,
    function: Callable[..., Tensor],
    exact: Callable[..., float],
    *spellings: Any,
    varies: Interval = EVERYTHING,
    onnx: str | Callable[[Call], str] | None = None,
    adapted: Mapping[Any, Adapt] | None = None,
    module: tuple[type, Callable[[Any], dict[str, Any] | str]] | None = None,
    lowered: Callable[..., Quantized] | None = None,
    demand: Own = Own(),  # noqa: B008 - it does not change
    traits: frozenset[Trait] = frozenset(),
    **settings: Any,
) -> Operator:
    """Declare a unary function.

    `function` is its float meaning on tensors, `exact` the one on a Python float that the table is made of: NaN where it has no value.
    `spellings` are further functions, names, and module classes. What PyTorch has of these names, and of `name`, spells it too: functions
    of torch, torch.special and torch.nn.functional, and methods, in place or not. `adapted` holds spellings, and `module` a class, that
    take more than the settings, or other operands. `settings` are the function's own parameters with their defaults, which `exact` takes
    as well and a module holds under the same names. Outside of `varies` the function is constant. `onnx` is the operator of ONNX that
    computes it, or writes it in several; see `Operator.onnx`. `demand` is of its result's grid.
    `lowered` is its integer meaning where that is not always a table. `traits` are those it has besides that of every such function.
    """

    def lower(lowering: Lowering, input: Quantized, **chosen: Any) -> Quantized:
        return by_table(lowering, input, name, **chosen) if lowered is None else lowered(lowering, input, **chosen)

    UNARY[name] = function, exact
    if exact in _FOR_POSITIVE:
        WITHOUT_NEGATIVE.add(name)
    if _has_poles(function, settings):
        SINGULAR.add(name)
    others = adapted or {}
    found = spelled(name, *(s for s in spellings if isinstance(s, str)))
    found_functions = [s for s in (*spellings, *found) if callable(s) and not isinstance(s, type)]
    classes = {s: lambda m: {setting: getattr(m, setting) for setting in settings} for s in spellings if isinstance(s, type)}

    def arguments(input: Any, *given: Any, inplace: bool = False, **named: Any) -> dict[str, Any]:
        """By name; PyTorch's `inplace` flag says nothing about the value."""
        return {"input": input, **settings, **dict(zip(settings, given, strict=False)), **named}

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        computed = [setting for setting in settings if isinstance(arguments[setting], fx.Node)]
        return f"its {computed[0]} is computed, not a number" if computed else None

    return register(
        Operator(
            name,
            function,
            ("input",),
            lower,
            demand,
            functions={**dict.fromkeys(found_functions, arguments), **{s: a for s, a in others.items() if callable(s)}},
            methods={
                **{s: arguments for s in (*spellings, *found) if isinstance(s, str) and hasattr(Tensor, s)},
                **{s: a for s, a in others.items() if isinstance(s, str)},
            },
            modules={**classes, **({} if module is None else dict([module]))},
            keeps=None if varies == EVERYTHING else lambda arguments, after: varies,
            refuses=refuses,
            parameters={"input": inspect.Parameter.empty, **settings},
            adapt=others.get(function, arguments),
            onnx=(lambda c: c.do(onnx, c.input)) if isinstance(onnx, str) else onnx,
            traits=traits | {Trait.ELEMENTWISE},
        )
    )


def _has_poles(function: Callable[..., Tensor], settings: Mapping[str, Any]) -> bool:
    """Return whether the function has no finite slope where such functions have their poles; of a power, at any exponent."""
    x = torch.tensor([-1.0, 0.0, 1.0], device="cpu", requires_grad=True, dtype=torch.float32)
    given = {key: 0.5 if isinstance(value, float) else value for key, value in settings.items()}
    with torch.enable_grad():
        value = function(x, **given)
        slope = torch.autograd.grad(value.sum(), x)[0] if value.requires_grad else torch.zeros(3, dtype=torch.float32, device="cpu")
    return not bool(torch.isfinite(slope).all())


def steep(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the operator of this name, with these arguments, is a unary function with poles, or with slopes without a bound."""
    if name == "shifted":
        return steep(arguments["function"], arguments["settings"])
    exponent = arguments.get("exponent")
    return name in SINGULAR and not (name == "pow" and isinstance(exponent, int | float) and exponent >= 1)


def exact(name: str, arguments: Mapping[str, Any]) -> Callable[[float], float] | None:
    """Return the function of one float that this operator computes with these arguments; None unless it is unary and without poles."""
    if name == "shifted":
        inner = exact(arguments["function"], arguments["settings"])
        return None if inner is None else lambda x: inner(_moved(x, arguments["factor"], arguments["offset"]))
    if name not in UNARY or steep(name, arguments):
        return None
    settings = {setting: value for setting, value in arguments.items() if setting != "input"}
    return lambda x: UNARY[name][1](x, **settings)


def has_pole(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the operator of this name, with these arguments, is a unary function that is infinite at 0."""
    if name == "shifted":
        return has_pole(arguments["function"], arguments["settings"])
    exponent = arguments.get("exponent")
    return name in POLES or (name == "pow" and isinstance(exponent, int | float) and exponent < 0)


def spelled(*names: str) -> list[Any]:
    """Return the functions of these names that PyTorch has, in place or not, and the names that are methods of tensors."""
    found: list[Any] = []
    for name in (n for plain in names for n in ((plain,) if plain.endswith("_") else (plain, f"{plain}_"))):
        places = [getattr(place, name) for place in (torch, torch.special, F) if hasattr(place, name)]
        found += [*places, *([name] if hasattr(Tensor, name) else [])]
    return found


# ---- the exact functions, on one Python float ------------------------------------------------------------------------


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float, beta: float = 1.0, threshold: float = 20.0) -> float:
    return x if x * beta > threshold else math.log1p(math.exp(x * beta)) / beta


def _gelu(x: float, approximate: str = "none") -> float:
    if approximate == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """PyTorch's gelu, whose setting is a keyword."""
    return F.gelu(input, approximate=approximate)


def _elu(x: float, alpha: float = 1.0) -> float:
    return x if x > 0 else alpha * math.expm1(x)


def _selu(x: float) -> float:
    return 1.0507009873554804934193349852946 * _elu(x, 1.6732632423543772848170429916717)


def _leaky_relu(x: float, negative_slope: float = 0.01) -> float:
    return x if x > 0 else x * negative_slope


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


def _for_positive(function: Callable[[float], float], at_zero: float) -> Callable[[float], float]:
    """Return a function of positive numbers with its limit at 0, NaN below."""

    def on_numbers(x: float) -> float:
        return function(x) if x > 0 else at_zero if x == 0 else math.nan

    _FOR_POSITIVE.append(on_numbers)
    return on_numbers


_FOR_POSITIVE: list[Callable[[float], float]] = []


# ---- as operators of ONNX --------------------------------------------------------------------------------------------

LARGEST_SOFTPLUS = 20.0  # beyond it, softplus equals its argument in float32


def _onnx_hardsigmoid(c: Call) -> str:
    return c.do("HardSigmoid", c.input, alpha=1 / 6, beta=0.5)


def _onnx_hardswish(c: Call) -> str:
    return c.do("HardSwish", c.input) if c.whole else c.do("Mul", c.input, _onnx_hardsigmoid(c))


def _onnx_mish(c: Call) -> str:
    return c.do("Mul", c.input, c.do("Tanh", c.do("Softplus", c.input)))


def _onnx_leaky_relu(c: Call) -> str:
    return c.do("LeakyRelu", c.input, alpha=float(c["negative_slope"]))


def _onnx_pow(c: Call) -> str:
    return c.do("Pow", c.input, c.number(c["exponent"]))


def _onnx_rsqrt(c: Call) -> str:
    return c.do("Reciprocal", c.do("Sqrt", c.input))


def _onnx_logsigmoid(c: Call) -> str:
    return c.do("Neg", c.do("Softplus", c.do("Neg", c.input)))


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

unary("sigmoid", torch.sigmoid, _sigmoid, F.sigmoid, "sigmoid", "sigmoid_", "expit", nn.Sigmoid, onnx="Sigmoid")
unary("tanh", torch.tanh, math.tanh, F.tanh, "tanh", "tanh_", nn.Tanh, onnx="Tanh")
unary("silu", F.silu, lambda x: x * _sigmoid(x), nn.SiLU, onnx=lambda c: c.do("Mul", c.input, c.do("Sigmoid", c.input)))
unary("hardswish", F.hardswish, lambda x: x * _hardsigmoid(x), nn.Hardswish, varies=(-3.0, math.inf), onnx=_onnx_hardswish)
unary("hardsigmoid", F.hardsigmoid, _hardsigmoid, nn.Hardsigmoid, varies=(-3.0, 3.0), onnx=_onnx_hardsigmoid)
unary("mish", F.mish, lambda x: x * math.tanh(_softplus(x)), nn.Mish, onnx=_onnx_mish)
unary("selu", F.selu, _selu, nn.SELU, onnx="Selu")
unary("softsign", F.softsign, lambda x: x / (1 + abs(x)), nn.Softsign, onnx="Softsign")
unary("tanhshrink", F.tanhshrink, lambda x: x - math.tanh(x), nn.Tanhshrink, onnx=lambda c: c.do("Sub", c.input, c.do("Tanh", c.input)))
unary("logsigmoid", F.logsigmoid, lambda x: -_softplus(-x, threshold=math.inf if x > -700 else 0.0), nn.LogSigmoid, onnx=_onnx_logsigmoid)
unary("exp", torch.exp, math.exp, "exp", "exp_", onnx="Exp")
unary("log", torch.log, _for_positive(math.log, -math.inf), "log", "log_", onnx="Log")
unary("sqrt", torch.sqrt, _for_positive(math.sqrt, 0.0), "sqrt", "sqrt_", onnx="Sqrt")
unary("rsqrt", torch.rsqrt, _for_positive(lambda x: 1 / math.sqrt(x), math.inf), "rsqrt", "rsqrt_", onnx=_onnx_rsqrt)
unary(
    "reciprocal",
    torch.reciprocal,
    lambda x: 1 / x if x else math.inf,
    onnx="Reciprocal",
    adapted=dict.fromkeys((torch.reciprocal, torch.reciprocal_, "reciprocal", "reciprocal_"), lambda input: of_inverse(input)),
)
unary("erf", torch.erf, math.erf, "erf", "erf_", onnx="Erf")
unary("abs", torch.abs, abs, operator.abs, "abs", "abs_", "absolute", onnx="Abs", traits=frozenset({Trait.HOMOGENEOUS}))
unary("square", torch.square, lambda x: x * x, "square", "square_", onnx=lambda c: c.do("Mul", c.input, c.input))
unary("sin", torch.sin, math.sin, "sin", "sin_", onnx="Sin")
unary("cos", torch.cos, math.cos, "cos", "cos_", onnx="Cos")
unary(
    "leaky_relu",
    F.leaky_relu,
    _leaky_relu,
    nn.LeakyReLU,
    negative_slope=0.01,
    onnx=_onnx_leaky_relu,
    lowered=_lower_leaky_relu,
    demand=Own(shared_where="slope_bits"),
    traits=frozenset({Trait.HOMOGENEOUS}),
)
unary("elu", F.elu, _elu, nn.ELU, alpha=1.0, onnx=lambda c: c.do("Elu", c.input, alpha=float(c["alpha"])))
unary("softplus", F.softplus, _softplus, nn.Softplus, beta=1.0, threshold=20.0, onnx=_onnx_softplus)
unary("gelu", gelu, _gelu, F.gelu, nn.GELU, approximate="none", onnx=_onnx_gelu)


def power_of(input: Tensor, base: float = math.e) -> Tensor:
    """Compute base ** input."""
    return torch.pow(base, input)


def _power_of(x: float, base: float = math.e) -> float:
    return math.inf if base == 0 and x < 0 else math.nan if base < 0 and x != int(x) else base**x


def power(input: Tensor, exponent: Tensor) -> Tensor:
    """Compute input ** exponent for two tensors."""
    return torch.pow(input, exponent)


def raised(input: Any, exponent: Any) -> dict[str, Any] | Instead:
    """A number to the power of a tensor is a function of the tensor, and a tensor to the power of another a composite."""
    if not isinstance(input, fx.Node):
        return Instead(power_of, {"input": exponent, "base": input})
    to_a_tensor = isinstance(exponent, fx.Node) and (isinstance(fact(exponent), TensorFact) or is_parameter(exponent))
    return Instead(power, {"input": input, "exponent": exponent}) if to_a_tensor else {"input": input, "exponent": exponent}


_POWERS = dict.fromkeys((torch.pow, operator.pow, operator.ipow, "pow", "pow_", "__pow__", "__ipow__"), raised)
unary("pow", torch.pow, _power, exponent=2.0, onnx=_onnx_pow, adapted=_POWERS)
unary("power_of", power_of, _power_of, "__rpow__", base=math.e)

# ---- with a number added in front -----------------------------------------------------------------------------------


def shifted(input: Tensor, function: str, factor: float, offset: float, settings: dict[str, Any]) -> Tensor:
    """Return the unary function of this name of factor · input + offset."""
    return UNARY[function][0](_moved(input, factor, offset), **settings)


def _lower_shifted(
    lowering: Lowering, input: Quantized, function: str, factor: float, offset: float, settings: dict[str, Any]
) -> Quantized:
    """Lower to one table on the operand's own grid: a number far below a step of the sum, the ε under a square root, is not lost."""
    return by_table(lowering, input, function, factor, offset, **settings)


def _onnx_shifted(c: Call) -> str:
    function = OPERATORS[UNARY[c["function"]][0]]
    if function.onnx is None:
        return c.exported()
    scaled = c.input if c["factor"] == 1 else c.do("Mul", c.input, c.number(c["factor"]))
    arguments = {"input": c.do("Add", scaled, c.number(c["offset"])), **c["settings"]}
    return function.onnx(replace(c, name=function.name, arguments=arguments))


SHIFTED = register(Operator("shifted", shifted, ("input",), _lower_shifted, onnx=_onnx_shifted, traits=frozenset({Trait.ELEMENTWISE})))


def of_inverse(input: Any) -> dict[str, Any] | Instead:
    """1 / exp(x) is exp(-x), one table: of small exponentials, no grid has enough to divide by."""
    operator = operator_of(input) if isinstance(input, fx.Node) else None
    if operator is None or operator.name != "exp":
        return {"input": input}
    return Instead(shifted, {"input": input.args[0], "function": "exp", "factor": -1.0, "offset": 0.0, "settings": {}})


def with_offset(function: Operator, arguments: dict[str, Any], addition: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of `shifted` for a unary function of the sum or difference of a number and a tensor; else None."""
    operator = operator_of(addition)
    if operator is None or operator.name not in ("add", "sub") or function.name not in UNARY or len(addition.users) > 1 or addition.kwargs:
        return None
    terms = operator.arguments(addition)
    left, right, alpha = terms["input"], terms["other"], terms["alpha"]
    sign = 1 if operator.name == "add" else -1
    settings = {name: value for name, value in arguments.items() if name != "input"}
    if isinstance(right, int | float) and isinstance(left, fx.Node):
        tensor, factor, offset = left, 1.0, sign * alpha * right
    elif isinstance(left, int | float) and isinstance(right, fx.Node):
        tensor, factor, offset = right, float(sign * alpha), left
    else:
        return None
    if is_parameter(tensor) or fact(tensor) != fact(addition) or not math.isfinite(offset) or not math.isfinite(factor):
        return None
    return {"input": tensor, "function": function.name, "factor": factor, "offset": float(offset), "settings": settings}

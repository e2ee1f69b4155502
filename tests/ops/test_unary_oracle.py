"""Every unary function's table, entry by entry, against the same function in arithmetic of forty digits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor
from torch.nn import functional as F

import fxquant as fxq
from fxquant.numerics.grids import ACTIVATION_TYPES, Grid, table
from fxquant.ops import BY_NAME
from fxquant.ops.elementwise.table import UNARY
from tests.shared.networks import members

mp.dps = 40
NAN = mpf("nan")
NAMES = tuple(UNARY)  # before other tests declare functions of their own
POINTS = 4001
SELU_SCALE, SELU_ALPHA = mpf("1.0507009873554804934193349852946"), mpf("1.6732632423543772848170429916717")


def sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def clipped(x: Any, low: float, high: float) -> Any:
    return min(max(x, mpf(low)), mpf(high))


def truncated(x: Any) -> Any:
    return mp.sign(x) * mp.floor(abs(x))


def inside(low: float, high: float, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function on an interval, and no number outside."""
    return lambda x: function(x) if low <= x <= high else NAN


def pole(sign: int) -> Any:
    return mpf("inf") * sign


CHOICE = ("where", ("gt", "input", 0), ("sqrt", "input"), ("mul", "input", 0.25))

# What a name means: with these settings, on numbers of the interval that the table is about.
MEANINGS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], float]] = {
    "curve": (lambda x: mp.sqrt(x) if x > 0 else x / 4, {"steps": CHOICE}, 6), "sigmoid": (sigmoid, {}, 6), "tanh": (mp.tanh, {}, 3),
    "silu": (lambda x: x * sigmoid(x), {}, 6), "hardswish": (lambda x: x * clipped(x + 3, 0, 6) / 6, {}, 5),
    "hardsigmoid": (lambda x: clipped(x + 3, 0, 6) / 6, {}, 5), "mish": (lambda x: x * mp.tanh(mp.log1p(mp.exp(x))), {}, 5),
    "selu": (lambda x: SELU_SCALE * (x if x > 0 else SELU_ALPHA * mp.expm1(x)), {}, 4), "softsign": (lambda x: x / (1 + abs(x)), {}, 4),
    "tanhshrink": (lambda x: x - mp.tanh(x), {}, 3), "logsigmoid": (lambda x: -mp.log1p(mp.exp(-x)), {}, 5), "exp": (mp.exp, {}, 2),
    "log": (lambda x: mp.log(x) if x > 0 else (pole(-1) if x == 0 else NAN), {}, 3),
    "log2": (lambda x: mp.log(x, 2) if x > 0 else (pole(-1) if x == 0 else NAN), {}, 3),
    "log10": (lambda x: mp.log10(x) if x > 0 else (pole(-1) if x == 0 else NAN), {}, 3),
    "log1p": (lambda x: mp.log1p(x) if x > -1 else (pole(-1) if x == -1 else NAN), {}, 3), "expm1": (mp.expm1, {}, 2),
    "exp2": (lambda x: mpf(2) ** x, {}, 2), "sqrt": (inside(0, math.inf, mp.sqrt), {}, 3),
    "rsqrt": (lambda x: 1 / mp.sqrt(x) if x > 0 else (pole(1) if x == 0 else NAN), {}, 3),
    "reciprocal": (lambda x: 1 / x if x else pole(1), {}, 3), "erf": (mp.erf, {}, 2), "erfc": (mp.erfc, {}, 2),
    "erfinv": (lambda x: mp.erfinv(x) if abs(x) < 1 else NAN, {}, 0.97), "erfcx": (lambda x: mp.exp(x * x) * mp.erfc(x), {}, 1.5),
    "abs": (abs, {}, 3), "square": (lambda x: x * x, {}, 3), "sin": (mp.sin, {}, 4), "cos": (mp.cos, {}, 4), "tan": (mp.tan, {}, 1.3),
    "asin": (inside(-1, 1, mp.asin), {}, 1.1), "acos": (inside(-1, 1, mp.acos), {}, 1.1), "atan": (mp.atan, {}, 3),
    "sinh": (mp.sinh, {}, 2), "cosh": (mp.cosh, {}, 2), "asinh": (mp.asinh, {}, 3), "acosh": (inside(1, math.inf, mp.acosh), {}, 3),
    "atanh": (lambda x: mp.atanh(x) if abs(x) < 1 else NAN, {}, 0.95),
    "sinc": (lambda x: mp.sin(mp.pi * x) / (mp.pi * x) if x else mpf(1), {}, 2),
    "leaky_relu": (lambda x: x if x >= 0 else x * mpf(0.3), {"negative_slope": 0.3}, 3),
    "elu": (lambda x: x if x > 0 else mpf(0.7) * mp.expm1(x), {"alpha": 0.7}, 3),
    "celu": (lambda x: x if x > 0 else mpf(0.7) * mp.expm1(x / mpf(0.7)), {"alpha": 0.7}, 3),
    "softplus": (lambda x: mp.log1p(mp.exp(2 * x)) / 2, {"beta": 2}, 3), "gelu": (lambda x: x * mp.ncdf(x), {}, 3),
    "pow": (lambda x: x**3, {"exponent": 3}, 2), "power_of": (lambda x: mpf(3) ** x, {"base": 3.0}, 2),
    "deg2rad": (lambda x: x * mp.pi / 180, {}, 90), "rad2deg": (lambda x: x * 180 / mp.pi, {}, 2), "ceil": (mp.ceil, {}, 5.3),
    "floor": (mp.floor, {}, 5.3), "trunc": (truncated, {}, 5.3),
    "round": (mp.nint, {}, 5.3),  # the even one of two that are as near
    "frac": (lambda x: x - truncated(x), {}, 5.3), "sign": (mp.sign, {}, 2),
    "logit": (lambda x: mp.log(x / (1 - x)) if 0 < x < 1 else (pole(-1) if x == 0 else NAN), {}, 0.97),
    "lgamma": (lambda x: mp.log(abs(mp.gamma(x))) if x > 0 or x != mp.floor(x) else pole(1), {}, 6),
    "digamma": (lambda x: mp.digamma(x) if x > 0 or x != mp.floor(x) else (NAN if x else pole(-1)), {}, 6),
    "i0": (lambda x: mp.besseli(0, x), {}, 2), "i0e": (lambda x: mp.besseli(0, x) * mp.exp(-abs(x)), {}, 3),
    "i1": (lambda x: mp.besseli(1, x), {}, 2), "i1e": (lambda x: mp.besseli(1, x) * mp.exp(-abs(x)), {}, 3),
    "entr": (lambda x: -x * mp.log(x) if x > 0 else (mpf(0) if x == 0 else pole(-1)), {}, 2), "ndtr": (mp.ncdf, {}, 3),
    "ndtri": (lambda x: mp.sqrt(2) * mp.erfinv(2 * x - 1) if 0 < x < 1 else (NAN if x else pole(-1)), {}, 0.97),
    "log_ndtr": (lambda x: mp.log(mp.ncdf(x)), {}, 3), "limited": (lambda x: clipped(x, -1, 2), {"min": -1.0, "max": 2.0}, 3),
    "threshold": (lambda x: x if x > 0.5 else mpf(-1.5), {"threshold": 0.5, "value": -1.5}, 3),
    "hardshrink": (lambda x: x if abs(x) > 0.5 else mpf(0), {"lambd": 0.5}, 3),
    "rrelu": (lambda x: x if x >= 0 else x * (mpf(0.1) + mpf(0.3)) / 2, {"lower": 0.1, "upper": 0.3}, 3),
    "quotient_of": (lambda x: mpf(1.7) / x if x else pole(1), {"numerator": 1.7}, 3),
    "floor_divide": (lambda x: mp.floor(x / mpf(0.7)), {"other": 0.7}, 3.1),
    "trunc_divide": (lambda x: truncated(x / mpf(0.7)), {"other": 0.7}, 3.1),
    "remainder": (lambda x: x - mp.floor(x / mpf(0.7)) * mpf(0.7), {"other": 0.7}, 3.1),
    "fmod": (lambda x: x - truncated(x / mpf(0.7)) * mpf(0.7), {"other": 0.7}, 3.1),
    "inverse_root": (lambda x: x ** (-1 / mpf(3)) if x > 0 else mpf(0), {"root": 3.0}, 3),
    "bounded_inverse": (lambda x: max(x, mpf(1)) ** -mpf(1.5), {"exponent": 1.5}, 3),
    "log_of_one_and_exponential": (lambda x: mp.log1p(mp.exp(-abs(x))), {}, 4),
    "log_of_base": (lambda x: mp.log(x) if x > 0 else (-20 * mp.log(2) if x == 0 else NAN), {}, 3),
    "angle_of_share": (lambda x: mp.atan2(x, 1 - abs(x)), {}, 1),
    "softshrink": (lambda x: mp.sign(x) * max(abs(x) - mpf(0.5), mpf(0)), {"lambd": 0.5}, 3),
}  # fmt: skip


def expected(function: Callable[[Any], Any], x: float, output: Grid) -> int:
    """clip(⌊f(x) / scale + ½⌋); the end of the range where it is infinite, 0 where there is no number."""
    value = function(mpf(x))
    if mp.isnan(value):
        return 0
    if mp.isinf(value):
        return output.high if value > 0 else output.low
    return int(min(max(mp.floor(value / mpf(float(output.scale)) + mpf("0.5")), output.low), output.high))


def grid(dtype: str, largest: float) -> Grid:
    kind = ACTIVATION_TYPES[dtype]
    return Grid(kind, torch.tensor(largest / kind.high, dtype=torch.float32), 0)


@pytest.mark.sweep(40)
@pytest.mark.parametrize("name", MEANINGS)
def test_a_table_is_the_function(name: str) -> None:
    function, settings, largest = MEANINGS[name]
    on_tensors, on_numbers = UNARY[name]
    for dtype, stride in (("int8", 1), ("int16", 641)):
        input = grid(dtype, largest)
        points = [c * float(input.scale) for c in range(input.low, input.high + 1)]
        with torch.no_grad():
            values = on_tensors(torch.tensor(points), **settings)
        output = grid(dtype, float(values[torch.isfinite(values)].abs().max()) * 0.83)  # something saturates
        result = table(lambda x: on_numbers(x, **settings), input, output, lambda x: on_tensors(x, **settings)).tolist()
        assert len(set(result)) > 2
        assert result[::stride] == [expected(function, x, output) for x in points[::stride]]


def functions_of(x: Tensor, c: float) -> tuple[Any, ...]:
    """Functions of a float32 tensor with a number from 0.1 to 0.9."""
    y = x.abs() + 0.5
    return (
        *(F.leaky_relu(x, c), F.elu(x, c), F.celu(x, c), F.softplus(x, c, 3), F.softplus(x, 2, c), F.threshold(x, c, -c), x.clamp(-c, c)),
        *(F.hardshrink(x, c), F.softshrink(x, c), F.rrelu(x, c, c), y**c, c**x, c / y, x / c, x * c, x + c, torch.sub(x, y, alpha=c)),
        *(x % c, torch.fmod(x, c), torch.sigmoid(x + c), torch.where(x > c, x, c), F.hardtanh(x, c, 2.0)),
        *(torch.where(x > 0, x, x * c), F.leaky_relu(x, c).clamp(-c), torch.floor(x / c), torch.round(y * c, decimals=1)),
    )


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "nash-e", "x86"])
def test_a_number_is_that_of_float32(target: str) -> None:
    """PyTorch passes it so to a function of float32 tensors, and ONNX to a chip."""

    @members(lambda round_to: dict(round_to=round_to))
    def Net(self, x: Tensor) -> tuple[Any, ...]:
        return tuple(y for c in (0.1, 0.3, 0.7, 0.9) for y in functions_of(x, self.round_to(c)))

    def outputs(round_to: Callable[[float], float]) -> Any:
        config = fxq.QConfig(fxq.ActivationConfig("int8", observer="min_max"))
        return fxq.quantize(Net(round_to).eval(), [x], target, config).integer(x)

    x = torch.linspace(-6.4, 6.35, 256).reshape(1, 4, 8, 8)  # PyTorch computes powers in vectors with a float32 exponent
    for actual, right in zip(outputs(float), outputs(lambda c: float(np.float32(c))), strict=True):
        assert torch.equal(actual, right)


def by_torch(name: str) -> bool:
    """Whether a function of numbers is PyTorch's: it says nothing about PyTorch's."""
    return UNARY[name][1].__qualname__.startswith("by_torch.")


@pytest.mark.parametrize("name", [name for name in NAMES if name in BY_NAME and not by_torch(name)])
def test_the_function_of_numbers_is_pytorchs_in_float64(name: str) -> None:
    """Two definitions, of two authors: what a table is made of, and what the float model computes. Either may be wrong alone."""
    on_tensors, on_numbers = UNARY[name]
    for sample in (sample for sample in BY_NAME[name].samples if not sample.text):
        settings = {key: value for key, value in sample.arguments.items() if key != "input"}
        low, high = sample.over or (-3.0, 3.0)
        points = torch.linspace(low, high, POINTS, dtype=torch.float64)
        result = torch.tensor([on_numbers(x, **settings) for x in points.tolist()], dtype=torch.float64)
        torch.testing.assert_close(result, on_tensors(points, **settings), rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_function_that_only_pytorch_has_is_defined_a_second_time() -> None:
    assert {name for name in NAMES if by_torch(name)} <= set(MEANINGS) <= set(NAMES)

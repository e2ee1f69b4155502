"""Operators as primitives at once: additions, joins, means, layers and resizing against the oracle, on scales at random; and gradients."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fxquant.backends.bpu import CHIP, CHIP_8, REAL
from fxquant.errors import AccumulatorOverflow
from fxquant.lowering.eager import EagerLowering, Mode
from fxquant.lowering.lowering import Quantized
from fxquant.numerics.grids import INT8, WEIGHT_INT8, Grid, IntType, Ratio
from fxquant.numerics.rounding import straight_through
from fxquant.ops import BY_NAME
from fxquant.ops.core.weighted import lower_weighted
from fxquant.ops.layers.linear import PRODUCT
from fxquant.ops.sampling.resize import _stepped_neighbours
from fxquant.primitives import PRIMITIVES, accumulate, elementwise, pool, quantization
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightQuantizer
from tests.shared import oracle
from tests.shared.drawn import EXACT, float32, random_integers

pytestmark = pytest.mark.quick

EVERY_INT8 = torch.arange(-128, 128).to(torch.int8)


@EXACT
@given(st.integers(1, 40), st.integers(1, 90), st.booleans(), st.sampled_from([8, 16]))
def test_stepped_neighbours(old: int, new: int, align_corners: bool, bits: int) -> None:
    result = _stepped_neighbours(old, new, None, align_corners, bits)
    expected = [oracle.stepped_row(position, old, new, align_corners, bits) for position in range(new)]
    for (first, second), ((place, weight), (following, other)) in zip(result, expected, strict=True):
        assert (first, second) == (place, other if following > place else 0)
        assert weight + other == 256


def test_stepped_neighbours_by_a_factor_follow_the_factor() -> None:
    """2 gives what the sizes give; 1.7 of 5 elements is 8 results, and not 5/8 of a step."""
    assert _stepped_neighbours(5, None, 2.0, False, 16) == _stepped_neighbours(5, 10, None, False, 16)
    by_factor = _stepped_neighbours(5, None, 1.7, False, 16)
    assert len(by_factor) == 8
    assert by_factor != _stepped_neighbours(5, 8, None, False, 16)
    for position, (first, second) in enumerate(by_factor):
        assert abs(first + second / 256 - min(max((position + 0.5) / 1.7 - 0.5, 0), 4)) < 1 / 100


class Recording(EagerLowering):
    """A lowering that keeps the constants it is given."""

    constants: dict[str, Tensor]

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        self.constants[role] = value
        return super().constant(role, value, dtype)


def lowering(arithmetic: Arithmetic, scale: Fraction, intermediate: Fraction | None = None, dtype: IntType = INT8) -> Recording:
    def quantizer(value: Fraction) -> Quantizer:
        return Quantizer(dtype, None, scale=float(value))

    inner = None if intermediate is None else quantizer(intermediate)
    built = Recording("y", arithmetic, quantizer(scale), inner, WeightQuantizer(WEIGHT_INT8), Mode())
    built.constants = {}
    return built


def quantized(integers: Tensor, scale: Fraction) -> Quantized:
    return Quantized(integers.float(), Grid(INT8, float32(scale)), tuple(integers.shape))


both_arithmetics = pytest.mark.parametrize("arithmetic", [CHIP, REAL], ids=["bayes-e", "real"])

measured_and_real = pytest.mark.parametrize("arithmetic", [CHIP, CHIP_8, REAL], ids=["bayes-e", "bernoulli2", "real"])

RULES = {id(CHIP): oracle.Rules("fixed", measured=True), id(REAL): oracle.Rules("real")}

RULES[id(CHIP_8)] = oracle.Rules("fixed", resize_bits=8, measured=True, by_layers=True)

near_scales = st.builds(lambda m, e: Fraction(m) * Fraction(2) ** (e - 23), st.integers(2**23, 2**24 - 1), st.integers(-8, 0))


def requantized(
    arithmetic: Arithmetic, accumulator: int, ratio: Fraction, low: int = -128, high: int = 127, bits: int = 32, kind: str = "value"
) -> int:
    """An int8 output, by the oracle."""
    return oracle.requantized(accumulator, ratio, oracle.Grid(Fraction(1), low, high, 8), RULES[id(arithmetic)], None, bits, kind)


@pytest.mark.parametrize(
    ("multiplier", "fused"),
    [
        ("0.5", False), ("0.51", True), ("255.49", True), ("256.5", True), ("257.5", True), ("1000", True), ("16776000", True),
        ("16777216", False),
    ],
)  # fmt: skip
def test_where_a_residual_is_added(multiplier: str, fused: bool) -> None:
    """In the accumulator from a whole multiplier of 1 on, rounded half to even, while the sum stays within int32."""
    constants, expected = residual_constants(CHIP_8, multiplier)
    assert fused == (expected >= 1 and 254 * 128 + expected * 128 < 2**31)
    assert ("residual_multiplier" in constants) == fused
    if fused:
        assert int(constants["residual_multiplier"]) == expected


@pytest.mark.parametrize(
    ("multiplier", "fused"), [("0.0001", True), ("255.49", True), ("65535.5", True), ("16776000", True), ("2e7", False)]
)
def test_a_residual_with_a_shift_is_added_at_every_ratio(multiplier: str, fused: bool) -> None:
    """Small multipliers keep 15 bits; only a sum beyond int32 is formed apart."""
    constants, _ = residual_constants(CHIP, multiplier)
    assert ("residual_multiplier" in constants) == fused
    if fused:
        step = oracle.float32(Fraction(1, 127))
        mantissa, n = oracle.measured_mantissa(oracle.float32(Fraction(multiplier) * step) / step, 31)
        result = int(constants["residual_multiplier"]), int(constants["residual_right_shift"])
        assert result == (mantissa << max(-n, 0), max(n, 0))


def residual_constants(arithmetic: Arithmetic, multiplier: str) -> tuple[dict[str, Tensor], int]:
    """Return the constants of a layer whose residual has about this ratio to its sum, and the ratio as an integer."""
    operator = lowering(arithmetic, Fraction(1), Fraction(1))
    weight, step = torch.tensor([[1.0, -1.0]]), oracle.float32(Fraction(1, 127))
    residual_scale = oracle.float32(Fraction(multiplier) * step)
    with torch.no_grad():
        lower_weighted(
            operator, PRODUCT, quantized(torch.tensor([[5, 7]]), Fraction(1)), weight, None, quantized(torch.tensor([[-3]]), residual_scale)
        )
    return operator.constants, oracle.residual_multiplier(residual_scale, Fraction(1), step)


@pytest.mark.parametrize(("inputs", "fits"), [(132_104, True), (132_105, False)])
def test_a_wide_sum_is_proved_or_refused(inputs: int, fits: bool) -> None:
    """Σ|w| · 128 < 2^31."""
    operator = lowering(CHIP, Fraction(1, 2**3))
    integers = random_integers(1, (1, inputs), -127, 126)

    def run() -> Quantized:
        with torch.no_grad():
            return lower_weighted(operator, PRODUCT, quantized(integers, Fraction(1, 2**24)), torch.ones(1, inputs), None)

    if fits:
        step = oracle.float32(Fraction(1, 127)) / 2**24
        total = 127 * sum(integers[0].tolist()) + oracle.lifted_bias(0, step, Fraction(1, 2**3))
        assert run().value.tolist() == [[requantized(CHIP, total, step * 2**3, kind="layer")]]
    else:
        with pytest.raises(AccumulatorOverflow):
            run()


@pytest.mark.parametrize(("rows", "fits"), [(127, True), (128, False)])
def test_a_window_is_proved_or_refused(rows: int, fits: bool) -> None:
    """A window's sum stays below 2^22: fewer than 2^15 int8 elements."""
    input = random_integers(1, (1, 1, rows, 256))

    def run() -> Quantized:
        with torch.no_grad():
            operator = lowering(REAL, Fraction(1, 2**7))
            return BY_NAME["avg_pool2d"].lower(operator, quantized(input, Fraction(1)), [rows, 256], None, 0, False, True, None)

    if fits:
        expected = requantized(REAL, sum(input.flatten().tolist()), Fraction(2**7, rows * 256))
        assert run().value.tolist() == [[[[expected]]]]
    else:
        with pytest.raises(AccumulatorOverflow):
            run()


def gradient(function: Callable[[Tensor], Tensor], at: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The value of the function, and the gradient of the sum of upstream · function."""
    variable = at.detach().clone().requires_grad_()
    value = function(variable)
    (slope,) = torch.autograd.grad(value, variable, upstream.to(value.dtype))
    return value.detach(), slope


def test_straight_through_has_the_bits_of_one_and_the_gradient_of_the_other() -> None:
    exact = torch.tensor([3.0, -0.0, 1e-45, -127.0, float("inf"), 2.0**24 + 2])
    upstream = torch.arange(1.0, 7.0)
    value, slope = gradient(lambda x: straight_through(x * 0.375, exact), torch.linspace(-9, 9, 6), upstream)
    assert torch.equal(value.view(torch.int32), exact.view(torch.int32))
    assert torch.equal(slope, upstream * 0.375)
    wide = torch.tensor([2.0**30 + 1.5], dtype=torch.float64)
    value, slope = gradient(lambda x: straight_through(x * 2, wide), torch.zeros(1), torch.ones(1, dtype=torch.float64))
    assert value.dtype == torch.float64
    assert torch.equal(value, wide)
    assert slope.dtype == torch.float32
    assert torch.equal(slope, torch.tensor([2.0]))


@both_arithmetics
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clamp", [None, (0.0, None), (0.0, 6.0)])
def test_requantization_gradient(arithmetic: Arithmetic, dtype: torch.dtype, clamp: Any) -> None:
    """The forward pass is the integer function; the slope is that of acc · ratio / scale inside the range, 0 where it saturates."""
    scale, ratio = Fraction(1, 16), torch.tensor(0.0007)
    accumulator = torch.tensor([0, 1, -1, 500, -500, 11000, 11300, 11400, -11300, -11500, 12345678, -12345678], dtype=dtype)
    operator = lowering(arithmetic, scale)
    upstream = torch.arange(1.0, 13.0)
    value, slope = gradient(lambda acc: operator.requantize(acc, Ratio((ratio,)), clamp).value, accumulator, upstream)
    with torch.no_grad():
        expected = operator.requantize(accumulator, Ratio((ratio,)), clamp).value
    integer = operator.requantize(accumulator.int(), Ratio((ratio,)), clamp).value
    assert torch.equal(value, expected)
    assert torch.equal(value, integer.float())
    real = accumulator.double() * float(ratio)
    low, high = max(-8.0, -9.0 if clamp is None else 0.0), min(127 / 16, 9.0 if clamp is None or clamp[1] is None else 6.0)
    inside = (real >= low) & (real <= high)
    assert inside.any()
    assert not inside.all()
    wide_ratio = ratio.to(dtype)
    assert torch.equal(slope, torch.where(inside, upstream.to(dtype) * 16 * wide_ratio, torch.zeros((), dtype=dtype)))


def test_quantize_gradient() -> None:
    operator = lowering(CHIP, Fraction(1, 16))
    input = torch.tensor([0.03, -0.03, 7.9, 7.9375, 7.95, 100.0, -8.0, -8.01, -1e30, 0.0])
    upstream = torch.arange(1.0, 11.0)
    value, slope = gradient(lambda x: operator.quantize(x).value, input, upstream)
    assert torch.equal(value, quantization.quantize(input, torch.tensor(1 / 16), -128, 127, torch.int8).float())
    inside = torch.tensor([True, True, True, True, False, False, True, False, False, True])
    assert torch.equal(slope, upstream * 16 * inside)
    surrogate = PRIMITIVES[quantization.quantize].surrogate
    assert surrogate is not None
    _, same = gradient(lambda x: surrogate(x, torch.tensor(1 / 16), -128, 127, torch.int8), input, upstream)
    assert torch.equal(same, slope)


@pytest.mark.parametrize(
    ("primitive", "parameters", "slope"),
    [
        (elementwise.align_fixed, (torch.tensor(19661, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)), 19661 / 4),
        (elementwise.align_real, (torch.tensor(4915.19970703125),), 4915.19970703125),
    ],
)
def test_align_gradient(primitive: Callable[..., Tensor], parameters: tuple[Tensor, ...], slope: float) -> None:
    operator = lowering(CHIP, Fraction(1))
    value, gradient_of = gradient(lambda q: operator.call(primitive, q, *parameters), EVERY_INT8.float(), torch.ones(256))
    assert torch.equal(value, primitive(EVERY_INT8, *parameters).float())
    assert torch.equal(gradient_of, torch.full((256,), slope))


CONVOLUTION = [2], [1], [1], 2
SUMS = {  # a float function, the primitive, what else both take, and the shapes of input, weight and result
    "convolution": (F.conv1d, accumulate.convolution, CONVOLUTION, ((2, 4, 6), (6, 2, 3), (2, 6, 3))),
    "convolution_wide": (F.conv1d, accumulate.convolution_wide, (*CONVOLUTION, [2, 4, 1, 8]), ((2, 4, 6), (6, 2, 3), (2, 6, 3))),
    "linear_wide": (F.linear, accumulate.linear_wide, (), ((3, 5), (4, 5), (3, 4))),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_have_the_gradient_of_the_float_operator(name: str) -> None:
    """Of each operand. Integers throughout, so that gradients are exact too."""
    function, primitive, rest, sizes = SUMS[name]
    operator, rest_of_float = lowering(CHIP, Fraction(1)), rest[:4]
    input, weight, upstream = (random_integers(seed, size, -127, 127).float() for seed, size in zip((2, 4, 6), sizes, strict=True))
    operands = input, weight, torch.arange(float(len(weight)))
    for index in range(3):

        def of(function: Callable[..., Tensor], *extra: Any, index: int = index) -> tuple[Tensor, Tensor]:
            return gradient(lambda x: function(*operands[:index], x, *operands[index + 1 :], *extra), operands[index], upstream)

        expected, (value, slope) = of(function, *rest_of_float), of(lambda *a: operator.call(primitive, *a), *rest)
        assert torch.equal(value.float(), expected[0])
        assert torch.equal(slope, expected[1])


def test_average_pool_and_residual_have_gradients() -> None:
    input = random_integers(2, (1, 1, 4, 4)).float()
    _, slope = gradient(lambda x: pool.sum_pool(x, [2, 2], [2, 2], [0, 0], [0, 0]), input, torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))
    assert slope[0, 0].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]
    accumulator = torch.zeros(1, 3, dtype=torch.float64)
    k = torch.tensor([256, 300, 999])
    _, slope = gradient(lambda r: accumulate.add_residual(accumulator, r, k), torch.ones(1, 3), torch.ones(1, 3))
    assert slope.tolist() == [[256, 300, 999]]
    operator = lowering(CHIP, Fraction(1))
    value, slope = gradient(
        lambda r: operator.call(accumulate.add_residual_shifted, accumulator, r, k, torch.tensor([1, 2, 9])),
        torch.ones(1, 3),
        torch.ones(1, 3),
    )
    assert value.tolist() == [[128, 75, 1]]
    assert slope.tolist() == [[128, 75, 999 / 512]]

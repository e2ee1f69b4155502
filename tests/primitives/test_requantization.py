"""Sums at the ends of what is exact, and every rounding at its ties, on each path against the oracle, bit for bit."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxquant.backends.bpu import MEASURED, WIDTHS
from fxquant.numerics.grids import INT8, INT16, Grid, IntType, Ratio, fixed_requantization, real_multiplier
from fxquant.primitives import accumulate, elementwise, pool, quantization
from fxquant.primitives.quantization import requantize_fixed, requantize_real
from tests.shared import oracle
from tests.shared.drawn import EXACT, SLOW, float32, random_integers, seeds

pytestmark = pytest.mark.quick

INT32_LOW, INT32_HIGH = -(2**31), 2**31 - 1
EXTREMES = (-128, -127, -125, -1, 0, 1, 125, 127)  # odd ones: products of -128 share a factor, and hide lost bits


def both_paths(
    primitive: Callable[..., Tensor], *operands: Any, storage: torch.dtype, activations: int = 1, wide: bool = False
) -> list[Any]:
    """The result of a primitive as a nested list, after comparing its two paths; the first `activations` operands are."""
    integer = primitive(*operands)
    assert integer.dtype == storage
    floating = primitive(*(o.float() if isinstance(o, Tensor) and i < activations else o for i, o in enumerate(operands)))
    assert floating.dtype == (torch.float64 if wide else torch.float32)
    assert torch.equal(floating.double(), integer.double())
    return integer.tolist()


@SLOW
@given(seeds, st.sampled_from(EXTREMES), st.booleans())
def test_wide_convolution_beyond_float32(seed: int, extreme: int, linear: bool) -> None:
    """Sums beyond 2^24, odd, from operands at the ends of their range: a float32 sum loses bits, the split one none."""
    channels = 2**13 if linear else 2**10
    weight = random_integers(seed | 1, (2, channels, 1 if linear else 3), 121, 127)
    weight = torch.where(weight % 2 == 0, weight - 1, weight)  # all odd
    input = torch.full((1, channels, 1 if linear else 3), extreme, dtype=torch.int8)
    input[0, 0, 0] = 1
    bias = torch.tensor([2**23 - 1, -(2**23) + 1], dtype=torch.int32)
    expected = (input.long() * weight.long()).sum(dim=(1, 2)) + bias.long()
    assert abs(extreme) < 100 or expected.abs().max() > 2**25
    if linear:
        result = both_paths(accumulate.linear_wide, input[..., 0], weight[..., 0], bias, storage=torch.int32, wide=True)
        assert result == [expected.tolist()]
    else:
        arguments = (input, weight, bias, [1], [0], [1], 1, [2, 4, 1, 8])
        result = both_paths(accumulate.convolution_wide, *arguments, storage=torch.int32, wide=True)
        assert result == [[[value] for value in expected.tolist()]]


def test_sums_ignore_autocast() -> None:
    input, weight = random_integers(2, (2, 64, 5)), random_integers(4, (3, 64, 3), -127, 127)
    convolve = [1], [1], [1], 1
    calls = [
        (accumulate.convolution, input, weight, None, *convolve),
        (accumulate.convolution_wide, input, weight, None, *convolve, [2, 4, 1, 8]),
        (accumulate.linear, input.mT, weight[..., 0], None),
        (accumulate.linear_wide, input.mT, weight[..., 0], None),
        (pool.sum, input, [1], False),
    ]
    expected = [primitive(*arguments) for primitive, *arguments in calls]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(primitive(*arguments), wanted) for (primitive, *arguments), wanted in zip(calls, expected, strict=True))


def test_split() -> None:
    for dtype, parts in itertools.product((INT8, INT16), (1, 2, 3, 4, 8)):
        bits = -(-dtype.bits // parts)
        values = torch.arange(dtype.low, dtype.high + 1, dtype=torch.float32)
        result = accumulate.split(values, parts, bits)
        assert torch.equal(sum(part * 2 ** (i * bits) for i, part in enumerate(result)), values)
        for low in result[:-1]:
            assert (low.min(), low.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert result[-1].abs().max() <= 2 ** (bits - 1)
        if parts == 2:
            low, high = result
            assert list(zip(high.tolist(), low.tolist(), strict=True)) == [oracle.split(int(value), bits) for value in values]


ends_of_int32 = st.sampled_from([INT32_LOW, INT32_LOW + 1, INT32_HIGH, -1, 0, 1])

whole = st.one_of(st.integers(INT32_LOW, INT32_HIGH), st.integers(-40000, 40000), ends_of_int32)


def odd_between(low: int, high: int) -> st.SearchStrategy[int]:
    """Odd numbers n with low ≤ n < high, both even."""
    return st.integers(low // 2, high // 2 - 1).map(lambda n: 2 * n + 1)


@st.composite
def fixed_at_ties(draw: Any) -> tuple[int, int, int, int]:
    """(acc, a, M, b) with t · M / 2^b equal to n + ½ or one step of t beside it, whatever the bits the first shift drops."""
    a, twos = draw(st.integers(0, 15)), draw(st.integers(0, 14))
    multiplier = 2**twos * (1 if twos == 14 else draw(odd_between(2 ** (14 - twos), 2 ** (15 - twos))))
    b = draw(st.integers(twos + 1, min(twos + 15, 31)))
    step = 2 ** (b - 1 - twos)
    t = step * draw(odd_between(-(2**15) // step, 2**15 // step)) + draw(st.sampled_from([-1, 0, 0, 1]))
    dropped = draw(st.sampled_from([0, 1, 2**a - 1])) % 2**a
    return t * 2**a + dropped, a, multiplier, b


ROUNDINGS = ("half_up", "floor", "half_step", "nearest_half_step", "half_away", "half_even")


def assert_on_every_path(
    primitive: Callable[..., Tensor], accumulator: list[int], constants: list[Tensor], *rest: Any, expected: Any
) -> None:
    """Of int32, of float64 and, where it is exact, of float32; each element has its own constants."""
    whole = torch.tensor(accumulator, dtype=torch.int32)
    short = whole.long().abs() < 2**24
    for operand, chosen in ((whole, slice(None)), (whole.double(), slice(None)), (whole.float(), short)):
        result = primitive(operand[chosen], *(constant[chosen] for constant in constants), *rest)
        assert result.dtype == (torch.float32 if operand.is_floating_point() else rest[-1])
        assert result.tolist() == torch.tensor(expected)[chosen].tolist()


def check_fixed(rows: list[tuple[int, int, int, int]], bits: int, rounding: str, low: int, high: int, storage: torch.dtype) -> None:
    """Rows of (acc, a, M, b), each its own channel."""
    accumulator, *constants = zip(*rows, strict=True)
    expected = [oracle.requantize_fixed(*row, bits, rounding, low, high) for row in rows]
    tensors = [torch.tensor(constant, dtype=torch.int32) for constant in constants]
    assert_on_every_path(requantize_fixed, list(accumulator), tensors, bits, rounding, low, high, storage, expected=expected)


@EXACT
@given(
    st.lists(st.tuples(whole, st.integers(0, 31), st.integers(0, 2**15 - 1), st.integers(1, 31)), min_size=1, max_size=24),
    st.sampled_from(ROUNDINGS), st.sampled_from([(-128, 127), (0, 127), (0, 102), (-50, 50)]),
)  # fmt: skip
def test_requantize_fixed(rows: list[tuple[int, int, int, int]], rounding: str, bounds: tuple[int, int]) -> None:
    check_fixed(rows, 16, rounding, *bounds, torch.int8)


@EXACT
@given(st.lists(fixed_at_ties(), min_size=1, max_size=24), st.sampled_from(ROUNDINGS))
def test_requantize_fixed_at_ties(rows: list[tuple[int, int, int, int]], rounding: str) -> None:
    check_fixed(rows, 16, rounding, -128, 127, torch.int8)
    check_fixed(rows, 16, rounding, -(2**20), 2**20, torch.int32)  # nothing saturates: every tie shows


@EXACT
@given(
    st.lists(st.tuples(whole, st.just(0), st.integers(0, 2**21 - 1), st.integers(1, 31)), min_size=1, max_size=24),
    st.sampled_from(ROUNDINGS),
)  # fmt: skip
def test_requantize_fixed_to_int16(rows: list[tuple[int, int, int, int]], rounding: str) -> None:
    check_fixed(rows, 32, rounding, -32768, 32767, torch.int16)
    check_fixed([(acc, a, m, 31) for acc, a, m, _ in rows], 32, rounding, -(2**22), 2**22, torch.int32)


def test_requantize_fixed_at_the_ends_of_everything() -> None:
    ends = (INT32_LOW, INT32_LOW + 1, -32769, -32768, -32767, -2, -1, 0, 1, 2, 32767, 32768, INT32_HIGH - 1, INT32_HIGH)
    rows = list(itertools.product(ends, (0, 1, 6, 16, 31), (0, 1, 2**14, 2**15 - 1), (1, 2, 15, 22, 30, 31)))
    for rounding in ROUNDINGS:
        check_fixed(rows, 16, rounding, -128, 127, torch.int8)
        check_fixed(rows, 16, rounding, -(2**24), 2**24, torch.int32)
        check_fixed([(acc, 0, 2**21 - m // 2**10 - 1, b) for acc, _, m, b in rows], 32, rounding, -32768, 32767, torch.int16)


ratio_scales = st.builds(lambda m, e: Fraction(m) * Fraction(2) ** (e - 23), st.integers(2**23, 2**24 - 1), st.integers(-23, 10))


@EXACT
@given(st.lists(st.tuples(ratio_scales, ratio_scales, whole), min_size=1, max_size=8), ratio_scales, st.sampled_from([INT8, INT16]))
def test_requantization_of_a_ratio(rows: list[tuple[Fraction, Fraction, int]], output: Fraction, dtype: IntType) -> None:
    """Parameters and values together, per channel, with the channel not last."""
    weights = torch.tensor([float(w) for _, w, _ in rows]).reshape(-1, 1)
    accumulator = torch.tensor([acc for *_, acc in rows], dtype=torch.int32).reshape(1, -1, 1).expand(2, -1, 3)
    input = rows[0][0]
    ratio = Ratio((float32(input), weights), (float32(output),))
    exact = [input * w / output for _, w, _ in rows]
    pairs = [(acc, m) for (*_, acc), m in zip(rows, exact, strict=True)]

    def check(primitive: Callable[..., Tensor], constants: Any, *rest: Any, expected: list[int]) -> None:
        for operand in (accumulator, accumulator.double()):
            assert primitive(operand, *constants, *rest, dtype.storage).tolist() == [[[value] * 3 for value in expected]] * 2

    widths, bits = WIDTHS[dtype.name], oracle.INT8_WIDTHS if dtype is INT8 else oracle.INT16_WIDTHS
    fixed, tail = fixed_requantization(ratio, widths, dtype), (widths.intermediate_bits, "half_up", dtype.low, dtype.high)
    expected = [oracle.requantize_fixed(acc, *oracle.fixed_parameters(m, bits, dtype.high), *tail) for acc, m in pairs]
    check(requantize_fixed, (fixed.shift, fixed.multiplier, fixed.right_shift), *tail, expected=expected)
    for layer, rounding in ((True, "floor"), (False, "half_up"), (False, "nearest_half_step")):
        built, tail = MEASURED[dtype.name].constants(ratio, dtype, 32, layer), (16, rounding, dtype.low, dtype.high)
        expected = [oracle.requantize_fixed(acc, *oracle.measured_parameters(m, dtype.bits, 32, layer), *tail) for acc, m in pairs]
        check(requantize_fixed, (built.shift, built.multiplier, built.right_shift), *tail, expected=expected)
    expected = [oracle.requantize_real(acc, oracle.real_multiplier(m), dtype.low, dtype.high) for acc, m in pairs]
    check(requantize_real, (real_multiplier(ratio),), dtype.low, dtype.high, expected=expected)


@EXACT
@given(st.lists(st.tuples(whole.filter(bool), st.integers(-140, 140), st.integers(-2, 2)), min_size=1, max_size=24))
def test_requantize_real_next_to_ties(rows: list[tuple[int, int, int]]) -> None:
    """Multipliers a few float32 steps around (n + ½) / acc: the product rounds onto ties and past them."""
    multipliers = []
    for acc, n, steps in rows:
        value = oracle.float32(abs(Fraction(2 * n + 1, 2 * acc)))
        multipliers.append(oracle.float32(value + steps * Fraction(2) ** (oracle.exponent_of(value) - 23)))
    accumulator, factor = [acc for acc, *_ in rows], torch.tensor([float(m) for m in multipliers])
    for low, high, storage in ((-128, 127, torch.int8), (-50, 0, torch.int8), (-32768, 32767, torch.int16)):
        expected = [oracle.requantize_real(acc, m, low, high) for acc, m in zip(accumulator, multipliers, strict=True)]
        assert_on_every_path(requantize_real, accumulator, [factor], low, high, storage, expected=expected)


def test_requantization_leaves_its_operand_alone() -> None:
    for dtype in (torch.int32, torch.float32, torch.float64):
        operand = torch.tensor([700, -300], dtype=dtype)
        before = operand.clone()
        one = torch.ones(2, dtype=torch.int32)
        requantize_fixed(operand, one, one * 20000, one * 20, 16, "half_up", -128, 127, torch.int8)
        requantize_real(operand, torch.tensor(0.1), -128, 127, torch.int8)
        elementwise.align_real(operand, torch.tensor(0.3))
        assert torch.equal(operand, before)


numbers = st.one_of(st.floats(width=32), st.integers(-600, 600).map(float))


@EXACT
@given(st.lists(numbers, min_size=1, max_size=24), ratio_scales, st.sampled_from([INT8, INT16]))
def test_quantize(numbers: list[float], scale: Fraction, dtype: IntType) -> None:
    halves = [float(oracle.float32(Fraction(n) * scale / 2)) for n in numbers if n == n and abs(n) <= 600]  # next to ties
    input = torch.tensor(numbers + halves)
    before = input.clone()
    expected = [oracle.quantize(x, scale, dtype.low, dtype.high) for x in input.tolist()]
    result = quantization.quantize(input, float32(scale), dtype.low, dtype.high, dtype.storage)
    assert result.dtype == dtype.storage
    assert result.tolist() == expected
    floating = Grid(dtype, float32(scale)).quantize(input)
    assert floating.dtype == torch.float32
    assert floating.tolist() == expected
    assert torch.equal(input.nan_to_num(), before.nan_to_num())


@EXACT
@given(st.lists(st.integers(-(2**22), 2**22), min_size=1, max_size=24), ratio_scales)
def test_dequantize(integers: list[int], scale: Fraction) -> None:
    expected = [float(oracle.dequantize(q, scale)) for q in integers]
    for dtype in (torch.int32, torch.float32):
        result = quantization.dequantize(torch.tensor(integers, dtype=dtype), float32(scale))
        assert result.dtype == torch.float32
        assert result.tolist() == expected


@pytest.mark.parametrize("dtype", [INT8, INT16])
@SLOW
@given(scale=ratio_scales)
def test_quantize_undoes_dequantize(dtype: IntType, scale: Fraction) -> None:
    integers = torch.arange(dtype.low, dtype.high + 1).to(dtype.storage)
    real = quantization.dequantize(integers, float32(scale))
    assert torch.equal(quantization.quantize(real, float32(scale), dtype.low, dtype.high, dtype.storage), integers)


EVERY_INT8 = torch.arange(-128, 128).to(torch.int8)


@SLOW
@given(st.one_of(st.just(Fraction(2**14)), st.builds(lambda a, b: 2**14 * min(a, b) / max(a, b), ratio_scales, ratio_scales)))
def test_align(ratio: Fraction) -> None:
    """Every int8 operand, at one ratio of scales; 2^14 for the larger operand."""
    above, below = (torch.tensor(float(part), dtype=torch.float64) for part in ratio.as_integer_ratio())
    parts = Ratio((above,), (below,))
    if parts.exact() != [ratio]:  # too long for a float64
        return
    multiplier, shift = parts.mantissa(15, largest_exponent=31)
    assert (multiplier.item(), shift.item()) == oracle.mantissa(ratio, 15, 31)
    expected = [oracle.align_fixed(q, *oracle.mantissa(ratio, 15, 31)) for q in range(-128, 128)]
    assert both_paths(elementwise.align_fixed, EVERY_INT8, multiplier.int(), shift.int(), storage=torch.int32) == expected
    assert elementwise.align_fixed(EVERY_INT8.float(), multiplier, shift).tolist() == expected  # as the prepared model passes them
    expected = [oracle.align_real(q, oracle.real_multiplier(ratio)) for q in range(-128, 128)]
    assert both_paths(elementwise.align_real, EVERY_INT8, real_multiplier(parts), storage=torch.int32) == expected


def test_sum_pool_up_to_its_bound() -> None:
    """The largest window of 2^15 elements, at odd extremes."""
    input = random_integers(1, (1, 1, 128, 255))
    assert pool.sum_pool(input, [128, 255], [1, 1], [0, 0], [0, 0]).item() == sum(input.flatten().tolist())
    assert pool.sum(input, [2, 3], True).shape == (1, 1, 1, 1)


def test_sum_of_many_odd_extremes() -> None:
    input = random_integers(1, (1, 2**17 - 1))
    input[input % 2 == 0] = -127
    assert both_paths(pool.sum, input, [1], False, storage=torch.int32) == [sum(input[0].tolist())]
    assert both_paths(pool.sum, torch.full((1, 2**17 - 1), -128, dtype=torch.int8), [1], False, storage=torch.int32) == [-128 * (2**17 - 1)]

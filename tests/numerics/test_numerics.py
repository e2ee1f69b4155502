"""The parameters of the arithmetic (scales, mantissas, shifts, biases, tables, proofs) against the oracle, bit for bit."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxquant.backends import bpu
from fxquant.backends.bpu import MEASURED, WIDTHS
from fxquant.numerics import grids
from fxquant.numerics.grids import INT4, INT8, INT16, WEIGHT_INT4, WEIGHT_INT8, WEIGHT_INT16, Grid, IntType, Ratio, round_up_to_power_of_two
from fxquant.ops.pooling.pool import _windows, runs, window_divisor
from fxquant.primitives.arithmetic import _without_last_bits
from tests.shared import oracle
from tests.shared.drawn import EXACT, SLOW, float32

Row = tuple[Fraction, Fraction, Fraction]


def stack(values: Iterable[Fraction | float]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


EDGES = st.sampled_from([2**23, 2**23 + 1, 2**23 + 2, 2**24 - 2, 2**24 - 1])
# float32 numbers of any mantissa; few significant bits, so that products and quotients meet ties; neighbours of powers of two
exponents = st.integers(-23, 10)
any_mantissa = st.builds(lambda m, e: Fraction(m) * Fraction(2) ** (e - 23), st.integers(2**23, 2**24 - 1), exponents)
short_mantissa = st.builds(lambda m, e: Fraction(m) * Fraction(2) ** e, st.integers(1, 31).map(lambda n: 2 * n - 1), exponents)
near_power = st.builds(lambda m, e: Fraction(m) * Fraction(2) ** (e - 23), EDGES, exponents)
power = exponents.map(lambda e: Fraction(2) ** e)
ONE = torch.ones(())
scales = st.one_of(any_mantissa, short_mantissa, near_power, power)
# a product of two odd numbers of at most 13 bits has up to 26: half of the time one more than a mantissa holds
odd_pairs = st.tuples(st.integers(1, 4096).map(lambda n: 2 * n - 1), st.integers(1, 4096).map(lambda n: 2 * n - 1), st.integers(-40, -10))
triples = st.one_of(
    st.tuples(scales, scales, scales), odd_pairs.map(lambda row: (Fraction(row[0]), Fraction(row[1]) * Fraction(2) ** row[2], Fraction(1)))
)


def ratio_of(rows: list[Row]) -> tuple[Ratio, list[Fraction]]:
    """The ratio s_x · s_w / s_y of every row, for the implementation and exactly."""
    input, weight, output = (stack(column) for column in zip(*rows, strict=True))
    return Ratio((input, weight), (output,)), [x * w / y for x, w, y in rows]


def listed(fixed: grids.FixedRequantization) -> list[tuple[int, int, int]]:
    """The shift, the multiplier and the right shift of every row."""
    return list(zip(*(part.flatten().tolist() for part in (fixed.shift, fixed.multiplier, fixed.right_shift)), strict=True))


def mantissas_of(ratio: Ratio, *settings: int) -> list[tuple[int, int]]:
    return list(zip(*(part.flatten().tolist() for part in ratio.mantissa(*settings)), strict=True))


# ---- scales ---------------------------------------------------------------------------------------------------------
@EXACT
@given(st.lists(st.tuples(any_mantissa, any_mantissa), min_size=1, max_size=40), st.sampled_from([INT4, INT8, INT16, WEIGHT_INT8]))
def test_observed_scale_is_the_correctly_rounded_quotient(ranges: list[tuple[Fraction, Fraction]], dtype: IntType) -> None:
    low, high = stack(-low for low, _ in ranges), stack(high for _, high in ranges)
    divisor = Fraction(dtype.high - dtype.low, 2)
    expected = stack(oracle.scale_from_range(-low, high, divisor) for low, high in ranges)
    assert torch.equal(grids.scale_from_range(low, high, dtype), expected)
    scalars = torch.stack([grids.scale_from_range(a, b, dtype) for a, b in zip(low, high, strict=True)])
    assert torch.equal(scalars, expected)  # one by one as together


def test_scale_conventions() -> None:
    assert [dtype.divisor for dtype in (INT8, INT16, INT4, WEIGHT_INT8, WEIGHT_INT16, WEIGHT_INT4)] == [127.5, 32767.5, 7.5, 127, 32767, 7]
    assert [dtype.magnitude for dtype in (INT8, INT16, WEIGHT_INT8)] == [128, 32768, 127]
    zero = torch.zeros(())
    assert grids.scale_from_range(zero, zero, INT8).item() == grids.FLOAT32_EPSILON == 2**-23
    assert grids.scale_from_threshold(4.0, INT8) == 4 / 128
    assert grids.scale_from_threshold(1.1, INT16) == 1.1 / 32768
    example = grids.scale_from_range(torch.tensor(-2.5), torch.tensor(3.1), INT8)
    assert Fraction(example.item()) == Fraction(3263333, 2**27)


@EXACT
@given(scales)
def test_power_of_two_scale_is_the_smallest_that_is_not_below(scale: Fraction) -> None:
    assert Fraction(round_up_to_power_of_two(float32(scale)).item()) == oracle.power_of_two_scale(scale)


def test_power_of_two_is_exact() -> None:
    exponent = torch.arange(-1022, 1024)
    assert grids.power_of_two(exponent).tolist() == [math.ldexp(1.0, e) for e in exponent.tolist()]
    assert grids.power_of_two(exponent.int()).dtype == torch.float64


@EXACT
@given(st.one_of(st.floats(-1e4, 1e4), st.integers(-300, 300).map(lambda n: n / 2)), scales, st.sampled_from([INT8, INT16]))
def test_clamp_bound(value: float, scale: Fraction, dtype: IntType) -> None:
    expected = oracle.clamp_bound(value, float(scale), 99, dtype.low, dtype.high)
    assert grids.clamp_bound(value, float(scale), 99, dtype) == expected


def test_clamp_bound_of_nothing_and_of_ties() -> None:
    assert grids.clamp_bound(None, 0.1, 127, INT8) == 127
    assert grids.clamp_bound(math.inf, 0.1, 127, INT8) == 127
    assert grids.clamp_bound(-math.inf, 0.1, -128, INT8) == -128
    assert [grids.clamp_bound(v, 2.0, 0, INT8) for v in (1.0, 3.0, -1.0, -3.0, 5.0)] == [1, 2, 0, -1, 3]
    assert [grids.clamp_bound(v, 1.0, 0, INT8) for v in (1e9, -1e9, 0.0)] == [127, -128, 0]
    assert grids.clamp_bound(6.0, float(float32(Fraction(59, 1000))), 127, INT8) == 102


# ---- ratios ---------------------------------------------------------------------------------------------------------
@EXACT
@given(
    st.lists(triples, min_size=1, max_size=12), st.integers(-2, 30), st.sampled_from([8, 15, 21, 24]), st.sampled_from([1000, 31, 10])
)  # fmt: skip
def test_a_ratio(rows: list[Row], bits: int, mantissa_bits: int, largest: int) -> None:
    """Exactly, rounded at powers of two, as a mantissa, and as a float32 number."""
    ratio, exact = ratio_of(rows)
    assert ratio.exact() == exact
    assert ratio.over(torch.tensor(7.0)).exact() == [value / 7 for value in exact]
    assert torch.allclose(ratio.approximate(), torch.tensor([float(value) for value in exact], dtype=torch.float64), rtol=2**-50, atol=0)
    exponents = [bits - 1 - oracle.exponent_of(value) for value in exact]  # results of `bits` bits
    rounded, multiplier = ratio.rounded(torch.tensor(exponents)), grids.real_multiplier(ratio)
    assert (rounded.dtype, multiplier.dtype) == (torch.int64, torch.float32)
    assert rounded.tolist() == [oracle.half_even(value * Fraction(2) ** e) for value, e in zip(exact, exponents, strict=True)]
    assert mantissas_of(ratio, mantissa_bits, largest) == [oracle.mantissa(value, mantissa_bits, largest) for value in exact]
    assert [Fraction(value) for value in multiplier.tolist()] == [oracle.float32(value) for value in exact]


long_odd = st.integers(2**22, 2**23 - 1).map(lambda n: 2 * n + 1)


@EXACT
@given(st.lists(st.tuples(st.integers(0, 2**27), long_odd, st.sampled_from([-1, 0, 1])), min_size=1, max_size=12))
def test_rounded_ratio_next_to_a_tie(rows: list[tuple[int, int, int]]) -> None:
    """((2n + 1) · d ± 1) / 2d is nearer to n + ½ than float64 arithmetic can tell for large n."""
    numerators = [(2 * n + 1) * d + side for n, d, side in rows]
    ratio = Ratio((torch.tensor(numerators, dtype=torch.float64),), (stack(Fraction(d) for _, d, _ in rows),))
    expected = [n + (n % 2 if side == 0 else (side + 1) // 2) for n, _, side in rows]
    assert expected == [oracle.half_even(Fraction(above, 2 * d)) for above, (_, d, _) in zip(numerators, rows, strict=True)]
    assert ratio.rounded(torch.full((len(rows),), -1)).tolist() == expected


@EXACT
@given(st.lists(st.tuples(st.integers(0, 2**11 - 1), st.integers(2**11, 2**12 - 1), long_odd, long_odd), min_size=1, max_size=12))
def test_ties_that_float64_arithmetic_loses(rows: list[tuple[int, int, int, int]]) -> None:
    """p · q · c · d / (c · d): an odd number p · q, exactly, but the product needs more than 53 bits on the way."""
    p, q, c, d = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    p, q = 2 * p + 1, 2 * q + 1
    ratio = Ratio((p, q, c, d), (d, c))
    odd = [int(value) for value in (p.double() * q.double()).tolist()]
    assert ratio.exact() == odd
    for twos in (1, 2, 9):
        expected = [oracle.half_even(Fraction(value, 2**twos)) for value in odd]
        assert ratio.rounded(torch.full((len(rows),), -twos)).tolist() == expected
    for bits in (8, 12, 15, 21):
        assert mantissas_of(ratio, bits) == [oracle.mantissa(Fraction(value), bits) for value in odd]
    assert grids.real_multiplier(ratio).tolist() == [oracle.float32(value) for value in odd]


@EXACT
@given(st.sampled_from([8, 15, 21]), st.integers(0, 2**6 - 1), st.booleans(), exponents)
def test_mantissa_at_ties(bits: int, offset: int, at_the_end: bool, exponent: int) -> None:
    """An odd number one bit longer than M: always a tie, up to the one that carries to 2^bits."""
    odd = 2 ** (bits + 1) - 1 - 2 * offset if at_the_end else 2**bits + 1 + 2 * offset
    mantissa, k = Ratio((float32(odd), float32(Fraction(2) ** exponent))).mantissa(bits)
    even = odd // 2 + (odd // 2) % 2
    carries = even == 2**bits
    assert (mantissa.item(), k.item()) == (even // 2 if carries else even, -1 - exponent - carries)


def test_ratio_at_the_edges_of_a_power_of_two() -> None:
    """Where the approximation may fall on the other side of a power of two, M and k come out the same."""
    one = 2**23
    rows = [(one + d, one - e) for d in range(4) for e in range(4)] + [(4097 * 2048, 4095 * 2048)]
    ratio, exact = ratio_of([(Fraction(a, one), Fraction(b, one), Fraction(1)) for a, b in rows])
    for bits in (2, 15, 21, 24):
        assert mantissas_of(ratio, bits) == [oracle.mantissa(value, bits) for value in exact]
    fifth = Ratio((torch.ones(4),), (torch.tensor([1.0, 2.0, 4.0, 5.0]),))
    assert [column.tolist() for column in fifth.mantissa(15)] == [[16384, 16384, 16384, 26214], [14, 15, 16, 17]]


def test_ratio_broadcasts() -> None:
    channels, window = torch.tensor([0.5, 0.3, 0.7]).reshape(3, 1, 1), torch.tensor([[4.0, 6.0], [6.0, 9.0]])
    ratio = Ratio((torch.tensor(0.1), channels), (window, torch.tensor(0.2)))
    assert [part.shape for part in ratio.mantissa(15)] == [(3, 2, 2)] * 2
    exact = [
        Fraction(torch.tensor(0.1).item()) * Fraction(c) / Fraction(w) / Fraction(torch.tensor(0.2).item())
        for c in channels.flatten().tolist() for w in window.flatten().tolist()
    ]  # fmt: skip
    assert ratio.exact() == exact
    assert mantissas_of(ratio, 15) == [oracle.mantissa(value, 15) for value in exact]


# ---- requantization parameters -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "dtype", "widths"), [("int8", INT8, oracle.INT8_WIDTHS), ("int16", INT16, oracle.INT16_WIDTHS)])
@EXACT
@given(rows=st.lists(triples, min_size=1, max_size=12), exponent=st.integers(-45, 25), bits=st.sampled_from([32, 48]))
def test_fixed_parameters(name: str, dtype: IntType, widths: oracle.Widths, rows: list[Row], exponent: int, bits: int) -> None:
    rows = [(x, w * Fraction(2) ** exponent, y) for x, w, y in rows]
    ratio, exact = ratio_of(rows)
    fixed = grids.fixed_requantization(ratio, WIDTHS[name], dtype, bits)
    assert fixed.shift.dtype == fixed.multiplier.dtype == fixed.right_shift.dtype == torch.int32
    assert listed(fixed) == [oracle.fixed_parameters(value, widths, dtype.high, bits) for value in exact]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "dtype"), [("int8", INT8), ("int16", INT16)])
@pytest.mark.parametrize("layer", [False, True])
@EXACT
@given(rows=st.lists(triples, min_size=1, max_size=12), exponent=st.integers(-45, 25), bits=st.sampled_from([8, 16, 32, 48]))
def test_measured_parameters(name: str, dtype: IntType, layer: bool, rows: list[Row], exponent: int, bits: int) -> None:
    """Of many channels, and of a single one, which is computed with Python's numbers."""
    rows = [(x, w * Fraction(2) ** exponent, y) for x, w, y in rows]
    for chosen in (rows, rows[:1]):
        ratio, exact = ratio_of(chosen)
        scalars = [Ratio(tuple(f[0] for f in ratio.numerators), (ratio.denominators[0][0],))] if len(chosen) == 1 else []
        for value in (ratio, *scalars):
            built = listed(MEASURED[name].constants(value, dtype, bits, layer))
            assert built == [oracle.measured_parameters(value, dtype.bits, bits, layer) for value in exact]


def test_measured_shifts_at_every_multiplier() -> None:
    """A layer's last shift is 23 from the multiplier 32513 on, every other one is 22; ties round up, but no multiplier to 2^15."""
    mantissas = torch.arange(2**14, 2**15, dtype=torch.float32)
    for layer, large in ((True, mantissas >= 32513), (False, torch.zeros(2**14, dtype=torch.bool))):
        for k in (1, 13, 22, 23, 24, 37, 40):
            built = MEASURED["int8"].constants(Ratio((mantissas, float32(Fraction(1, 2**k)))), INT8, 32, layer)
            exponent = min(k, 37)  # with a first shift of 15
            last = torch.where(large & (k == exponent), 23, 22).clamp_max(exponent).int()
            assert torch.equal(built.right_shift, last)
            assert torch.equal(built.shift, exponent - last)
            assert torch.equal(built.multiplier, torch.floor(mantissas * 2.0 ** (exponent - k) + 0.5).clamp_max(2**15 - 1).int())
    above = Ratio((torch.tensor([2**16 - 1.0, 2**16 - 2.0]),))  # half a step below 2^15, and a whole one
    assert MEASURED["int8"].constants(above, INT8, 32, False).multiplier.tolist() == [2**15 - 1, 2**15 - 1]


@EXACT
@given(st.lists(triples, min_size=1, max_size=8), st.integers(8, 24), st.integers(8, 24), st.sampled_from([INT4, INT8, INT16]))
def test_fixed_parameters_of_other_widths(rows: list[Row], intermediate: int, multiplier: int, dtype: IntType) -> None:
    """The rule is one of the widths, not of 16 and 15: a row of a target can change them."""
    if 2 ** (intermediate - 1) <= dtype.high:
        return
    ratio, exact = ratio_of(rows)
    fixed = grids.fixed_requantization(ratio, grids.FixedWidths(intermediate, multiplier, True), dtype)
    widths = oracle.Widths(intermediate, multiplier, True)
    assert listed(fixed) == [oracle.fixed_parameters(value, widths, dtype.high) for value in exact]


def test_first_shift_at_every_multiplier() -> None:
    """a changes between M = 32640 and 32641; every M of 15 bits, at several exponents, and with the carry."""
    mantissas = torch.arange(2**14, 2**15, dtype=torch.float32)
    for k in (1, 13, 22, 23, 24, 25, 40, 53, 54, 55, 62, 63):
        fixed = grids.fixed_requantization(Ratio((mantissas, float32(Fraction(1, 2**k)))), WIDTHS["int8"], INT8)
        least = [-(-255 * 2**k // (2 * 32767 * m)) for m in mantissas.int().tolist()]  # 2^a is at least this
        shift = torch.tensor([min((n - 1).bit_length(), 31) for n in least], dtype=torch.int32)
        assert torch.equal(fixed.shift, shift)
        assert torch.equal(fixed.right_shift, (k - shift).clamp_max(31))
        assert torch.equal(fixed.multiplier, torch.where(k - shift > 31, 0, mantissas.int()))


@EXACT
@given(st.lists(triples, min_size=1, max_size=12))
def test_residual_multiplier(rows: list[Row]) -> None:
    rows = [(r, x, w) for r, x, w in rows if r / (x * w) < 2**30]
    if not rows:
        return
    residual, input, weight = (stack(column) for column in zip(*rows, strict=True))
    multiplier = Ratio((residual,), (input, weight)).rounded(torch.zeros(len(rows), dtype=torch.int64))
    assert multiplier.tolist() == [oracle.residual_multiplier(*row) for row in rows]


# ---- weights and biases ----------------------------------------------------------------------------------------------------
weight_types = st.sampled_from([WEIGHT_INT8, WEIGHT_INT16, WEIGHT_INT4])


@SLOW
@given(st.lists(st.lists(any_mantissa, min_size=3, max_size=3), min_size=1, max_size=6), weight_types)
def test_weight_scale(rows: list[list[Fraction]], dtype: IntType) -> None:
    weight = torch.tensor([[float(v) * (-1) ** i for i, v in enumerate(row)] for row in rows], dtype=torch.float32)
    expected = [max(oracle.float32(max(row) / dtype.high), oracle.SMALLEST_SCALE) for row in rows]
    assert torch.equal(grids.weight_scale(weight, 0, dtype), stack(expected))
    assert torch.equal(grids.weight_scale(weight.t().reshape(3, -1, 1), 1, dtype), stack(expected))
    assert torch.equal(grids.weight_scale(weight, None, dtype), stack([max(expected)]))
    scale = grids.weight_scale(weight, 0, dtype)
    integers = torch.round(weight / scale.reshape(-1, 1))
    exact = [[oracle.weight_integer(Fraction(v), Fraction(s)) for v in row] for row, s in zip(weight.tolist(), scale.tolist(), strict=True)]
    assert integers.tolist() == exact
    assert integers.abs().max() <= dtype.high


biases = st.one_of(any_mantissa, short_mantissa).map(float).flatmap(lambda b: st.sampled_from([b, -b, 0.0]))


@EXACT
@given(st.lists(st.tuples(biases, scales), min_size=1, max_size=12), scales)
def test_bias_integers_and_the_scale_they_need(rows: list[tuple[float, Fraction]], input_scale: Fraction) -> None:
    bias, scale = torch.tensor([b for b, _ in rows], dtype=torch.float32), stack(s for _, s in rows)
    raised = torch.maximum(scale, grids.least_scale_for_bias(bias, float32(input_scale)))
    assert [Fraction(value) for value in raised.tolist()] == [oracle.raised_scale(s, b, float(input_scale)) for b, s in rows]
    integers = grids.bias_integers(bias, float32(input_scale), raised)
    assert integers.tolist() == [oracle.bias_integer(b, float(input_scale), s) for (b, _), s in zip(rows, raised.tolist(), strict=True)]
    assert float(integers.abs().max()) < 2**23
    kept = (bias.double() / (float(input_scale) * scale.double())).abs() < 2**23 - 3
    assert torch.equal(raised[kept], scale[kept])


@EXACT
@given(st.lists(st.tuples(st.integers(-(2**23) + 4, 2**23 - 4), any_mantissa), min_size=1, max_size=12), any_mantissa)
def test_bias_integers_next_to_ties(rows: list[tuple[int, Fraction]], input_scale: Fraction) -> None:
    """Biases that are the float32 numbers nearest to n + ½ steps."""
    bias = [float(oracle.float32((n + oracle.HALF) * s * input_scale)) for n, s in rows]
    integers = grids.bias_integers(torch.tensor(bias), float32(input_scale), stack(s for _, s in rows))
    assert integers.tolist() == [oracle.bias_integer(b, float(input_scale), float(s)) for b, (_, s) in zip(bias, rows, strict=True)]


@EXACT
@given(
    st.lists(st.tuples(st.integers(-(2**23), 2**23), st.sampled_from([0, 1, -1, 2]), any_mantissa), min_size=1, max_size=12), any_mantissa
)
def test_measured_biases_with_half_a_step(rows: list[tuple[int, int, Fraction]], output: Fraction) -> None:
    """At ties and beside them; with all bits, and with 16 bits."""
    steps = [oracle.float32(step * Fraction(1, 64)) for *_, step in rows]
    bias = [float(oracle.float32((n + Fraction(half, 2)) * step)) for (n, half, _), step in zip(rows, steps, strict=True)]
    for arithmetic, bits in ((bpu.CHIP, 32), (bpu.CHIP_8, 16)):
        own = arithmetic.bias(torch.tensor(bias), stack(steps), torch.ones(()))
        assert own.tolist() == [oracle.measured_bias(b, step) for b, step in zip(bias, steps, strict=True)]
        whole = arithmetic.layer_bias(own, stack(steps), float32(output))
        expected = [oracle.lifted_bias(int(b), step, output, bits) for b, step in zip(own.tolist(), steps, strict=True)]
        assert whole.tolist() == expected


def test_biases_of_16_bits_lose_their_last_ones_towards_zero() -> None:
    whole = [0, 1, -1, 32767, 32768, 32769, -32768, -32769, -32770, 65535, 65536, 65537, -65536, -65537, 2**30 - 1, 1 - 2**30]
    expected = [0, 1, -1, 32767, 32768, 32768, -32768, -32768, -32770, 65534, 65536, 65536, -65536, -65536, 32767 * 2**15, -32767 * 2**15]
    result = _without_last_bits(torch.tensor(whole, dtype=torch.float64), 16).tolist()
    assert result == expected
    for value, kept in zip(whole, result, strict=True):
        shift = next(n for n in range(32) if -32768 <= value >> n <= 32767)
        assert (abs(kept) <= abs(value), kept % 2**shift, abs(value - kept) < 2**shift) == (True, 0, True)


# ---- tables -----------------------------------------------------------------------------------------------------------------
def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _broken(x: float) -> float:
    return math.nan if x < 0 else -math.inf if x < 1 else x


@pytest.mark.sweep(2)
@pytest.mark.parametrize("function", [_sigmoid, math.exp, math.tanh, float, _broken])
@SLOW
@given(input_scale=scales, output_scale=scales)
def test_table(function: Callable[[float], float], input_scale: Fraction, output_scale: Fraction) -> None:
    """By float64 numbers, and by float32 ones."""
    from_, to = (Grid(INT8, float32(scale)) for scale in (input_scale, output_scale))
    plain = oracle.table(function, float(input_scale), float(output_scale), range(-128, 128), -128, 127)
    measured = oracle.measured_table(function, input_scale, oracle.Grid(output_scale, -128, 127, 8), range(-128, 128))
    for in_float32, expected in ((False, plain), (True, measured)):
        result = grids.table(function, from_, to, in_float32=in_float32)
        assert result.dtype == torch.int8
        assert result.tolist() == expected


UP, AWAY = "-4 -3 -3 -2 -2 -1 -1 0 0 1 1 2 2 3 3 4", "-4 -4 -3 -3 -2 -2 -1 -1 0 1 1 2 2 3 3 4"


@pytest.mark.parametrize(("in_float32", "halves"), [(False, UP), (True, AWAY)])
def test_a_table_rounds_halves_up_or_away_from_zero(in_float32: bool, halves: str) -> None:
    result = grids.table(lambda x: x / 2, Grid(INT4, ONE), Grid(INT8, ONE), in_float32=in_float32)
    assert result.tolist() == [int(value) for value in halves.split()]


def test_a_table_saturates() -> None:
    assert grids.table(lambda x: x * 100, Grid(INT4, ONE), Grid(INT8, ONE)).tolist() == [-128] * 7 + [-100, 0, 100] + [127] * 6
    wide = grids.table(math.exp, Grid(INT16, ONE), Grid(INT16, ONE))  # overflows float64 at the far end
    assert (wide.dtype, wide.shape, wide[-1]) == (torch.int16, (65536,), 32767)
    assert wide[:3].tolist() == [0, 0, 0]


# ---- proofs -----------------------------------------------------------------------------------------------------------------
@SLOW
@given(st.integers(0, 2**32 - 1), st.sampled_from([128, 32768]))
def test_accumulator_bound(seed: int, magnitude: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (3, 2, 2, 2), generator=generator)
    bias = torch.randint(-(2**23), 2**23, (3,), generator=generator)
    for axis in (0, 1):
        channels = weight.movedim(axis, 0).flatten(1).tolist()
        sums = [magnitude * sum(map(abs, row)) for row in channels]
        assert grids.accumulator_bound(weight.float(), None, axis, magnitude).tolist() == sums
    expected = [magnitude * sum(map(abs, row)) + abs(b) for row, b in zip(weight.flatten(1).tolist(), bias.tolist(), strict=True)]
    assert grids.accumulator_bound(weight.float(), bias.float(), 0, magnitude).tolist() == expected


def test_bits_of() -> None:
    for bits in range(2, 40):
        assert grids.bits_of(2 ** (bits - 1) - 1) == bits
        assert grids.bits_of(2 ** (bits - 1)) == bits + 1


# ---- windows of pools --------------------------------------------------------------------------------------------------------
windows = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(1, 2), st.booleans()).filter(
    lambda row: 2 * row[3] <= row[1] and row[4] * (row[1] - 1) + 1 <= row[0] + 2 * row[3]
)


@EXACT
@given(windows)
def test_windows(row: tuple[int, int, int, int, int, bool]) -> None:
    size, kernel, _stride, _padding, dilation, _ceil_mode = row
    starts = oracle.window_starts(*row)
    count, end = _windows(*row)
    assert count == len(starts)
    assert end == max(starts[-1] + dilation * (kernel - 1) + 1 - size, 0)


@EXACT
@given(windows, windows, st.booleans(), st.booleans())
def test_window_divisor(first: tuple[int, ...], second: tuple[int, ...], ceil_mode: bool, include_padding: bool) -> None:
    rows = [(size, kernel, stride, padding) for size, kernel, stride, padding, *_ in (first, second)]
    end = [_windows(*row, 1, ceil_mode)[1] for row in rows]
    shape, kernel, stride, begin = ([row[part] for row in rows] for part in range(4))
    counts = window_divisor([2, 3, *shape], {"count_include_pad": include_padding}, kernel, stride, begin, end)
    expected = np.array(oracle.window_counts(*zip(*rows, strict=True), ceil_mode, include_padding), dtype=np.float32)  # type: ignore[call-arg]
    assert np.array_equal(np.broadcast_to(counts.numpy(), expected.shape), expected)
    assert (counts.dim() == 0) == bool((expected == expected.flat[0]).all())
    starts = [oracle.window_starts(*row, 1, ceil_mode) for row in rows]
    joined = [runs(*row, len(each), include_padding) for row, each in zip(rows, starts, strict=True)]
    along = [[run.divisor for run in each for _ in range(run.windows)] for each in joined]
    assert np.array_equal(np.outer(*along), expected)
    firsts = [[run.start + index * step for run in each for index in range(run.windows)] for each, step in zip(joined, stride, strict=True)]
    assert firsts == [[max(start, 0) for start in each] for each in starts]


def test_the_largest_numbers_have_a_scale_on_which_every_integer_is_finite() -> None:
    largest = torch.tensor(torch.finfo(torch.float32).max)
    for dtype in (INT8, INT16):
        assert bool(torch.isfinite(grids.scale_from_range(-largest, largest, dtype) * dtype.low))

"""A requantization written as one rounded product: equal to its definition for every integer there can be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxquant as fxq
from fxquant import backends
from fxquant.backends.bpu import CHIP, REAL, WIDTHS
from fxquant.numerics.grids import FLOAT32_EXACT, INT8, IntType, Ratio
from fxquant.primitives import accumulate, quantization
from fxquant.primitives.arithmetic import Arithmetic, Composer, FixedArithmetic, RealArithmetic
from fxquant.primitives.elementwise import align_fixed, align_real
from fxquant.primitives.proof import unproved
from fxquant.primitives.quantization import HALF_STEPS, NEAREST_HALF_STEP, Rounded, _rounded_fixed, _rounded_half_step
from fxquant.target import Target
from tests.shared import contract
from tests.shared.drawn import EXACT
from tests.shared.networks import Network, members

SIXTEEN_BITS = torch.arange(-(2**15), 2**15)
mantissas = st.lists(st.integers(2**14, 2**15 - 1), min_size=1, max_size=4)
shifts = st.integers(14, 31)


def by_definition(whole: Tensor, shift: int, multiplier: Tensor, right_shift: int, rounding: str, low: int, high: int) -> Tensor:
    """`requantize_fixed` of a row of integers for each multiplier."""
    constants = torch.full_like(multiplier, shift), multiplier, torch.full_like(multiplier, right_shift)
    return quantization.requantize_fixed(whole.expand(multiplier.shape[0], -1), *constants, 16, rounding, low, high, torch.int8)


def numbers(shift: int, right_shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, multiplier and right shift of a product with a power of two."""
    return tuple(torch.full((1, 1), value, dtype=torch.int32) for value in (shift, 2**14, right_shift))  # type: ignore[return-value]


def by_product(whole: Tensor, how: Rounded | None, low: int, high: int) -> Tensor:
    """Return the integers of Mul, Round or Floor, and Clip."""
    assert how is not None
    product = (whole.float() + (0.0 if how.add is None else how.add.reshape(-1, 1))) * how.by.reshape(-1, 1)
    return (product.round() if how.ties else product.floor()).clamp(low, high).to(torch.int8)


@EXACT
@given(mantissas, shifts, st.sampled_from([(-128, 127), (0, 127), (0, 96), (-20, 31)]))
def test_the_rest_of_fixed_is_a_product_wherever_one_is_found(numbers: list[int], right_shift: int, limits: tuple[int, int]) -> None:
    multiplier = torch.tensor(numbers, dtype=torch.int32)[:, None]
    size = 2.0**right_shift / multiplier.double()
    steps = quantization.steps_of(none := torch.zeros_like(multiplier), multiplier, none + right_shift, none, *limits, up=True)
    how = quantization.rounded(steps, size[:, :, None], *limits)
    if bool((size * (max(limits[1], -limits[0]) + 0.5) < 2**15).all()):  # as the first shift has it, and nothing saturates before
        wanted = by_definition(SIXTEEN_BITS, 0, multiplier, right_shift, "half_up", *limits)
        assert torch.equal(by_product(SIXTEEN_BITS, how, *limits), wanted)


def test_ties_round_up_by_a_factor_next_to_theirs() -> None:
    multiplier, right_shift = torch.full((1, 1, 1), 2**14, dtype=torch.int32), torch.full((1, 1, 1), 15, dtype=torch.int32)
    for low in (-128, 0):
        assert _rounded_fixed(multiplier, right_shift + 1, 2**15, low, 127, lowered=True) == (0.25, 0.0, None)
        how = _rounded_fixed(multiplier, right_shift, 2**15, low, 127, lowered=False)  # 1/2 rounds up to 1, and -1/2 up to 0
        assert torch.equal(by_product(SIXTEEN_BITS, how, low, 127), by_definition(SIXTEEN_BITS, 0, multiplier[0], 15, "half_up", low, 127))


def test_steps_that_lie_on_no_line_are_no_product() -> None:
    steps = torch.arange(-127, 128)[None] * 10 - 5
    size = torch.full((1, 1, 1), 10.0, dtype=torch.float64)
    assert quantization.rounded(steps, size, -128, 127) is not None
    steps[0, 100] += 7
    assert quantization.rounded(steps, size, -128, 127) is None


def test_a_channel_whose_multiplier_is_zero_gives_zero() -> None:
    multiplier, right_shift = torch.tensor([[0], [20001]], dtype=torch.int32), torch.full((2, 1), 24, dtype=torch.int32)
    size = torch.tensor([[[2.0**25]], [[2.0**24 / 20001]]], dtype=torch.float64)
    steps = quantization.steps_of(0 * multiplier, multiplier, right_shift, 0 * multiplier, -128, 127, up=True)
    how = quantization.rounded(steps, size, -128, 127)
    assert torch.equal(by_product(SIXTEEN_BITS, how, -128, 127), by_definition(SIXTEEN_BITS, 0, multiplier, 24, "half_up", -128, 127))


@pytest.mark.parametrize("total", range(0, 17))
@pytest.mark.parametrize("limits", [(-128, 127), (0, 127)])
@pytest.mark.parametrize("rounding", HALF_STEPS)
def test_half_steps_of_powers_of_two_are_one_product(total: int, limits: tuple[int, int], rounding: str) -> None:
    shift, right_shift = max(0, total - 8), 14 + min(total, 8)
    constants = numbers(shift, right_shift)
    how = _rounded_half_step(*constants, 2**15, *limits, rounding)
    if total == 0 and rounding == NEAREST_HALF_STEP:  # half a step is a whole one there: no power of two
        assert int(quantization.half_step(*constants, rounding)) == 1
        return
    half = quantization.half_step(*constants, rounding)
    near = torch.cat([torch.arange(-3, 4) + step for step in quantization.steps_of(*constants, half, *limits)[0].tolist()])
    whole = torch.cat([near, torch.tensor([-(2**23), 2**23 - 1]), torch.arange(-3000, 3000)]).unique()
    whole = whole[(whole.abs() <= 2**23) & (total > 0 or whole.abs() < 2**15)]
    assert torch.equal(by_product(whole, how, *limits), by_definition(whole, shift, constants[1], right_shift, rounding, *limits))


def test_steps_beyond_23_bits_leave_no_room_for_a_half() -> None:
    for total, result in ((16, True), (17, False)):  # the last step is at 126.5 · 2^17
        for rounding in HALF_STEPS:
            assert (_rounded_half_step(*numbers(total - 8, 14 + 8), 2**15, -128, 127, rounding) is not None) == result


@EXACT
@given(mantissas, st.sampled_from([14, 18, 21, 22, 22, 22, 23]), st.sampled_from([(-128, 127), (0, 127), (0, 96), (-20, 31)]))
def test_what_is_rounded_down_is_a_product_wherever_one_is_found(numbers: list[int], right_shift: int, limits: tuple[int, int]) -> None:
    multiplier = torch.tensor(numbers, dtype=torch.int32)[:, None, None]
    shift = torch.full_like(multiplier, right_shift)
    how = _rounded_fixed(multiplier, shift, 2**15, *limits, lowered=True)
    reached = quantization.steps_of(torch.zeros_like(shift), multiplier, shift, torch.zeros_like(shift), *limits)
    if bool((reached.abs() < 2**15).all()):
        wanted = by_definition(SIXTEEN_BITS, 0, multiplier[:, 0], right_shift, "floor", *limits)
        assert torch.equal(by_product(SIXTEEN_BITS, how, *limits), wanted)
        if limits[0] == 0:  # files have a Relu before, and no lower limit after
            rectified = SIXTEEN_BITS.clamp_min(0)
            assert torch.equal(by_product(rectified, how, -128, limits[1]), wanted)


def test_what_saturates_before_its_last_shift_is_no_product() -> None:
    for multiplier, result in ((32639, True), (32513, True), (32512, False)):  # 32767 · M / 2^23 reaches 127 from 32513 on
        constants = torch.full((1, 1, 1), multiplier, dtype=torch.int32), torch.full((1, 1, 1), 23, dtype=torch.int32)
        how = _rounded_fixed(*constants, 2**15, 0, 127, lowered=True)
        assert (how is not None) == result
        if how is not None:
            wanted = by_definition(SIXTEEN_BITS, 0, constants[0][:, 0], 23, "floor", 0, 127)
            assert torch.equal(by_product(SIXTEEN_BITS, how, 0, 127), wanted)


# ---- files --------------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
def test_wide_sums_are_formed_from_blocks_of_channels(target: str, tmp_path: Path) -> None:
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    deep = Network(lambda s, x: s.deep(torch.tanh(s.spread(x))), spread=nn.Conv2d(3, 300, 1), deep=nn.Conv2d(300, 8, 3, padding=1))
    nn.init.uniform_(deep.deep.weight, 0.5, 1.0)  # of so many channels, sums exceed 2^24
    result = fxq.quantize(deep.eval(), batches, target=target)
    assert any(node.target is accumulate.convolution_wide for node in result.integer.graph.nodes)
    path = result.export(tmp_path / "model.onnx", style="exact")
    assert result.verify(path, [*batches, 100 * batches[0]]).mismatches == 0
    assert any(node.op_type == "Split" for node in onnx.load(path).graph.node)


def test_every_block_stays_below_the_limit_and_few_are_no_more_than_eight() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (8, 1000, 3, 3), generator=generator)
    blocks = accumulate._blocks(weight, INT8.high + 1)
    assert blocks is not None
    assert (sum(blocks), len(blocks) > 1) == (1000, True)
    assert all(size % 16 == 0 for size in blocks[:-1])
    for block in weight.split(blocks, 1):
        assert int(block.abs().flatten(1).sum(1).max()) * 128 < FLOAT32_EXACT
    assert accumulate._blocks(torch.full((1, 4000, 3, 3), 127), 128) is None  # more than eight
    assert accumulate._blocks(torch.full((1, 64, 40, 40), 127), 128) is None  # one channel is too much


# ---- an arithmetic is one class: a third one, made here, holds the contract ------------------------------------------------
@dataclass(frozen=True)
class Mixed(FixedArithmetic):
    """Operands are aligned by float32 numbers, sums requantized by whole ones, which round down."""

    final_rounding: str = "floor"

    primitives = frozenset((quantization.requantize_fixed, align_real))

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        return RealArithmetic.align(self, composer, value, ratio, dtype, role, wide)  # type: ignore[arg-type]


MIXED = Target("mixed", "an example", Mixed("mixed", widths=WIDTHS))


@members(lambda: dict(left=nn.Conv2d(3, 4, 3), right=nn.Conv2d(3, 4, 3)))
def Net(self, x: Tensor) -> Tensor:
    """A sum of products, an addition, a join and a mean."""
    left, right = torch.relu(self.left(x)), self.right(x)
    return torch.cat((torch.sigmoid(left) + right, right), 1).mean((2, 3))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is known by name, as a family in a folder of its own would be."""
    monkeypatch.setitem(backends.TARGETS, MIXED.name, MIXED)


@pytest.mark.quick
@pytest.mark.usefixtures("known")
def test_a_third_arithmetic_holds_the_contract(tmp_path: Path) -> None:
    batch = torch.randn(4, 3, 8, 8)
    prepared, integer = contract.compiled(Net(), [batch], "mixed")
    result = {node.target for node in integer.graph.nodes}
    assert Mixed.primitives <= result
    assert not result & {quantization.requantize_real, align_fixed}
    contract.assert_contract(prepared, tmp_path / "model.onnx", batch, integer=integer)
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert torch.equal(loaded(batch), integer(batch))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "fast.onnx", style="fast"), [batch])


@pytest.mark.quick
@pytest.mark.parametrize("other", [CHIP, REAL, FixedArithmetic("down", widths=WIDTHS, final_rounding="floor")], ids=lambda a: a.name)
def test_a_graph_is_that_of_its_own_arithmetic_alone(other: Arithmetic) -> None:
    integer = contract.compiled(Net(), [torch.randn(4, 3, 8, 8)], MIXED).integer  # type: ignore[arg-type]
    assert not list(unproved(integer, MIXED.arithmetic))
    _, because = next(unproved(integer, other))
    assert because == f"its target requantizes by {other.multiplies_by}" or "as its target does" in because

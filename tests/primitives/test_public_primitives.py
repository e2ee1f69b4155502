"""Every integer primitive called by its public name, without a model, on numbers that can be checked by hand."""

from __future__ import annotations

import doctest
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fxquant as fxq
from fxquant import primitives
from fxquant.numerics.grids import INT8
from fxquant.numerics.rescaling import Ratio, real_multiplier
from fxquant.primitives import PRIMITIVES


def i8(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


def i16(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int16)


def i32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def holds(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def f32(*values: float) -> Tensor:
    return torch.tensor(values)


class Call(NamedTuple):
    """Arguments and what they give: values, and the dtype they are stored in."""

    arguments: tuple[Any, ...]
    values: Any
    dtype: torch.dtype


def gives(values: Any, dtype: torch.dtype, *arguments: Any) -> Call:
    return Call(arguments, values, dtype)


IMAGE = i8([[[1, 2, 3], [4, 5, 6], [7, 8, -9]]])  # [1, 1, 3, 3]
KERNEL = i8([[[1, 0], [0, -1]]])  # [1, 1, 2, 2]
ONES = [1, 1]
NONE = [0, 0]
CUT = [2, 8, 1, 8]  # the operand in two parts of 8 bits, the weight whole

CALLS = {
    "convolution": gives([[[[-4 + 10, -4 + 10], [-4 + 10, 14 + 10]]]], torch.int32, IMAGE, KERNEL, i32(10), ONES, NONE, ONES, 1),
    "convolution_wide": gives([[[[300 * 100 - 2]]]], torch.int32, i16([[[300]]]), i8([[[100]]]), i32(-2), ONES, NONE, ONES, 1, CUT),
    "transposed_convolution": gives(
        [[[[3, 0, 5, 0], [0, -3, 0, -5]]]], torch.int32, i8([[[3, 5]]]), KERNEL, None, [2, 2], NONE, NONE, ONES, 1
    ),
    "transposed_convolution_wide": gives(
        [[[[300 * 100 + 7]]]], torch.int32, i16([[[300]]]), i8([[[100]]]), i32(7), ONES, NONE, NONE, ONES, 1, CUT
    ),
    "dynamic_linear": gives(
        [[(255 * 2 + 51 * 3) * 0.5 + 1.0]], torch.float32, torch.tensor([[255.0, 51.4]]), i8([2, 3]), torch.tensor(0.5), torch.tensor([1.0])
    ),
    "linear": gives([[2 * 5 - 3 * 7 + 1, 2 * -128 - 3 * 0 + 0]], torch.int32, i8([2, -3]), i8([5, 7], [-128, 0]), i32(1, 0)),
    "linear_wide": gives([[20000 * 127 * 2]], torch.int32, i16([20000, 20000]), i8([127, 127]), None),
    "matrix_product": gives([[[1 * 3 + 2 * 4]]], torch.int32, i8([[1, 2]]), i8([[3], [4]])),
    "matrix_product_wide": gives([[[30000 * 30000 * 2]]], torch.int64, i16([[30000, 30000]]), i16([[30000], [30000]])),
    "scale_channels": gives([[[2 * 3 + 1], [-4 * 5 - 1]]], torch.int32, i8([[2], [-4]]), i8(3, 5), i32(1, -1), 1),
    "scale_channels_wide": gives([[[20000 * 127], [-20000 * 100 + 5]]], torch.int32, i16([[20000], [-20000]]), i8(127, 100), i32(0, 5), 1),
    "rectify": gives([[4 * 10, -3 * 2]], torch.int32, i8([4, -3]), 10, i32(7, 2)),
    "maximum": gives([3, -1], torch.int8, i8(3, -5), i8(2, -1)),
    "minimum": gives([2, -5], torch.int8, i8(3, -5), i8(2, -1)),
    "add_residual": gives([1000 + 3 * 256, -1000 - 2 * 300], torch.int32, i32(1000, -1000), i8(3, -2), i32(256, 300)),
    "add_residual_shifted": gives(
        [1000 + 2, -1000 - 3, 5 - 1], torch.int32, i32(1000, -1000, 5), i8(5, -5, -1), i32(1, 1, 1), i32(1, 1, 31)
    ),
    "quantize": gives(
        [0, 2, 2, -128, 127, 0], torch.int8, f32(0.25, 0.75, 1.25, -1e9, 1e9, float("nan")), torch.tensor(0.5), -128, 127, torch.int8
    ),
    "dequantize": gives([-64.0, 0.5], torch.float32, i8(-128, 1), torch.tensor(0.5)),
    "align_fixed": gives([-2, 7], torch.int32, i8(-3, 14), i32(1), i32(1)),
    "align_real": gives([-2, 2, 4], torch.int32, i8(-3, 5, 7), torch.tensor(0.5)),
    "add": gives([5, -2], torch.int32, i32(2, -4), i32(3, 2)),
    "subtract": gives([-1, -6], torch.int32, i32(2, -4), i32(3, 2)),
    "add_constant": gives([102, 96], torch.int32, i32(2, -4), i32(100)),
    "multiply": gives([-128 * -128, -6], torch.int32, i8(-128, 2), i8(-128, -3)),
    "widen": gives([-128, 127], torch.int32, i8(-128, 127)),
    "centre": gives([-3, 252], torch.int32, torch.tensor([0, 255], dtype=torch.uint8), 3),
    "negate": gives([128, -127], torch.int32, i8(-128, 127)),
    "clamp": gives([-2, 0, 6], torch.int8, i8(-100, 0, 100), -2, 6),
    "lookup": gives([-64, 0, 63], torch.int8, i8(-128, 0, 127), (torch.arange(-128, 128) // 2).to(torch.int8)),
    "shift_right": gives([-1, 2, 3], torch.int32, i32(-6, 6, 10), 2),
    "max_pool": gives([[[-1, -7]]], torch.int8, i8([[-5, -1, -7, -9]]), [2], [2], [0], [0], [1]),
    "sum_pool": gives([[[-5, -8, -9]]], torch.int32, i8([[-5, -1, -7, -9]]), [2], [2], [1], [1]),
    "sum": gives([[-22]], torch.int32, i8([-5, -1, -7, -9]), [1], True),
    "requantize_fixed": gives(
        [4, -4, 127], torch.int8, i32(10, -9, 9**9), i32(1), i32(3), i32(2), 16, "half_up", -128, 127, torch.int8
    ),
    "requantize_real": gives([0, 2, 2, -128, 127], torch.int8, i32(1, 3, 5, -999, 999), torch.tensor(0.5), -128, 127, torch.int8),
    "accumulator_output": gives([-(2**31), 2**31 - 1], torch.int32, i32(-(2**31), 2**31 - 1)),
    "clamp_accumulator": gives([[0, 6, 4]], torch.int32, i32([-5, 10, 4]), i32(0), i32(6)),
    "resize_linear": gives([[[1, 2, 3]]], torch.int8, i8([[1, 3]]), None, i32([256, 0], [128, 128], [0, 256]), 8, False),
    "transform": gives([[-1, 6], [-3, 8]], torch.int32, i8([2, 3], [1, 4]), i32([1, -1], [0, 2]), -1, 2, False),
    "sample": gives(
        [[[[2, 0, 4]]]],
        torch.int8,
        *(i8([[[1, 3], [5, 7]]]), i32([[[1, 0], [4, 0], [1, 1]]]), [2, 2], 1, "bilinear", "zeros", False, 0, False),
    ),
    "sample_cubic": gives(
        [[[[2 * 5 * 2, (-1 * 5 + 1 * 5 + 2 * 3) * 2]]]],
        torch.int32,
        *(i8([[[5, 3]]]), i32([[[0, 0], [1, 0]]]), i32([0, 2, 0, 0], [-1, 1, 2, 0]), [1, 2], 1, "border", False, False),
    ),
    "pool_indices": gives([[[2, 3]]], torch.int64, i8([[5, 1, 7, 9]]), [3], [1], [0], [0], [1], [4], False),
    "unpool": gives([[[0, 8, 0, 9]]], torch.int8, i8([[8, 9]]), torch.tensor([[[1, 3]]]), [4], 0),
    "reshape": gives([[1, 2], [3, 4]], torch.int8, i8(1, 2, 3, 4), [2, -1]),
    "permute": gives([[1, 3], [2, 4]], torch.int8, i8([1, 2], [3, 4]), [1, 0]),
    "concatenate": gives([1, 2, 3], torch.int8, [i8(1), i8(2, 3)], 0),
    "crop": gives([[2, 4]], torch.int8, i8([1, 2, 3, 4, 5]), [1], [1], [-1], [2]),
    "select": gives([[3, 1, 3]], torch.int8, i8([1, 2, 3]), 1, torch.tensor([2, 0, 2])),
    "expand": gives([[7, 7]], torch.int8, i8([7]), [-1, 2]),
    "tile": gives([1, 2, 1, 2], torch.int8, i8(1, 2), [2]),
    "pad": gives([9, 1, 2, 9, 9], torch.int8, i8(1, 2), [1], [2], 9),
    "compare": gives([True, True, True], torch.bool, i8(-128, 127, 0), torch.tensor(200), "lt"),  # beyond the dtype of the other
    "logic": gives([False, True, True, False], torch.bool, holds(0, 0, 1, 1), holds(0, 1, 0, 1), "xor"),
    "opposite": gives([True, False], torch.bool, holds(0, 1)),
    "truth": gives([[False], [True]], torch.bool, holds([1, 0], [1, 1]), [1], True, True),
    "choose": gives([1, -7], torch.int8, i8(1, 2), i8(-6, -7), holds(1, 0)),
    "least": gives([-9, -1], torch.int8, i8([-5, -9], [-1, 7]), [1], False),
    "arg_extremum": gives([0, 1], torch.int64, i8([7, 7, -3], [1, 2, 2]), 1, False, True),
    "ranking": gives([[2, 0], [1, 0]], torch.int64, i8([4, 7, -3], [2, 1, 2]), 1, 2, False),
    "rows": gives([[[3, 4], [1, 2]]], torch.int8, i8([1, 2], [3, 4]), i64([1, 0])),
    "pick": gives([[3, 1], [6, 4]], torch.int8, i8([1, 2, 3], [4, 5, 6]), 1, i64(-1, 0)),
    "take_along": gives([[3, 1], [4, 5]], torch.int8, i8([1, 2, 3], [4, 5, 6]), 1, i64([2, 0], [0, 1])),
    "joined": gives([-2, 1], torch.int64, i64(-7, 7), i64(4, 4), "quotient"),
    "converted": gives([-56, 5], torch.int8, i64(200, 5), torch.int8),
    "truncated": gives([-2, 0, 3], torch.int64, i8(-5, 1, 6), torch.tensor(0.5), torch.tensor(0.0)),
    "chosen": gives([1, 2**40], torch.int64, i64(1, 2), i64(-6, 2**40), holds(1, 0)),
    "reduced": gives([2**40, 5], torch.int64, i64([2**40, 3], [-1, 5]), [1], False, "largest"),
    "running": gives([[1, 3, 6]], torch.int64, i64([1, 2, 3]), 1),
    "put_along": gives([[9, 2, 8], [4, 7, 7]], torch.int8, i8([1, 2, 3], [4, 5, 6]), i8([8, 9], [7, 7]), 1, i64([2, 0], [1, 2])),
    "sum_along": gives([[5, 0, -4], [0, 9, 0]], torch.int32, i8([-7, 5, 3], [4, -1, 6]), 1, i64([2, 0, 2], [1, 1, 1]), 3, False),
    "extremum_along": gives([[9, 2], [8, 5]], torch.int8, i8([1, 2], [4, 5]), i8([9, -4], [7, 8]), 1, i64([0, 1], [0, 0]), 2, True),
    "count": gives([2, 1], torch.int64, holds([1, 0, 1], [0, 0, 1]), [1], False),
}  # fmt: skip


def test_every_primitive_is_tried_under_its_public_name() -> None:
    names = {record.name for record in PRIMITIVES.values()}
    assert names == CALLS.keys()
    assert len(names) == len(PRIMITIVES)
    assert names <= set(dir(primitives))
    assert not names & set(primitives.__all__), "no module hides a function"


@pytest.mark.parametrize("name", CALLS)
def test_a_primitive_on_plain_integers(name: str) -> None:
    function = getattr(fxq.primitives, name)
    record = PRIMITIVES[function]
    assert (record.name, record.function, function.__name__) == (name, function, name)
    assert record.kind in ("quantized", "accumulator", "plain", "float", "dynamic")
    arguments, values, dtype = CALLS[name]
    result = function(*arguments)
    assert result.dtype == dtype
    assert result.tolist() == values


@pytest.mark.parametrize("name", CALLS)
def test_a_primitive_says_what_it_computes(name: str) -> None:
    doc = getattr(primitives, name).__doc__
    assert doc
    assert doc.strip().splitlines()[0].endswith((".", "float64."))


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="no primitive is named 'requantise'"):
        primitives.requantise  # noqa: B018


def test_a_layer_made_of_primitives_is_the_layer_of_a_model() -> None:
    """Quantize, multiply and requantize by hand, with the scales of a model: its own integers come out."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(6, 4), torch.randn(8, 6)
    result = fxq.quantize(model, [x], target="nash-e")
    scales = fxq.qparams(result.prepared)
    s_x, s_y = (torch.tensor(scale) for scale in scales.values())  # of the quantized input, and of the output
    s_w = (model.weight.abs().amax(1) / 127).detach()
    weight = torch.round(model.weight / s_w[:, None]).to(torch.int8)
    bias = torch.round(model.bias.double() / (s_x.double() * s_w.double())).to(torch.int32)
    q = primitives.quantize(x, s_x, INT8.low, INT8.high, torch.int8)
    acc = primitives.linear(q, weight, bias)
    y = primitives.requantize_real(acc, real_multiplier(Ratio((s_x, s_w), (s_y,))), INT8.low, INT8.high, torch.int8)
    assert len(y.unique()) > 10
    assert torch.equal(primitives.dequantize(y, s_y), result.integer(x))


def test_the_example_of_the_documentation() -> None:
    outcome = doctest.testmod(primitives)
    assert outcome.attempted >= 6
    assert outcome.failed == 0

"""Calls of every primitive on small random operands, for the C program to be held against."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant import primitives
from fxquant.backends.bpu import WIDTHS
from fxquant.numerics.grids import ACTIVATION_TYPES, Ratio, fixed_requantization

I8, U8, I16, I32, I64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
RANGES = {I8: (-128, 127), U8: (0, 255), I16: (-32768, 32767)}


class Case(NamedTuple):
    """A primitive and the arguments it is called with."""

    primitive: Callable[..., Tensor]
    arguments: tuple[Any, ...]


class Draw:
    """Random operands of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, *shape: int, dtype: torch.dtype = I8, low: int | None = None, high: int | None = None) -> Tensor:
        """Return random integers, by default of the dtype's range, including its ends."""
        low, high = RANGES[dtype][0] if low is None else low, RANGES[dtype][1] if high is None else high
        drawn = torch.randint(low, high + 1, shape, generator=self.generator)
        ends = torch.rand(shape, generator=self.generator)
        return torch.where(ends < 0.1, low, torch.where(ends > 0.9, high, drawn)).to(dtype)

    def real(self, *shape: int, low: float = -14.0, high: float = 2.0) -> Tensor:
        """Float32 numbers of very different sizes."""
        return torch.exp2(torch.rand(shape, generator=self.generator) * (high - low) + low)

    def truth(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.5

    def one(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]


def cases(seed: int) -> list[Case]:
    """Each primitive at least once."""
    draw = Draw(seed)
    drawn: list[Case] = []
    for family in (_boundary, _dynamic, _requantizations, _sums, _elementwise, _windows, _dimensions, _places, _sampling, _whole, _varying):
        for name, *arguments in family(draw):
            drawn.append(Case(getattr(primitives, name), tuple(arguments)))
    return drawn


Calls = Iterator[tuple[Any, ...]]


def _boundary(draw: Draw) -> Calls:
    scale = draw.real(low=-9.0)
    x = torch.randn(3, 4, generator=draw.generator) * 60 * scale
    x[0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.5 * float(scale)])
    yield "quantize", x, scale, -128, 127, I8
    yield "quantize", x, scale, -30, 225, U8, 30
    yield "quantize", x.double() * 1.1, scale, -32768, 32767, I16
    yield "dequantize", draw.whole(2, 3), draw.real()
    yield "dequantize", draw.whole(2, 3, 5, dtype=I32, low=-(2**30), high=2**30), draw.real(3, 1)
    yield "dequantize", draw.whole(2, 3, dtype=U8), draw.real(), torch.float64, 131


def _dynamic(draw: Draw) -> Calls:
    x = torch.randn(2, 3, 5, generator=draw.generator)
    odd = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e-40, -3e38], [0.0, -0.0, 1e-20, 2.5, 1.0]])
    for operand in (x, odd, x.abs() + 1, -x.abs(), x * 0, x * 1e-42, torch.tensor([[127.0, -128.0, 0.5, 1.5, -2.5]])):
        yield "dynamic_linear", operand, draw.whole(4, 5, low=-127), draw.real(4), torch.randn(4, generator=draw.generator)
    yield "dynamic_linear", x, draw.whole(2, 5, low=-127), draw.real(), None


def _requantizations(draw: Draw) -> Calls:
    for dtype, bits, out in ((I32, 16, I8), (I32, 32, I16), (I64, 32, I16), (I64, 16, I8), (I16, 16, I8)):
        reach = {I32: 2**31 - 1, I64: 2**46, I16: 2**15 - 1}[dtype]
        low, high = RANGES[out]
        for shape in ((), (4, 1)):
            scale = draw.real(*shape, low=-34.0 if dtype == I64 else -22.0, high=-2.0)
            acc = (torch.randn(2, 4, 6, generator=draw.generator).double() * 200 / scale.double()).clamp(-reach, reach).to(dtype)
            yield "requantize_real", acc, scale, low, high, out
            yield "requantize_real", acc, scale, -9, 246, U8, 9
            parameters = _fixed(scale, out, dtype == I64)
            for rounding in ("half_up", "floor", "half_step", "nearest_half_step", "half_away", "half_even") if out == I8 else ("half_up",):
                yield "requantize_fixed", acc, *parameters, bits, rounding, low, high, out
    yield "accumulator_output", draw.whole(5, dtype=I32, low=-(2**31), high=2**31 - 1)
    limits = draw.whole(3, 1, dtype=I32, low=-900, high=-2), draw.whole(3, 1, dtype=I32, low=0, high=900)
    yield "clamp_accumulator", draw.whole(2, 3, 4, dtype=I32, low=-2000, high=2000), *limits
    yield "clamp_accumulator", draw.whole(2, 3, 4, dtype=I32, low=-(2**29), high=2**29), *(each * 2**19 for each in limits)


def _varying(draw: Draw) -> Calls:
    acc = draw.whole(2, 4, dtype=I32, low=-9000, high=9000)
    yield "add_counted", acc, 2, draw.whole(5, dtype=I32, low=-90, high=90)
    scale = draw.real(5, low=-9.0, high=-5.0)
    yield "requantize_real_counted", acc, 3, scale, -128, 127, I8
    yield "requantize_real_counted", acc, 4, scale, -9, 246, U8, 9
    for rounding in ("half_up", "floor", "half_step", "half_away", "half_even"):
        yield "requantize_fixed_counted", acc, 1, *_fixed(scale, I8, False), 16, rounding, -128, 127, I8
    for sizes, factors in (([5, 2], [None, None]), ([None, None], [2.0, 1.5])):
        for exact in (False, True):
            yield "resize_nearest_to", draw.whole(2, 3, 3, 4), sizes, factors, exact
        for corners in (False, True):
            yield "resize_linear_to", draw.whole(2, 3, 3, 4), sizes, factors, corners, 8, 16, corners, False
            yield "resize_linear_to", draw.whole(2, 3, 3, 4, dtype=I16), sizes, factors, corners, 16, 0, False, True


def _fixed(scale: Tensor, out: torch.dtype, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    grid = ACTIVATION_TYPES[str(out).removeprefix("torch.")]
    built = fixed_requantization(Ratio((scale,)), WIDTHS[grid.name], grid, 48 if wide else 32)
    return built.shift, built.multiplier, built.right_shift


def _sums(draw: Draw) -> Calls:
    for rank in (1, 2, 3):
        groups = draw.one(1, 2)
        sizes = [int(draw.whole(low=4, high=7)) for _ in range(rank)]
        kernel = [int(draw.whole(low=1, high=3)) for _ in range(rank)]
        stride, dilation = ([int(draw.whole(low=1, high=2)) for _ in range(rank)] for _ in range(2))
        padding = [int(draw.whole(low=0, high=max(k - 1, 0))) for k in kernel]
        weight, bias = draw.whole(4, 4 // groups, *kernel, low=-127), draw.whole(4, dtype=I32, low=-5000, high=5000)
        sizes = [max(n, d * (k - 1) + 1) for n, k, d in zip(sizes, kernel, dilation, strict=True)]
        around = [*padding, *(int(draw.whole(low=0, high=3)) for _ in kernel)]
        yield "convolution", draw.whole(2, 4, *sizes), weight, bias, stride, around, dilation, groups
        yield "convolution", draw.whole(2, 4, *sizes), weight, bias, stride, padding, dilation, groups
        wide = draw.whole(4, 4 // groups, *kernel, dtype=I16)
        yield "convolution_wide", draw.whole(2, 4, *sizes, dtype=I16), wide, None, stride, padding, dilation, groups, [2, 8, 2, 8]
        yield "convolution_wide", draw.whole(2, 4, *sizes, dtype=I16), weight, bias, stride, around, dilation, groups, [2, 8, 1, 8]
        yield "convolution_wide", draw.whole(2, 4, *sizes), weight, bias, stride, padding, dilation, groups, [2, 4, 1, 8]
        turned, more = draw.whole(4, 3, *kernel, low=-127), draw.whole(3 * groups, dtype=I32, low=-5000, high=5000)
        out = [int(draw.whole(low=0, high=s - 1)) for s in stride]
        yield "transposed_convolution", draw.whole(2, 4, *sizes), turned, more, stride, padding, out, dilation, groups
        longer = draw.whole(2, 4, *sizes, dtype=I16)
        yield "transposed_convolution_wide", longer, turned, None, stride, padding, out, dilation, groups, [2, 8, 1, 8]
    yield "linear", draw.whole(2, 3, 7), draw.whole(5, 7), draw.whole(5, dtype=I32, low=-900, high=900)
    yield "linear_wide", draw.whole(2, 7, dtype=I16), draw.whole(5, 7, dtype=I16), None
    yield "linear_wide", draw.whole(2, 7), draw.whole(5, 7, low=-127), draw.whole(5, dtype=I32, low=-(2**20), high=2**20)
    yield "matrix_product", draw.whole(2, 1, 3, 5), draw.whole(4, 5, 2)
    yield "matrix_product_wide", draw.whole(3, 5, dtype=I16), draw.whole(2, 5, 2, dtype=I16)
    yield "scale_channels", draw.whole(2, 3, 4), draw.whole(3), draw.whole(3, dtype=I32, low=-900, high=900), 1
    yield "scale_channels_wide", draw.whole(2, 3, 4, dtype=I16), draw.whole(4, dtype=I16), None, 0
    yield "rectify", draw.whole(2, 3, 4), 64, draw.whole(3, 1, dtype=I32, low=-50, high=50)
    yield "rectify", draw.whole(2, 3, dtype=I16), 1 << 14, draw.whole(dtype=I32, low=-(2**15), high=2**15), True
    for dim in (-1, -2, -3):
        yield "transform", draw.whole(2, 4, 5), draw.whole(3, (2, 4, 5)[dim]), dim, 3, False
        yield "transform", draw.whole(2, 4, 5, dtype=I16), draw.whole(3, (2, 4, 5)[dim], dtype=I32, low=-70000, high=70000), dim, 3, True
    rows, columns = (_weights(draw, out, size, 8) for out, size in ((5, 3), (2, 4)))
    yield "resize_linear", draw.whole(2, 3, 4), rows, columns, 8, False
    yield "resize_linear", draw.whole(2, 3, 4, dtype=I16), rows, None, 8, True
    yield "resize_linear", draw.whole(2, 3, 4), None, columns, 8, False
    yield "resize_linear", draw.whole(2, 3, 4), None, columns, 8, False, False
    yield "resize_linear", draw.whole(2, 3, 4, dtype=I16), rows, None, 8, True, False
    acc = draw.whole(2, 3, 4, dtype=I32, low=-90000, high=90000)
    yield "add_residual", acc, draw.whole(2, 3, 4), draw.whole(3, 1, dtype=I32, low=256, high=999)
    shifted = draw.whole(3, 1, dtype=I32, low=2**14, high=2**15 - 1), draw.whole(3, 1, dtype=I32, low=0, high=31)
    yield "add_residual_shifted", acc, draw.whole(2, 3, 4), *shifted
    yield "add_residual_shifted", acc.to(I64) * 2**20, draw.whole(2, 1, 4, dtype=I16), *shifted
    yield "add_residual", acc.to(I64) * 2**20, draw.whole(2, 1, 4, dtype=I16), draw.whole(dtype=I32, low=256, high=99999)


def _weights(draw: Draw, out: int, size: int, bits: int) -> Tensor:
    """Rows of two neighbours' weights."""
    filled, first = torch.zeros(out, size, dtype=I32), draw.whole(out, low=0, high=size - 2).long()
    weight = draw.whole(out, dtype=I32, low=0, high=2**bits)
    filled[torch.arange(out), first], filled[torch.arange(out), first + 1] = weight, 2**bits - weight
    return filled


def _elementwise(draw: Draw) -> Calls:
    multiplier, shift = draw.whole(3, 1, dtype=I32, low=2**14, high=2**15 - 1), draw.whole(3, 1, dtype=I32, low=0, high=31)
    yield "align_fixed", draw.whole(2, 3, 4), multiplier, shift
    fine = draw.whole(dtype=I32, low=2**13, high=2**16 - 1), draw.whole(dtype=I32, low=0, high=31)
    yield "align_fixed", draw.whole(2, 3, dtype=I16), *fine, True
    yield "align_real", draw.whole(2, 3, 4), draw.real(3, 1, high=14.0)
    yield "align_real", draw.whole(2, 3, dtype=I16), draw.real(high=14.0), True
    a, b = draw.whole(2, 3, 4, dtype=I32, low=-(2**30), high=2**30 - 1), draw.whole(3, 1, dtype=I32, low=-(2**30), high=2**30 - 1)
    for name in ("add", "subtract", "add_constant"):
        yield name, a, b
        yield name, a.to(I64) * 2**13, b
    yield "negate", a
    yield "multiply", draw.whole(2, 1, 4), draw.whole(3, 1)
    yield "multiply", draw.whole(2, 3, dtype=I16), draw.whole(2, 3, dtype=I16), True
    yield "multiply", draw.whole(2, 3), draw.whole(3, dtype=I16), True
    for x in (draw.whole(2, 3), draw.whole(4, dtype=I16), draw.whole(4, dtype=U8)):
        yield "widen", x
        yield "negate", x
        near = (x % 300).to(x.dtype)
        yield "lookup", near, draw.whole(300, dtype=draw.one(I8, I16)), 0
    yield "lookup", draw.whole(9), draw.whole(256)
    yield "lookup", draw.whole(9, dtype=U8), draw.whole(256, dtype=U8), 0
    yield "centre", draw.whole(7, dtype=U8), 131
    for bits in (1, 7):
        yield "shift_right", draw.whole(7, dtype=I16), bits
        yield "shift_right", a, bits
        yield "shift_right", a.to(I64) * 2**16, bits + 10
    yield "clamp", draw.whole(9), -7, 101
    yield "clamp", draw.whole(9, dtype=U8), 3, 101
    for name in ("maximum", "minimum"):
        yield name, draw.whole(2, 3, 4), draw.whole(3, 1)
        yield name, draw.whole(4, dtype=I16), draw.whole(2, 4, dtype=I16)
    for relation in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield "compare", draw.whole(4, 5, low=-2, high=2), draw.whole(5, low=-2, high=2), relation
        yield "compare", draw.whole(9, dtype=U8), draw.whole(dtype=I32, low=-(2**20), high=2**20), relation
        yield "compare", 2**62 - draw.whole(9, dtype=I64, low=0, high=2), 2**62 - draw.whole(9, dtype=I64, low=0, high=2), relation
    yield "compare", draw.whole(9, dtype=I64, low=-3, high=3), torch.tensor(0.5), "gt"
    for operation in ("and", "or", "xor"):
        yield "logic", draw.truth(3, 4), draw.truth(4), operation
    yield "opposite", draw.truth(7)
    yield "choose", draw.whole(2, 3), draw.whole(3), draw.truth(2, 1)
    yield "choose", draw.whole(3, dtype=I64, low=-(2**62), high=2**62), draw.whole(2, 1, dtype=I64, low=-9, high=9), draw.truth(3)


def _windows(draw: Draw) -> Calls:
    for rank in (1, 2, 3):
        kernel, stride = ([int(draw.whole(low=1, high=3)) for _ in range(rank)] for _ in range(2))
        begin, end = ([int(draw.whole(low=0, high=k - 1)) for k in kernel] for _ in range(2))
        dilation = [int(draw.whole(low=1, high=2)) for _ in range(rank)]
        sizes = [int(draw.whole(low=5, high=7)) for _ in range(rank)]
        x = draw.whole(2, 3, *sizes, dtype=draw.one(I8, I16, U8))
        yield "max_pool", x, kernel, stride, begin, end, dilation
        yield "sum_pool", x, kernel, stride, begin, end, True
        yield "sum_pool", draw.whole(2, 3, *sizes), kernel, stride, begin, end
        level = draw.whole(2, 3, *sizes, low=-2, high=2)  # many equal ones
        yield "pool_indices", level, kernel, stride, begin, end, dilation, sizes, True
    named = torch.randperm(level[0, 0].numel(), generator=draw.generator)
    yield "pool_indices", level, kernel, stride, begin, end, dilation, sizes, True, named
    indices = torch.stack([torch.randperm(12, generator=draw.generator)[:4] for _ in range(6)]).reshape(2, 3, 2, 2)
    yield "unpool", draw.whole(2, 3, 2, 2), indices, [3, 4], -128


def _dimensions(draw: Draw) -> Calls:
    for dim, keep in (([1], True), ([-1, -3], False), ([0, 1, 2], True)):
        yield "sum", draw.whole(2, 3, 4), dim, keep
        yield "sum", draw.whole(2, 3, 4, dtype=I16), dim, keep, True
        for name in ("least", "greatest"):
            yield name, draw.whole(2, 3, 4, dtype=draw.one(I8, I16)), dim, keep
        yield "count", draw.truth(2, 3, 4), dim, keep
        yield "truth", draw.truth(2, 3, 4), dim, keep, True
        yield "truth", draw.truth(2, 3, 4), dim, keep, False
        for operation in ("sum", "largest"):
            yield "reduced", draw.whole(2, 3, 4, dtype=I64, low=-(2**62), high=2**62), dim, keep, operation
    for dim in (0, 1, -1):
        yield "running", draw.whole(2, 3, 4, dtype=I64, low=-(2**62), high=2**62), dim
        for largest in (True, False):
            level = draw.whole(5, 4, 6, low=-2, high=2)
            yield "arg_extremum", level, dim, draw.one(True, False), largest
            yield "ranking", level, dim, 3, largest


def _places(draw: Draw) -> Calls:
    x = draw.whole(2, 3, 4)
    yield "reshape", x, [-1, 6]
    yield "permute", x, [2, 0, 1]
    yield "concatenate", [x, draw.whole(2, 1, 4), x], 1
    yield "concatenate", [x.to(I16), draw.whole(2, 3, 2, dtype=I16)], -1
    yield "crop", x, [2, 1], [-3, 1], [2**63 - 1, 3], [2, 1]
    yield "crop", x, [2], [draw.one(0, 1, 2)], [-1], [draw.one(1, 2)]
    yield "select", x, 1, draw.whole(4, dtype=I64, low=0, high=2)
    yield "rows", draw.whole(5, 3), draw.whole(2, 4, dtype=I64, low=0, high=4)
    yield "expand", draw.whole(3, 1), [2, -1, 4]
    yield "tile", x, [draw.one(1, 2), 1, draw.one(1, 2, 3)]
    yield "pad", x, [0, 1, draw.one(0, 1, 2)], [1, 0, draw.one(0, 3)], -5
    yield "pad", x.to(I16), [0, 0, 1], [0, 2, 0], 300
    yield "pick", x, 1, torch.tensor([[0, -1], [2, -3]])
    index = draw.whole(2, 2, 3, dtype=I64, low=0, high=2)
    yield "take_along", x, 1, index
    yield "take_along", draw.whole(2, 3, 3, dtype=I64, low=-(2**62), high=2**62), 1, index
    unique = torch.stack([torch.randperm(3, generator=draw.generator)[:2] for _ in range(6)]).reshape(2, 3, 2).transpose(1, 2).contiguous()
    yield "put_along", x, draw.whole(2, 2, 3), 1, unique
    yield "put_along", x.to(I64) * 2**55 + 1, draw.whole(2, 2, 3, dtype=I64, low=-(2**62), high=2**62), 1, unique
    yield "put_along", x, draw.whole(), 1, unique, True
    yield "sum_along", draw.whole(2, 5, 3), 1, draw.whole(2, 5, 3, dtype=I64, low=0, high=3), 4, False
    yield "sum_along", draw.whole(5, dtype=I16), 0, draw.whole(5, dtype=I64, low=0, high=1), 2, True
    for largest in (True, False):
        yield "extremum_along", draw.whole(2, 3, 4), draw.whole(2, 5, 4), 1, draw.whole(2, 5, 4, dtype=I64, low=0, high=2), 5, largest


def _sampling(draw: Draw) -> Calls:
    bits, corners = draw.one(4, 8), draw.one(True, False)
    for padding in ("zeros", "border", "reflection"):
        for rank in (2, 3):
            sizes = [int(draw.whole(low=1, high=5)) for _ in range(rank)]
            where = draw.whole(2, *[3] * rank, rank, dtype=I16, low=-(9 << bits) // 2, high=9 << bits)
            for mode in ("bilinear", "nearest"):
                image = draw.whole(2, 3, *sizes, dtype=draw.one(I8, I16))
                yield "sample", image, where, sizes, bits, mode, padding, corners, draw.one(0, 7), True


def _whole(draw: Draw) -> Calls:
    a = draw.whole(4, 5, dtype=I64, low=-(2**61), high=2**61)
    small = draw.whole(5, dtype=I64, low=-7, high=7)
    for operation in ("add", "subtract", "multiply", "larger", "smaller", "and"):
        yield "joined", a * 3, a[:1], operation
        yield "joined", small, draw.whole(4, 5), operation
    divisor = torch.where(small == 0, 3, small)
    for operation in ("quotient", "remainder"):
        yield "joined", a, divisor, operation
        yield "joined", draw.whole(5, dtype=I64, low=-9, high=9), divisor, operation
    for dtype in (I64, I32, I16, I8, U8):
        yield "converted", a, dtype
        yield "converted", draw.truth(5), dtype
    yield "truncated", draw.whole(9, dtype=I16), draw.real(), torch.tensor(0.5)
    yield "truncated", draw.whole(9), draw.real(), torch.tensor(0.0)
    yield "chosen", a, small, draw.truth(4, 1)

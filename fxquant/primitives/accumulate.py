"""Sums of products: convolution and matrix product, and what is added to them before requantization.

The accumulator is proved, from the actual weights, to stay below 2^24 in magnitude (`convolution`,
`linear`), where float32 kernels compute integers exactly in any order. Where it can be larger (`*_wide`), a
matrix product is formed in float64; a convolution, which runtimes have in float32 only, is the sum of
convolutions of parts of the operand's and the weight's bits, each below 2^24.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.numerics.grids import FLOAT32_EXACT, accumulator_bound, power_of_two
from fxquant.primitives import record
from fxquant.primitives.record import Emitter, Range, Role, Value, constant_of, exact_below, full_precision, need, primitive, stored
from fxquant.primitives.steps import Op, Writer

DEQUANTIZES = 19  # the opset from which on ONNX's own evaluator has DequantizeLinear of int8
CHANNELS_TOGETHER = 16  # runtimes have their quickest kernels for multiples of it
MOST_BLOCKS = 8
Sizes = list[int]  # one number for each dimension of a window; of a cut, the fields of a `Split`
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def sides(padding: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Return the zeros before and the zeros after each dimension; `padding` has `rank` numbers, or all before and then all after."""
    return list(padding[:rank]), list(padding[-rank:])


def window_padding(begin: list[int], end: list[int]) -> list[int]:
    """Return PyTorch's padding list: last dimension first, begin before end."""
    return [p for pair in reversed(list(zip(begin, end, strict=True))) for p in pair]


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Compute a convolution of floats; `padding` is that of `sides`, or one number."""
    rank = weight.dim() - 2
    if isinstance(padding, list | tuple) and len(padding) > rank:
        input, padding = F.pad(input, window_padding(*sides(padding, rank))), 0
    result: Tensor = CONVOLUTIONS[rank](input, weight, bias, stride, padding, dilation, groups)
    return result


class Split(NamedTuple):
    """The decomposition of a wide sum: the number of parts of the operand and of the weight, and the bits of a part."""

    parts: int
    bits: int
    weight_parts: int = 1
    weight_bits: int = 16


def split(value: Tensor, parts: int, bits: int) -> list[Tensor]:
    """Return p_0, p_1, … with value = Σ p_i · 2^(i·bits), each but the last in [-2^(bits-1), 2^(bits-1) - 1].

    `value` and the parts are integers in a floating-point dtype, all of one shape.
    """
    lower = []
    for _ in range(parts - 1):
        high = torch.floor((value + 2 ** (bits - 1)) * 2.0**-bits)
        lower.append(value - high * 2**bits)
        value = high
    return [*lower, value]


def onnx_split(e: Emitter, value: str, parts: int, bits: int) -> list[str]:
    """Emit the ONNX form of `split` and return the names of the parts."""
    lower = []
    for _ in range(parts - 1):
        raised = e.node("Add", value, e.constant(float(2 ** (bits - 1))))
        high = e.node("Floor", e.node("Mul", raised, e.constant(2.0**-bits)))
        lower.append(e.node("Sub", value, e.node("Mul", high, e.constant(float(2**bits)))))
        value = high
    return [*lower, value]


def sum_parts(input: Tensor, weight: Tensor, bias: Tensor | None, cut: Split, kernel: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Σ kernel(x_i, w_j) · 2^(i·bits + j·weight_bits) + bias in float64; the bias has one element per output channel."""
    total: Tensor | None = None
    weights = split(weight.float(), cut.weight_parts, cut.weight_bits)
    for i, part in enumerate(split(input.float(), cut.parts, cut.bits)):
        for j, factor in enumerate(weights):
            term = kernel(part, factor).double().mul_(2.0 ** (i * cut.bits + j * cut.weight_bits))
            total = term if total is None else total.add_(term)
    assert total is not None
    return total if bias is None else total.add_(per_channel(bias.double(), weight.dim() - 2))


def onnx_sum_parts(e: Emitter, x: str, w: str, bias: tuple[str, ...], cut: Split, kernel: Callable[[str, str], str]) -> str:
    """Emit the ONNX form of `sum_parts` for operands in their storage dtypes; a bias is float64."""
    parts = onnx_split(e, e.node("Cast", x, to=torch.float32), cut.parts, cut.bits)
    weights = onnx_split(e, e.node("Cast", w, to=torch.float32), cut.weight_parts, cut.weight_bits)
    total = ""
    for i, part in enumerate(parts):
        for j, factor in enumerate(weights):
            term = e.node("Cast", kernel(part, factor), to=torch.float64)
            shift = i * cut.bits + j * cut.weight_bits
            term = e.node("Mul", term, e.constant(2.0**shift, torch.float64)) if shift else term
            total = e.node("Add", total, term) if total else term
    return e.node("Add", total, bias[0]) if bias else total


def accumulated(total: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Convert a float64 sum to an accumulator: int32, or int64 (48 bits are used) for int16 weights.

    A sum of a floating-point operand is returned unchanged.
    """
    return total if input.is_floating_point() else total.to(torch.int64 if weight.dtype == torch.int16 else torch.int32)


def per_channel(values: Tensor, trailing: int) -> Tensor:
    """Return values per channel, reshaped to broadcast against a tensor with `trailing` dimensions after its channels."""
    return values.reshape(-1, *[1] * trailing)


def attributes_of(weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> dict[str, object]:
    """Return the attributes of an ONNX convolution."""
    return {
        "kernel_shape": list(weight.shape[2:]),
        "strides": list(stride),
        "pads": [*itertools.chain(*sides(padding, len(stride)))],
        "dilations": list(dilation),
        "group": groups,
    }


def _onnx_convolution(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, *window: Any) -> str:
    operands = [input, *(e.constant(value) for value in (weight, bias) if value is not None)]
    return e.node("Conv", *(e.node("Cast", operand, to=torch.float32) for operand in operands), **attributes_of(weight, *window))


def check_cut(x: Value, weight: Tensor, cut: Sizes) -> None:
    """Raise Unproved unless every sum of parts stays below 2^24 and the parts hold all bits of the operand and the weight."""
    chosen = Split(*cut)
    need(min(chosen) >= 1 and max(chosen) <= 64, f"it splits its operands into {list(chosen)} parts and bits")
    part = 2 ** (chosen.bits - 1)
    need(x.largest <= part * 2 ** (chosen.bits * (chosen.parts - 1)), "the parts of its operand hold fewer bits than it has")
    limit = 2 ** (chosen.weight_parts * chosen.weight_bits - 1)
    low, high = map(int, torch.aminmax(weight))
    need(-limit < low and high < limit, "the parts of its weight hold fewer bits than it has")
    for factor in [weight] if chosen.weight_parts == 1 else split(weight.double(), chosen.weight_parts, chosen.weight_bits):
        largest = float(accumulator_bound(factor, None, 0, part).max())
        need(largest < FLOAT32_EXACT, f"a sum of its parts can reach {largest:.0f}")


def _bounds_convolution(input: Value, weight: Value, bias: Value | None, padding: Sizes, cut: Sizes | None = None, **_: Any) -> Range:
    rank = constant_of(weight, "weight").dim() - 2
    need(len(padding) in (rank, 2 * rank) and min(padding) >= 0, "its padding is not a number, or two, for each dimension")
    return bounds_of_sums(input, constant_of(weight, "weight"), bias, cut)


def bounds_of_sums(input: Value, weight: Tensor, bias: Value | None, cut: Sizes | None) -> Range:
    """Return the range of the sums over windows with a weight (out, in / groups, …); raise Unproved if they can be too large."""
    if cut is not None:
        check_cut(input, weight, cut)
    return record.sum_of_products(input, weight, bias, weight.dim() - 2, exact_below(cut is not None))


_CONVOLUTION: dict[str, Any] = {"bounds": _bounds_convolution, "kind": "accumulator", "role": Role.CONVOLUTION, "casts": True}


@primitive(_onnx_convolution, **_CONVOLUTION)
def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Compute Σ x·w + bias with zero padding (`sides`), as int32; |result| < 2^24 for every input of its dtype."""
    return stored(_convolution_real(input.float(), weight.float(), bias, stride, padding, dilation, groups), input, torch.int32)


def _convolution_real(input: Tensor, weight: Tensor, bias: Tensor | None, *window_and_cut: Any) -> Tensor:
    with full_precision(input):
        return convolve(input, weight, None if bias is None else bias.float(), *window_and_cut[:4])


def _blocks(weight: Tensor, largest: int) -> list[int] | None:
    """Return the sizes of blocks of input channels whose sums stay below 2^24 for an operand of this magnitude.

    Return None if that takes more than MOST_BLOCKS blocks, or if a block would be empty.
    """
    reach = (weight.abs().double().flatten(2).sum(2) * largest).cumsum(1)  # of each output channel, up to each input channel
    blocks: list[int] = []
    start = 0
    while start < reach.shape[1]:
        before = reach[:, start - 1 : start] if start else 0.0
        fitting = int(((reach[:, start:] - before).amax(0) < FLOAT32_EXACT).sum())
        if start + fitting < reach.shape[1]:
            fitting -= fitting % CHANNELS_TOGETHER
        if fitting == 0 or len(blocks) == MOST_BLOCKS:
            return None
        blocks.append(fitting)
        start += fitting
    return blocks


def _onnx_sum_blocks(e: Emitter, x: str, w: str, bias: tuple[str, ...], blocks: list[int], attributes: dict[str, Any]) -> str:
    """Emit the sum, in `e.wide`, of convolutions of blocks of input channels; together they cost as much as one convolution."""
    sizes = e.constant(blocks, torch.int64)

    def split_up(whole: str) -> list[str]:
        return e.results("Split", [torch.float32] * len(blocks), e.node("Cast", whole, to=torch.float32), sizes, axis=1)

    sums = [e.node("Conv", value, factor, **attributes) for value, factor in zip(split_up(x), split_up(w), strict=True)]
    terms = [e.node("Cast", term, to=e.wide) for term in sums]
    total = terms[0]
    for term in (*terms[1:], *bias):
        total = e.node("Add", total, term)
    return total


def _onnx_convolution_wide(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, *window_and_cut: Any) -> str:
    *window, cut = window_and_cut
    attributes = attributes_of(weight, *window)
    limit = 2 ** (cut[0] * cut[1] - 1)
    dtype = e.dtype(input)
    blocks = _blocks(weight, limit if dtype.is_floating_point else min(limit, -torch.iinfo(dtype).min or 255)) if window[-1] == 1 else None

    def body(e: Emitter, x: str, w: str, *bias: str) -> str:
        if blocks is not None:
            return _onnx_sum_blocks(e, x, w, bias, blocks, attributes)
        return onnx_sum_parts(e, x, w, bias, Split(*cut), lambda part, factor: e.node("Conv", part, factor, **attributes))

    values = (*attributes.values(), list(cut if blocks is None else blocks), bias is not None, str(dtype).removeprefix("torch."))
    name = "convolution_wide_" + "_".join(str(v).strip("[]").replace(", ", "x") for v in values)
    added = [] if bias is None else [e.constant(per_channel(bias, weight.dim() - 2), torch.float64 if blocks is None else e.wide)]
    return e.call(name, body, input, e.constant(weight), *added)


@primitive(_onnx_convolution_wide, surrogate=_convolution_real, wide=True, **_CONVOLUTION)
def convolution_wide(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, cut: Sizes
) -> Tensor:
    """Compute `convolution` where the sum can reach 2^24.

    The operand and the weight are cut into parts by `cut`, the fields of a `Split`. The float32 sum of each pair of parts stays below
    2^24, and the sums are added in float64 (in files, in int32 where that is enough). The result is int32, or int64 for int16 weights.
    """
    window = stride, padding, dilation, groups
    total = sum_parts(input, weight, bias, Split(*cut), lambda part, factor: _convolution_real(part, factor, None, *window))
    return accumulated(total, input, weight)


def _onnx_linear(e: Emitter, input: str, weight: Tensor, bias: Tensor | None) -> str:
    transposed = e.node("Cast", e.constant(weight.t().contiguous()), to=torch.float32)
    product = e.node("MatMul", e.node("Cast", input, to=torch.float32), transposed)
    return product if bias is None else e.node("Add", product, e.node("Cast", e.constant(bias), to=torch.float32))


def _bounds_linear(exact: int, input: Value, weight: Value, bias: Value | None) -> Range:
    return record.sum_of_products(input, constant_of(weight, "weight"), bias, 0, exact)


_LINEAR: dict[str, Any] = {"kind": "accumulator", "role": Role.LINEAR, "casts": True}


@primitive(_onnx_linear, bounds=partial(_bounds_linear, FLOAT32_EXACT), **_LINEAR)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x · wᵀ + bias over the last dimension, as int32; |result| < 2^24 for every input of its dtype."""
    return stored(_linear_real(input.float(), weight.float(), bias), input, torch.int32)


_TAKES: ContextVar[Callable[[Tensor, Tensor, Tensor], Tensor] | None] = ContextVar("takes", default=None)


@contextmanager
def products_given(to: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Inside, give every `linear` with gradients to a function (operand, weight, sums), and take the tensor that it returns as the sums."""
    token = _TAKES.set(to)
    try:
        yield
    finally:
        _TAKES.reset(token)


def _linear_real(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with full_precision(input):
        sums = F.linear(input, weight, None if bias is None else bias.float())
    take = _TAKES.get() if sums.requires_grad else None
    return sums if take is None else take(input, weight, sums)


def onnx_double(e: Emitter, value: str) -> str:
    """Emit an operand of a float64 matrix product.

    Round is a barrier: without it onnxruntime up to 1.23 fuses the product with a transposition before it, which it cannot run in float64.
    """
    return e.node("Round", e.node("Cast", value, to=torch.float64))


def _onnx_linear_wide(e: Emitter, input: str, weight: Tensor, bias: Tensor | None) -> str:
    transposed = e.node("Cast", e.constant(weight.t().contiguous()), to=torch.float64)
    # Round is a barrier: without it the runtime may fuse the product with the multiplier that follows.
    product = e.node("Round", e.node("MatMul", onnx_double(e, input), transposed))
    return product if bias is None else e.node("Add", product, e.node("Cast", e.constant(bias), to=torch.float64))


@primitive(_onnx_linear_wide, bounds=partial(_bounds_linear, record.FLOAT64_EXACT), surrogate=_linear_real, wide=True, **_LINEAR)
def linear_wide(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` where the sum can reach 2^24, in float64; the result is int32, or int64 for int16 weights."""
    total = F.linear(input.double(), weight.double(), None if bias is None else bias.double())  # autocast leaves float64 alone
    return accumulated(total, input, weight)


def _onnx_add_residual(e: Emitter, accumulator: str, residual: str, multiplier: Tensor) -> str:
    dtype = e.dtype(accumulator)
    if dtype == torch.float32 and e.opset >= DEQUANTIZES and e.dtype(residual) == torch.int8:
        axes = [dim - multiplier.dim() for dim, count in enumerate(multiplier.shape) if count > 1]
        if len(axes) < 2:  # a product of integers below 2^24, in one operator
            by = multiplier.flatten().float() if axes else multiplier.flatten()[0].float()
            zeros, axis = torch.zeros_like(by, dtype=torch.int8), {"axis": axes[0]} if axes else {}
            return e.node("Add", accumulator, e.node("DequantizeLinear", residual, e.constant(by), e.constant(zeros), **axis))

    def body(e: Emitter, accumulator: str, residual: str, multiplier: str) -> str:
        # Round is a barrier: without it the runtime may fold the constant into a neighbouring operator.
        return e.node("Add", accumulator, e.node("Round", e.node("Mul", e.node("Cast", residual, to=dtype), multiplier)))

    return e.call(f"add_residual_{str(dtype).removeprefix('torch.')}", body, accumulator, residual, e.constant(multiplier, dtype))


def _bounds_add_residual(accumulator: Value, residual: Value, multiplier: Value) -> Range:
    factors = constant_of(multiplier, "multiplier").double().abs()
    return record.within(accumulator.magnitude + factors * residual.largest, accumulator.exact)


def _onnx_add_residual_shifted(e: Emitter, accumulator: str, residual: str, multiplier: Tensor, right_shift: Tensor) -> str:
    dtype = e.dtype(accumulator)

    def body(e: Emitter, accumulator: str, residual: str, factor: str) -> str:
        return e.node("Add", accumulator, e.node("Floor", e.node("Mul", e.node("Cast", residual, to=dtype), factor)))

    factor = e.constant(multiplier.double() * power_of_two(-right_shift), dtype)
    return e.call(f"add_residual_shifted_{str(dtype).removeprefix('torch.')}", body, accumulator, residual, factor)


def _bounds_add_residual_shifted(accumulator: Value, residual: Value, multiplier: Value, right_shift: Value) -> Range:
    factors, shift = constant_of(multiplier, "multiplier").double().abs(), constant_of(right_shift, "right shift").double()
    need((shift >= 0).all() and (shift <= 31).all(), "its right shift is not in 0…31")
    need(float((factors * residual.largest).max()) < FLOAT32_EXACT or accumulator.exact > FLOAT32_EXACT, "its product exceeds 2^24")
    return record.within(accumulator.magnitude + torch.ceil(factors * residual.largest * torch.exp2(-shift)), accumulator.exact)


def _add_residual_real(accumulator: Tensor, residual: Tensor, multiplier: Tensor, right_shift: Tensor) -> Tensor:
    return accumulator + residual * (multiplier * power_of_two(-right_shift)).to(accumulator.dtype)


_RESIDUAL: dict[str, Any] = {"kind": "accumulator", "role": Role.RESIDUAL, "casts": True}


@primitive(_onnx_add_residual_shifted, bounds=_bounds_add_residual_shifted, surrogate=_add_residual_real, **_RESIDUAL)
def add_residual_shifted(accumulator: Tensor, residual: Tensor, multiplier: Tensor, right_shift: Tensor) -> Tensor:
    """Compute accumulator + ⌊residual · multiplier / 2^right_shift⌋; `multiplier` and `right_shift` are int32, shaped to broadcast.

    |residual · multiplier| is below 2^24 where the accumulator is.
    """
    if accumulator.is_floating_point():
        factor = (multiplier.double() * power_of_two(-right_shift)).to(accumulator.dtype)
        return accumulator + torch.floor(residual.to(accumulator.dtype) * factor)
    wide = residual.to(torch.int64) * multiplier
    return accumulator + (wide >> right_shift).to(accumulator.dtype)


def _steps_add_residual(w: Writer, accumulator: int, residual: int, multiplier: Tensor) -> int:
    return w.write(Op.ADD, accumulator, w.write(Op.MULTIPLY, residual, multiplier))


@primitive(_onnx_add_residual, bounds=_bounds_add_residual, steps=_steps_add_residual, **_RESIDUAL)
def add_residual(accumulator: Tensor, residual: Tensor, multiplier: Tensor) -> Tensor:
    """Compute accumulator + residual · multiplier, with an integer multiplier per channel, shaped to broadcast."""
    if accumulator.is_floating_point():
        return accumulator + residual * multiplier.to(accumulator.dtype)
    return accumulator + residual.to(accumulator.dtype) * multiplier


# ---- Transposed convolution: the products of each input element are added to a window of the output ------------------
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Return a weight of shape (in, out/groups, …) in the shape (out, in/groups, …); a second call undoes it."""
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)


class _Form:
    """The ONNX form of one transposed convolution.

    With one group it is ConvTranspose. With several, zeros are inserted between the input's elements, and the result is convolved with
    the mirrored weight, which gives the same sum: ONNX's own evaluator computes groups wrongly. This form is also used where the output
    padding reaches the stride, which PyTorch allows with a dilation and onnxruntime does not.
    """

    def __init__(self, weight: Tensor, stride: Sizes, padding: Sizes, output_padding: Sizes, dilation: Sizes, groups: int) -> None:
        self.spreads = groups > 1 or any(more >= step for more, step in zip(output_padding, stride, strict=True))
        self.weight = swap_channels(weight, groups).flip(list(range(2, weight.dim()))).contiguous() if self.spreads else weight
        self.stride, self.padding, self.output_padding, self.dilation, self.groups = stride, padding, output_padding, dilation, groups
        self.kernel = list(weight.shape[2:])
        self.name = "_".join("x".join(map(str, v)) for v in (self.kernel, stride, padding, output_padding, dilation, [groups]))

    def emit(self, e: Emitter, x: str, *weight_and_bias: str) -> str:
        """Emit the sum, for float32 values."""
        attributes = {"kernel_shape": self.kernel, "dilations": list(self.dilation), "group": self.groups}
        if self.spreads:
            return e.node("Conv", self._spread(e, x), *weight_and_bias, **attributes)
        attributes |= {"strides": list(self.stride), "pads": list(self.padding) * 2, "output_padding": list(self.output_padding)}
        return e.node("ConvTranspose", x, *weight_and_bias, **attributes)

    def _spread(self, e: Emitter, x: str) -> str:
        """Emit the input with stride - 1 zeros after every element, and the padding that the windows read beyond the edges."""
        rank = len(self.kernel)
        begin, end = [0] * (rank + 2), [0] * (rank + 2)
        for i in range(rank):
            x = self._spread_along(e, x, i + 2, self.stride[i])
            reach = self.dilation[i] * (self.kernel[i] - 1) - self.padding[i]
            begin[i + 2], end[i + 2] = reach, reach + self.output_padding[i] - (self.stride[i] - 1)
        x = e.node("Pad", x, e.constant([max(p, 0) for p in begin + end]))
        starts, stops = [max(-p, 0) for p in begin], [min(p, 0) or 2**31 - 1 for p in end]
        return e.node("Slice", x, e.constant(starts), e.constant(stops)) if min(begin + end) < 0 else x

    def _spread_along(self, e: Emitter, x: str, axis: int, stride: int) -> str:
        if stride == 1:
            return x
        rank = len(self.kernel) + 2
        order = [*(d for d in range(rank) if d != axis), axis]
        x = e.node("Unsqueeze", e.node("Transpose", x, perm=order), e.constant([rank]))
        x = e.node("Pad", x, e.constant([0] * (2 * rank + 1) + [stride - 1]))
        x = e.node("Reshape", x, e.constant([0] * (rank - 1) + [-1]))
        return e.node("Transpose", x, perm=[order.index(d) for d in range(rank)])


def _onnx(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, *attributes: Any) -> str:
    form = _Form(weight, *attributes)
    operands = [input, *(e.constant(value) for value in (form.weight, bias) if value is not None)]
    return form.emit(e, *(e.node("Cast", operand, to=torch.float32) for operand in operands))


def _bounds(input: Value, weight: Value, bias: Value | None, groups: int, cut: Sizes | None = None, **_: Any) -> Range:
    return bounds_of_sums(input, swap_channels(constant_of(weight, "weight"), groups), bias, cut)


@primitive(_onnx, bounds=_bounds, kind="accumulator", chip_bits=8, role=Role.TRANSPOSED, casts=True)
def transposed_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, output_padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Compute the sums x·w + bias of a transposed convolution, as int32; |result| < 2^24 for every input of its dtype."""
    result = _kernel(input.float(), weight, bias, stride, padding, output_padding, dilation, groups)
    return stored(result, input, torch.int32)


def _kernel(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int, *_: Any
) -> Tensor:
    real = None if bias is None else bias.float()
    with full_precision(input):
        result: Tensor = TRANSPOSED[weight.dim() - 2](input, weight.float(), real, stride, padding, output_padding, groups, dilation)
    return result


def _onnx_wide(e: Emitter, input: str, weight: Tensor, bias: Tensor | None, *attributes_and_cut: Any) -> str:
    *attributes, cut = attributes_and_cut
    form = _Form(weight, *attributes)

    def body(e: Emitter, x: str, w: str, *bias: str) -> str:
        return onnx_sum_parts(e, x, w, bias, Split(*cut), lambda part, factor: form.emit(e, part, factor))

    added = [] if bias is None else [e.constant(per_channel(bias.double(), weight.dim() - 2))]
    name = f"transposed_convolution_wide_{form.name}_{'x'.join(map(str, cut))}_{bias is not None}"
    return e.call(name, body, input, e.constant(form.weight), *added)


@primitive(_onnx_wide, bounds=_bounds, surrogate=_kernel, kind="accumulator", chip_bits=8, role=Role.TRANSPOSED)
def transposed_convolution_wide(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, output_padding: Sizes, dilation: Sizes, groups: int,
    cut: Sizes,
) -> Tensor:  # fmt: skip
    """Compute `transposed_convolution` where the sum can reach 2^24, from parts of the operand and the weight, as `convolution_wide`."""
    window = stride, padding, output_padding, dilation, groups
    total = sum_parts(input, weight, bias, Split(*cut), lambda part, factor: _kernel(part, factor, None, *window))
    return accumulated(total, input, weight)

"""Transposed convolution: the products of each input element are added to a window of the output.

As in `accumulate`, sums stay below 2^24; in the `*_wide` form, the sums of parts of the operand's and the weight's bits do.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.primitives.accumulate import Sizes, Split, accumulated, bounds_of_sums, onnx_sum_parts, per_channel, sum_parts
from fxquant.primitives.record import Emitter, Range, Role, Value, constant_of, full_precision, primitive, stored

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
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    dilation: Sizes,
    groups: int,
    cut: Sizes,
) -> Tensor:
    """Compute `transposed_convolution` where the sum can reach 2^24, from parts of the operand and the weight, as `convolution_wide`."""
    window = stride, padding, output_padding, dilation, groups
    total = sum_parts(input, weight, bias, Split(*cut), lambda part, factor: _kernel(part, factor, None, *window))
    return accumulated(total, input, weight)

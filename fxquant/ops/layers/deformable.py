"""Deformable convolution: a convolution whose every tap is read where an offset moves it. A composite: the taps, and a convolution.

taps (N, C, H'·kh, W'·kw), read between the pixels;   y = conv(taps · mask, weight), kernel and stride (kh, kw)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from fxquant.numerics.grids import EVERYTHING
from fxquant.ops.core.declare import Guard, are_fixed, fixed_sizes, known_sizes, needs
from fxquant.ops.core.operators import SAMPLED, Builder, Call, Lowering, Quantized, Same, composite, fact, lowered, sampled, selected
from fxquant.ops.core.weighted import shape_of, sizes
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.layers.convolution import conv2d
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import permute, reshape
from fxquant.ops.sampling.grid import GRID_SAMPLE_OPSET, LINEAR_OPSET, Positions, lower_sample, refuses_image, spatial_of
from fxquant.primitives import shape
from fxquant.primitives.sampling import sample

Geometry = tuple[Any, Any, Any, Any]  # kernel, stride, padding, dilation


def _deform_conv2d(
    input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tensors = tuple(value for value in (input, offset, weight, bias, mask) if value is not None)
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(deform_conv2d, tensors, input, offset, weight, bias, stride, padding, dilation, mask)
        return result
    kernel = list(weight.shape[2:])
    taps = deformed_taps(input, offset, kernel, stride, padding, dilation)
    if mask is not None:
        taps = taps * _spread_mask(mask, taps, kernel)
    return F.conv2d(taps, weight, bias, kernel, 0, 1, input.shape[1] // weight.shape[1])


def _base(height: int, width: int, geometry: Geometry) -> Tensor:
    """Return (x, y) of every tap of every output where nothing moves it: float64 (H'·kh, W'·kw, 2)."""
    axes = []
    for count, taps, stride, padding, dilation in zip((height, width), *(sizes(value, 2) for value in geometry), strict=True):
        starts = torch.arange(count, dtype=torch.float64, device="cpu") * stride - padding
        axes.append((starts.unsqueeze(1) + torch.arange(taps, dtype=torch.float64, device="cpu") * dilation).flatten())
    rows, columns = axes
    return torch.stack((columns.expand(len(rows), -1), rows.unsqueeze(1).expand(-1, len(columns))), -1)


def _deformed_taps(input: Tensor, offset: Tensor, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Tensor:
    (rows, columns), (height, width) = sizes(kernel_size, 2), offset.shape[2:]
    groups = offset.shape[1] // (2 * rows * columns)
    moved = offset.reshape(-1, rows, columns, 2, height, width).permute(0, 4, 1, 5, 2, 3).flip(-1)
    moved = moved.reshape(-1, height * rows, width * columns, 2)
    absolute = moved + _base(height, width, (kernel_size, stride, padding, dilation)).to(moved)
    images = input.reshape(-1, input.shape[1] // groups, *input.shape[2:])
    extent = torch.tensor([input.shape[3], input.shape[2]], dtype=moved.dtype, device=moved.device)
    taps = F.grid_sample(images, (2 * absolute + 1) / extent - 1, "bilinear", "zeros", False)
    return taps.reshape(-1, input.shape[1], height * rows, width * columns)


def _onnx_taps(c: Call) -> str:
    """Write a GridSample at the taps' positions; the offsets are scaled first: onnxruntime cannot move a DequantizeLinear after Reshape."""
    node: Any = c.primitive(sample)
    height, width = spatial_of(c)
    channels, rows, columns = (int(size) for size in fact(c.node).shape[1:])
    taps = sizes(c["kernel_size"], 2)
    geometry = c["kernel_size"], c["stride"], c["padding"], c["dilation"]
    groups = channels // fact(node.args[0]).shape[1]
    factors = torch.tensor([2 / height, 2 / width], device="cpu", dtype=torch.float32).repeat(groups * taps[0] * taps[1])
    moved = c.do("Mul", c.operand("offset"), c.e.constant(factors.reshape(1, -1, 1, 1)))
    moved = c.do("Reshape", moved, c.integers([-1, *taps, 2, rows // taps[0], columns // taps[1]]))
    moved = c.do("Gather", c.do("Transpose", moved, perm=[0, 4, 1, 5, 2, 3]), c.integers([1, 0]), axis=5)
    base = _base(rows // taps[0], columns // taps[1], geometry)
    start = (2 * base + 1) / torch.tensor([width, height], dtype=torch.float64, device="cpu") - 1
    grid = c.do("Add", c.do("Reshape", moved, c.integers([-1, rows, columns, 2])), c.e.constant(start.float()))
    image = c.operand("input")
    if groups > 1:  # on the result's grid, which is the image's: rounding it changes nothing
        image = c.rounded(c.do("Reshape", image, c.integers([-1, channels // groups, height, width])))
    mode = "linear" if c.e.opset >= LINEAR_OPSET else "bilinear"
    value = c.do("GridSample", image, grid, mode=mode, padding_mode="zeros", align_corners=0)
    return value if groups == 1 else c.do("Reshape", value, c.integers([-1, channels, rows, columns]))


_REFUSES_TAPS: tuple[Guard, Guard] = (
    fixed_sizes("the size of its offsets is not known", "offset", 1),
    lambda node, arguments: refuses_image(arguments["input"], "bilinear", "zeros"),
)


@lowered(
    function=_deformed_taps,
    dtypes={"offset": "int16"},
    keeps=lambda arguments, after, bits: EVERYTHING,
    refuses=_REFUSES_TAPS,
    onnx=lambda c: c.exported() if c.e.opset < GRID_SAMPLE_OPSET else _onnx_taps(c),
    demand=Same(("input",)),
)
@sampled("{fxq.nn.DeformConv2d(3, 2, 1)}(x, y)", within=SAMPLED, x=(3, 6, 6), y=(2, 6, 6))
def deformed_taps(
    lowering: Lowering, input: Quantized, offset: Quantized, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> Quantized:
    """Return (N, C, H'·kh, W'·kw): the sampled input of each tap of each output, in blocks of kh by kw."""
    (rows, columns), (moves, height, width) = sizes(kernel_size, 2), known_sizes(offset.shape[1:])
    channels, *spatial = known_sizes(input.shape[1:])
    groups = moves // (2 * rows * columns)

    def exact() -> Any:
        moved = lowering.call(shape.reshape, offset.value, [-1, rows, columns, 2, height, width])
        moved = lowering.call(shape.permute, moved, [0, 4, 1, 5, 2, 3])
        moved = selected(lowering, moved, 5, [1, 0], "order")
        moved = lowering.call(shape.reshape, moved, [-1, height * rows, width * columns, 2])
        images = input.value
        if groups > 1:
            images = lowering.call(shape.reshape, images, [-1, channels // groups, *spatial])
        image = replace(input, value=images, shape=(input.shape[0], channels // groups, *spatial))
        positions = Positions([1.0, 1.0], _base(height, width, (kernel_size, stride, padding, dilation)), False)
        taps = lower_sample(lowering, image, offset.with_value(moved), positions, "bilinear", "zeros")
        return lowering.call(shape.reshape, taps, [-1, channels, height * rows, width * columns])

    return lowering.result(exact, lambda: deformed_taps(input.real(), offset.real(), kernel_size, stride, padding, dilation))


def _spread_mask(mask: Tensor, taps: Tensor, kernel: list[int]) -> Tensor:
    """Return the factor of every tap, in the taps' shape."""
    (rows, columns), (height, width) = kernel, mask.shape[2:]
    groups, channels = mask.shape[1] // (rows * columns), taps.shape[1]
    spread = mask.reshape(-1, groups, rows, columns, height, width).permute(0, 1, 4, 2, 5, 3)
    spread = spread.reshape(-1, groups, 1, height * rows, width * columns).expand(-1, -1, channels // groups, -1, -1)
    return spread.reshape(-1, channels, height * rows, width * columns)


@composite(
    operands=("input", "offset", "mask"),
    function=_deform_conv2d,
    refuses=(
        needs("its weight is not a tensor of known shape", lambda arguments: shape_of(arguments["weight"]) is not None),
        needs("the size of its mask is not known", lambda arguments: are_fixed((shape_of(arguments["mask"]) or ())[1:])),
        *_REFUSES_TAPS,
    ),
)
@sampled("{fxq.nn.DeformConv2d(3, 4, 3, padding=1)}(x, y)", within=SAMPLED, x=(3, 6, 6), y=(18, 6, 6))
def deform_conv2d(
    build: Builder, input: fx.Node, offset: fx.Node, weight: fx.Node, bias: fx.Node | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, mask: fx.Node | None = None,
) -> Any:  # fmt: skip
    """Deformable convolution, version 2 with a mask, with the arguments of torchvision.ops.deform_conv2d.

    input (N, C, H, W); offset (N, 2·groups·kh·kw, H', W'), in pixels, y before x; mask (N, groups·kh·kw, H', W'), a factor for each tap;
    weight (O, C / groups of the convolution, kh, kw). Outside of the image is 0. From: Zhu et al., Deformable ConvNets v2, 2019.
    """
    _, inputs, rows, columns = known_sizes(shape_of(weight) or ())
    taps = build(deformed_taps, input, offset, [rows, columns], stride, padding, dilation)
    channels, tall, wide = known_sizes(build.fact(taps).shape[1:])
    if mask is not None:
        mask_channels, height, width = known_sizes(build.fact(mask).shape[1:])
        groups = mask_channels // (rows * columns)
        factors = build(permute, build(reshape, mask, [-1, groups, rows, columns, height, width]), [0, 1, 4, 2, 5, 3])
        factors = build(reshape, factors, [-1, groups, 1, tall, wide])
        if groups > 1:
            factors = build(expand, factors, [-1, -1, channels // groups, -1, -1])
        taps = build(mul, taps, build(reshape, factors, [-1, channels if groups > 1 else 1, tall, wide]))
    return build(conv2d, taps, weight, bias, [rows, columns], 0, 1, channels // inputs)

"""Kernels made of tensor operations alone: oneDNN's sums of products of bytes, as PyTorch provides them. Nothing is compiled.

oneDNN returns the sums as float32 integers, exact below 2^24. Images are processed in groups whose sums stay in the cache.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.kernels.admission import Layer, enumerated, prove, residual_factor
from fxquant.kernels.kernel import Binding, Bound, Built, ChannelsLast, Disagrees, Implementation, NotApplicable, Site, implementation
from fxquant.numerics.grids import FLOAT32_EXACT, accumulator_bound, power_of_two
from fxquant.primitives import quantization
from fxquant.primitives.runtime_scales import MAGNITUDE, centred

CACHED = 2**20  # bytes of float32 sums that are computed at a time
Requantization = Callable[[Tensor], Tensor]  # of float32 sums, which it may overwrite, with the zero added


def _shaped(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).reshape(1, -1, 1, 1)


def _real(site: Site) -> Requantization:
    """Return the requantization by one float32 product, as the primitive forms it."""
    arguments: Any = site.match.root.args
    _, node, low, high, *_ = arguments
    factor, zero = _shaped(site.constant(node), torch.float32), site.result().zero

    def requantized(sums: Tensor) -> Tensor:
        value = sums.mul_(factor).round_().clamp_(low, high)
        return value.add_(zero) if zero else value

    return requantized


def _fixed(width: torch.dtype) -> Callable[[Site], Requantization]:
    """Return a builder of the requantization by shift, product and shift, in float64 (always exact) or float32 (if proved exact)."""

    def of(site: Site) -> Requantization:
        arguments: Any = site.match.root.args
        _, *nodes, bits, rounding, low, high, _ = arguments
        shift, multiplier, right_shift = (_shaped(site.constant(node), torch.int64) for node in nodes)
        NotApplicable.unless(rounding not in quantization.TIES, "its ties are not rounded by an added constant")
        before = quantization.half_step(shift, multiplier, right_shift, rounding) if rounding in quantization.HALF_STEPS else None
        NotApplicable.unless(before is None or width == torch.float64 or float(before.max()) < FLOAT32_EXACT, "half a step is beyond 2^24")
        before = None if before is None else before.to(width)
        first, product = power_of_two(-shift).to(width), (multiplier.double() * power_of_two(-right_shift)).to(width)
        limit, zero, shifts = 2 ** (bits - 1), site.result().zero, bool((shift > 0).any())
        half = 0.5 if rounding == "half_up" else 0.0

        def requantized(sums: Tensor) -> Tensor:
            value = sums.to(width)
            if before is not None:
                value = value.add_(before)
            if shifts:
                value = value.mul_(first).floor_()
            value = value.clamp_(-limit, limit - 1).mul_(product)
            value = (value.add_(half) if half else value).floor_().clamp_(low, high)
            return value.add_(zero) if zero else value

        return requantized

    return of


@dataclass(frozen=True)
class _Sums:
    """oneDNN's sums, requantized in groups of images; `skipped` is 1 for images without depth, else 0."""

    layer: Layer
    input: ChannelsLast
    result: ChannelsLast
    residual: ChannelsLast | None
    residual_factor: Tensor | None
    requantized_sums: Requantization
    packed: Tensor
    ones: Tensor
    zeros: Tensor
    bias: Tensor | None
    skipped: int

    def sums(self, images: Tensor) -> Tensor:
        """Return the sums (images, channels, depth · height, width) of images of bytes, channels last."""
        window = [self.layer.window[name][self.skipped :] for name in ("stride", "padding", "dilation")]
        sums: Tensor = torch.ops.onednn.qconv_pointwise(
            images, 1.0, self.input.zero, self.packed, self.ones, self.zeros, self.bias,
            *window, self.layer.window["groups"], 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return sums.flatten(2, -2)

    def requantized(self, sums: Tensor) -> Tensor:
        return self.requantized_sums(sums.float()[..., None, None]).to(torch.uint8)[..., 0, 0]

    def bind(self) -> Bound:
        result, residual, channels = self.result, self.residual, self.result.channels
        _, depth, height, width, _ = result.grid
        area, step = (depth * height, width), max(1, CACHED // (4 * depth * height * width * channels))

        def images_of(form: ChannelsLast, held: Tensor, area: Sequence[int], channels: int) -> Tensor:
            return held.view(-1, *area, form.pixel)[..., :channels].movedim(-1, 1)

        def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
            packed = self.input.pixel if self.layer.window["groups"] == 1 else self.input.channels
            images = images_of(self.input, inputs[0], self.input.grid[1 + self.skipped : -1], packed)
            written = images_of(result, output, area, channels)
            added = None if residual is None else images_of(residual, inputs[1], area, channels)
            for first in range(0, images.shape[0], step):
                sums = self.sums(images[first : first + step])
                if added is not None and residual is not None:
                    centred = added[first : first + step].float()
                    centred = centred.sub_(residual.zero) if residual.zero else centred
                    sums.add_(centred.mul_(self.residual_factor).floor_())  # type: ignore[arg-type]
                written[first : first + step].copy_(self.requantized_sums(sums))

        return bound


@functools.cache
def _saturates() -> bool:
    """Return whether oneDNN adds pairs of products in 16 bits on this processor, where two products of bytes can saturate."""
    ones, zeros = torch.ones(64, dtype=torch.float32, device="cpu"), torch.zeros(64, dtype=torch.int64, device="cpu")
    window, images = ([1, 1], [0, 0], [1, 1], 1), torch.full((1, 64, 8, 8), 255, dtype=torch.uint8, device="cpu")
    weight = torch.full((64, 64, 1, 1), 127, dtype=torch.int8, device="cpu")
    packed = torch.ops.onednn.qconv_prepack(weight, ones, 1.0, 0, *window, [1, 64, 8, 8])
    sums = torch.ops.onednn.qconv_pointwise(images, 1.0, 0, packed, ones, zeros, None, *window, 1.0, 0, torch.float32, "none", [], "")
    return bool((sums != 64 * 127 * 255).any())


def require_onednn(name: str) -> None:
    """Raise NotApplicable unless oneDNN has an operator of this name."""
    NotApplicable.unless(torch._C._has_mkldnn and hasattr(torch.ops.onednn, name), "this PyTorch has no integer operators of oneDNN")


def unless_saturated(site: Site, implementation: Implementation, built: Built) -> Built:
    """Return what was built; raise NotApplicable if its sums saturate at this place, as they do on processors without VNNI."""
    if _saturates():
        try:
            prove(site, implementation, built)
        except Disagrees as error:
            raise NotApplicable(f"oneDNN adds pairs of products in 16 bits on this processor, and they saturate: {error}") from error
    return built


@implementation("oneDNN convolution")
def onednn(site: Site) -> Built:
    """Build sums of products of bytes by oneDNN."""
    layer = Layer.of(site)
    require_onednn("qconv_pointwise")
    NotApplicable.unless(not layer.window["transposed"] and not layer.window["uneven"], "it is transposed, or has more padding on one side")
    NotApplicable.unless(layer.largest < FLOAT32_EXACT, f"a sum can reach {layer.largest:.0f}, beyond 2^24")
    NotApplicable.unless(site.result().dtype != torch.int32, "its result is a sum")
    for length, spread, padding in zip(layer.weight.shape[2:], layer.window["dilation"], layer.window["padding"], strict=True):
        if padding > spread * (length - 1):  # seen to crash, on pages that are not mapped
            raise NotApplicable("oneDNN reads outside of the image where a whole window is padding")
    input, result, groups = site.held(site.match.reads[0]), site.result(), layer.window["groups"]
    if input.zero and 1 < groups < layer.weight.shape[0]:  # seen with AMX: 17 outputs a group, windows of padding alone
        raise NotApplicable("oneDNN subtracts a wrong zero point in some grouped convolutions")
    weight = F.pad(layer.weight, (*[0] * 6, 0, input.pixel - input.channels)) if groups == 1 else layer.weight
    outer = weight.shape[0]
    ones = torch.ones(outer, dtype=torch.float32, device="cpu")
    zeros = torch.zeros(outer, dtype=torch.int64, device="cpu")
    batch, *area, _ = input.grid
    skipped = int(weight.shape[2] == area[0] == result.grid[1] == 1)
    weight = weight[:, :, 0] if skipped else weight
    window = [layer.window[name][skipped:] for name in ("stride", "padding", "dilation")]
    sizes = [batch, weight.shape[1] * groups, *area[skipped:]]
    packed = torch.ops.onednn.qconv_prepack(weight.contiguous(), ones, 1.0, input.zero, *window, groups, sizes)
    bias = None if layer.given is None else layer.given.float()
    residual = factor = None
    if site.match.parts["factor"] is not None:
        residual, factor = site.held(site.match.reads[1]), _shaped(residual_factor(site), torch.float32)
    is_real = site.match.root.target is quantization.requantize_real
    *shorter, last = [_real] if is_real else [_fixed(torch.float32), _fixed(torch.float64)]
    for form in (*shorter, last):
        try:
            requantized = form(site)
            built = _Sums(layer, input, result, residual, factor, requantized, packed, ones, zeros, bias, skipped)
            layer.prove_requantization(site, built.requantized)
            break
        except (NotApplicable, Disagrees):
            if form is last:
                raise
    return unless_saturated(site, onednn, built)


@implementation("PyTorch's maximum")
def tensor_pool(site: Site) -> Built:
    """Build the largest byte of each window, by PyTorch: along the depth, then along the height, then along the width."""
    parts, input, result = site.match.parts, site.held(site.match.reads[0]), site.result()
    NotApplicable.unless(input.zero == result.zero, "its result and its operand have different memory layouts")
    _, *area, _ = input.grid
    _, *sizes, _ = result.grid
    windows = list(zip(sizes, *(parts[name] for name in ("kernel", "stride", "begin", "dilation")), strict=True))

    def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
        value = inputs[0].view(-1, *area, input.pixel)
        for dim, (size, taps, stride, begin, dilation) in enumerate(windows, start=1):
            reach = (size - 1) * stride + (taps - 1) * dilation + 1
            around = [0, 0] * (3 - dim) + [begin, reach - begin - value.shape[dim]]
            value = F.pad(value, [0, 0, *around])  # with zeros, which are never above the maximum
            parts = [value.narrow(dim, tap * dilation, (size - 1) * stride + 1) for tap in range(taps)]
            strided = [part[(slice(None),) * dim + (slice(None, None, stride),)] for part in parts]
            value = functools.reduce(torch.maximum, strided)
        output.view(value.shape).copy_(value)

    return Binding(lambda: bound)


@implementation("PyTorch's table")
def tensor_table(site: Site) -> Built:
    """Build a kernel that looks bytes, or pairs of bytes, up in a table, by PyTorch."""
    forms, result = [site.held(read) for read in site.match.reads], site.result()
    NotApplicable.unless(not any(form.sizes != result.sizes for form in forms), "its operands have different sizes")
    table = enumerated(site, forms, result)
    offsets = torch.arange(0, len(table), 256, dtype=torch.int32, device="cpu") if site.match.parts["channels"] else None

    def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
        index = inputs[0].to(torch.int32)
        if len(inputs) == 2:
            index = index.mul_(256).add_(inputs[1])
        if offsets is not None:
            index = index.add_(offsets)
        torch.index_select(table, 0, index.flatten(), out=output.view(-1))

    return Binding(lambda: bound)


@implementation("oneDNN linear layer", reads_held=False)
def onednn_dynamic(site: Site) -> Built:
    """Build a kernel of a dynamically quantized layer: oneDNN sums products of bytes, tensor operations compute the remainder."""
    weight, scale, bias = site.tensor("weight"), site.tensor("scale"), site.constant(site.match.parts["bias"])
    require_onednn("qlinear_pointwise")
    largest = float(accumulator_bound(weight, None, 0, MAGNITUDE).max())
    NotApplicable.unless(largest < FLOAT32_EXACT, f"a sum can reach {largest:.0f}, beyond 2^24")
    prepacked = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    ones = torch.ones(len(weight), dtype=torch.float32, device="cpu")
    zeros = torch.zeros(len(weight), dtype=torch.int64, device="cpu")

    def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
        operand = centred(inputs[0])
        zero_point = int(operand.zero_point)
        stored = operand.integers.add_(operand.zero_point).to(torch.uint8)
        sums = torch.ops.onednn.qlinear_pointwise(
            stored, 1.0, zero_point, prepacked, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        torch.mul(sums.add_(0.0), operand.scale * scale, out=output)
        if bias is not None:
            output.add_(bias)

    return unless_saturated(site, onednn_dynamic, Binding(lambda: bound))

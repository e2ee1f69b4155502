"""The list of kernels for PyTorch on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.backends.cpu import compiled, native, tensors
from fxquant.backends.cpu.compiled import loaded_library, packed
from fxquant.backends.cpu.tensors import require_onednn, unless_saturated
from fxquant.kernels import patterns
from fxquant.kernels.kernel import ALIGNMENT, Bound, Built, Kernel, NotApplicable, Site, Stateless, implementation
from fxquant.numerics.grids import FLOAT32_EXACT, LARGEST_DYNAMIC, SMALLEST_DYNAMIC, accumulator_bound
from fxquant.primitives.runtime_scales import MAGNITUDE, centred
from fxquant.support.files import address, point


@implementation("native dynamic layer", reads_held=False)
def native_dynamic(site: Site) -> Built:
    """Build a dynamically quantized layer by native.c: the grid, the bytes, the sums and their dequantization."""
    loaded = loaded_library(dot_products=True)
    weight, scale, bias = site.tensor("weight"), site.tensor("scale"), site.constant(site.match.parts["bias"])
    outputs, inputs = weight.shape
    pixel = -(-inputs // ALIGNMENT) * ALIGNMENT
    kept = {
        "weight": packed(weight[..., None, None], 1, pixel),
        "totals": weight.to(torch.int32).sum(1, dtype=torch.int32),
        "scale": scale.expand(outputs).contiguous(),
        **({} if bias is None else {"bias": bias.contiguous()}),
    }
    made = native.Dynamic(inputs=inputs, smallest=SMALLEST_DYNAMIC, largest=LARGEST_DYNAMIC)
    window = ("height", "width", "out_height", "out_width", "kernel_height", "kernel_width", "stride_height", "stride_width")
    for name in (*window, "dilation_height", "dilation_width", "groups"):
        setattr(made.sum, name, 1)
    made.sum.channels, made.sum.out_channels, made.sum.out_pixel = pixel, outputs, outputs
    weight = kept.pop("weight")
    made.sum.weight = address(weight)
    return _Native(loaded.fxq_dynamic, made, (weight, *point(made, kept.items())), inputs)


@dataclass(frozen=True)
class _Native:
    function: Any
    structure: native.Dynamic
    keeps: tuple[Tensor, ...]
    inputs: int

    def bind(self) -> Bound:
        own = native.Dynamic.from_buffer_copy(self.structure)
        function, inputs, place, sums = self.function, self.inputs, ctypes.addressof(own), own.sum

        def bound(given: Sequence[Tensor], output: Tensor, _keeps: Any = (own, self.keeps)) -> None:
            (operand,) = point(own, [("input", given[0].contiguous())])
            own.output = address(output)
            sums.batch = operand.numel() // inputs
            sums.threads = torch.get_num_threads()
            function(place)

        return bound


@implementation("oneDNN linear layer", reads_held=False)
def onednn_dynamic(site: Site) -> Built:
    """Build a dynamically quantized layer by oneDNN's sums of products of bytes; the rest by tensor operations."""
    weight, scale, bias = site.tensor("weight"), site.tensor("scale"), site.constant(site.match.parts["bias"])
    require_onednn("qlinear_pointwise")
    largest = float(accumulator_bound(weight, None, 0, MAGNITUDE).max())
    if largest >= FLOAT32_EXACT:
        raise NotApplicable(f"a sum can reach {largest:.0f}, beyond 2^24")
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

    return unless_saturated(site, onednn_dynamic, Stateless(bound))


KERNELS = (
    Kernel("sum of products", patterns.sum_of_products, (compiled.depthwise, compiled.convolution, tensors.onednn)),
    Kernel("quantization", patterns.quantization, (compiled.quantize,)),
    Kernel("maximum", patterns.maximum, (compiled.max_pool, tensors.tensor_pool)),
    Kernel("table", patterns.pointwise, (compiled.pointwise, tensors.tensor_table)),
    Kernel("dynamic layer", patterns.dynamic_layer, (native_dynamic, onednn_dynamic)),
    Kernel("concatenation", patterns.joined, (compiled.join,)),
)

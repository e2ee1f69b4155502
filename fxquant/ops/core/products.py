"""Sums of products of an operand and a weight's integers: narrow, wide, in parts, and the largest accumulator."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.lowering import Clamp, Epilogue, Lift, Lowering, Quantized
from fxquant.numerics.grids import FLOAT32_EXACT, INT32_MAX, INT48_MAX, IntType, accumulator_bound
from fxquant.numerics.rescaling import Ratio
from fxquant.primitives import accumulate
from fxquant.primitives.arithmetic import LAYER, WIDE_LAYER
from fxquant.quantization.weights import QuantizedWeight

IN_PARTS = {accumulate.convolution: 1, accumulate.linear: -1}  # sums that can be formed in parts: the dimension of the input channels


@dataclass(frozen=True)
class Product:
    """How primitives form a sum of products.

    narrow      the primitive whose sums stay below 2^24
    wide        the one for larger ones
    attributes  what both take behind input, weight and bias
    trailing    how many dimensions follow the channels in the output
    layout      brings the weight, whose output channels are dimension 0, into the form that both take
    channels    the dimension where that has its output channels
    in_parts    whether `wide` takes a `Split` that keeps the sums of parts below 2^24; else it sums in float64
    """

    narrow: Callable[..., Tensor]
    wide: Callable[..., Tensor]
    attributes: tuple[Any, ...] = ()
    trailing: int = 0
    layout: Callable[[Tensor], Tensor] = lambda weight: weight
    channels: int = 0
    in_parts: bool = False


@dataclass(frozen=True)
class LayerSum:
    """A sum of products from where its weight's integers are known: its operand, of this magnitude at most, and its weight."""

    lowering: Lowering
    product: Product
    input: Quantized
    magnitude: int
    weight: QuantizedWeight

    @property
    def limit(self) -> int:
        """The largest accumulator."""
        return accumulator_limit(self.lowering)

    @property
    def kind(self) -> str:
        """Kind of its accumulator for `Arithmetic.requantize`."""
        return WIDE_LAYER if self.input.dtype.bits > 8 else LAYER

    @property
    def whole(self) -> torch.dtype:
        """Dtype that holds a number of steps: a bias, a multiplier."""
        return torch.int64 if self.lowering.weight.dtype.bits > 8 else torch.int32

    def bound(self, bias: Tensor | None) -> Tensor:
        """Return the largest |accumulator| that any input can cause, per output channel."""
        bound = self.weight.total * self.magnitude
        return bound if bias is None else bound + bias.detach().double().abs()

    def end(self, steps: tuple[Tensor, ...], clamp: Clamp | None, bound: float, lift: Lift | None) -> Epilogue:
        """Return how the accumulator, of this step, becomes the output."""
        ratio = Ratio(tuple(per_channel(factor, self.product.trailing) for factor in steps))
        return Epilogue(ratio, clamp, bound, lift, self.kind)

    def form(self, largest: float, bias: Tensor | None) -> Any:
        """Return the sum, which can reach `largest`: narrow where float32 is exact, else wide."""
        lowering, product, dtype = self.lowering, self.product, self.lowering.weight.dtype
        operands = (
            self.input.value,
            lowering.constant("weight", product.layout(self.weight.integers), dtype.storage),
            None if bias is None else lowering.constant("bias", bias, self.whole),
            *product.attributes,
        )
        if largest < FLOAT32_EXACT:
            return lowering.call(product.narrow, *operands)
        axis = IN_PARTS.get(product.narrow)
        parts = 0 if axis is None else lowering.parts(self.input.value, self.weight.integers, bias)
        if parts == 1:
            return lowering.call(product.narrow, *operands)
        if parts and self.input.value.shape[axis] == operands[1].shape[1]:  # not in groups
            return self._in_channels(parts, operands[1], bias)
        cut = [list(_cut(self.weight.integers.detach(), self.magnitude, dtype))] if product.in_parts else []
        how = "in parts" if product.in_parts else "in float64"
        lowering.note("wide", f"a sum can reach {largest:.0f}, beyond 2^24, so it is formed {how}")
        return lowering.call(product.wide, *operands, *cut)

    def _in_channels(self, parts: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the sums over parts of the input channels, and add them in float64."""
        lowering, product, axis = self.lowering, self.product, IN_PARTS[self.product.narrow]
        pairs = zip(self.input.value.chunk(parts, axis), weight.chunk(parts, 1), strict=True)
        terms = [lowering.call(product.narrow, *pair, None, *product.attributes).double() for pair in pairs]
        total: Tensor = functools.reduce(torch.add, terms)
        return total if bias is None else total + per_channel(bias, product.trailing)


def accumulator_limit(lowering: Lowering) -> int:
    """Return the largest accumulator: of 48 bits where weights have 16, else of 32."""
    return INT48_MAX if lowering.weight.dtype.bits > 8 else INT32_MAX


def per_channel(channels: Tensor, trailing: int) -> Tensor:
    """Reshape per-channel values to broadcast to an output with `trailing` dimensions after the channel; a single one stays a scalar."""
    return channels.reshape(-1, *[1] * trailing) if channels.numel() > 1 else channels.reshape(())


def _cut(integers: Tensor, magnitude: int, dtype: IntType) -> accumulate.Split:
    """Return the fewest parts of an operand of this magnitude, and of the weight, for which every sum of parts stays below 2^24."""
    bits = (magnitude - 1).bit_length() + 1
    largest: dict[int, float] = {}  # Σ|w_j| of the worst part, by the number of the weight's parts
    for parts, weight_parts in sorted(itertools.product(range(1, bits + 1), range(1, dtype.bits + 1)), key=lambda p: (p[0] * p[1], p[1])):
        cut = accumulate.Split(parts, -(-bits // parts), weight_parts, -(-dtype.bits // weight_parts))
        if weight_parts not in largest:
            factors = accumulate.split(integers, weight_parts, cut.weight_bits)
            largest[weight_parts] = max(float(accumulator_bound(factor, None, 0, 1).max()) for factor in factors)
        if largest[weight_parts] * 2 ** (cut.bits - 1) < FLOAT32_EXACT:
            return cut
    raise AssertionError("parts of one bit always fit: a channel has fewer than 2^24 weights")

"""Layer normalisation: a composite, 16 bits wide inside.

    y = c / sqrt(mean c² + ε) · weight + bias,   c = x - mean x

Items are brought to one magnitude first; `magnitude` says how, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.numerics.grids import FLOAT32_EXACT, INT16, Grid
from fxquant.ops.core.operators import NORMED, WIDE, Builder, Lowering, Own, Quantized, Ratio, composite, lowered, numbers, sample
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.elementwise.table import shifted, tabled
from fxquant.ops.normalization.channels import scale_channels
from fxquant.ops.pooling.totals import mean
from fxquant.ops.reduction.extremum import amax, amin
from fxquant.primitives import elementwise
from fxquant.primitives.arithmetic import PRODUCT

# ---- Items of one batch brought to one magnitude before their squares are averaged -----------------------------------
#
# 16 bits then hold the statistics of all of them.
#
#     c / sqrt(mean c² + ε) = u / sqrt(mean u² + ε f²),   u = c · f,   f = 1 / max(extent, √ε)
#
# On one linear grid, the squares of an item a hundred times smaller than the largest one have 2 of 15 bits. The inverse deviation of a
# constant item, 1 / √ε, leaves no bits for those of the others. With f, one number for each item, all of them have squares near 1.
# The result does not depend on f, so f is coarse, and has no gradient.
#
# The extent is the distance between the smallest and the largest element, or, without a mean, the largest magnitude. It is computed from
# the integers of the operand, so it is exactly 0 where an item is constant. The rounding of the mean is all that such an item has beside
# 0, and f is 0 there.
#
# Without `Target.normalizes_items`, elements are not scaled, and the inverse deviation is one table of the variance, with ε in it.


COARSE = 32  # steps of f at the largest extent of its grid: items are brought to one magnitude to 3 percent, if not 1000 times smaller
NOT_ZERO = 1e-12  # in place of √ε where ε is 0
CENTRED = Own("int16", headroom=1.5)  # an operand ends where its grid does, so its differences from the mean exceed those seen by little


@tabled(lambda x, exponent=1.0: math.pow(max(x, 1.0), -exponent))
def bounded_inverse(input: Tensor, exponent: float = 1.0) -> Tensor:
    """Return x^-exponent, at most 1, without a gradient."""
    return input.detach().clamp_min(1.0) ** -exponent


@lru_cache(maxsize=64)
def _factors(scale: float, least: float, step: float, bounds: tuple[int, int]) -> Tensor:
    """Return the table of f in its steps, at least one, and 0 where the extent is 0; callers must not write into it."""
    extents = torch.arange(bounds[0], bounds[1] + 1, dtype=torch.float64, device="cpu") * scale
    steps = torch.floor(1 / (extents.clamp_min(least) * step)).clamp(1, INT16.high)
    return torch.where(extents > 0, steps, 0.0).to(torch.int16)


@lowered(function=lambda input, extent, least: input / extent.detach().clamp_min(least))
def of_one_magnitude(lowering: Lowering, input: Quantized, extent: Quantized, least: float) -> Quantized:
    """Return the elements over the extents of their items, or over `least` where these are smaller; without a gradient of the extents.

    Multiply by a table of the extent on int16, with as many steps as it has left at the largest extent.
    """
    top = min(1 / least, 1 / (COARSE * float(extent.scale)))
    grid = Grid(INT16, torch.tensor(top / INT16.high, dtype=torch.float32, device=extent.scale.device))
    entries = _factors(float(extent.scale), least, float(grid.scale), extent.grid.bounds).to(extent.scale.device)
    factor = lowering.holds(lowering.call(elementwise.lookup, extent.value, lowering.constant("table", entries, torch.int16)), grid)
    largest = lowering.prove(input.grid.magnitude * grid.magnitude, "the product")
    product = lowering.call(elementwise.multiply, input.value, factor, largest >= FLOAT32_EXACT)
    return lowering.requantize(product, Ratio(lowering.arithmetic.step(input.scale, grid.scale)), kind=PRODUCT)


def extent_of(build: Builder, input: fx.Node, dims: Sequence[int]) -> Any:
    """Return the distance between the smallest and the largest element of each item, which bounds its centred elements."""
    largest, smallest = build(amax, input, list(dims), True), build(amin, input, list(dims), True)
    return build(sub, largest, smallest, demand=WIDE)


def magnitude_of(build: Builder, input: fx.Node, dims: Sequence[int]) -> Any:
    """Return the largest magnitude of each item."""
    return build(amax, build(torch.abs, input, demand=WIDE), list(dims), True)


def unit_and_inverse(
    build: Builder, input: fx.Node, extent: Callable[[], fx.Node], dims: Sequence[int], eps: float
) -> tuple[fx.Node, fx.Node]:
    """Return the two factors of x / sqrt(mean x² + ε): u = x / extent of its item, or x itself, and 1 / sqrt(mean u² + ε / extent²)."""
    if not build.normalizes_items:
        return input, build(shifted, _power(build, input, dims), "rsqrt", 1.0, eps, {}, demand=WIDE)
    least, extents = math.sqrt(eps) or NOT_ZERO, extent()
    unit = build(of_one_magnitude, input, extents, least, demand=WIDE)
    power = _power(build, unit, dims)
    if eps:
        share = build(shifted, extents, "bounded_inverse", 1 / least, 0.0, {"exponent": 2.0}, demand=WIDE)
        power = build(add, power, share, demand=WIDE)
    return unit, build(torch.rsqrt, power, demand=WIDE)


def _power(build: Builder, input: fx.Node, dims: Sequence[int]) -> Any:
    return build(mean, build(mul, input, input, demand=WIDE), list(dims), True, demand=WIDE)


@composite(
    takes="input normalized_shape weight bias eps cudnn_enable",
    refuses=numbers("eps", "normalized_shape"),
    samples=(sample(within=NORMED, input=(3, 6, 6), normalized_shape=[6], eps=0.1),),
)
def layer_norm(
    build: Builder, input: fx.Node, normalized_shape: Sequence[int], weight: fx.Node | None = None, bias: fx.Node | None = None,
    eps: float = 1e-05,
) -> Any:  # fmt: skip
    """Normalize the last dimensions to mean 0 and variance 1, multiply by weight and add bias."""
    dims = list(range(-len(normalized_shape), 0))
    centred = build(sub, input, build(mean, input, dims, True, demand=WIDE), demand=CENTRED if build.normalizes_items else WIDE)
    unit, inverse = unit_and_inverse(build, centred, lambda: extent_of(build, input, dims), dims, float(eps))
    if weight is None and bias is None:
        return build(mul, unit, inverse)
    normalized = build(mul, unit, inverse, demand=WIDE)
    if weight is not None and len(normalized_shape) == 1:
        return build(scale_channels, normalized, weight, bias)
    if weight is None:
        return build(add, normalized, bias)
    if bias is None:
        return build(mul, normalized, weight)
    return build(add, build(mul, normalized, weight, demand=WIDE), bias)

"""prelu: a learned slope below zero, for all channels or for each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.numerics.grids import FLOAT32_EXACT, INT32_MAX, SMALLEST_SCALE, WEIGHT_INT16
from fxquant.numerics.rounding import straight_through
from fxquant.ops.core.operators import Call, Clamp, Lowering, Own, Quantized, Ratio, Trait, is_parameter, lowered, sampled
from fxquant.ops.core.slope import by_whole_slope
from fxquant.ops.core.weighted import shape_of
from fxquant.ops.elementwise.arithmetic import limited
from fxquant.primitives import elementwise, product
from fxquant.primitives.comparison import choose, compare


def _shaped(slopes: Tensor, input: Quantized) -> Tensor:
    """Return one slope, or one per channel, in a shape that broadcasts to the operand."""
    return slopes.reshape(-1, *[1] * (len(input.shape) - 2)) if slopes.numel() > 1 else slopes.reshape(())


def _by_whole_slope(lowering: Lowering, input: Quantized, weight: Tensor, clamp: Clamp | None) -> Quantized:
    slopes = _shaped(weight.detach(), input)
    return lowering.result(
        lambda: by_whole_slope(lowering, input, slopes, clamp, added=True), lambda: prelu(input.real(), weight, clamp=clamp)
    )


def _by_sign(lowering: Lowering, input: Quantized, weight: Tensor, clamp: Clamp | None) -> Quantized:
    """Compute q where q ≥ 0, else q · A, both on the operand's grid and then brought to the output's.

    A = round_half_even(weight_c / σ), of 16 bits, σ = max |weight| / 32767.
    """
    slopes = _shaped(weight.detach(), input)
    scale = (slopes.abs().max().float() / WEIGHT_INT16.high).clamp_min(SMALLEST_SCALE)
    whole = torch.round(slopes.double() / scale.double()).clamp(WEIGHT_INT16.low, WEIGHT_INT16.high)
    lowering.describe("slope", scale)
    wide = input.dtype.bits > 8  # a product then reaches 2^30
    product = lowering.call(elementwise.multiply, input.value, lowering.constant("slope", whole, torch.int32), wide)
    ratio = Ratio(lowering.arithmetic.step(input.scale, scale), (input.scale,))
    below = lowering.holds(
        lowering.arithmetic.requantize(lowering, product, ratio, *input.grid.bounds, input.grid, "negative_"), input.grid
    )
    zero = lowering.constant("zero", torch.zeros((), dtype=torch.float32, device=scale.device), torch.int8)
    chosen = lowering.call(choose, input.value, below, lowering.call(compare, input.value, zero, "ge"))

    def exact() -> Any:
        grid, limits = lowering.output.grid, lowering.bounds(clamp, lowering.output)
        steps = Ratio((input.scale,), (grid.scale,))
        return lowering.arithmetic.requantize(lowering, chosen, steps, *limits, grid, accumulator_bits=input.dtype.bits)

    return lowering.result(exact, lambda: prelu(input.real(), weight, clamp=clamp))


def _refuses_prelu(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    weight = arguments["weight"]
    if not isinstance(weight, fx.Node) or not is_parameter(weight):
        return "its weight is computed, not a parameter"
    operand = shape_of(arguments["input"])
    return "its input has no channels" if operand is not None and len(operand) < 2 and shape_of(weight) != (1,) else None


def _onnx_prelu(c: Call) -> str:
    slope = c.real("slope")
    return c.epilogue(c.do("PRelu", c.input, c.e.constant(slope.reshape(1) if slope.dim() == 0 else slope)))


@lowered(
    function=lambda input, weight, *, clamp=None: limited(F.prelu(input, weight), clamp),
    traits=frozenset({Trait.HOMOGENEOUS}),
    absorbs=frozenset({"clamp"}),
    refuses=_refuses_prelu,
    onnx=_onnx_prelu,
    demand=Own(shared_where="slope_bits"),
)
@sampled("F.prelu(x, {P(3)}).clamp(max=1)", "prelu(x, {P(1)})", "nn.PReLU()", "nn.PReLU(3)")
def prelu(lowering: Lowering, input: Quantized, weight: Tensor, *, clamp: Clamp | None = None) -> Quantized:
    """Compute max(x, 0) + weight · min(x, 0), with one weight or one per channel, and a fused clamp.

    y = requantize(2^n · max(q, 0) + a_c · min(q, 0), s_x · 2^-n / s_y),  a_c = round_half_even(weight_c · 2^n).

    n is the same for all channels: the largest for which no product reaches 2^23 (2^30 for int16, and where slopes are so steep
    that none but a negative one would do), 15 for int8 and slopes up to one. What is above zero is exact, so a slope of one is the
    identity.
    """
    lowering.parameters["its weight"] = weight
    if not bool(torch.isfinite(weight).all()):
        raise lowering.not_finite()
    if lowering.arithmetic.slope_bits and input.dtype.bits <= 8:
        return _by_whole_slope(lowering, input, weight, clamp)
    if lowering.arithmetic.multiplies_by_layers:
        return _by_sign(lowering, input, weight, clamp)
    steepest = float(weight.detach().abs().max())
    largest = math.frexp(input.grid.magnitude * max(1.0, steepest))[1]
    wide = input.dtype.bits > 8 or largest > 23
    bits = max((30 if wide else 23) - largest, 0)  # the proof refuses what is steeper still
    real = weight * 2.0**bits
    exact = torch.round(real.detach())
    slopes = straight_through(real, exact) if real.requires_grad else exact
    reach = exact.double().abs().clamp_min(2.0**bits)
    lowering.prove(reach * input.grid.magnitude, "the product", INT32_MAX if wide else FLOAT32_EXACT - 1)
    unit = torch.tensor(2.0**bits, dtype=torch.float64, device=input.scale.device)
    lowering.describe("slope", 1 / unit)
    rectified = lowering.call(product.rectify, input.value, 2**bits, lowering.constant("slope", _shaped(slopes, input), torch.int32), wide)
    return lowering.requantize(rectified, Ratio((input.scale,), (unit,)), clamp)

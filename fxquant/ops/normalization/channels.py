"""Batch normalization that is not folded into a layer: one factor and one bias per channel, as in a layer norm; and layer norms."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import TensorFact, fact, is_parameter
from fxquant.numerics.grids import FLOAT32_EXACT, INT16, Grid, Ratio
from fxquant.ops.core import WIDE, Builder, Call, Clamp, Layer, Lowering, Own, Quantized, composite, lowered, numbers, sample
from fxquant.ops.core.record import BY_NAME, Parameter
from fxquant.ops.core.samples import IMAGES, NORMED, sampled
from fxquant.ops.core.weighted import check_statistics, epilogue, lower_weighted, refuses_weighted
from fxquant.ops.elementwise.arithmetic import add, by_channels, mul, sub
from fxquant.ops.elementwise.comparison import amax, amin
from fxquant.ops.elementwise.table import shifted, tabled
from fxquant.ops.pooling.totals import mean
from fxquant.primitives import elementwise
from fxquant.primitives.arithmetic import PRODUCT
from fxquant.quantization.weights import BatchNorm, BatchNormTensors, multiplied

NO_STATISTICS = "it has no running statistics"


def _batch_norm(input: Tensor, batch_norm: BatchNorm, *, clamp: Clamp | None = None) -> Tensor:
    bn = batch_norm
    return epilogue(F.batch_norm(input, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps), None, clamp, None)


def _functional(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Any] | str:  # fmt: skip
    if training or running_mean is None or running_var is None:
        return NO_STATISTICS
    return {"input": input, "batch_norm": BatchNormTensors(running_mean, running_var, weight, bias, momentum, eps)}


def _by_function(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float, *_: Any, **__: Any
) -> dict[str, Any] | str:
    """torch.batch_norm, whose weight and bias stand first."""
    return _functional(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    operand, norm = fact(arguments["input"]), arguments["batch_norm"]
    if isinstance(operand, TensorFact) and (len(operand.shape) < 2 or not isinstance(operand.shape[1], int)):
        return "its input has no channels of a fixed number"
    computed = [value.name for value in norm if isinstance(value, fx.Node) and not is_parameter(value)] if isinstance(norm, tuple) else []
    return f"its statistics are computed by %{computed[0]}: neither stored nor computed from stored values" if computed else None


def _shaped(channels: Tensor, trailing: int) -> Tensor:
    return channels.reshape(-1, *[1] * trailing)


def _onnx_scaled(c: Call, trailing: int) -> str:
    weight, *bias = (c.e.constant(_shaped(c.real(role), trailing)) for role in ("weight", "bias") if role in c.constants)
    scaled = c.do("Mul", c.input, weight)
    return c.epilogue(c.do("Add", scaled, *bias) if bias else scaled)


@lowered(
    function=_batch_norm,
    adapt=_functional,
    calls={torch.batch_norm: _by_function},
    modules=dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        lambda m: NO_STATISTICS if m.running_mean is None else {"batch_norm": Parameter("")},
    ),
    absorbs=frozenset({"clamp"}),
    refuses=_refuses,
    layer=Layer(
        channels=lambda arguments: 1,
        # What it reads is never multiplied: its statistics are of that.
        rescaled=lambda arguments, inputs, outputs: {"batch_norm": multiplied(arguments["batch_norm"], outputs)},
    ),
    onnx=lambda c: _onnx_scaled(c, len(c.operand_shape) - 2),
)
@sampled("F.batch_norm(x, {B(torch.randn(3))}, {B(torch.rand(3) + 0.5)}, {P(3)}, {P(3)})", "{nn.BatchNorm2d(3)}(x.relu())")
@sampled("torch.batch_norm(x, {P(3)}, {P(3)}, {B(torch.randn(3))}, {B(torch.rand(3) + 0.5)}, False, 0.1, 1e-5, True)")
@sampled("nn.BatchNorm1d(8)", x=(8,))
@sampled("nn.BatchNorm3d(3)", x=IMAGES[3])
def batch_norm(lowering: Lowering, input: Quantized, batch_norm: BatchNorm, *, clamp: Clamp | None = None) -> Quantized:
    """Normalize channels with running statistics, and apply a fused clamp.

    Fold it into a layer that multiplies every channel by one; a channel's only weight is then ±127 steps.
    """
    mean = batch_norm.running_mean
    assert mean is not None
    form = by_channels(len(input.shape) - 2)
    return lower_weighted(lowering, form, input, torch.ones_like(mean).unsqueeze(1), None, clamp=clamp, batch_norm=batch_norm)


def _function_of_instances(input: Tensor, batch_norm: BatchNorm, *, clamp: Clamp | None = None, own: bool = False) -> Tensor:
    bn = batch_norm
    statistics = bn.running_mean, bn.running_var, bn.weight, bn.bias
    return epilogue(F.instance_norm(input, *statistics, own, bn.momentum or 0.0, bn.eps), None, clamp, None)


@lowered(
    function=_function_of_instances,
    by_name=False,
    absorbs=frozenset({"clamp"}),
    refuses=_refuses,
    layer=BY_NAME["batch_norm"].layer,
    onnx=BY_NAME["batch_norm"].onnx,
)
@sampled("nn.InstanceNorm2d(3, track_running_stats=True)")
def normalized_instances(lowering: Lowering, input: Quantized, batch_norm: BatchNorm, *, clamp: Clamp | None = None) -> Quantized:
    """Normalize channels by running statistics; in live training by the statistics of each sample, which update the running ones."""
    if not lowering.live_batch_norm:
        return BY_NAME["batch_norm"].lower(lowering, input, batch_norm, clamp=clamp)  # type: ignore[no-any-return]
    check_statistics(lowering, math.prod(size for size in input.shape[2:] if isinstance(size, int)))
    real = _function_of_instances(input.real(), batch_norm, clamp=clamp, own=True)
    return lowering.result(lambda: lowering.output.grid.quantize(real.detach()), lambda: real)


# ---- channels of one dimension, before `trailing` others ---------------------------------------------------------------
def _scale_channels(input: Tensor, weight: Tensor, bias: Tensor | None = None, trailing: int = 0, *, clamp: Clamp | None = None) -> Tensor:
    value = input * _shaped(weight, trailing)
    return epilogue(value if bias is None else value + _shaped(bias, trailing), None, clamp, None)


def _rescaled_channels(arguments: dict[str, Any], inputs: Tensor, outputs: Tensor) -> dict[str, Any]:
    weight, bias = arguments["weight"] * (outputs / inputs), arguments.get("bias")
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias * outputs}


@lowered(
    function=_scale_channels,
    absorbs=frozenset({"clamp"}),
    refuses=refuses_weighted,
    layer=Layer(
        weight=lambda weight, **_: weight.unsqueeze(1),
        channels=lambda arguments: -1 - arguments.get("trailing", 0),
        rescaled=_rescaled_channels,
    ),
    onnx=lambda c: _onnx_scaled(c, c.arguments.get("trailing", 0)),
)
@sampled("F.layer_norm(x, (8,), {P(8)}, {P(8)})", within=NORMED, x=(8,))
def scale_channels(
    lowering: Lowering, input: Quantized, weight: Tensor, bias: Tensor | None = None, trailing: int = 0, *, clamp: Clamp | None = None
) -> Quantized:
    """Compute x · weight + bias per channel, and a fused clamp; `trailing` dimensions follow the channels."""
    return lower_weighted(lowering, by_channels(trailing), input, weight.unsqueeze(1), bias, clamp=clamp)


# ---- Layer normalisation: a composite, 16 bits wide inside -----------------------------------------------------------
#
#     y = c / sqrt(mean c² + ε) · weight + bias,   c = x - mean x
#
# Items are brought to one magnitude first; `magnitude` says how, and why.


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
    """Return input / max(extent, least), where `extent` has a value for each item; without a gradient of `extent`.

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

"""Statistics of a tensor, and normalization by them: composites with 16-bit inner tensors.

    var(x) = Σ c² / (n - correction),  c = x - mean x        std(x) = sqrt(var x)

Norms bring their items to one magnitude first, as layer norms do. A batch norm that is not folded into a layer is one factor and one bias
per channel.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import TensorFact, fact, is_parameter, largest_size
from fxquant.numerics.grids import FLOAT32_EXACT, INT16, Grid, Ratio
from fxquant.ops.core import POSITIVE, Builder, Clamp, Lowering, Quantized, composite, lowered
from fxquant.ops.core import numbers as numeric
from fxquant.ops.core.declare import COMPUTED, NO_DIMENSIONS, are_fixed, settings_of, shape_of
from fxquant.ops.core.record import BY_NAME, WIDE, Instead, Layer, Own, Parameter, Trait
from fxquant.ops.core.samples import IMAGES, NORMED, sample, sampled, written
from fxquant.ops.core.weighted import check_statistics, epilogue, lower_weighted, refuses_weighted
from fxquant.ops.elementwise.arithmetic import add, by_channels, div, mul, onnx_scaled, sub
from fxquant.ops.elementwise.comparison import amax, amin, where
from fxquant.ops.elementwise.table import shifted, tabled
from fxquant.ops.movement.shape import MANY_SIZES, reshape
from fxquant.ops.pooling.totals import mean, sum
from fxquant.primitives import elementwise
from fxquant.primitives.accumulate import per_channel
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


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    operand, norm = fact(arguments["input"]), arguments["batch_norm"]
    if isinstance(operand, TensorFact) and (len(operand.shape) < 2 or not isinstance(operand.shape[1], int)):
        return "its input has no channels of a fixed number"
    computed = [value.name for value in norm if isinstance(value, fx.Node) and not is_parameter(value)] if isinstance(norm, tuple) else []
    return f"its statistics are computed by %{computed[0]}: neither stored nor computed from stored values" if computed else None


@lowered(
    function=_batch_norm,
    adapt=_functional,
    calls={  # its weight and bias stand first
        torch.batch_norm: lambda input, weight, bias, running_mean, running_var, training, momentum, eps, *_, **__: _functional(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
    },
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
    onnx=lambda c: onnx_scaled(c, c.input, len(c.operand_shape) - 2),
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
    value = input * per_channel(weight, trailing)
    return epilogue(value if bias is None else value + per_channel(bias, trailing), None, clamp, None)


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
    onnx=lambda c: onnx_scaled(c, c.input, c.arguments.get("trailing", 0)),
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
    refuses=numeric("eps", "normalized_shape"),
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


# ---- Statistics, and what is normalized by them ----------------------------------------------------------------------
def centre(build: Builder, input: fx.Node, dims: Sequence[int]) -> Any:
    """Subtract a tensor's mean from it."""
    return build(sub, input, build(mean, input, list(dims), True, demand=WIDE), demand=WIDE)


def _statistics(
    input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None, axis: Any = None
) -> dict[str, Any] | str:
    """x.var(), x.var(False), x.var(1, True), x.var(dim=1, correction=0), …"""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced(input, axis if dim is None else dim)
    if isinstance(dims, str):
        return dims
    chosen = correction if correction is not None else 1 if unbiased is None else int(unbiased)
    return {"input": input, "dim": dims, "correction": chosen, "keepdim": keepdim}


def reduced(input: Any, dim: Any) -> list[int] | str:
    """Return the dimensions of a reduction as sorted indices >= 0, every one for None or an empty list; or why they cannot be known."""
    sizes = shape_of(input)
    if not sizes:
        return "its operand is not a tensor" if sizes is None else NO_DIMENSIONS
    chosen = [dim] if isinstance(dim, int) else list(dim or range(len(sizes)))
    return sorted(d % len(sizes) for d in chosen) if all(isinstance(d, int) for d in chosen) else "its dimensions are computed"


def over_dimensions(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return the arguments of a reduction with its dimensions as `reduced` lists them."""
    dims = reduced(arguments["input"], arguments["dim"])
    return dims if isinstance(dims, str) else {**arguments, "dim": dims}


def _refuses_statistics(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    because = refuses_reduction(arguments["input"], arguments["dim"])
    if because is not None:
        return because
    sizes = [fact(arguments["input"]).shape[dim] for dim in arguments["dim"]]
    if not are_fixed(sizes):
        return "its number of elements varies"
    free = math.prod(sizes) - arguments["correction"]
    return None if free > 0 else "its correction is not less than its number of elements"


def refuses_reduction(input: Any, dims: list[int]) -> str | None:
    """Return why a sum over these dimensions cannot be computed on integers; None if it can."""
    sizes = shape_of(input)
    if not sizes:
        return "its operand is not a tensor" if sizes is None else NO_DIMENSIONS
    return None if all(largest_size(sizes[d]) is not None for d in dims) else "it reduces the batch, whose size is not fixed"


def _spread(name: str, dims: str, root: bool) -> Iterator[Callable[..., Tensor]]:
    """Declare the variance or standard deviation, alone and together with the mean; `dims` is the argument in samples."""

    def spread(build: Builder, input: fx.Node, dim: list[int], correction: float = 1, keepdim: bool = False) -> Any:
        """Compute the variance over dimensions, Σ (x - mean)² / (n - correction), or its square root."""
        centred, free = centre(build, input, dim), math.prod(fact(input).shape[d] for d in dim) - correction
        total = build(sum, build(mul, centred, centred, demand=WIDE), dim, keepdim, demand=WIDE)
        return build(shifted, total, "sqrt", 1 / free, 0.0, {}) if root else build(div, total, float(free))

    def with_mean(build: Builder, input: fx.Node, dim: list[int], correction: float = 1, keepdim: bool = False) -> Any:
        """Return the variance over dimensions, or its root, and the mean."""
        return spread(build, input, dim, correction, keepdim), build(mean, input, dim, keepdim)

    text = f"torch.{name}_mean(x, {dims})[0] + torch.{name}_mean(x, {dims})[1]"
    samples = (sample(within=NORMED, input=(3, 6), dim=[1, 2], correction=0), sample(within=NORMED, input=(3, 6), dim=[2], keepdim=True))
    fields: dict[str, Any] = {"adapt": _statistics, "refuses": _refuses_statistics}
    yield composite(name=name, traits=frozenset({Trait.STATISTIC}), samples=samples, **fields)(spread)
    yield composite(name=f"{name}_mean", samples=written(text, within=NORMED), **fields)(with_mean)


var, var_mean = _spread("var", "1", root=False)
std, std_mean = _spread("std", "(2, 3)", root=True)


# ---- normalisation of groups, of instances, by the root of the mean square ------------------------------------------
def scaled(build: Builder, input: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> Any:
    """Return a tensor times weight, plus bias, of its channels."""
    if weight is None and bias is not None:
        weight = build.constant(torch.ones(fact(bias).shape, dtype=torch.float32, device="cpu"))
    return build(scale_channels, input, weight, bias, len(fact(input).shape) - 2)


def _refuses_group_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    shape, groups = fact(arguments["input"]).shape, arguments["num_groups"]
    if not isinstance(groups, int) or not isinstance(arguments["eps"], int | float):
        return COMPUTED
    if len(shape) < 2 or not isinstance(shape[1], int):
        return "its input has no channels of a fixed number"
    if shape[1] % groups:
        return "its groups do not divide its channels"
    return None if all(largest_size(size) is not None for size in shape[1:]) else MANY_SIZES


@sampled("F.group_norm(x, 3, eps=0.1)", "torch.group_norm(x, 1)", "nn.GroupNorm(1, 3)", "nn.GroupNorm(3, 3, affine=False)", within=NORMED)
def _in_groups(
    build: Builder, input: fx.Node, num_groups: int, weight: fx.Node | None = None, bias: fx.Node | None = None, eps: float = 1e-5
) -> Any:
    """Normalize each group of channels to mean 0 and variance 1, then multiply by weight and add bias, per channel."""
    shape = build.sizes(input)
    merged = [math.prod(shape[1:]) // num_groups] if are_fixed(fact(input).shape[1:]) else [shape[1] // num_groups, *shape[2:]]
    grouped, dims = build(reshape, input, [shape[0], num_groups, *merged]), list(range(2, 2 + len(merged)))
    unit, inverse = unit_and_inverse(build, centre(build, grouped, dims), lambda: extent_of(build, grouped, dims), dims, float(eps))
    if weight is None and bias is None:
        return build(reshape, build(mul, unit, inverse), shape)
    return scaled(build, build(reshape, build(mul, unit, inverse, demand=WIDE), shape), weight, bias)


group_norm = composite(
    *(F.group_norm, torch.group_norm, nn.GroupNorm),
    name="group_norm",
    by_name=False,
    takes="input num_groups weight bias eps cudnn_enabled",
    refuses=_refuses_group_norm,
)(_in_groups)


MOVES = "it moves its running statistics in eval mode as well"


def _by_statistics(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-05,
) -> dict[str, Any] | str | Instead:  # fmt: skip
    """Adapt F.instance_norm: a call with running statistics becomes the operator normalized_instances."""
    if running_mean is None or running_var is None:
        return {"input": input, "weight": weight, "bias": bias, "eps": eps}
    norm = BatchNormTensors(running_mean, running_var, weight, bias, momentum, eps)
    return MOVES if use_input_stats else Instead(normalized_instances, {"input": input, "batch_norm": norm})


def _instance_norm_module(module: Any) -> dict[str, Any] | str | Instead:
    if module.running_mean is None:
        return settings_of(("weight", "bias", "eps"))(module)
    norm = {"batch_norm": Parameter("")}
    return Instead(normalized_instances, norm) if module.track_running_stats else MOVES


def _refuses_instance_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    shape = fact(arguments["input"]).shape
    if len(shape) < 3:
        return "its input has no batch dimension"
    return _refuses_group_norm(node, {**arguments, "num_groups": shape[1] if isinstance(shape[1], int) else 1})


@composite(
    function=lambda input, weight=None, bias=None, eps=1e-5: F.instance_norm(input, None, None, weight, bias, True, 0.0, eps),
    adapt=_by_statistics,
    calls={  # its weight and bias stand first
        torch.instance_norm: lambda input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, *_: _by_statistics(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    },
    modules=dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm_module),
    refuses=_refuses_instance_norm,
)
@sampled("F.instance_norm(x)", "torch.instance_norm(x, {P(3)}, {P(3)}, None, None, True, 0.1, 1e-5, True)", within=NORMED)
@sampled("nn.InstanceNorm2d(3)", within=NORMED)
@sampled("nn.InstanceNorm1d(3, affine=True)", within=NORMED, x=IMAGES[1])
@sampled("nn.InstanceNorm3d(3)", within=NORMED, x=IMAGES[3])
def instance_norm(build: Builder, input: fx.Node, weight: fx.Node | None = None, bias: fx.Node | None = None, eps: float = 1e-05) -> Any:
    """Normalize each channel of each sample to mean 0 and variance 1, then multiply by weight and add bias."""
    return _in_groups(build, input, fact(input).shape[1], weight, bias, eps)


@composite(
    refuses=numeric("normalized_shape", "eps", none=True), samples=(sample(within=NORMED, input=(3, 6, 6), normalized_shape=[6], eps=0.1),)
)
def rms_norm(
    build: Builder, input: fx.Node, normalized_shape: Sequence[int], weight: fx.Node | None = None, eps: float | None = None
) -> Any:
    """Return the last dimensions over the root of their mean square, times weight."""
    dims = list(range(-len(normalized_shape), 0))
    small = torch.finfo(torch.float32).eps if eps is None else float(eps)
    unit, inverse = unit_and_inverse(build, input, lambda: magnitude_of(build, input, dims), dims, small)
    if weight is None:
        return build(mul, unit, inverse)
    normalized = build(mul, unit, inverse, demand=WIDE)
    return build(scale_channels, normalized, weight, None) if len(dims) == 1 else build(mul, normalized, weight)


# ---- Norms of vectors and of matrices, and division by norms: composites with 16-bit inner tensors
#
#     norm(x) = (Σ |x|^p)^(1/p)
#
# The inverse of a norm is one table, s^(-1/p), with 0 at s = 0: a row of zeros stays a row of zeros. Rows that are divided by their norms
# are brought to one magnitude first, as the items of a layer norm are.
@tabled(lambda x, root=2.0: x ** (-1 / root) if x > 0 else 0.0)
@sampled("F.normalize(x, dim=1)", over=POSITIVE, within=NORMED)
def inverse_root(input: Tensor, root: float = 2.0) -> Tensor:
    """Return x^(-1/root) of positive numbers, and 0 of 0."""
    return torch.where(input > 0, input.clamp_min(torch.finfo(torch.float32).tiny) ** (-1 / root), 0.0)


def _powers(build: Builder, input: fx.Node, p: float, dims: list[int], keepdim: bool, last: dict[str, Any]) -> tuple[fx.Node, float]:
    """Return (tensor, degree): the norm is the degree-th root of the tensor. `last` is the demand for a tensor that is the norm."""
    if p == 2:
        return build(sum, build(mul, input, input, demand=WIDE), dims, keepdim, demand=WIDE), 2.0
    if p == 0:
        return build(sum, build(where, build(torch.ne, input, 0.0), 1.0, 0.0), dims, keepdim, **last), 1.0
    magnitude = build(torch.abs, input, demand=WIDE)
    if p == math.inf:
        return build(amax, magnitude, dims, keepdim), 1.0
    if p == -math.inf:
        return build(amin, magnitude, dims, keepdim), 1.0
    if p == 1:
        return build(sum, magnitude, dims, keepdim, **last), 1.0
    return build(sum, build(torch.pow, magnitude, float(p), demand=WIDE), dims, keepdim, demand=WIDE), float(p)


def _norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> dict[str, Any] | str:
    """torch.norm and Tensor.norm: the numbers are norms of vectors, over whatever dimensions."""
    if dtype not in (None, torch.float32):
        return f"it computes in {dtype}"
    dims = reduced(input, dim)
    if isinstance(dims, str):
        return dims
    p = 2 if p in (None, "fro") else p
    if not isinstance(p, int | float):
        return f"the norm {p!r} has no integer form"
    return {"input": input, "p": float(p), "dim": dims, "keepdim": keepdim}


def _matrix_norm(input: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None) -> dict[str, Any] | str:
    if ord != "fro":
        return f"the matrix norm {ord!r} has no integer form"
    return _norm(input, "fro", dim, keepdim, None, dtype)


def _linalg_norm(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> dict[str, Any] | str:
    """torch.linalg.norm: of two dimensions, or of a matrix, a number is a norm of matrices."""
    dims = reduced(input, dim)
    matrix = not isinstance(dims, str) and len(dims) == 2 and ord is not None
    if not matrix:
        return _norm(input, "fro" if ord is None else ord, dim, keepdim, dtype=dtype)
    return _matrix_norm(input, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)


def _normalized(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> dict[str, Any] | str:
    dims = reduced(input, dim)
    return dims if isinstance(dims, str) else {"input": input, "p": float(p), "dim": dims, "eps": eps}


def _refuses_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    p = arguments["p"]
    if not isinstance(p, float) or (p < 0 and p != -math.inf) or math.isnan(p):
        return f"the {p}-norm has no integer form"
    if p <= 0 and "eps" in arguments:
        return f"it divides by the {p}-norm"
    return refuses_reduction(arguments["input"], arguments["dim"])


@composite(
    function=lambda input, p, dim, keepdim=False: torch.linalg.vector_norm(input, p, dim, keepdim),
    adapt=_norm,
    calls={
        torch.linalg.norm: _linalg_norm,
        torch.linalg.vector_norm: lambda input, ord=2, dim=None, keepdim=False, *, dtype=None: _norm(input, ord, dim, keepdim, None, dtype),
        torch.linalg.matrix_norm: _matrix_norm,
    },
    traits=frozenset({Trait.STATISTIC}),
    refuses=_refuses_norm,
)
@sampled("torch.norm(x, dim=1)", "torch.norm(x, 1, (1, 2), True)", "x.norm(math.inf, 1)", "torch.linalg.norm(x, dim=(2, 3))", within=NORMED)
@sampled("torch.linalg.vector_norm(x, 3, (1, 2))", "torch.linalg.vector_norm(x, -math.inf, dim=1)", within=NORMED)
@sampled("torch.linalg.matrix_norm(x)", within=NORMED)
def norm(build: Builder, input: fx.Node, p: float, dim: list[int], keepdim: bool = False) -> Any:
    """Compute the p-norm over dimensions: (Σ |x|^p)^(1/p).

    For p = inf it is the largest magnitude, for -inf the smallest, for 0 how many elements are not 0.
    """
    total, root = _powers(build, input, p, dim, keepdim, {})
    return total if root == 1 else build(torch.sqrt, total) if root == 2 else build(torch.pow, total, 1 / root)


@composite(
    function=lambda input, p, dim, eps=1e-12: input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps),
    adapt=_normalized,
    refuses=_refuses_norm,
    samples=(sample(within=NORMED, input=(3, 6, 6), p=1.0, dim=[1]),),
)
def normalize(build: Builder, input: fx.Node, p: float, dim: list[int], eps: float = 1e-12) -> Any:
    """Return the elements over the p-norm of theirs along dimensions."""
    unit = input
    if build.normalizes_items:
        unit = build(of_one_magnitude, input, magnitude_of(build, input, dim), NOT_ZERO, demand=WIDE)
    total, root = _powers(build, unit, p, dim, True, {"demand": WIDE})
    return build(mul, unit, build(inverse_root, total, root, demand=WIDE))

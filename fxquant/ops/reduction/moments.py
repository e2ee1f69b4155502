"""Statistics of a tensor, and normalization by them: composites with 16-bit inner tensors.

    var(x) = Σ c² / (n - correction),  c = x - mean x        std(x) = sqrt(var x)

Norms bring their items to one magnitude first, as layer norms do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import largest_size
from fxquant.ops.core import POSITIVE, WIDE, Builder, Instead, Trait, composite, fact
from fxquant.ops.core import numbers as numeric
from fxquant.ops.core.declare import COMPUTED, NO_DIMENSIONS, are_fixed, settings_of, shape_of
from fxquant.ops.core.record import Parameter
from fxquant.ops.core.samples import IMAGES, NORMED, sample, sampled, written
from fxquant.ops.elementwise.arithmetic import div, mul, sub
from fxquant.ops.elementwise.comparison import amax, amin, where
from fxquant.ops.elementwise.table import shifted, tabled
from fxquant.ops.movement.shape import MANY_SIZES, numbers, reshape
from fxquant.ops.normalization import channels
from fxquant.ops.normalization.channels import extent_of, magnitude_of, normalized_instances, scale_channels, unit_and_inverse
from fxquant.ops.pooling.totals import mean, sum
from fxquant.quantization.weights import BatchNormTensors


def centre(build: Builder, input: fx.Node, dims: Sequence[int]) -> Any:
    """Subtract a tensor's mean from it."""
    return build(sub, input, build(mean, input, list(dims), True, demand=WIDE), demand=WIDE)


def _sizes(input: fx.Node, dims: list[int]) -> list[Any]:
    return [fact(input).shape[dim] for dim in dims]


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
    sizes = _sizes(arguments["input"], arguments["dim"])
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
        centred, free = centre(build, input, dim), math.prod(_sizes(input, dim)) - correction
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
    return None if all(isinstance(size, int) for size in shape[1:]) else MANY_SIZES


@sampled("F.group_norm(x, 3, eps=0.1)", "torch.group_norm(x, 1)", "nn.GroupNorm(1, 3)", "nn.GroupNorm(3, 3, affine=False)", within=NORMED)
def _in_groups(
    build: Builder, input: fx.Node, num_groups: int, weight: fx.Node | None = None, bias: fx.Node | None = None, eps: float = 1e-5
) -> Any:
    """Normalize each group of channels to mean 0 and variance 1, then multiply by weight and add bias, per channel."""
    shape = numbers(fact(input).shape)
    grouped = build(reshape, input, [shape[0], num_groups, math.prod(shape[1:]) // num_groups])
    unit, inverse = unit_and_inverse(build, centre(build, grouped, [2]), lambda: extent_of(build, grouped, [2]), [2], float(eps))
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


def _weights_first(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool, momentum: float, eps: float, *_: Any
) -> dict[str, Any] | str | Instead:
    """Adapt torch.instance_norm, whose weight and bias stand first."""
    return _by_statistics(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


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
    calls={torch.instance_norm: _weights_first},
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
        unit = build(channels.of_one_magnitude, input, magnitude_of(build, input, dim), channels.NOT_ZERO, demand=WIDE)
    total, root = _powers(build, unit, p, dim, True, {"demand": WIDE})
    return build(mul, unit, build(inverse_root, total, root, demand=WIDE))

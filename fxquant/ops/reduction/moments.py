"""Statistics of a tensor and what is normalised by them: composites, 16 bits wide inside.

    var(x) = Σ c² / (n - correction),  c = x - mean x        std(x) = sqrt(var x)

Norms bring their items to one magnitude first, as layer norms do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite
from fxquant.ops.core.demands import WIDE
from fxquant.ops.core.record import Operator, Parameter, register
from fxquant.ops.core.samples import NORMED, sample
from fxquant.ops.core.traits import Trait
from fxquant.ops.elementwise.arithmetic import mul, sub
from fxquant.ops.elementwise.division import div
from fxquant.ops.elementwise.table import shifted
from fxquant.ops.movement.shape import MANY_SIZES, numbers, reshape
from fxquant.ops.normalization.channels import scale_channels
from fxquant.ops.normalization.magnitude import extent_of, magnitude_of, unit_and_inverse
from fxquant.ops.pooling.totals import mean, sum

# ---- variance and deviation -----------------------------------------------------------------------------------------


def centre(build: Builder, input: fx.Node, dims: Sequence[int]) -> fx.Node:
    """Subtract a tensor's mean from it."""
    centred: fx.Node = build(sub, input, build(mean, input, list(dims), True, demand=WIDE), demand=WIDE)
    return centred


def _squares(build: Builder, input: fx.Node, dims: list[int], keepdim: bool) -> tuple[fx.Node, float]:
    """Return the sum of the squares of what is left without the mean, and of how many elements."""
    centred = centre(build, input, dims)
    count = math.prod(_sizes(input, dims))
    return build(sum, build(mul, centred, centred, demand=WIDE), dims, keepdim, demand=WIDE), count


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
    """Return the dimensions of a reduction, counted from the front; all of them for None and for an empty list."""
    known = fact(input) if isinstance(input, fx.Node) else None
    if not isinstance(known, TensorFact):
        return "its operand is not a tensor"
    chosen = [dim] if isinstance(dim, int) else list(dim or range(len(known.shape)))
    if not all(isinstance(d, int) for d in chosen):
        return "its dimensions are computed"
    return sorted(d % len(known.shape) for d in chosen)


def _refuses_statistics(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    because = refuses_reduction(arguments["input"], arguments["dim"])
    if because is not None:
        return because
    free = math.prod(_sizes(arguments["input"], arguments["dim"])) - arguments["correction"]
    return None if free > 0 else "its correction is not less than its number of elements"


def refuses_reduction(input: Any, dims: list[int]) -> str | None:
    """Return why a sum over these dimensions cannot be computed on integers; None if it can."""
    known = fact(input)
    if not isinstance(known, TensorFact):
        return "its operand is not a tensor"
    if not known.shape:
        return "its operand has no dimensions"
    return None if all(isinstance(known.shape[d], int) for d in dims) else "it reduces the batch, whose size is not fixed"


def _var(build: Builder, input: fx.Node, dim: list[int], correction: float, keepdim: bool) -> Any:
    total, count = _squares(build, input, dim, keepdim)
    return build(div, total, float(count - correction))


def _std(build: Builder, input: fx.Node, dim: list[int], correction: float, keepdim: bool) -> Any:
    total, count = _squares(build, input, dim, keepdim)
    return build(shifted, total, "sqrt", 1 / (count - correction), 0.0, {})


SPREADS = (sample(within=NORMED, input=(3, 6), dim=[1, 2], correction=0), sample(within=NORMED, input=(3, 6), dim=[2], keepdim=True))


@composite(adapt=_statistics, refuses=_refuses_statistics, traits=frozenset({Trait.STATISTIC}), samples=SPREADS)
def var(build: Builder, input: fx.Node, dim: list[int], correction: float = 1, keepdim: bool = False) -> Any:
    """Return the variance over dimensions, of whose n elements n - correction are free."""
    return _var(build, input, dim, correction, keepdim)


@composite(adapt=_statistics, refuses=_refuses_statistics, traits=frozenset({Trait.STATISTIC}), samples=SPREADS)
def std(build: Builder, input: fx.Node, dim: list[int], correction: float = 1, keepdim: bool = False) -> Any:
    """Return the root of the variance."""
    return _std(build, input, dim, correction, keepdim)


@composite(adapt=_statistics, refuses=_refuses_statistics)
def var_mean(build: Builder, input: fx.Node, dim: list[int], correction: float = 1, keepdim: bool = False) -> Any:
    """Return the variance and the mean."""
    return _var(build, input, dim, correction, keepdim), build(mean, input, dim, keepdim)


@composite(adapt=_statistics, refuses=_refuses_statistics)
def std_mean(build: Builder, input: fx.Node, dim: list[int], correction: float = 1, keepdim: bool = False) -> Any:
    """Return the deviation and the mean."""
    return _std(build, input, dim, correction, keepdim), build(mean, input, dim, keepdim)


# ---- normalisation of groups, of instances, by the root of the mean square ------------------------------------------


def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalize each group of channels to mean 0 and variance 1, then multiply by weight and add bias, per channel."""
    return F.group_norm(input, num_groups, weight, bias, eps)


def _expand_group_norm(build: Builder, input: fx.Node, num_groups: int, weight: fx.Node | None, bias: fx.Node | None, eps: float) -> Any:
    shape = numbers(fact(input).shape)
    grouped = build(reshape, input, [shape[0], num_groups, math.prod(shape[1:]) // num_groups])
    unit, inverse = unit_and_inverse(build, centre(build, grouped, [2]), lambda: extent_of(build, grouped, [2]), [2], float(eps))
    if weight is None and bias is None:
        return build(reshape, build(mul, unit, inverse), shape)
    return scaled(build, build(reshape, build(mul, unit, inverse, demand=WIDE), shape), weight, bias)


def scaled(build: Builder, input: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> fx.Node:
    """Return a tensor times weight, plus bias, of its channels."""
    if weight is None and bias is not None:
        weight = build.constant(torch.ones(fact(bias).shape, dtype=torch.float32, device="cpu"))
    result: fx.Node = build(scale_channels, input, weight, bias, len(fact(input).shape) - 2)
    return result


def _refuses_group_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    shape, groups = fact(arguments["input"]).shape, arguments["num_groups"]
    if not isinstance(groups, int) or not isinstance(arguments["eps"], int | float):
        return "one of its settings is computed, not a number"
    if len(shape) < 2 or not isinstance(shape[1], int):
        return "its input has no channels of a fixed number"
    if shape[1] % groups:
        return "its groups do not divide its channels"
    return None if all(isinstance(size, int) for size in shape[1:]) else MANY_SIZES


def _affine(module: Any) -> dict[str, Any]:
    return {name: None if getattr(module, name) is None else Parameter(name) for name in ("weight", "bias")}


def _group_norm_module(module: Any) -> dict[str, Any]:
    return {"num_groups": module.num_groups, **_affine(module), "eps": module.eps}


def _group_norm(
    input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enabled: bool = True
) -> dict[str, Any]:
    return {"input": input, "num_groups": num_groups, "weight": weight, "bias": bias, "eps": eps}


register(
    Operator(
        "group_norm",
        group_norm,
        ("input",),
        expand=_expand_group_norm,
        functions={F.group_norm: _group_norm, torch.group_norm: _group_norm},
        modules={nn.GroupNorm: _group_norm_module},
        refuses=_refuses_group_norm,
    )
)


def _float_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, 0.0, eps)


def _instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> dict[str, Any]:
    statistics = {"running_mean": running_mean, "running_var": running_var} if not use_input_stats else {}
    return {"input": input, **statistics, "weight": weight, "bias": bias, "use_input_stats": use_input_stats, "eps": eps}


def _instance_norm_module(module: Any) -> dict[str, Any]:
    running = module.running_mean is not None
    statistics = {name: Parameter(name) for name in ("running_mean", "running_var")} if running else {}
    return {**statistics, **_affine(module), "use_input_stats": not running, "eps": module.eps}


def _refuses_instance_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    shape = fact(arguments["input"]).shape
    if len(shape) < 3:
        return "its input has no batch dimension"
    return _refuses_group_norm(node, {**arguments, "num_groups": shape[1] if isinstance(shape[1], int) else 1})


@composite(
    function=_float_instance_norm,
    adapt=_instance_norm,
    modules=dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm_module),
    refuses=_refuses_instance_norm,
)
def instance_norm(
    build: Builder,
    input: fx.Node,
    running_mean: fx.Node | None = None,
    running_var: fx.Node | None = None,
    weight: fx.Node | None = None,
    bias: fx.Node | None = None,
    use_input_stats: bool = True,
    eps: float = 1e-05,
) -> Any:
    """Normalize each channel of each sample to mean 0 and variance 1, or by running statistics; multiply by weight and add bias."""
    if use_input_stats:
        return _expand_group_norm(build, input, fact(input).shape[1], weight, bias, eps)
    factor = build(shifted, running_var, "rsqrt", 1.0, float(eps), {})
    factor = factor if weight is None else build(mul, factor, weight)
    offset = build(mul, running_mean, factor)
    return scaled(build, input, factor, build(torch.neg, offset) if bias is None else build(sub, bias, offset))


def _rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return F.rms_norm(input, list(normalized_shape), weight, eps)


def _rms_norm_module(module: Any) -> dict[str, Any]:
    weight = None if module.weight is None else Parameter("weight")
    return {"normalized_shape": list(module.normalized_shape), "weight": weight, "eps": module.eps}


def _refuses_rms_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    given = [arguments["eps"] or 0, *arguments["normalized_shape"]]
    return None if all(isinstance(value, int | float) for value in given) else "one of its settings is computed, not a number"


@composite(function=_rms_norm, modules={nn.RMSNorm: _rms_norm_module}, refuses=_refuses_rms_norm)
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

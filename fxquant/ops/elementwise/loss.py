"""Losses, element by element: composites of a difference, or of a product, and one table.

    mse              d²                               d = input - target
    l1               |d|
    smooth_l1        d² / (2·beta) where |d| < beta, else |d| - beta/2
    huber            d² / 2 where |d| < delta, else delta · (|d| - delta/2)
    soft_margin      log(1 + exp(-target · input))
    bce              -(target · log(input) + (1 - target) · log(1 - input)), its logarithms limited to -100
    bce with logits  log(1 + exp(x)) - target · x
    kl_div           target · (log(target) - input)
    poisson_nll      exp(input) - target · input

Their mean and sum run over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.demands import INNER, WIDE
from fxquant.ops.core.record import Operator, Parameter, register
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.elementwise.table import unary
from fxquant.ops.pooling.totals import mean, sum
from fxquant.ops.reduction.distance import xlogy

LOWEST_LOGARITHM = -100.0  # PyTorch's, of a probability

# ---- functions of a difference ---------------------------------------------------------------------------------------


def smooth_magnitude(input: Tensor, beta: float = 1.0) -> Tensor:
    """Compute x² / (2·beta) where |x| < beta, else |x| - beta/2."""
    return F.smooth_l1_loss(input, torch.zeros_like(input), reduction="none", beta=beta)


def huber_magnitude(input: Tensor, delta: float = 1.0) -> Tensor:
    """Compute x² / 2 where |x| < delta, else delta · (|x| - delta/2)."""
    return F.huber_loss(input, torch.zeros_like(input), reduction="none", delta=delta)


unary("smooth_magnitude", smooth_magnitude, lambda x, beta=1.0: x * x / (2 * beta) if abs(x) < beta else abs(x) - beta / 2, beta=1.0)
unary("huber_magnitude", huber_magnitude, lambda x, delta=1.0: x * x / 2 if abs(x) < delta else delta * (abs(x) - delta / 2), delta=1.0)


# ---- the losses, with a weight and a reduction ------------------------------------------------------------------------


def _weighed(value: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    """Return a loss times its weight, whose mean is that of the weighed elements over the weights."""
    value = value if weight is None else value * weight
    if reduction == "none":
        return value
    if reduction == "sum":
        return value.sum()
    return value.mean() if weight is None else value.sum() / weight.expand_as(value).sum()


def mse_loss(input: Tensor, target: Tensor, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
    """Return the squared difference."""
    return _weighed(F.mse_loss(input, target, reduction="none"), reduction, weight)


def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
    """Return the magnitude of the difference."""
    return _weighed(F.l1_loss(input, target, reduction="none"), reduction, weight)


def smooth_l1_loss(input: Tensor, target: Tensor, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Compute a square of small values, a magnitude of large ones."""
    return F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)


def huber_loss(input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None) -> Tensor:
    """Half a square of what is small, delta times a magnitude of what is large."""
    return _weighed(F.huber_loss(input, target, reduction="none", delta=delta), reduction, weight)


def soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Compute log(1 + exp(-target · input))."""
    return F.soft_margin_loss(input, target, reduction=reduction)


def binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Of probabilities."""
    return F.binary_cross_entropy(input, target, weight, reduction=reduction)


def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean", pos_weight: Tensor | None = None
) -> Tensor:
    """Of numbers whose sigmoids are probabilities."""
    return F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)


def kl_div(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Of logarithms of probabilities."""
    return F.kl_div(input, target, reduction=reduction, log_target=log_target)


def poisson_nll_loss(input: Tensor, target: Tensor, log_input: bool = True, reduction: str = "mean") -> Tensor:
    """Of the logarithm of a rate, or of the rate."""
    return F.poisson_nll_loss(input, target, log_input=log_input, reduction=reduction)


Last = dict[str, Any]  # how the grid of the loss itself is found, where nothing is behind it; else it is wide


def _mse(build: Builder, input: fx.Node, target: fx.Node, last: Last) -> Any:
    return build(torch.square, build(sub, input, target, demand=INNER), **last)


def _l1(build: Builder, input: fx.Node, target: fx.Node, last: Last) -> Any:
    return build(torch.abs, build(sub, input, target, demand=INNER), **last)


def _smooth_l1(build: Builder, input: fx.Node, target: fx.Node, last: Last, beta: float) -> Any:
    difference = build(sub, input, target, demand=INNER)
    return build(torch.abs, difference, **last) if beta == 0 else build(smooth_magnitude, difference, float(beta), **last)


def _huber(build: Builder, input: fx.Node, target: fx.Node, last: Last, delta: float) -> Any:
    return build(huber_magnitude, build(sub, input, target, demand=INNER), float(delta), **last)


def _soft_margin(build: Builder, input: fx.Node, target: fx.Node, last: Last) -> Any:
    return build(F.softplus, build(torch.neg, build(mul, input, target, demand=INNER), demand=INNER), **last)


def _entropy(build: Builder, input: fx.Node, target: fx.Node, last: Last) -> Any:
    """Compute log(1 - p) + target · (log p - log(1 - p)), negated."""
    yes = build(clamp, build(torch.log, input, demand=WIDE), LOWEST_LOGARITHM, None)
    no = build(clamp, build(torch.log, build(sub, 1.0, input, demand=WIDE), demand=WIDE), LOWEST_LOGARITHM, None)
    difference = build(sub, yes, no, demand=WIDE)
    return build(torch.neg, build(add, no, build(mul, target, difference, demand=WIDE), demand=WIDE), **last)


def _entropy_of_logits(build: Builder, input: fx.Node, target: fx.Node, last: Last, pos_weight: Any) -> Any:
    """softplus(x) - target · x; with a weight of what is true, (1 - target) · x + (1 + (w - 1) · target) · softplus(-x)."""
    if pos_weight is None:
        return build(sub, build(F.softplus, input, demand=INNER), build(mul, input, target, demand=INNER), **last)
    excess = build(sub, pos_weight, 1.0)
    factor = build(add, build(mul, target, excess, demand=WIDE), 1.0, demand=WIDE)
    weighed = build(mul, factor, build(F.softplus, build(torch.neg, input, demand=INNER), demand=WIDE), demand=WIDE)
    return build(add, build(mul, input, build(sub, 1.0, target, demand=WIDE), demand=WIDE), weighed, **last)


def _divergence(build: Builder, input: fx.Node, target: fx.Node, last: Last, log_target: bool) -> Any:
    if log_target:
        probability = build(torch.exp, target, demand=WIDE)
        return build(mul, probability, build(sub, target, input, demand=WIDE), **last)
    return build(sub, build(xlogy, target, target, demand=WIDE), build(mul, target, input, demand=WIDE), **last)


def _poisson(build: Builder, input: fx.Node, target: fx.Node, last: Last, log_input: bool) -> Any:
    if log_input:
        return build(sub, build(torch.exp, input, demand=INNER), build(mul, target, input, demand=INNER), **last)
    logarithm = build(torch.log, build(add, input, 1e-8, demand=WIDE), demand=WIDE)
    return build(sub, input, build(mul, target, logarithm, demand=WIDE), **last)


def _expand(loss: Callable[..., Any]) -> Callable[..., Any]:
    def expand(build: Builder, input: fx.Node, target: fx.Node, reduction: str, weight: Any = None, **settings: Any) -> Any:
        behind = reduction != "none" or weight is not None
        value = loss(build, input, target, {"demand": INNER} if behind else {}, **settings)
        if weight is not None:
            value = build(mul, value, weight, **({} if reduction == "none" else {"demand": INNER}))
        if reduction == "none":
            return value
        return build(mean if reduction == "mean" else sum, value, list(range(len(build.fact(value).shape))), False)

    return expand


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    reduction, known = arguments["reduction"], fact(arguments["input"])
    if reduction not in ("none", "mean", "sum"):
        return f"its reduction {reduction!r} runs over the batch, whose size is not fixed"
    if not isinstance(known, TensorFact) or not known.shape:
        return "its operand has no dimensions"
    if reduction != "none" and not all(isinstance(size, int) for size in known.shape):
        return f"its reduction {reduction!r} runs over the batch, whose size is not fixed"
    target = fact(arguments["target"])
    if isinstance(target, TensorFact) and target.dtype != torch.float32 and not is_parameter(arguments["target"]):
        return "its target is not a float32 tensor"
    if (
        reduction == "mean"
        and arguments.get("weight") is not None
        and "pos_weight" not in arguments
        and node.target is not binary_cross_entropy
    ):
        return "its mean is over the weights"
    numbers = [arguments.get(name, 0.0) for name in ("beta", "delta")]
    return (
        None if all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) else "one of its settings is computed, not a number"
    )


def _adapted(names: tuple[str, ...]) -> Callable[..., dict[str, Any] | str]:
    """Return the arguments by position, of which two that PyTorch no longer reads say nothing where they are not given."""

    def adapt(*given: Any, **named: Any) -> dict[str, Any] | str:
        found = {**dict(zip(names, given, strict=False)), **named}
        for old in ("size_average", "reduce"):
            if found.pop(old, None) is not None:
                return f"{old} is no longer an argument of losses"
        if found.pop("full", False):
            return "it adds Stirling's approximation"
        found.pop("eps", None)
        return found

    return adapt


def _module(settings: tuple[str, ...]) -> Callable[[Any], dict[str, Any] | str]:
    def of_module(module: Any) -> dict[str, Any] | str:
        if getattr(module, "full", False):
            return "it adds Stirling's approximation"
        taken = {name: getattr(module, name) for name in settings}
        return {name: Parameter(name) if isinstance(value, Tensor) else value for name, value in taken.items()}

    return of_module


def _loss(function: Callable[..., Tensor], loss: Callable[..., Any], positions: str, module: type, *settings: str) -> None:
    """Register a loss: `positions` are the parameters of PyTorch's function, in order, `settings` what its module holds besides."""
    register(
        Operator(
            function.__name__,
            function,
            ("input", "target"),
            expand=_expand(loss),
            functions={getattr(F, function.__name__): _adapted(tuple(positions.split()))},
            modules={module: _module(("reduction", *settings))},
            refuses=_refuses,
        )
    )


_loss(mse_loss, _mse, "input target size_average reduce reduction weight", nn.MSELoss)
_loss(l1_loss, _l1, "input target size_average reduce reduction weight", nn.L1Loss)
_loss(smooth_l1_loss, _smooth_l1, "input target size_average reduce reduction beta", nn.SmoothL1Loss, "beta")
_loss(huber_loss, _huber, "input target reduction delta weight", nn.HuberLoss, "delta")
_loss(soft_margin_loss, _soft_margin, "input target size_average reduce reduction", nn.SoftMarginLoss)
_loss(binary_cross_entropy, _entropy, "input target weight size_average reduce reduction", nn.BCELoss, "weight")
_loss(
    binary_cross_entropy_with_logits,
    _entropy_of_logits,
    "input target weight size_average reduce reduction pos_weight",
    nn.BCEWithLogitsLoss,
    "weight",
    "pos_weight",
)
_loss(kl_div, _divergence, "input target size_average reduce reduction log_target", nn.KLDivLoss, "log_target")
_loss(poisson_nll_loss, _poisson, "input target log_input full size_average eps reduce reduction", nn.PoissonNLLLoss, "log_input")

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

from fxquant.numerics.grids import Interval
from fxquant.ops.core.operators import INNER, NORMED, SHARES, WIDE, Builder, TensorFact, composite, fact, is_parameter, sample, sampled
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.elementwise.table import tabled
from fxquant.ops.pooling.totals import mean, sum
from fxquant.ops.reduction.distance import xlogy

LOWEST_LOGARITHM = -100.0  # PyTorch's, of a probability
STIRLING = "it adds Stirling's approximation"

# ---- functions of a difference ---------------------------------------------------------------------------------------


@tabled(lambda x, beta=1.0: x * x / (2 * beta) if abs(x) < beta else abs(x) - beta / 2)
@sampled("F.smooth_l1_loss(x, y, reduction='none', beta=0.3)", within=NORMED)
def smooth_magnitude(input: Tensor, beta: float = 1.0) -> Tensor:
    """Compute x² / (2·beta) where |x| < beta, else |x| - beta/2."""
    return F.smooth_l1_loss(input, torch.zeros_like(input), reduction="none", beta=beta)


@tabled(lambda x, delta=1.0: x * x / 2 if abs(x) < delta else delta * (abs(x) - delta / 2))
@sampled("F.huber_loss(x, y, 'none', 0.7)", within=NORMED)
def huber_magnitude(input: Tensor, delta: float = 1.0) -> Tensor:
    """Compute x² / 2 where |x| < delta, else delta · (|x| - delta/2)."""
    return F.huber_loss(input, torch.zeros_like(input), reduction="none", delta=delta)


# ---- the losses, with a weight and a reduction ------------------------------------------------------------------------


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
            return STIRLING
        found.pop("eps", None)
        return found

    return adapt


def _loss(
    function: Callable[..., Any], module: type, takes: str, over: Interval | None = None, **fields: Any
) -> Callable[[Callable[..., Any]], Callable[..., Tensor]]:
    """Declare a loss: `takes` are the parameters of PyTorch's function, in order."""
    samples = (sample(over, within=NORMED, input=(3, 6), target=(3, 6), reduction="none"),)
    adapt = _adapted(tuple(takes.split()))
    return composite(function, module, by_name=False, adapt=adapt, refuses=_refuses, samples=samples, **fields)


def _reduced(build: Builder, reduction: str, weight: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return the loss of each element, function(*args), times its weight, and reduced; its grid is wide where anything is behind it."""
    value = build(function, *args, demand=None if reduction == "none" and weight is None else INNER)
    if weight is not None:
        value = build(mul, value, weight, demand=None if reduction == "none" else INNER)
    if reduction == "none":
        return value
    return build(mean if reduction == "mean" else sum, value, list(range(len(build.fact(value).shape))), False)


@_loss(F.mse_loss, nn.MSELoss, "input target size_average reduce reduction weight")
def mse_loss(build: Builder, input: fx.Node, target: fx.Node, reduction: str = "mean", weight: Any = None) -> Any:
    """Return the squared difference."""
    return _reduced(build, reduction, weight, torch.square, build(sub, input, target, demand=INNER))


@_loss(F.l1_loss, nn.L1Loss, "input target size_average reduce reduction weight")
def l1_loss(build: Builder, input: fx.Node, target: fx.Node, reduction: str = "mean", weight: Any = None) -> Any:
    """Return the magnitude of the difference."""
    return _reduced(build, reduction, weight, torch.abs, build(sub, input, target, demand=INNER))


@_loss(F.smooth_l1_loss, nn.SmoothL1Loss, "input target size_average reduce reduction beta")
def smooth_l1_loss(build: Builder, input: fx.Node, target: fx.Node, reduction: str = "mean", beta: float = 1.0) -> Any:
    """Compute a square of small values, a magnitude of large ones."""
    magnitude = (torch.abs,) if beta == 0 else (smooth_magnitude, float(beta))
    return _reduced(build, reduction, None, magnitude[0], build(sub, input, target, demand=INNER), *magnitude[1:])


@_loss(F.huber_loss, nn.HuberLoss, "input target reduction delta weight")
def huber_loss(build: Builder, input: fx.Node, target: fx.Node, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Any:
    """Half a square of what is small, delta times a magnitude of what is large."""
    return _reduced(build, reduction, weight, huber_magnitude, build(sub, input, target, demand=INNER), float(delta))


@_loss(F.soft_margin_loss, nn.SoftMarginLoss, "input target size_average reduce reduction")
def soft_margin_loss(build: Builder, input: fx.Node, target: fx.Node, reduction: str = "mean") -> Any:
    """Compute log(1 + exp(-target · input))."""
    return _reduced(build, reduction, None, F.softplus, build(torch.neg, build(mul, input, target, demand=INNER), demand=INNER))


@_loss(F.binary_cross_entropy, nn.BCELoss, "input target weight size_average reduce reduction", SHARES)
def binary_cross_entropy(build: Builder, input: fx.Node, target: fx.Node, weight: Any = None, reduction: str = "mean") -> Any:
    """Of probabilities: compute log(1 - p) + target · (log p - log(1 - p)), negated."""
    yes = build(clamp, build(torch.log, input, demand=WIDE), LOWEST_LOGARITHM, None)
    no = build(clamp, build(torch.log, build(sub, 1.0, input, demand=WIDE), demand=WIDE), LOWEST_LOGARITHM, None)
    difference = build(sub, yes, no, demand=WIDE)
    return _reduced(build, reduction, weight, torch.neg, build(add, no, build(mul, target, difference, demand=WIDE), demand=WIDE))


@_loss(F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, "input target weight size_average reduce reduction pos_weight")
def binary_cross_entropy_with_logits(
    build: Builder, input: fx.Node, target: fx.Node, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Any:
    """Of numbers whose sigmoids are probabilities: softplus(x) - target · x.

    With a weight of what is true, (1 - target) · x + (1 + (w - 1) · target) · softplus(-x).
    """
    if pos_weight is None:
        product = build(F.softplus, input, demand=INNER), build(mul, input, target, demand=INNER)
        return _reduced(build, reduction, weight, sub, *product)
    excess = build(sub, pos_weight, 1.0)
    factor = build(add, build(mul, target, excess, demand=WIDE), 1.0, demand=WIDE)
    weighed = build(mul, factor, build(F.softplus, build(torch.neg, input, demand=INNER), demand=WIDE), demand=WIDE)
    return _reduced(build, reduction, weight, add, build(mul, input, build(sub, 1.0, target, demand=WIDE), demand=WIDE), weighed)


@_loss(F.kl_div, nn.KLDivLoss, "input target size_average reduce reduction log_target", SHARES)
def kl_div(build: Builder, input: fx.Node, target: fx.Node, reduction: str = "mean", log_target: bool = False) -> Any:
    """Of logarithms of probabilities."""
    if log_target:
        probability = build(torch.exp, target, demand=WIDE)
        return _reduced(build, reduction, None, mul, probability, build(sub, target, input, demand=WIDE))
    entropy = build(xlogy, target, target, demand=WIDE)
    return _reduced(build, reduction, None, sub, entropy, build(mul, target, input, demand=WIDE))


@_loss(
    F.poisson_nll_loss,
    nn.PoissonNLLLoss,
    "input target log_input full size_average eps reduce reduction",
    modules={nn.PoissonNLLLoss: lambda m: STIRLING if m.full else {"log_input": m.log_input, "reduction": m.reduction}},
)
def poisson_nll_loss(build: Builder, input: fx.Node, target: fx.Node, log_input: bool = True, reduction: str = "mean") -> Any:
    """Of the logarithm of a rate, or of the rate."""
    if log_input:
        return _reduced(build, reduction, None, sub, build(torch.exp, input, demand=INNER), build(mul, target, input, demand=INNER))
    logarithm = build(torch.log, build(add, input, 1e-8, demand=WIDE), demand=WIDE)
    return _reduced(build, reduction, None, sub, input, build(mul, target, logarithm, demand=WIDE))

"""Softmax and its logarithm: composites, 16 bits wide inside.

    softmax(x) = e / Σ e,   log_softmax(x) = d - log Σ e,   logsumexp(x) = max x + log Σ e,   with d = x - max x, e = exp(d)

No e is larger than 1, so its scale is constant: 2^-15. The scales of the differences d, the sum and its reciprocal are calibrated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxquant.ops.core.operators import WIDE, Builder, Fixed, Trait, composite, fact, sample, taking
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.movement.shape import MANY_SIZES, many_sizes, numbers, rank_of, reshape
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.extremum import amax
from fxquant.ops.reduction.moments import over_dimensions, refuses_reduction

AT_MOST_ONE = Fixed(2.0**-15, "int16")


def _exponentials(build: Builder, input: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Return the largest elements, the differences from these, their exponentials, and the sums of these."""
    largest = build(amax, input, dims, True)
    difference = build(sub, input, largest, demand=WIDE)
    exponential = build(torch.exp, difference, demand=AT_MOST_ONE)
    return largest, difference, exponential, build(sum, exponential, dims, True, demand=WIDE)


FUNCTIONAL = taking("input dim _stacklevel dtype", ("input", "dim"))


def _chosen_dimension(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without a dimension, PyTorch chooses it, with a warning."""
    chosen = 0 if rank_of(arguments["input"]) in (0, 1, 3) else 1
    return arguments if arguments["dim"] is not None else {**arguments, "dim": chosen}


def _refuses_logsumexp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    because = refuses_reduction(arguments["input"], arguments["dim"])
    return because or (MANY_SIZES if not arguments["keepdim"] and many_sizes(node) else None)


@composite(
    function=lambda input, dim=None: F.softmax(input, dim, _stacklevel=5),
    takes="input dim dtype",
    calls={F.softmax: FUNCTIONAL},
    modules={nn.Softmax2d: lambda m: {"dim": -3}},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
    samples=(sample(input=(3, 6, 6), dim=-3),),
)
def softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(x) / Σ exp(x) along one dimension."""
    _, _, exponential, total = _exponentials(build, input, [dim])
    return build(mul, exponential, build(torch.reciprocal, total, demand=WIDE))


@composite(
    function=lambda input, dim=None: F.log_softmax(input, dim, _stacklevel=5),
    takes="input dim dtype",
    calls={F.log_softmax: FUNCTIONAL},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
    samples=(sample(input=(3, 6, 6), dim=-1),),
)
def log_softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute x - log Σ exp(x) along one dimension."""
    _, difference, _, total = _exponentials(build, input, [dim])
    return build(sub, difference, build(torch.log, total, demand=WIDE))


@composite(takes="input dim _stacklevel dtype", normalize=_chosen_dimension, samples=(sample(input=(3, 6, 6), dim=1),))
def softmin(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(-x) / Σ exp(-x) along one dimension."""
    return build(softmax, build(torch.neg, input), dim)


@composite(normalize=over_dimensions, refuses=_refuses_logsumexp, samples=(sample(input=(3, 6, 6), dim=[1, 3]),))
def logsumexp(build: Builder, input: fx.Node, dim: list[int], keepdim: bool = False) -> Any:
    """Compute log Σ exp(x) over dimensions."""
    largest, _, _, total = _exponentials(build, input, dim)
    logarithm = build(torch.log, total, demand=WIDE)
    if keepdim:
        return build(add, largest, logarithm)
    shape = [size for position, size in enumerate(numbers(fact(largest).shape)) if position not in dim]
    return build(add, build(reshape, largest, shape), build(reshape, logarithm, shape))

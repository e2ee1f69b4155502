"""Norms of a whole tensor, and of its slices along a dimension: composites.

dist    (Σ |x - y|^p)^(1/p)
renorm  x · min(1, maxnorm / (norm + 10^-7))    of each slice, the factor by a table of the norm
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import shape_of as sizes_of
from fxquant.ops.core.operators import INNER, NORMED, WIDE, Builder, Size, composite, sample, sampled
from fxquant.ops.elementwise.arithmetic import mul, sub
from fxquant.ops.elementwise.table import tabled
from fxquant.ops.reduction.norms import norm

SMALL = 1e-7  # what renorm adds to a norm before it divides


def _refuses_norm(arguments: dict[str, Any], varying: list[Size]) -> str | None:
    p = arguments["p"]
    if not isinstance(p, int | float) or not p > 0:
        return f"the {p}-norm has no integer form"
    return "it reduces the batch, whose size is not fixed" if varying else None


def _refuses_dist(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = [size for name in ("input", "other") for size in sizes_of(arguments[name])]
    return _refuses_norm(arguments, [size for size in sizes if not isinstance(size, int)])


@composite(refuses=_refuses_dist)
@sampled("dist(x[0], y[0])", "x[0].dist(y[0], 1)", within=NORMED)
def dist(build: Builder, input: fx.Node, other: fx.Node, p: float = 2) -> Any:
    """Return the p-norm of all elements of a difference."""
    difference = build(sub, input, other, demand=INNER)
    return build(norm, difference, float(p), list(range(len(build.fact(difference).shape))), False)


@tabled(lambda x, most=1.0: most / (x + SMALL) if x > most else 1.0)
@sampled("torch.renorm(x, 2, 0, 0.5)", within=NORMED)
def shrinking(input: Tensor, most: float = 1.0) -> Tensor:
    """Return the factor for a slice with this norm that makes its norm at most `most`."""
    return torch.where(input > most, most / (input + SMALL), 1.0)


def _refuses_renorm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = list(sizes_of(arguments["input"]))
    del sizes[arguments["dim"]]
    return _refuses_norm(arguments, [size for size in sizes if not isinstance(size, int)])


@composite(refuses=_refuses_renorm, samples=(sample(input=(3, 6), p=2, dim=0, maxnorm=1.5), sample(input=(3, 6), p=1, dim=0, maxnorm=5.0)))
def renorm(build: Builder, input: fx.Node, p: float, dim: int, maxnorm: float) -> Any:
    """Return the slices along a dimension, those with a p-norm above `maxnorm` shrunk to it."""
    rank = len(sizes_of(input))
    others = [place for place in range(rank) if place != dim % rank]
    length = build(norm, input, float(p), others, True, demand=WIDE)
    return build(mul, input, build(shrinking, length, float(maxnorm), demand=WIDE))

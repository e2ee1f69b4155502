"""Softmax and its logarithm: composites, 16 bits wide inside.

    softmax(x) = e / Σ e,   log_softmax(x) = d - log Σ e,   logsumexp(x) = max x + log Σ e,   with d = x - max x, e = exp(d)

No e is larger than 1, so its grid is given: 2^-15. A difference d, a sum and its reciprocal have grids of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import fact
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite
from fxquant.ops.core.demands import WIDE, Fixed
from fxquant.ops.core.traits import Trait
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.movement.shape import MANY_SIZES, many_sizes, numbers, rank_of, reshape
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.extremum import amax
from fxquant.ops.reduction.moments import reduced, refuses_reduction

AT_MOST_ONE = Fixed(2.0**-15, "int16")


def _softmax(input: Tensor, dim: int | None = None) -> Tensor:
    return F.softmax(input, dim, _stacklevel=5)


def _log_softmax(input: Tensor, dim: int | None = None) -> Tensor:
    return F.log_softmax(input, dim, _stacklevel=5)


def _exponentials(build: Builder, input: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Return the largest elements, the differences from these, their exponentials, and the sums of these."""
    largest = build(amax, input, dims, True)
    difference = build(sub, input, largest, demand=WIDE)
    exponential = build(torch.exp, difference, demand=AT_MOST_ONE)
    return largest, difference, exponential, build(sum, exponential, dims, True, demand=WIDE)


def _arguments(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> dict[str, Any] | str:
    if dim is None:  # as PyTorch chooses it, with a warning
        dim = 0 if rank_of(input) in (0, 1, 3) else 1
    return {"input": input, "dim": dim} if dtype in (None, torch.float32) else f"it computes in {dtype}"


def _method(input: Any, dim: Any, dtype: Any = None) -> dict[str, Any] | str:
    return _arguments(input, dim, dtype=dtype)


def _special(input: Any, dim: Any, *, dtype: Any = None) -> dict[str, Any] | str:
    return _arguments(input, dim, dtype=dtype)


def _module(module: Any) -> dict[str, Any]:
    return {} if module.dim is None else {"dim": module.dim}


def _chosen_dimension(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """A module need not say along which dimension it is."""
    return arguments if arguments["dim"] is not None else _arguments(arguments["input"])


def _over_dimensions(input: Any, dim: Any, keepdim: bool = False) -> dict[str, Any] | str:
    dims = reduced(input, dim)
    return dims if isinstance(dims, str) else {"input": input, "dim": dims, "keepdim": keepdim}


def _refuses_logsumexp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    because = refuses_reduction(arguments["input"], arguments["dim"])
    return because or (MANY_SIZES if not arguments["keepdim"] and many_sizes(node) else None)


@composite(
    function=_softmax,
    adapt=_method,
    calls={F.softmax: _arguments, torch.special.softmax: _special},
    modules={nn.Softmax: _module, nn.Softmax2d: lambda m: {"dim": -3}},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
)
def softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(x) / Σ exp(x) along one dimension."""
    _, _, exponential, total = _exponentials(build, input, [dim])
    return build(mul, exponential, build(torch.reciprocal, total, demand=WIDE))


@composite(
    function=_log_softmax,
    adapt=_method,
    calls={F.log_softmax: _arguments, torch.special.log_softmax: _special},
    modules={nn.LogSoftmax: _module},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
)
def log_softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute x - log Σ exp(x) along one dimension."""
    _, difference, _, total = _exponentials(build, input, [dim])
    return build(sub, difference, build(torch.log, total, demand=WIDE))


@composite(adapt=_arguments, modules={nn.Softmin: _module}, normalize=_chosen_dimension)
def softmin(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(-x) / Σ exp(-x) along one dimension."""
    return build(softmax, build(torch.neg, input), dim)


@composite(adapt=_over_dimensions, refuses=_refuses_logsumexp)
def logsumexp(build: Builder, input: fx.Node, dim: list[int], keepdim: bool = False) -> Any:
    """Compute log Σ exp(x) over dimensions."""
    largest, _, _, total = _exponentials(build, input, dim)
    logarithm = build(torch.log, total, demand=WIDE)
    if keepdim:
        return build(add, largest, logarithm)
    shape = [size for position, size in enumerate(numbers(fact(largest).shape)) if position not in dim]
    return build(add, build(reshape, largest, shape), build(reshape, logarithm, shape))

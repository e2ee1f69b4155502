"""Softmax and its logarithm: composites, 16 bits wide inside.

    softmax(x) = e / Σ e,   log_softmax(x) = d - log Σ e,   with d = x - max x, e = exp(d)

No e is larger than 1, so its grid is given: 2^-15. A difference d, a sum and its reciprocal have grids of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ops.arithmetic import mul, sub
from fxquant.ops.composite import Builder
from fxquant.ops.extremum import amax
from fxquant.ops.pool import sum
from fxquant.ops.record import Fixed, Operator, Own, register

WIDE = Own("int16")
AT_MOST_ONE = Fixed(2.0**-15, "int16")


def softmax(input: Tensor, dim: int) -> Tensor:
    """exp(x) / Σ exp(x) along one dimension."""
    return torch.softmax(input, dim)


def log_softmax(input: Tensor, dim: int) -> Tensor:
    """x - log Σ exp(x) along one dimension."""
    return torch.log_softmax(input, dim)


def _exponentials(build: Builder, input: fx.Node, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The differences from the largest element, their exponentials, and the sums of these."""
    difference = build(sub, input, build(amax, input, [dim], True), demand=WIDE)
    exponential = build(torch.exp, difference, demand=AT_MOST_ONE)
    return difference, exponential, build(sum, exponential, [dim], True, demand=WIDE)


def _expand_softmax(build: Builder, input: fx.Node, dim: int) -> Any:
    _, exponential, total = _exponentials(build, input, dim)
    return build(mul, exponential, build(torch.reciprocal, total, demand=WIDE))


def _expand_log_softmax(build: Builder, input: fx.Node, dim: int) -> Any:
    difference, _, total = _exponentials(build, input, dim)
    return build(sub, difference, build(torch.log, total, demand=WIDE))


def _arguments(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> dict[str, Any] | str:
    if dim is None:
        return "its dimension is not given"
    return {"input": input, "dim": dim} if dtype in (None, torch.float32) else f"it computes in {dtype}"


def _method(input: Any, dim: Any, dtype: Any = None) -> dict[str, Any] | str:
    return _arguments(input, dim, dtype=dtype)


def _module(module: Any) -> dict[str, Any] | str:
    return "its dimension is not given" if module.dim is None else {"dim": module.dim}


register(
    Operator(
        "softmax",
        softmax,
        ("input",),
        expand=_expand_softmax,
        functions={torch.softmax: _method, F.softmax: _arguments},
        methods={"softmax": _method},
        modules={nn.Softmax: _module, nn.Softmax2d: lambda m: {"dim": -3}},
    )
)
register(
    Operator(
        "log_softmax",
        log_softmax,
        ("input",),
        expand=_expand_log_softmax,
        functions={torch.log_softmax: _method, F.log_softmax: _arguments},
        methods={"log_softmax": _method},
        modules={nn.LogSoftmax: _module},
    )
)

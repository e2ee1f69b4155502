"""Norms of vectors and of matrices, and division by norms: composites with 16-bit inner tensors.

    norm(x) = (Σ |x|^p)^(1/p)

The inverse of a norm is one table, s^(-1/p), with 0 at s = 0: a row of zeros stays a row of zeros. Rows that are divided by their norms are
brought to one magnitude first, as the items of a layer norm are.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core import NORMED, POSITIVE, WIDE, Builder, Trait, composite, sample, sampled
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.table import tabled
from fxquant.ops.normalization.channels import NOT_ZERO, magnitude_of, of_one_magnitude
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.extremum import amax, amin
from fxquant.ops.reduction.moments import reduced, refuses_reduction


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

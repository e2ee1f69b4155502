"""Operators on the order of elements: both extremes, running extremes, quantiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import shape_of
from fxquant.ops.core.operators import EXACT, INNER, Builder, Same, composite, sample, sampled
from fxquant.ops.core.places import constant_value
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.indexing.ranking import fixed_dimension, gather, ranked, sort
from fxquant.ops.movement.join import cat, stack
from fxquant.ops.movement.shape import rank_of
from fxquant.ops.reduction.extremum import amax, amin, maximum, minimum
from fxquant.ops.reduction.progression import along, length_of

# ---- both extremes ---------------------------------------------------------------------------------------------------------


@composite(refuses=fixed_dimension("looks through", whole=True))
@sampled("aminmax(x, dim=1)[1]", "x.aminmax(dim=-1, keepdim=True).min", within=EXACT)
def aminmax(build: Builder, input: fx.Node, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the smallest and the largest element along a dimension, or of all."""
    dims = [] if dim is None else [dim]
    return build(amin, input, dims, keepdim), build(amax, input, dims, keepdim)


def _refuses_msort(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = shape_of(arguments["input"])
    return None if sizes and isinstance(sizes[0], int) else "it ranks the batch, whose size is not fixed"


@composite(refuses=_refuses_msort)
@sampled("msort(x[0])", within=EXACT)
def msort(build: Builder, input: fx.Node) -> Any:
    """Return the elements along the first dimension in order."""
    return build(sort, input, 0)[0]


# ---- running extremes --------------------------------------------------------------------------------------------------------


def _expand_running(build: Builder, input: fx.Node, dim: int, extremum: Any) -> Any:
    """Of twice as many elements in each step: of itself and what lies 1, 2, 4, … before."""
    length, dim = length_of(input, dim), dim % rank_of(input)
    distance = 1
    while distance < length:
        first = along(build, input, dim, slice(0, distance))
        later = along(build, input, dim, slice(distance, length))
        earlier = along(build, input, dim, slice(0, length - distance))
        joined = [first, build(extremum, later, earlier, demand=Same())]
        input = build(cat, joined, dim, demand=Same())
        distance *= 2
    return (input,)


def _refuses_running(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    picked = [reader.args[1] if getattr(reader.target, "__name__", "") == "getitem" else 1 for reader in node.users]
    if any(pick != 0 for pick in picked):
        return "its indices are read as well"
    return None if shape_of(arguments["input"])[arguments["dim"]] != 1 else "its dimension has one element"


_RUNNING = (*fixed_dimension("looks through"), _refuses_running)


@composite(refuses=_RUNNING)
@sampled("cummax(x, 1)[0]", within=EXACT)
def cummax(build: Builder, input: fx.Node, dim: int) -> Any:
    """Return the largest element so far along a dimension, and where it is."""
    return _expand_running(build, input, dim, maximum)


@composite(refuses=_RUNNING)
@sampled("cummin(x, dim=2)[0]", within=EXACT)
def cummin(build: Builder, input: fx.Node, dim: int) -> Any:
    """Return the smallest element so far along a dimension, and where it is."""
    return _expand_running(build, input, dim, minimum)


# ---- quantiles -----------------------------------------------------------------------------------------------------------------


def _quantile(input: Tensor, q: Any, dim: int, keepdim: bool = False, interpolation: str = "linear") -> Tensor:
    of = q if isinstance(q, int | float) else torch.tensor(q, dtype=input.dtype, device=input.device)
    return torch.quantile(input, of, dim, keepdim, interpolation=interpolation)


def _share(position: float, interpolation: str) -> float:
    """Return how much of the later of two neighbours counts at a position between them."""
    part = position - math.floor(position)
    return {
        "linear": part,
        "lower": 0.0,
        "higher": float(part > 0),
        "midpoint": 0.5 if part > 0 else 0.0,
        "nearest": float(round(position) - math.floor(position)),
    }[interpolation]


def _of_constants(input: Any, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear") -> dict[str, Any] | str:
    value = constant_value(q)
    if value is not None:
        q = value.tolist()
    if not isinstance(q, int | float | list):
        return "which quantile it takes is computed"
    if dim is None and len(shape_of(input)) != 1:
        return "it ranks the flattened tensor"
    return {"input": input, "q": q, "dim": dim or 0, "keepdim": keepdim, "interpolation": interpolation}


@composite(
    "nanquantile",
    function=_quantile,
    adapt=_of_constants,
    refuses=fixed_dimension("ranks"),
    samples=(sample(input=(4, 6, 6), q=0.3, dim=1), sample(input=(4, 6, 6), q=0.6, dim=2, interpolation="lower")),
)
def quantile(build: Builder, input: fx.Node, q: Any, dim: int, keepdim: bool = False, interpolation: str = "linear") -> Any:
    """Return the q-th quantile along a dimension; of a list of them, along a new first dimension."""
    length, dim = length_of(input, dim), dim % rank_of(input)
    in_order = build(gather, input, dim, build(ranked, input, dim, length, False))

    def at(place: int) -> Any:
        return along(build, in_order, dim, slice(place, place + 1) if keepdim else place)

    def of(quantity: float) -> Any:
        position = float(torch.tensor(quantity, dtype=torch.float32, device="cpu") * (length - 1))  # which PyTorch computes so
        share = _share(position, interpolation)
        first = min(math.floor(position), length - 1)
        if share in (0.0, 1.0):
            return at(first + int(share))
        return build(add, build(mul, at(first), 1 - share, demand=INNER), build(mul, at(first + 1), share, demand=INNER))

    if isinstance(q, int | float):
        return of(float(q))
    return build(stack, [of(float(quantity)) for quantity in q], 0)

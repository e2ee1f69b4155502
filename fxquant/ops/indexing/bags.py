"""Bags of embeddings: the sum, mean or largest of the rows that each of them names.

Bags of other sizes than one, whose offsets are a constant, are filled up to the largest with a row that counts for nothing: zeros in a
sum, the smallest of each column where the largest counts. So is what `padding_idx` leaves out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import shape_of
from fxquant.ops.core.operators import (
    INNER,
    Builder,
    Lowering,
    Plain,
    TensorFact,
    are_fixed,
    bound,
    composite,
    fact,
    is_parameter,
    listed,
    lowered,
    operator_named,
    settings_of,
)
from fxquant.ops.core.places import constant_value
from fxquant.ops.core.samples import NORMED, sampled
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.selection import where
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.ops.indexing.index import CHANGES, embedding, getitem, refuses_embedding
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.ops.pooling.totals import mean, sum
from fxquant.ops.reduction.extremum import amax
from fxquant.ops.reduction.progression import length_of
from fxquant.primitives import scatter, shape

# ---- Integers from counting: one-hot vectors, and how many booleans are true -----------------------------------------


def _refuses_real(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    return None if isinstance(known, TensorFact) and known.dtype == torch.int64 else "its operand is not an integer tensor"


# ---- one-hot vectors -----------------------------------------------------------------------------------------------------


def _refuses_one_hot(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    count = arguments["num_classes"]
    return None if isinstance(count, int) and count > 0 else "the size of its result depends on the data"


@lowered(
    adapt=lambda tensor, num_classes=-1: {"input": tensor, "num_classes": num_classes},
    reads=("input",),
    refuses=(_refuses_real, _refuses_one_hot),
    demand=Plain("int64"),
)
@sampled("one_hot(x.argmax(3), 6)")
def one_hot(lowering: Lowering, input: Any, num_classes: int) -> Any:
    """Return for each integer a vector of zeros with a 1 at its place, along a new last dimension: int64.

    Take rows of the unit matrix.
    """
    unit = lowering.given("unit", torch.eye(num_classes, dtype=torch.int64, device="cpu"), torch.int64)
    return lowering.call(shape.rows, unit, lowering.given("input", input, torch.int64))


# ---- how many hold -------------------------------------------------------------------------------------------------------


def _counting_counted(input: Any, dim: Any = None) -> dict[str, Any] | str:
    if fact(input).dtype != torch.bool:
        return "its operand is not a boolean tensor"
    rank = len(shape_of(input))
    return {"input": input, "dim": [d % rank for d in (range(rank) if dim is None else listed([dim]))]}


def _refuses_count(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = shape_of(arguments["input"])
    return None if sizes and are_fixed(sizes[d] for d in arguments["dim"]) else "it counts over the batch, whose size is not fixed"


@lowered(
    adapt=_counting_counted,
    reads=("input",),
    onnx=lambda c: c.reduced("ReduceSum", c.do("Cast", c.operand("input"), to=torch.int64), list(c["dim"]), False),
    refuses=_refuses_count,
    demand=Plain("int64"),
)
@sampled("torch.count_nonzero(x > 0.2, (1, 2))")
def count_nonzero(lowering: Lowering, input: Any, dim: list[int]) -> Any:
    """Count how many of the booleans along dimensions are true: int64."""
    return lowering.call(scatter.count, lowering.given("input", input, torch.bool), list(dim), False)


def _embedding_bag(input: Tensor, offsets: Any = None, per_sample_weights: Any = None, weight: Any = None, *settings: Any) -> Tensor:
    mode, include_last_offset, padding_idx = settings
    return F.embedding_bag(input, weight, offsets, None, 2.0, False, mode, False, per_sample_weights, include_last_offset, padding_idx)


def _places(input: fx.Node, offsets: fx.Node | None, include_last_offset: bool) -> list[range]:
    """Return which places of a row of numbers each bag has; none where the bags are rows themselves."""
    value = None if offsets is None else constant_value(offsets)
    if value is None:
        return []
    starts: list[int] = value.tolist()
    size = fact(input).shape[0]
    ends = starts[1:] if include_last_offset else [*starts[1:], size]
    return [range(start, end) for start, end in zip(starts, ends, strict=False)]


def _arranged(build: Builder, value: fx.Node, places: Tensor) -> Any:
    """Return a row of numbers as bags, [bags, size]."""
    return build(reshape, build(getitem, value, [places.flatten().tolist()]), list(places.shape))


def _with_row_for_nothing(build: Builder, weight: fx.Node, mode: str, padding: int | None, another: bool) -> fx.Node:
    """Return the table with a neutral row in place of the padding's, and, with `another`, a further such row at its end."""
    rows, features = numbers(build.fact(weight).shape)
    if padding is None and not another:
        return weight
    zeros = torch.zeros(1, features, device="cpu", dtype=torch.float32)
    nothing: Any = build.host(torch.amin, weight, 0, True) if mode == "max" else build.constant(zeros)
    if padding is not None:
        mask = torch.arange(rows, device="cpu").reshape(-1, 1) == padding
        weight = build.host(torch.where, build.constant(mask), nothing, weight)
    return build.host(torch.cat, [weight, nothing]) if another else weight


def _counted(build: Builder, input: fx.Node, padding: int) -> Any:
    return build(count_nonzero, build(WHOLE["ne"], input, padding), [1])


def _share(build: Builder, input: fx.Node, padding: int | None, count: Tensor | None) -> Any:
    """Return one over the number of rows that count in each bag, [bags, 1]; 0 where none does."""
    if padding is None:
        assert count is not None
        return build.constant(torch.where(count > 0, 1 / count.clamp(min=1), 0.0))
    size = numbers(build.fact(input).shape)[1]
    table = torch.tensor([[0.0], *([1 / number] for number in range(1, size + 1))], device="cpu", dtype=torch.float32)
    return build(embedding, _counted(build, input, padding), build.constant(table), demand=INNER)


def _function(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    given = bound(F.embedding_bag, *args, **kwargs)
    changes = given["max_norm"] is not None
    return CHANGES if changes else {name: given[name] for name in operator_named("embedding_bag").parameter_names}


_settings = settings_of(("weight", "mode", "include_last_offset", "padding_idx"))


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known, offsets = fact(arguments["input"]), arguments["offsets"]
    if not isinstance(known, TensorFact) or not isinstance(known.shape[-1], int):
        return "the sizes of its bags depend on the batch size"
    if len(known.shape) == 1 and not (isinstance(offsets, fx.Node) and is_parameter(offsets)):
        return "the sizes of its bags depend on the data: give offsets that are a buffer, or bags of one size, [bags, size]"
    return None


@composite(
    operands=("per_sample_weights",),
    function=_embedding_bag,
    by_name=False,
    calls={F.embedding_bag: _function},
    modules={nn.EmbeddingBag: lambda module: CHANGES if module.max_norm is not None else _settings(module)},
    reads=("input",),
    refuses=(_refuses, refuses_embedding),
)
@sampled("F.embedding_bag(x[:, 0].argmax(2), {P(6, 5)}, mode='max')", "{nn.EmbeddingBag(6, 5)}(x[:, 1].argmax(2))", within=NORMED)
@sampled("F.embedding_bag(x[:, 0].argmax(2), {P(6, 5)}, mode='sum', per_sample_weights=y[:, 0, 0])", within=NORMED)
def embedding_bag(
    build: Builder,
    input: fx.Node,
    offsets: fx.Node | None = None,
    per_sample_weights: fx.Node | None = None,
    weight: Any = None,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """For each bag the "sum", "mean" or "max" of the rows of `weight` that it names: [bags, features]; zeros of an empty one.

    The bags are the rows of `input`, int64 [bags, size], or begin at `offsets`, int64 [bags], in `input` [places]. In a sum each row may
    have a factor, `per_sample_weights`, of the shape of `input`. What names the row `padding_idx` is left out.
    """
    bags, rows = _places(input, offsets, include_last_offset), length_of(weight, 0)
    padding = None if padding_idx is None else padding_idx % rows
    filled = torch.tensor([], dtype=torch.bool, device="cpu")  # where a bag of the largest size has a place that it has not itself
    if bags:
        size = max(1, *map(len, bags))
        places = torch.tensor([[*bag, *[0] * (size - len(bag))] for bag in bags], device="cpu", dtype=torch.int64)
        filled = torch.tensor([[place >= len(bag) for place in range(size)] for bag in bags], device="cpu", dtype=torch.bool)
        input = _arranged(build, input, places)
        per_sample_weights = None if per_sample_weights is None else _arranged(build, per_sample_weights, places)
    weight = _with_row_for_nothing(build, weight, mode, padding, bool(filled.any()) and padding is None)
    if filled.any():
        input = build(WHOLE["mul"], input, build.constant((~filled).long()))
        input = build(WHOLE["add"], input, build.constant(filled.long() * (rows if padding is None else padding)))
    taken = build(embedding, input, weight)
    if per_sample_weights is not None:
        taken = build(mul, taken, build(reshape, per_sample_weights, [-1, build.fact(per_sample_weights).shape[1], 1]))
    if padding is None and not filled.any():
        return build({"sum": sum, "mean": mean, "max": amax}[mode], taken, [1], False)
    if mode == "sum":
        return build(sum, taken, [1], False)
    # How many rows of each bag count: known, or counted where the padding is among what is read.
    count = (~filled).sum(1, keepdim=True) if padding is None else None
    if mode == "mean":
        total = build(sum, taken, [1], False, demand=INNER)
        return build(mul, total, _share(build, input, padding, count))
    largest = build(amax, taken, [1], False)
    if count is not None:
        return build(where, build.constant(count > 0), largest, 0.0) if bool((count == 0).any()) else largest
    assert padding is not None
    counted = build(WHOLE["ne"], build(reshape, _counted(build, input, padding), [-1, 1]), 0)
    return build(where, counted, largest, 0.0)

"""Bags of embeddings: the sum, mean or largest of the rows whose indices a bag holds; one-hot vectors, and counts of booleans."""

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import shape_of
from fxquant.ops.core import NORMED, Builder, Lowering, TensorFact, fact, sampled
from fxquant.ops.core.declare import bound, composite, dtype_of, fixed_along, has_dimensions, listed, lowered, needs, settings_of
from fxquant.ops.core.record import Instead, Plain, operator_named
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.indexing.index import CHANGES, embedding, refuses_embedding
from fxquant.ops.movement.shape import reshape
from fxquant.ops.pooling.totals import mean, sum
from fxquant.ops.reduction.extremum import amax
from fxquant.primitives import selection, shape


@lowered(
    adapt=lambda tensor, num_classes=-1: {"input": tensor, "num_classes": num_classes},
    reads=("input",),
    refuses=(
        needs("its operand is not an integer tensor", lambda arguments: dtype_of(arguments["input"]) == torch.int64),
        needs(
            "the size of its result depends on the data",
            lambda arguments: isinstance(arguments["num_classes"], int) and arguments["num_classes"] > 0,
        ),
    ),
    demand=Plain("int64"),
)
@sampled("one_hot(x.argmax(3), 6)")
def one_hot(lowering: Lowering, input: Any, num_classes: int) -> Any:
    """Return for each integer a vector of zeros with a 1 at its place, along a new last dimension: int64.

    Take rows of the unit matrix.
    """
    unit = lowering.given("unit", torch.eye(num_classes, dtype=torch.int64, device="cpu"), torch.int64)
    return lowering.call(shape.rows, unit, lowering.given("input", input, torch.int64))


def _counted_along(input: Any, dim: Any = None) -> dict[str, Any] | str:
    if fact(input).dtype != torch.bool:
        return "its operand is not a boolean tensor"
    rank = len(shape_of(input))
    return {"input": input, "dim": [d % rank for d in (range(rank) if dim is None else listed([dim]))]}


@lowered(
    adapt=_counted_along,
    reads=("input",),
    onnx=lambda c: c.reduced("ReduceSum", c.do("Cast", c.operand("input"), to=torch.int64), list(c["dim"]), False),
    refuses=(has_dimensions(), fixed_along("dim", "it counts over the batch, whose size is not fixed")),
    demand=Plain("int64"),
)
@sampled("torch.count_nonzero(x > 0.2, (1, 2))", "(x > 0.2).count_nonzero(1)")
def count_nonzero(lowering: Lowering, input: Any, dim: list[int]) -> Any:
    """Count how many of the booleans along dimensions are true: int64."""
    return lowering.call(selection.count, lowering.given("input", input, torch.bool), list(dim), False)


OFFSETS = "its bags begin at offsets: give bags of one size, [bags, size]"


def _why_not(max_norm: float | None, padding_idx: int | None, include_last_offset: bool, scale_grad_by_freq: bool) -> str | None:
    """Return why bags with these settings have no integer form; None where they have one."""
    reasons = {
        CHANGES: max_norm is not None,
        "its bags leave out the rows of its padding_idx": padding_idx is not None,
        "PyTorch divides the gradient of a bag by counts of other rows (scale_grad_by_freq)": scale_grad_by_freq,
        OFFSETS: include_last_offset,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


WHY = ("max_norm", "padding_idx", "include_last_offset", "scale_grad_by_freq")


def _function(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    arguments = bound(F.embedding_bag, *args, **kwargs)
    because = _why_not(*(arguments[name] for name in WHY))
    return because or {name: arguments[name] for name in operator_named("embedding_bag").parameter_names}


_settings = settings_of(("weight", "mode", "sparse"))


def _module(module: nn.EmbeddingBag) -> dict[str, Any] | str | Instead:
    return _why_not(*(getattr(module, name) for name in WHY)) or _settings(module)


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    input_fact = fact(arguments["input"])
    if not isinstance(input_fact, TensorFact) or not isinstance(input_fact.shape[-1], int):
        return "the sizes of its bags depend on the batch size"
    return None if len(input_fact.shape) == 2 else OFFSETS


@composite(
    operands=("per_sample_weights",),
    function=lambda input, offsets=None, per_sample_weights=None, weight=None, mode="mean", sparse=False: F.embedding_bag(
        input, weight, offsets, mode=mode, per_sample_weights=per_sample_weights, sparse=sparse
    ),
    by_name=False,
    calls={F.embedding_bag: _function},
    modules={nn.EmbeddingBag: _module},
    reads=("input",),
    refuses=(_refuses, refuses_embedding),
)
@sampled("F.embedding_bag(x[:, 0].argmax(2), {P(6, 5)}, mode='max')", "{nn.EmbeddingBag(6, 5)}(x[:, 1].argmax(2))", within=NORMED)
@sampled("F.embedding_bag(x[:, 0].argmax(2), {P(6, 5)}, mode='sum', per_sample_weights=y[:, 0, 0])", within=NORMED)
def embedding_bag(
    build: Builder,
    input: fx.Node,
    offsets: None = None,
    per_sample_weights: fx.Node | None = None,
    weight: Any = None,
    mode: str = "mean",
    sparse: bool = False,
) -> Any:
    """Return the "sum", "mean" or "max" of the rows of `weight` that each bag names, [bags, features].

    The bags are the rows of `input`, int64 [bags, size]; `offsets`, for bags of different sizes, have no integer form. In a
    sum each row may have a factor, `per_sample_weights`, of the shape of `input`.
    """
    rows = build(embedding, input, weight, None, False, sparse)
    if per_sample_weights is not None:
        rows = build(mul, rows, build(reshape, per_sample_weights, [-1, build.fact(per_sample_weights).shape[1], 1]))
    return build({"sum": sum, "mean": mean, "max": amax}[mode], rows, [1], False)

"""Bags of embeddings, all of one size: the sum, mean or largest of the rows that each of them names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.facts import TensorFact
from fxquant.graph import fact
from fxquant.ops.arithmetic import mul
from fxquant.ops.composite import Builder
from fxquant.ops.embedding import embedding, refuses_embedding
from fxquant.ops.extremum import amax
from fxquant.ops.pool import mean, sum
from fxquant.ops.record import Operator, Parameter, register
from fxquant.ops.shape import reshape


def embedding_bag(input: Tensor, weight: Tensor, mode: str = "mean", per_sample_weights: Tensor | None = None) -> Tensor:
    """For each row of `input`, int64 [bags, size], the "sum", "mean" or "max" of the rows of `weight` that it names: [bags, features].

    In a sum each of them may have a factor: per_sample_weights [bags, size].
    """
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.amax(1)


def _expand(build: Builder, input: fx.Node, weight: fx.Node, mode: str, per_sample_weights: fx.Node | None) -> Any:
    rows = build(embedding, input, weight)
    if per_sample_weights is not None:
        size = build.fact(per_sample_weights).shape[1]
        rows = build(mul, rows, build(reshape, per_sample_weights, [-1, size, 1]))
    if mode == "max":
        return build(amax, rows, [1], False)
    return build(sum if mode == "sum" else mean, rows, [1], False)


def _function(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> dict[str, Any] | str:
    if offsets is not None:
        return "the sizes of its bags depend on the data"
    if max_norm is not None:
        return "it changes its weight while it runs (max_norm)"
    if padding_idx is not None:
        return "how many rows of a bag count depends on the data (padding_idx)"
    return {"input": input, "weight": weight, "mode": mode, "per_sample_weights": per_sample_weights}


def _module(module: Any) -> dict[str, Any] | str:
    given = _function(None, Parameter("weight"), max_norm=module.max_norm, mode=module.mode, padding_idx=module.padding_idx)
    return given if isinstance(given, str) else {"weight": given["weight"], "mode": given["mode"]}


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or len(known.shape) != 2 or not isinstance(known.shape[1], int):
        return "the sizes of its bags depend on the data"
    return refuses_embedding(node, arguments)


register(
    Operator(
        "embedding_bag",
        embedding_bag,
        ("per_sample_weights",),
        reads=("input",),
        expand=_expand,
        functions={F.embedding_bag: _function},
        modules={nn.EmbeddingBag: _module},
        refuses=_refuses,
    )
)

"""Spellings of what is chosen, placed and counted by whole numbers: of two live tensors of shape (B, 4, 6, 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.ir import functional

Forward = Callable[[Any, Tensor, Tensor], Any]


class Written(NamedTuple):
    """One spelling: the operator it is, and what is computed; `fine`: its result is near the float one, which an order has not to be."""

    operator: str
    forward: Forward
    fine: bool = True


def both(name: str, function: Callable[..., Any], fine: bool = True) -> Written:
    return Written(name, lambda m, x, y: function(x, y), fine)


def places(x: Tensor) -> Tensor:
    """The same of every batch: whole numbers of the shape of a tensor."""
    return torch.tensor([3, 0, 0, 1]).view(1, 4, 1, 1).expand_as(x)


def written_into_a_view(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.narrow(1, 1, 2).copy_(x[:, :2])
    out.diagonal(dim1=2, dim2=3).fill_(0.3)
    return out


def filled_lists(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 4, 6, 6)
    out[:, :2], out[:, 2:] = x[:, :2], y[:, 2:]
    out[:, [0, 3], [1, 2]] = 0.25
    return out


SPELLED: dict[Any, Written] = {
    torch.index_put: both("setitem", lambda x, y: torch.index_put(x[0], (torch.tensor([0, 2]),), torch.tensor(0.5))),
    "index_put": both("setitem", lambda x, y: x[0].index_put((torch.tensor([1]),), y[0, :1])),
    "index_put_": both("index_put", lambda x, y: (x[0] * 2).index_put_((torch.tensor([0, 1]), torch.tensor([2, 5])), torch.tensor(0.5))),
    functional.write: both("write", written_into_a_view),
    functional.copy: both("write", lambda x, y: (z := x * 2, z.narrow(1, 0, 1).copy_(y[:, 2:3]))[0]),
    torch.diagonal_scatter: both("write", lambda x, y: torch.diagonal_scatter(x, y[..., 0], 0, 2, 3)),
    "diagonal_scatter": both("write", lambda x, y: x.diagonal_scatter(y[..., :5, 0], 1, 2, 3)),
    torch.take: both("take", lambda x, y: torch.take(x, torch.tensor([[3, 17], [0, 5]]))),
    "take": both("take", lambda x, y: x.take(torch.tensor([9, 8]))),
    torch.diagonal: both("diagonal", lambda x, y: torch.diagonal(x, 1, 2, 3)),
    "diagonal": both("diagonal", lambda x, y: x.diagonal(-1, dim1=3, dim2=1)),
    torch.linalg.diagonal: both("diagonal", lambda x, y: torch.linalg.diagonal(x, offset=2)),
    torch.diag: both("diagonal", lambda x, y: torch.diag(x[0, 1])),
    "diag": both("diag_embed", lambda x, y: x[0, 1, 2].diag(-1)),
    torch.trace: both("einsum", lambda x, y: torch.trace(x[0, 0])),
    "trace": both("einsum", lambda x, y: y[0, 0].trace()),
    torch.scatter_add: both("scatter_add", lambda x, y: torch.scatter_add(x, 1, places(x), y)),
    "scatter_add": both("scatter_add", lambda x, y: torch.zeros_like(x).scatter_add(1, places(x), y)),
    "scatter_add_": both("scatter_add", lambda x, y: (x * 2).scatter_add_(3, y.argmax(3, True), y), False),
    torch.index_add: both("index_add", lambda x, y: torch.index_add(x, 1, torch.tensor([0, 0, 2]), y[:, 1:], alpha=-0.5)),
    "index_add": both("index_add", lambda x, y: torch.zeros_like(x).index_add(2, torch.tensor([1, 1]), y[:, :, :2])),
    "index_add_": both("index_add", lambda x, y: (x * 2).index_add_(3, torch.tensor([5, 0]), y[..., :2])),
    torch.scatter_reduce: both("scatter_extremum", lambda x, y: torch.scatter_reduce(x, 1, places(x), y, "amax")),
    "scatter_reduce": both("scatter_extremum", lambda x, y: x.scatter_reduce(1, places(x), y, "amin", include_self=False)),
    "scatter_reduce_": both("scatter_add", lambda x, y: (x * 2).scatter_reduce_(1, places(x), y, "sum")),
    F.one_hot: both("one_hot", lambda x, y: F.one_hot(x.argmax(3), 6), False),
    torch.count_nonzero: both("count_nonzero", lambda x, y: torch.count_nonzero(x > 0.2, (1, 2)), False),
    "count_nonzero": both("count_of", lambda x, y: x.relu().count_nonzero(1), False),
    torch.bucketize: both("bucketize", lambda x, y: torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5])), False),
    torch.searchsorted: both("bucketize", lambda x, y: torch.searchsorted(torch.tensor([0.2, 0.5]), y, side="right"), False),
    torch.isin: both("isin", lambda x, y: torch.isin(x.argmax(1), torch.tensor([0, 3])), False),
    torch.aminmax: both("aminmax", lambda x, y: torch.aminmax(x, dim=1)[1]),
    "aminmax": both("aminmax", lambda x, y: x.aminmax(dim=-1, keepdim=True).min),
    torch.msort: both("msort", lambda x, y: torch.msort(x[0])),
    "msort": both("msort", lambda x, y: y[0].msort()),
    torch.cummax: both("cummax", lambda x, y: torch.cummax(x, 1)[0]),
    "cummax": both("cummax", lambda x, y: x.cummax(-1).values),
    torch.cummin: both("cummin", lambda x, y: torch.cummin(x, dim=2).values),
    "cummin": both("cummin", lambda x, y: y.cummin(1)[0]),
    torch.nanmedian: both("median", lambda x, y: torch.nanmedian(x, 1)[0]),
    "nanmedian": both("median", lambda x, y: x.nanmedian(-1, True).values),
    F.embedding_bag: Written(
        "embedding_bag", lambda m, x, y: F.embedding_bag(x[:, 0].argmax(2), m.layers["EmbeddingBag"].weight, mode="max"), False
    ),
    nn.EmbeddingBag: Written("embedding_bag", lambda m, x, y: m.layers["EmbeddingBag"](x[:, 1].argmax(2)), False),
}
ALSO_SPELLED: dict[str, Written] = {
    "several quantiles": both("quantile", lambda x, y: x.quantile(torch.tensor([0.25, 0.5]), dim=-1, keepdim=True)),
    "several lists": both("index", lambda x, y: x[:, [0, 1], :, [[2], [3]]]),
    "lists beside slices": both("index_parts", lambda x, y: x[:, None, [3, 1], 1:, [0, 5]]),
    "a mask of constants": both("index", lambda x, y: x[..., torch.ones(6, 6).tril().bool()]),
    "of each item": both("pick_each", lambda x, y: x[torch.arange(x.shape[0]), :, y[:, 0, 0].argmax(1)], False),
    "beside a slice": both("pick_parts", lambda x, y: x[:, 1:3, y[0, 0, 0].argmax(0, keepdim=True)], False),
    "places that are broadcast": both("take_along_dim", lambda x, y: torch.take_along_dim(x, y[:, :, :1].argsort(3), 3), False),
    "a number": both("scatter", lambda x, y: torch.zeros_like(x).scatter(1, x.argmax(1, True), 1.0) * y, False),
    "a part of the source": both("scatter", lambda x, y: x.scatter(1, y.argmax(1, True), y), False),
    "lists that are filled": both("index_put", filled_lists),
    "an order of places": both("argsort", lambda x, y: x.argsort(3).argsort(3), False),
    "places beside each other": both("cat", lambda x, y: torch.cat((x.argmax(1), y.argmin(1)), 1), False),
    "of a constant row": both("pick", lambda x, y: torch.linspace(-1, 1, 6)[x.argmax(3)], False),
    "factors of a bag": Written(
        "embedding_bag",
        lambda m, x, y: F.embedding_bag(x[:, 0].argmax(2), m.layers["EmbeddingBag"].weight, mode="sum", per_sample_weights=y[:, 0, 0]),
        False,
    ),
}

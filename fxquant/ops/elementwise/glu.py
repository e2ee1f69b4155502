"""The gated linear unit: one half of the channels times the sigmoid of the other. A composite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.record import Fixed, Operator, register
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.indexing.index import WHOLE, getitem

GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """Return the first half along a dimension times the sigmoid of the second."""
    return F.glu(input, dim)


def _expand(build: Builder, input: fx.Node, dim: int) -> Any:
    shape = fact(input).shape
    half = shape[dim] // 2

    def part(start: int) -> fx.Node:
        index: list[Any] = [WHOLE] * len(shape)
        index[dim] = slice(start, start + half)
        made: fx.Node = build(getitem, input, index)
        return made

    return build(mul, part(0), build(torch.sigmoid, part(half), demand=GATE))


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known, dim = fact(arguments["input"]), arguments["dim"]
    halves = isinstance(known, TensorFact) and isinstance(dim, int) and isinstance(known.shape[dim], int)
    return None if halves else "it splits the batch, whose size is not fixed"


register(
    Operator("glu", glu, ("input",), expand=_expand, functions={F.glu: None}, modules={nn.GLU: lambda m: {"dim": m.dim}}, refuses=_refuses)
)

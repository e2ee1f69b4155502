"""The gated linear unit: one half of the channels times the sigmoid of the other. A composite."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite
from fxquant.ops.core.demands import Fixed
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.indexing.index import WHOLE, getitem

GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known, dim = fact(arguments["input"]), arguments["dim"]
    halves = isinstance(known, TensorFact) and isinstance(dim, int) and isinstance(known.shape[dim], int)
    return None if halves else "it splits the batch, whose size is not fixed"


@composite(refuses=_refuses)
def glu(build: Builder, input: fx.Node, dim: int = -1) -> Any:
    """Return the first half along a dimension times the sigmoid of the second."""
    shape = fact(input).shape
    half = shape[dim] // 2

    def part(start: int) -> fx.Node:
        index: list[Any] = [WHOLE] * len(shape)
        index[dim] = slice(start, start + half)
        made: fx.Node = build(getitem, input, index)
        return made

    return build(mul, part(0), build(torch.sigmoid, part(half), demand=GATE))

"""Integers from counting: one-hot vectors, and how many booleans are true."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import fact, shape_of
from fxquant.ops.core.operators import Lowering, Plain, TensorFact, are_fixed, listed, lowered
from fxquant.ops.core.samples import sampled
from fxquant.primitives import scatter, shape


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


def _counted(input: Any, dim: Any = None) -> dict[str, Any] | str:
    if fact(input).dtype != torch.bool:
        return "its operand is not a boolean tensor"
    rank = len(shape_of(input))
    return {"input": input, "dim": [d % rank for d in (range(rank) if dim is None else listed([dim]))]}


def _refuses_count(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = shape_of(arguments["input"])
    return None if sizes and are_fixed(sizes[d] for d in arguments["dim"]) else "it counts over the batch, whose size is not fixed"


@lowered(
    adapt=_counted,
    reads=("input",),
    onnx=lambda c: c.reduced("ReduceSum", c.do("Cast", c.operand("input"), to=torch.int64), list(c["dim"]), False),
    refuses=_refuses_count,
    demand=Plain("int64"),
)
@sampled("torch.count_nonzero(x > 0.2, (1, 2))")
def count_nonzero(lowering: Lowering, input: Any, dim: list[int]) -> Any:
    """Count how many of the booleans along dimensions are true: int64."""
    return lowering.call(scatter.count, lowering.given("input", input, torch.bool), list(dim), False)

"""Operators that calibration, or a method of tuning, leaves as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State


def in_float(model: nn.Module) -> list[QuantizedOperator]:
    """Return the operators in state FLOAT; none if all are."""
    operators = quantized_operators(model).values()
    found = [operator for operator in operators if operator.state is State.FLOAT]
    return found if len(found) < len(operators) else []


@contextmanager
def leaving_out(chosen: Iterable[QuantizedOperator]) -> Iterator[None]:
    """Inside, `left_out` is set on these operators, so that calibration and tuning leave them as they are."""
    marked = [operator for operator in chosen if not operator.left_out]
    try:
        for operator in marked:
            operator.left_out = True
        yield
    finally:
        for operator in marked:
            operator.left_out = False

"""Operators that calibration, or a method of tuning, leaves as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State


def in_float(model: nn.Module) -> list[QuantizedOperator]:
    """The operators in state FLOAT, if the others are not."""
    operators = quantized_operators(model).values()
    found = [operator for operator in operators if operator.state is State.FLOAT]
    return found if len(found) < len(operators) else []


@contextmanager
def leaving_out(chosen: Iterable[QuantizedOperator]) -> Iterator[None]:
    """Inside, these operators are left as they are, by whatever asks for `left_out`."""
    marked = [operator for operator in chosen if not operator.left_out]
    try:
        for operator in marked:
            operator.left_out = True
        yield
    finally:
        for operator in marked:
            operator.left_out = False

"""Operators that calibration, or a method of tuning, leaves as they are, and objects that are otherwise for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State


def in_float(model: nn.Module) -> list[QuantizedOperator]:
    """Return the operators in state FLOAT; none if all are."""
    operators = quantized_operators(model).values()
    found = [operator for operator in operators if operator.state is State.FLOAT]
    return found if len(found) < len(operators) else []


@contextmanager
def having(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Inside, these objects have these values of their attributes, as in `having(operators, left_out=True)`."""
    before = [(each, {name: getattr(each, name) for name in values}) for each in objects]
    try:
        for each, _ in before:
            for name, value in values.items():
                setattr(each, name, value)
        yield
    finally:
        for each, had in before:
            for name, value in had.items():
                setattr(each, name, value)

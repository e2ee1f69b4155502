"""A function of one tensor, element by element, that is made of several operators: one table in integers.

Its meaning is written as a nest, which a file holds as it is: `INPUT` stands for the operand, and ("sub", ("sqrt", INPUT), 1.0, 1) for a
call of an operator of the table with its arguments in order. Only operators for which `is_pointwise` holds occur.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.ops.core import samples
from fxquant.ops.core.record import BY_NAME, Operator, Trait, register
from fxquant.ops.elementwise.table import SINGULAR, UNARY, by_table

INPUT = "input"
_MAPPING = "mapping"  # ("mapping", ((name, value), …)) stands for a dict among the arguments

Steps = Any  # a nest as above


def is_pointwise(name: str) -> bool:
    """Return whether the operator of this name may be a part of such a function, should its operands be of one size."""
    return name in BY_NAME and (name in UNARY or Trait.POINTWISE in BY_NAME[name].traits)


def written(value: Any) -> Steps:
    """Return an argument of a call that is not a tensor as a nest holds it: hashable."""
    if isinstance(value, dict):
        return (_MAPPING, tuple((name, written(item)) for name, item in value.items()))
    return tuple(written(item) for item in value) if isinstance(value, list | tuple) else value


def curve(input: Tensor, steps: Steps) -> Tensor:
    """Compute the function that the nest describes. Raise ValueError for an entry that is not an operator that it may contain."""
    found: Tensor = _value(steps, input)
    return found if found.is_floating_point() else found.to(input.dtype)


def _value(steps: Steps, input: Tensor) -> Any:
    if steps == INPUT:
        return input
    if not isinstance(steps, tuple):
        return steps
    name, *arguments = steps
    if name == _MAPPING:
        return {key: _value(value, input) for key, value in arguments[0]}
    if not isinstance(name, str) or not is_pointwise(name):
        raise ValueError(f"{name!r} is not an elementwise function of one tensor")
    return BY_NAME[name].function(*(_value(argument, input) for argument in arguments))


def _on_number(x: float, steps: Steps) -> float:
    with torch.no_grad():
        return float(curve(torch.tensor(x, dtype=torch.float64, device="cpu"), steps))


UNARY["curve"] = curve, _on_number
SINGULAR.add("curve")  # some have poles, or slopes without a bound
register(
    Operator(
        "curve",
        curve,
        ("input",),
        lambda lowering, input, steps: by_table(lowering, input, "curve", steps=written(steps)),
        element=curve,
        samples=samples.written("torch.where(x > 0, x.sqrt(), x)", within=samples.LIMITED),
    )
)

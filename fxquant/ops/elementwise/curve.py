"""A function of one tensor, element by element, that is made of several operators: one table in integers.

Its meaning is written as a nest, which a file holds as it is: `INPUT` stands for the operand, and ("sub", ("sqrt", INPUT), 1.0, 1) for a
call of an operator of the table with its arguments in order. Only operators for which `is_pointwise` holds occur.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fxquant.numerics.grids import Interval
from fxquant.ops.core import Call, Lowering, Plain, Quantized
from fxquant.ops.core.record import BY_NAME, Trait, register
from fxquant.ops.core.samples import LIMITED, written
from fxquant.ops.elementwise.functions import by_torch
from fxquant.ops.elementwise.table import FARTHEST, MAPPING, ON_TENSORS, SINGULAR, UNARY, by_table, hashable, is_pointwise

INPUT = "input"

Steps = Any  # a nest as above


def curve(input: Tensor, steps: Steps) -> Tensor:
    """Compute the function that the nest describes. Raise ValueError for an entry that is not an operator that it may contain."""
    result: Tensor = _value(steps, input, {})
    return result.to(input.dtype)  # of numbers alone, a choice is float32


def _value(steps: Steps, input: Tensor, values: dict[Steps, Any]) -> Any:
    """Evaluate nested calls on `input`; `values` caches the parts already evaluated, so that each is computed once."""
    if steps == INPUT:
        return input
    if not isinstance(steps, list | tuple):
        return steps
    name, *arguments = steps
    if name == MAPPING:
        return {key: _value(value, input, values) for key, value in arguments[0]}
    if not isinstance(name, str) or not is_pointwise(name):
        raise ValueError(f"{name!r} is not an elementwise function of one tensor")
    key = hashable(steps)
    if key not in values:
        record, operands = BY_NAME[name], [_value(argument, input, values) for argument in arguments]
        if isinstance(record.demand, Plain) or Trait.EXTREMUM in record.traits:  # PyTorch's takes no number, or none on the left
            operands = [input.new_full((), value) if isinstance(value, float) else value for value in operands]
        values[key] = record.function(*operands)
    return values[key]


# ---- the interval in which it changes, and the operator of PyTorch that computes the same ---------------------------
_SIDE = torch.cat([torch.arange(2 * FARTHEST + 1, device="cpu") / 2, torch.tensor([96, 128, 192, 256, 384, 512], device="cpu")]).double()
_SMALL = 2.0 ** -torch.arange(-5, 20, dtype=torch.float64, device="cpu")  # functions may differ close to 0 alone
_EVERYWHERE = torch.cat([torch.linspace(-37.3, 41.9, 1001, dtype=torch.float64, device="cpu"), -_SMALL, _SMALL])
_SAME = 2.0**-23  # how far two ways to write one function may be apart, which round numbers like √2 to float32


@lru_cache(maxsize=256)
def _keeps(steps: Steps, bits: int) -> Interval:
    """Return the interval beyond which it is within a quarter of a step of 2^-bits, times its change at ±1, of its limit."""
    with torch.no_grad():
        sides = [curve(sign * _SIDE, steps) for sign in (-1, 1)]
    near = torch.cat([side[:3] for side in sides])
    tolerance = min(1.0, float(near.max() - near.min())) * 2.0 ** -(bits + 2)

    def end(side: Tensor) -> float:
        changing = torch.nonzero(~((side - side[-1]).abs() <= tolerance)).flatten().tolist()  # NaN is none
        after = max(changing, default=-1) + 1
        return after / 2 if tolerance > 0 and after < 2 * FARTHEST else math.inf

    return -end(sides[0]), end(sides[1])


def settings_of(name: str, **settings: Any) -> dict[str, Any]:
    """Return all settings of the unary operator of this name: `settings`, and the defaults of the others."""
    return {key: value for key, value in BY_NAME[name].bind((None,), settings).items() if key != "input"}


@lru_cache(maxsize=256)
def same_as(steps: Steps) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of the unary operator with a form in ONNX that computes this function; None if there is none."""
    with torch.no_grad():
        own = curve(_EVERYWHERE, steps)
        for name, (function, _) in UNARY.items():
            record = BY_NAME.get(name)
            if record is None or record.onnx is None or name == "curve":
                continue
            for each in ({}, *(call.arguments for call in record.samples if not call.text)):
                settings = settings_of(name, **{key: value for key, value in each.items() if key != "input"})
                if torch.allclose(function(_EVERYWHERE, **settings), own, rtol=_SAME, atol=_SAME):
                    return name, settings
    return None


def _lower(lowering: Lowering, input: Quantized, steps: Steps) -> Quantized:
    same = same_as(hashable(steps))
    return by_table(lowering, input, "curve", steps=hashable(steps)) if same is None else by_table(lowering, input, same[0], **same[1])


def _onnx(c: Call) -> str:
    same = same_as(hashable(c["steps"]))
    if same is None:
        return c.exported()
    record = BY_NAME[same[0]]
    assert record.onnx is not None
    return record.onnx(replace(c, name=record.name, arguments={"input": c.input, **same[1]}))


UNARY["curve"] = curve, by_torch(curve)
SINGULAR.add("curve")  # some have poles, or slopes without a bound
ON_TENSORS.add("curve")
register(
    "curve",
    curve,
    ("input",),
    _lower,
    element=curve,
    keeps=lambda arguments, after, bits: None if bits is None else _keeps(hashable(arguments["steps"]), bits),
    onnx=_onnx,
    traits=frozenset({Trait.ELEMENTWISE}),
    samples=written("torch.where(x > 0, x.sqrt(), x)", within=LIMITED),
)

"""What a primitive's record says of its range: the bounds of its result, from those of its operands and from its constants.

    def _bounds_add(input: Value, other: Value) -> Range:
        need(input.exact == other.exact, "its operands have different widths")
        return within(input.magnitude + other.magnitude, input.exact)

`fxquant.primitives.proof` holds a graph against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxquant.ir.facts import BatchDim, TensorFact
from fxquant.numerics.grids import FLOAT32_EXACT, accumulator_bound

FLOAT64_EXACT = 2**53


class Unproved(ValueError):
    """A graph computes something that is not proved to be right for every input."""


@dataclass(frozen=True)
class Value:
    """What a node can hold: float64 bounds that broadcast against it, closed, and below which it is exact where runtimes hold it.

    constant  the tensor itself, where it is one
    """

    low: Tensor
    high: Tensor
    fact: TensorFact
    exact: int = FLOAT32_EXACT
    constant: Tensor | None = None

    @property
    def magnitude(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def largest(self) -> int:
        """The largest magnitude of all."""
        return int(self.magnitude.max()) if self.magnitude.numel() else 0

    def size(self, dim: int) -> int:
        """A size, which must not depend on the batch."""
        found = self.fact.shape[dim]
        if isinstance(found, BatchDim):
            refuse(f"it reduces or picks from dimension {dim}, whose size depends on the batch")
        return found


@dataclass(frozen=True)
class Range:
    """What is said of a result: its bounds, and below what it is exact."""

    low: Any
    high: Any
    exact: int = FLOAT32_EXACT


def refuse(because: str) -> NoReturn:
    """Raises Unproved."""
    raise Unproved(because)


def need(condition: bool | Tensor, because: str) -> None:
    """Raises Unproved where the condition does not hold."""
    if not bool(condition):
        refuse(because)


def within(bound: Any, exact: int) -> Range:
    """An accumulator of that magnitude."""
    bound = as_double(bound)
    return Range(-bound, bound, exact)


def as_double(bound: Any) -> Tensor:
    """A number or a tensor as float64; a number is on the CPU, whatever PyTorch's default device is."""
    return bound.double() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")


def exact_below(wide: bool) -> int:
    """Below what a sum is exact that is formed in float64, or in float32."""
    return FLOAT64_EXACT if wide else FLOAT32_EXACT


def constant_of(value: Value | None, what: str) -> Tensor:
    """A constant's tensor."""
    if value is None or value.constant is None:
        refuse(f"its {what} is no constant")
    return value.constant


def bias_of(value: Value | None) -> Tensor | None:
    """A bias, where there is one."""
    return None if value is None else constant_of(value, "bias")


def sum_of_products(x: Value, weight: Tensor, bias: Tensor | None, trailing: int, exact: int) -> Range:
    """Output channels are the weight's dimension 0, followed by `trailing` dimensions in the result."""
    return within(accumulator_bound(weight, bias, 0, x.largest).reshape(-1, *[1] * trailing), exact)


def multipliers(value: Value) -> Tensor:
    """Multipliers of *real*: finite, and not negative."""
    factors = constant_of(value, "multiplier")
    need(factors.dtype == torch.float32 and torch.isfinite(factors).all() and (factors >= 0).all(), "its multiplier is out of range")
    return factors.double()


def stored_limits(low: int, high: int, zero_point: int) -> Range:
    """Centred limits as stored integers."""
    need(type(zero_point) is int, f"its zero point is {zero_point!r}")
    return Range(float(low + zero_point), float(high + zero_point))

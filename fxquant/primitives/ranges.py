"""The range of an integer primitive: the bounds of its result, from the bounds of its operands and from its constants.

    def _bounds_add(input: Value, other: Value) -> Range:
        need(input.exact == other.exact, "its operands have different widths")
        return within(input.magnitude + other.magnitude, input.exact)

`fxquant.primitives.proof` checks a graph against them.
"""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxquant.ir.graph import BatchDim, TensorFact, largest_size
from fxquant.numerics.grids import FLOAT32_EXACT, accumulator_bound

FLOAT64_EXACT = 2**53


class Unproved(ValueError):
    """Raised where a graph computes something that is not proved to be right for every input."""


@dataclass(frozen=True)
class Value:
    """The values that a node can hold."""

    low: Tensor  # low, high: closed bounds, float64, which broadcast against the node's tensor
    high: Tensor
    fact: TensorFact  # the shape and dtype of the tensor
    exact: int = FLOAT32_EXACT  # the magnitude below which integers are exact in the dtype in which runtimes hold it
    constant: Tensor | None = None  # the tensor itself, if the node is a constant

    @property
    def magnitude(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def largest(self) -> int:
        """The largest magnitude over all elements; 0 for an empty tensor."""
        return int(self.magnitude.max()) if self.magnitude.numel() else 0

    def size(self, dim: int) -> int:
        """Return the size of a dimension; raise Unproved if it varies."""
        size = self.fact.shape[dim]
        if isinstance(size, BatchDim):
            refuse(f"it picks from dimension {dim}, whose size varies")
        return size

    def terms(self, *dims: int) -> int:
        """Return the largest number of elements along dimensions; raise Unproved if it has no bound, as that of a batch."""
        sizes = [largest_size(self.fact.shape[dim]) for dim in dims]
        need(None not in sizes, f"it reduces dimensions {dims}, of which one depends on the batch")
        return math.prod(size for size in sizes if size is not None)


@dataclass(frozen=True)
class Range:
    """The bounds of a result, and the magnitude below which it is exact."""

    low: Any
    high: Any
    exact: int = FLOAT32_EXACT


BOOLEAN = Range(0.0, 1.0)


def refuse(because: str) -> NoReturn:
    """Raise Unproved."""
    raise Unproved(because)


def need(condition: bool | Tensor, because: str) -> None:
    """Raise Unproved if the condition does not hold."""
    if not bool(condition):
        refuse(because)


def within(bound: Any, exact: int) -> Range:
    """Return the range of an accumulator of at most this magnitude."""
    bound = as_double(bound)
    return Range(-bound, bound, exact)


def as_double(bound: Any) -> Tensor:
    """Return a number or a tensor as a float64 tensor; a number is on the CPU, whatever PyTorch's default device is."""
    return bound.double() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")


def exact_below(wide: bool) -> int:
    """Return the magnitude below which a sum is exact, formed in float64 if `wide`, else in float32."""
    return FLOAT64_EXACT if wide else FLOAT32_EXACT


def constant_of(value: Value | None, what: str) -> Tensor:
    """Return a constant's tensor; raise Unproved if the value is not a constant."""
    if value is None or value.constant is None:
        refuse(f"its {what} is not a constant")
    return value.constant


def sum_of_products(x: Value, weight: Tensor, bias: Value | None, trailing: int, exact: int) -> Range:
    """Return the range of a sum of products with a weight, and a constant bias.

    Output channels are the weight's dimension 0; in the result `trailing` dimensions follow them.
    """
    added = None if bias is None else constant_of(bias, "bias")
    return within(accumulator_bound(weight, added, 0, x.largest).reshape(-1, *[1] * trailing), exact)


def multipliers(value: Value) -> Tensor:
    """Return the multipliers of the *real* arithmetic as float64; raise Unproved if any is infinite, NaN or negative."""
    factors = constant_of(value, "multiplier")
    need(factors.dtype == torch.float32 and torch.isfinite(factors).all() and (factors >= 0).all(), "its multiplier is out of range")
    return factors.double()


def union(*values: Value) -> Range:
    """Return the range (lowest, highest) of a result whose elements all come from its operands."""
    return Range(torch.stack([value.low.min() for value in values]).min(), torch.stack([value.high.max() for value in values]).max())


def stored_limits(low: int, high: int, zero_point: int) -> Range:
    """Return the range of stored integers, given the limits of the centred ones."""
    need(type(zero_point) is int, f"its zero point is {zero_point!r}")
    return Range(float(low + zero_point), float(high + zero_point))

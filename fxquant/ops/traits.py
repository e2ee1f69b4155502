"""Traits of operators: what passes and backends rely on instead of an operator's name.

An operator that has a trait meets its criterion; tests/test_traits.py runs each of them. One without it may meet it all the same: then no
pass relies on it yet. In a criterion f is the operator's float function, x and y are activations, c and z are numbers.
"""

from __future__ import annotations

from enum import Enum, auto


class Trait(Enum):
    """Criteria that operators meet."""

    ELEMENTWISE = auto()
    """A function of each element of one tensor: f of a permuted x is the permuted f(x)."""
    HOMOGENEOUS = auto()
    """f(2x) = 2 f(x), for all activations together. Of a clamp with bounds other than 0 it does not hold, nor of a given divisor."""
    AFFINE = auto()
    """With a number as one of its two operands: f((x + y) / 2, c) = (f(x, c) + f(y, c)) / 2."""
    SPATIAL = auto()
    """Mixes elements along the dimensions behind the channels alone: f of permuted channels is f(x) with its channels permuted."""
    REDUCTION = auto()
    """Reduces dimensions, in whatever order: f of x, permuted along them, is f(x)."""
    SUMMATION = auto()
    """A reduction that adds up: f(x + y) = f(x) + f(y)."""
    STATISTIC = auto()
    """A reduction of squares: f(-x) = f(x), and f(2x) is 2 f(x) or 4 f(x)."""
    SOFTMAX = auto()
    """Tells the elements of a row apart by their differences, in their order: f(x + c) = f(x), and f(x) is sorted as x is."""
    MATRIX_PRODUCT = auto()
    """Sums of products of two operands: f(2x, y) = f(x, 2y) = 2 f(x, y), and elements of both are summed over."""
    DIVIDES = auto()
    """Has a pole where its second operand is 0: f(c, 0) is not finite."""
    CHOOSES = auto()
    """Chooses for each element: what it does not choose may be NaN, and its result is finite all the same."""
    BOUNDED_BELOW = auto()
    """Raises what is below a bound: no element of f(x, c) is less than c."""
    RESHAPES = auto()
    """Gives its elements another shape in the same order; it may repeat them, and leaves out none."""
    REARRANGES = auto()
    """Returns elements of its operands, whole rows in whatever place, and computes nothing."""
    OUTPUTS_FIRST = auto()
    """Its weight's dimension 0 is the output channels: with a weight twice as large at one index, that channel alone is twice as large."""

"""Traits of operators: what passes and backends rely on instead of an operator's name.

An operator that has a trait meets its criterion; tests/ops/test_traits.py runs each of them. One without it may meet it all the same:
then no pass relies on it yet. In a criterion f is the operator's float function, x and y are activations, c and z are numbers.
"""

from __future__ import annotations

from enum import Enum


class Trait(Enum):
    """Criteria that operators meet."""

    ELEMENTWISE = "A function of each element of one tensor: f of a permuted x is the permuted f(x)."
    HOMOGENEOUS = "f(2x) = 2 f(x), for all activations together; bounds of a clamp are 0, and no divisor is given."
    AFFINE = "With a number as one of its two operands: f((x + y) / 2, c) = (f(x, c) + f(y, c)) / 2."
    SPATIAL = "Mixes elements along the dimensions after the channels only: f of permuted channels is f(x) with its channels permuted."
    REDUCTION = "Reduces dimensions, in whatever order: f of x, permuted along them, is f(x)."
    SUMMATION = "A reduction that adds up: f(x + y) = f(x) + f(y)."
    STATISTIC = "A reduction of squares: f(-x) = f(x), and f(2x) is 2 f(x) or 4 f(x)."
    SOFTMAX = "Depends on the differences of the elements of a row, and keeps their order: f(x + c) = f(x), and f(x) is sorted like x."
    MATRIX_PRODUCT = "Sums of products of two operands: f(2x, y) = f(x, 2y) = 2 f(x, y), and not of elements at the same index."
    DIVIDES = "Has a pole where its second operand is 0: f(c, 0) is not finite."
    CHOOSES = "Selects for each element: values that are not selected may be NaN, and its result is still finite."
    BOUNDED_BELOW = "Raises values below a bound to it: no element of f(x, c) is less than c."
    RESHAPES = "Reshapes its elements in the same order; it may repeat them, and drops none."
    REARRANGES = "Returns elements of its operands, in entire rows and any order, without arithmetic."
    OUTPUTS_FIRST = "Dimension 0 of its weight is the output channels: twice the weight at one index doubles that channel only."

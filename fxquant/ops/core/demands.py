"""Grids that an operator demands of its result: its own, its operand's, a fixed one, or none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Own:
    """A grid of its own: of this dtype, or, where that is None, of the one that the qconfig asks for.

    A target that has no activations of the dtype refuses the operator, which then stays in float, unless `otherwise` names another.
    shared_where   a flag of `Arithmetic` with which the grid is that of all operands all the same
    otherwise      the dtype on a target that has no activations of the first: `Own("int16", otherwise="int8")`
    headroom       what the scale that calibration finds is multiplied by, so that larger values than it has seen do not saturate; only for
                   that dtype
    """

    dtype: str | None = None
    shared_where: str | None = None
    otherwise: str | None = None
    headroom: float = 1.0
    limit: float | None = None


# For an inner tensor of a composite: what its result needs, and what its result is better with.
WIDE = Own("int16", headroom=2.0)


OWN = Own()
INNER = Own("int16", otherwise="int8")


@dataclass(frozen=True)
class Same:
    """The grid of the operands of these parameters; of all operands, where none is named."""

    operands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A grid that is given, whatever the values: this scale and this dtype.

    zero_point  of an affine dtype; None: the one that covers what a symmetric dtype does
    otherwise   what is demanded on a target that has no activations of the dtype; None: it refuses the operator
    """

    scale: float
    dtype: str
    zero_point: int | None = None
    otherwise: Fixed | Own | None = None


@dataclass(frozen=True)
class Plain:
    """No grid: the result is booleans or integers ("bool", "int64"), which are read as they are. It has no gradient."""

    dtype: str


Demand = Own | Same | Fixed | Plain


def supported_demand(demanded: Demand, dtypes: Collection[str]) -> Demand:
    """Return the demand that applies on a target with activations of these dtypes: its alternative, where the target lacks the first."""
    if not isinstance(demanded, Own | Fixed) or demanded.otherwise is None or demanded.dtype in dtypes:
        return demanded
    if isinstance(demanded, Own):
        return replace(demanded, dtype=demanded.otherwise, otherwise=None, headroom=1.0)
    return supported_demand(demanded.otherwise, dtypes)

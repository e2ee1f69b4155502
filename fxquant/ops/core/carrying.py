"""Operators that only copy elements: their result holds elements of what they read, and no others."""

from __future__ import annotations

from torch import fx

from fxquant.ir.parts import part
from fxquant.ops.core.demands import Own, Same
from fxquant.ops.core.record import BY_NAME, Operator, demand, operator_of


def carried(operator: Operator) -> tuple[str, ...]:
    """Return the parameters whose elements an operator's result holds as they are; none where it computes."""
    return operator.carries or (operator.operands if operator.moves else ())


def copies(node: fx.Node) -> bool:
    """Return whether a canonical node's result holds elements of what it reads, and no others, whatever grids these are on.

    Of a part of a composite this is so where the whole only copies as well: what computes has its grids as it demands them.
    """
    operator, whole = operator_of(node), part(node)
    if operator is None or not carried(operator) or not isinstance(demand(node), Own | Same):
        return False
    if whole is None:
        return True
    composite = BY_NAME.get(whole.composite)
    return composite is not None and bool(carried(composite))  # a part of what was legalized computes

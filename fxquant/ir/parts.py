"""Facts on the parts of composite operators.

part        the composite operator a node is a part of ("softmax: exp")
demand      the demand of the composite on the grid of this part
ties        names of its ties: nodes with one tie in common share one grid
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx


def stated_demand(node: fx.Node) -> Any:
    """Return the demand of a composite on the grid of this part of it (an `ops.Demand`); None for any other node."""
    return node.meta.get("demand")


def state_demand(node: fx.Node, value: Any) -> None:
    """Write the demand of the composite on the grid of this part of it."""
    node.meta["demand"] = value


@dataclass(frozen=True)
class Part:
    """The operator of the model that a node is a part of.

    composite  the operator's name
    role       the part's
    inner      whether its value is read by other parts alone; the last one's is the operator's result
    step       of a recurrence: at which of its steps it is computed, counted from 0; None of what is computed once
    """

    composite: str
    role: str
    inner: bool = True
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.composite}: {self.role}"


def part(node: fx.Node) -> Part | None:
    """Return the composite a node is a part of; None if it is a whole operator."""
    value = node.meta.get("part")
    return value if isinstance(value, Part) else None


def set_part(node: fx.Node, value: Part) -> None:
    """Write which composite the node is a part of."""
    node.meta["part"] = value


def is_inner_part(node: fx.Node) -> bool:
    """Return whether a node holds an inner tensor of a composite."""
    known = part(node)
    return known is not None and known.inner


def set_inner(node: fx.Node, inner: bool) -> None:
    """Write whether only other parts read the value of this part."""
    node.meta["part"] = replace(node.meta["part"], inner=inner)


def step_of(node: fx.Node) -> int | None:
    """Return the step of a recurrence at which a part of it is computed, counted from 0; None for any other node."""
    known = part(node)
    return None if known is None else known.step


def ties(node: fx.Node) -> tuple[str, ...]:
    """Return the names of a node's ties: nodes with one tie in common share one grid."""
    return tuple(node.meta.get("ties", ()))


def tie(node: fx.Node, name: str) -> None:
    """Add a name to those with which the node's tensor shares its grid."""
    node.meta["ties"] = (*ties(node), name)

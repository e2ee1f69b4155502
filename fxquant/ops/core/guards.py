"""Guards of operator declarations: each says why a particular node must stay in float, or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.ops.core.declare import Guard

NO_DIMENSIONS = "its operand has no dimensions"
COMPUTED = "one of its settings is computed, not a number"


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape of a node's tensor; None for what is not a node with a tensor."""
    known = fact(value) if isinstance(value, fx.Node) else None
    return known.shape if isinstance(known, TensorFact) else None


def is_tensor(value: Any) -> bool:
    """Return whether an argument is a node with a tensor, an activation or a parameter."""
    return isinstance(value, fx.Node) and (isinstance(fact(value), TensorFact) or is_parameter(value))


def nodes(*names: str, because: str = "one of its operands is a number") -> Guard:
    """Refuse a number in place of a tensor."""
    return lambda node, arguments: None if all(isinstance(arguments[name], fx.Node) for name in names) else because


def numbers(*names: str, because: str = COMPUTED, finite: bool = False, none: bool = False) -> Guard:
    """Refuse settings that are computed: neither numbers, nor lists of such, nor None, where that is allowed."""

    def fits(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(map(fits, value))
        return (none and value is None) or (isinstance(value, int | float) and (not finite or math.isfinite(value)))

    return lambda node, arguments: None if all(fits(arguments[name]) for name in names) else because


def one_of(name: str, *values: Any, because: Callable[[Any], str]) -> Guard:
    """Refuse other values of a setting, with a reason that is made of the value."""
    return lambda node, arguments: None if arguments[name] in values else because(arguments[name])


def has_dimensions(name: str = "input", because: str = NO_DIMENSIONS) -> Guard:
    """Refuse an operand without dimensions."""
    return lambda node, arguments: None if shape_of(arguments[name]) else because


def fixed(dim: str | int = "dim", name: str = "input", because: str = "it runs along the batch, whose size is not fixed") -> Guard:
    """Refuse a dimension whose size is not fixed, and an operand without dimensions."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        sizes = shape_of(arguments[name])
        if not sizes:
            return NO_DIMENSIONS
        at = arguments[dim] if isinstance(dim, str) else dim
        return None if isinstance(at, int) and isinstance(sizes[at], int) else because

    return refuses


def fixed_sizes(because: str, name: str = "input", start: int | None = None) -> Guard:
    """Refuse an operand of whose sizes, from the dimension `start` on, some are not fixed."""
    return lambda node, arguments: None if are_fixed(fact(arguments[name]).shape[start:]) else because


def fixed_along(dims: str, because: str, name: str = "input") -> Guard:
    """Refuse a list of dimensions of which some have a size that is not fixed."""
    return lambda node, arguments: None if are_fixed(fact(arguments[name]).shape[dim] for dim in arguments[dims]) else because


def are_fixed(sizes: Iterable[Any]) -> bool:
    """Return whether none of these sizes depends on the batch size."""
    return all(isinstance(size, int) for size in sizes)


def known_size(size: Any) -> int:
    """Return a size that does not depend on the batch size."""
    assert isinstance(size, int)
    return size


def known_sizes(sizes: Iterable[Any]) -> list[int]:
    """Return sizes of which none depends on the batch size."""
    return list(map(known_size, sizes))

"""Where a measure is taken, and the table of all of them.

A measure is a function of a `Site` that returns values, each of which a limit holds for. It returns none where it does not apply: to
another operator, or to a size that depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxquant.ir.facts import Size, TensorFact
from fxquant.ir.graph import fact
from fxquant.ops.core.record import Operator, operand_nodes
from fxquant.ops.core.weighted import shape_of, sizes


@dataclass(frozen=True)
class Site:
    """An operator of a graph: its node, its record, and its canonical arguments by name."""

    node: fx.Node
    operator: Operator
    arguments: dict[str, Any]

    def shape(self, name: str = "input") -> tuple[Size, ...]:
        """Return the shape of an argument; empty if it is not a tensor."""
        return shape_of(self.arguments.get(name)) or ()

    @property
    def operands(self) -> list[fx.Node]:
        """The activations it reads."""
        return operand_nodes(self.operator, self.arguments)

    @property
    def result(self) -> tuple[Size, ...]:
        """Return the shape of its result; empty if it is not a tensor."""
        value = fact(self.node)
        return value.shape if isinstance(value, TensorFact) else ()

    @property
    def rank(self) -> int:
        """How many spatial dimensions it has: 2 for conv2d."""
        return len(self.shape()) - 2

    def spatial(self, name: str) -> list[int]:
        """Return an argument that is one number, or one for each spatial dimension, as a list; empty if it has no such argument."""
        value = self.arguments.get(name)
        if name == "stride" and value in (None, [], ()):
            value = self.arguments.get("kernel_size")
        return [] if value is None or isinstance(value, str) else sizes(value, self.rank)


Measure = Callable[[Site], list[Any]]
MEASURES: dict[str, Measure] = {}


def measure(name: str) -> Callable[[Measure], Measure]:
    """Make the decorated function the measure of this name; the name is what a user reads: "its <name> is"."""

    def declare(function: Measure) -> Measure:
        MEASURES[name] = function
        return function

    return declare


def known(values: Any) -> list[int]:
    """Return the sizes that do not depend on the batch."""
    return [value for value in values if isinstance(value, int)]

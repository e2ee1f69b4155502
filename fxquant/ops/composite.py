"""How a composite operator is written in others: the builder that its `expand` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.facts import BATCH_SIZES, TensorFact
from fxquant.graph import Part, fact, inherit, is_parameter, mark_parameter, set_fact, set_part, spell, spelling, state_demand, tie
from fxquant.ops.record import OPERATORS, Demand


class Builder:
    """Writes the parts of one operator, as calls of other operators, in front of its node.

    name         the operator's
    node         its node, which has its meaning in float
    activations  the dtypes of activations that the target computes with
    parts        the nodes that were made, in order
    step         the step of a recurrence that is being written, counted from 0; None outside of it
    """

    def __init__(self, name: str, node: fx.Node, activations: Sequence[str]) -> None:
        self.name = name
        self.node = node
        self.activations = activations
        self._within = ""  # the composites inside of it that are being written, as a role begins with them
        self.parts: list[fx.Node] = []
        self.step: int | None = None
        self._ties = 0

    def __call__(self, function: Callable[..., Any], *args: Any, demand: Demand | None = None, **kwargs: Any) -> Any:
        """A call of an operator of the table, by its function, with this function's arguments.

        `demand` is what is asked of the grid of its result, in place of what the operator itself does. The call becomes an ordinary
        node, annotated, calibrated and trained as any other. A call of another composite is written as its parts; what is returned is
        the node of the result, or the nest of them that this composite returns.
        """
        operator = OPERATORS[function]
        bound: dict[str, Any] | str = operator.bind(args, kwargs)
        assert isinstance(bound, dict)
        if operator.expand is not None:
            return self._nested(operator, bound, demand)
        made = self.node.graph.create_node("call_function", function, tuple(bound.values()), {}, name=f"{self.node.name}_{operator.name}")
        self.node.prepend(made)
        inherit(made, self.node, "composite.expand")
        set_fact(made, TensorFact.between(*(_on_meta(made, batch) for batch in BATCH_SIZES)))
        bound = operator.normalize(made, bound)
        assert isinstance(bound, dict), f"{self.name} cannot be expanded: {bound}"
        made.args = tuple(bound.values())
        set_part(made, Part(self.name, self._within + operator.name, step=self.step))
        spell(made, *spelling(self.node))
        if demand is not None:
            state_demand(made, demand)
        self.parts.append(made)
        return made

    def parameter(self, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        """What a function of the table computes from parameters alone, a part of a bias: a parameter, too."""
        made: fx.Node = self.node.graph.create_node("call_function", function, args, {}, name=f"{self.node.name}_parameter")
        self.node.prepend(made)
        inherit(made, self.node, "composite.expand")
        mark_parameter(made)
        set_fact(made, TensorFact.between(*(_on_meta(made, batch) for batch in BATCH_SIZES)))
        self.parts.append(made)
        return made

    def tie(self, *nodes: fx.Node) -> None:
        """These parts have one grid, found for all of them together: the state of a recurrence, over all of its steps."""
        self._ties += 1
        for node in nodes:
            tie(node, f"{self.node.name}.{self._ties}")

    @staticmethod
    def fact(value: Any) -> TensorFact:
        """Shape and dtype of an operand, or of a part."""
        known = fact(value)
        assert isinstance(known, TensorFact)
        return known


def _on_meta(node: fx.Node, batch: int) -> Tensor:
    """The part's value on tensors without data."""

    def example(operand: fx.Node) -> Any:
        known = fact(operand)
        if isinstance(known, TensorFact):
            return torch.empty(known.at(batch), dtype=known.dtype, device="meta")
        assert not is_parameter(operand), f"%{operand.name} has no known shape"
        return known

    result: Tensor = node.target(*fx.map_arg(node.args, example), **fx.map_arg(node.kwargs, example))  # type: ignore[operator]
    return result

"""The builder that a remedy receives, and the table of all remedies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from fxquant.analysis.breaches import Breach
from fxquant.ir.facts import Size, TensorFact
from fxquant.ir.graph import Annotation, annotate, annotation, fact, inherit, mark_parameter, parameter_value, set_fact, shape_of
from fxquant.ir.model import free_name
from fxquant.ir.parts import Part, part, set_part
from fxquant.ops import Operator, Same
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.parameters import folded_bias, folded_weight
from fxquant.ops.core.record import demand, shares
from fxquant.ops.core.weighted import FUSED
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.layers.linear import linear
from fxquant.target import Target

Remedy = Callable[["Rewriting"], fx.Node | None]
REMEDIES: dict[tuple[str, str | None], tuple[str, Remedy]] = {}  # by operator and measure: its name and its function


def remedy(name: str, operators: str, *measures: str | None) -> Callable[[Remedy], Remedy]:
    """Declare the decorated function the remedy if one of these operators breaks a limit of these measures.

    None is the measure of an operator that the target does not have. `explain` begins its lines about the parts with the name. The function
    returns the node of the result, or None if it cannot handle this node; the nodes that it made are then removed.
    """

    def declare(function: Remedy) -> Remedy:
        REMEDIES.update({(operator, measure): (name, function) for operator in operators.split() for measure in measures})
        return function

    return declare


class Rewriting(Builder):
    """Writes the replacement of an annotated operator, before its node, as annotated operators.

    operator   its record
    arguments  its canonical arguments, by name
    limit      the limit it breaks; `value` is the largest number that breaks it, if these are numbers
    because    the broken limit, in words
    """

    def __init__(self, gm: fx.GraphModule, node: fx.Node, operator: Operator, target: Target, name: str, breach: Breach) -> None:
        super().__init__(name, node, target.activations)
        self.gm, self.operator, self.target, self.limit, self.because = gm, operator, target, breach.limit, breach.sentence
        self.arguments = operator.arguments(node)
        self.values = list(breach.values)
        self.notes: list[str] = []
        spec = annotation(node)
        assert spec is not None
        assert spec.dtype is not None
        self.spec, self.dtype = spec, spec.dtype

    @property
    def input(self) -> fx.Node:
        """Return the operand of an operator with one."""
        found = self.arguments["input"]
        assert isinstance(found, fx.Node)
        return found

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the operand's shape."""
        return shape_of(self.input)

    @property
    def result(self) -> tuple[Size, ...]:
        """Return the result's shape."""
        return shape_of(self.node)

    @property
    def pieces(self) -> int:
        """Return the least number of equal pieces of the oversized dimension that keep the limit."""
        assert isinstance(self.limit.high, int)
        return -(-int(max(self.values)) // self.limit.high)

    @property
    def partial(self) -> str:
        """Return the dtype of partial sums: 16 bits if the target supports them there, for the least loss."""
        limited = any(limit.measure == "bits" and self.operator.name in limit.operators for limit in self.target.limits)
        narrow = limited and self.operator.function is not linear
        if "int16" in self.target.activations and not narrow and self.dtype != "int4":
            return "int16"
        return "int8" if self.dtype in ("int32", "int16") else self.dtype

    def __call__(self, function: Callable[..., Any], *args: Any, demand: Any = None, dtype: str | None = None, **kwargs: Any) -> Any:
        """Append a call of an operator, as `Builder` does; `dtype` is that of its result, if it differs from that of the whole.

        `batch_norm`, `residual` and `clamp` are fused into it.
        """
        fused = {name: value for name in FUSED if (value := kwargs.pop(name, None)) is not None}
        made = super().__call__(function, *args, demand=demand, **kwargs)
        inherit(made, self.node, "adapt.apply")
        made.kwargs = fused
        outer = part(self.node)
        if outer is not None:
            known = part(made)
            set_part(made, Part(outer.composite, f"{outer.role}: {known}"))
        taken = annotation(made.args[0][0] if isinstance(made.args[0], list | tuple) else made.args[0])
        chosen = taken.dtype if shares(made) and taken is not None and taken.dtype is not None else dtype or self.dtype
        annotate(made, Annotation(chosen, f"{self.name}, since {self.because}", self.spec.config))
        return made

    def parameter(self, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        """Append a value computed from parameters alone in every run: the parameters keep their names, and are trained."""
        made = self.node.graph.create_node("call_function", function, args, name=f"{self.node.name}_{function.__name__}")
        self.node.prepend(made)
        inherit(made, self.node, "adapt.apply")
        mark_parameter(made)
        value = parameter_value(self.gm, made)
        set_fact(made, TensorFact(tuple(value.shape), value.dtype))
        return made

    def constant(self, value: Tensor) -> fx.Node:
        """Append a constant tensor that is not in any state_dict."""
        name = free_name(self.gm, f"{self.node.name}_constant")
        self.gm.register_buffer(name, value, persistent=False)
        made = self.node.graph.create_node("get_attr", name, name=name)
        self.node.prepend(made)
        inherit(made, self.node, "adapt.apply")
        set_fact(made, TensorFact(tuple(value.shape), value.dtype))
        return made

    def folded(self, axis: int) -> tuple[Any, Any]:
        """Return weight and bias with the fused batch norm folded in; training then uses its running statistics, too."""
        weight, bias, batch_norm = (self.arguments.get(name) for name in ("weight", "bias", "batch_norm"))
        if batch_norm is None:
            return weight, bias
        self.notes.append(
            f"the batch norm of %{self.node.name} keeps its running statistics while training, since the layer is {self.name}"
        )
        both = (folded_weight, folded_bias)
        made = [self.parameter(function, weight, bias, batch_norm, axis) for function in both]
        return made[0], made[1]

    def cut(self, value: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """Return some elements of an activation along one dimension; the activation itself if these are all."""
        shape = shape_of(value)
        if (start, stop) == (0, shape[dim]):
            return value
        index: list[Any] = [WHOLE] * len(shape)
        index[dim] = slice(start, stop)
        found: fx.Node = self(getitem, value, index)
        return found

    def on_one_grid(self, *nodes: fx.Node) -> None:
        """Give these parts one grid, so that their concatenation only moves integers."""
        self.tie(*nodes)

    def finish(self, result: fx.Node) -> None:
        """Replace the node by the result, with its name and dtype; parts that the result only moves get the grid of the whole."""
        node, source = self.node, result
        while isinstance(demand(source), Same) and source in self.parts:
            operand = source.args[0]
            if not isinstance(operand, fx.Node):
                break
            source = operand
        if source in self.parts and source is not result:
            known = part(source)
            assert known is not None
            set_part(source, replace(known, inner=part(node) is not None and part(node).inner))  # type: ignore[union-attr]
        if result not in self.parts:  # the result is another node's value
            node.replace_all_uses_with(result)
            node.graph.erase_node(node)
            return
        known = part(result)
        assert known is not None
        inner = part(node) is not None and part(node).inner  # type: ignore[union-attr]
        spec = annotation(result)
        node.target, node.args, node.kwargs = result.target, result.args, result.kwargs
        for key in ("demand", "ties"):
            if key in result.meta:
                node.meta[key] = result.meta[key]
        set_part(node, replace(known, inner=inner))
        assert spec is not None
        annotate(node, spec)
        node.graph.erase_node(result)
        self.parts[self.parts.index(result)] = node

    def undo(self) -> None:
        """Remove every node that was made."""
        made = [node for node in self.node.graph.nodes if node.meta.get("made_by") == "adapt.apply"]
        for node in reversed(made):
            if not node.users and node is not self.node:
                node.graph.erase_node(node)


def even(size: int, pieces: int) -> list[tuple[int, int]]:
    """Return (start, stop) of this number of pieces of a size, as equal as possible."""
    ends = [size * index // pieces for index in range(pieces + 1)]
    return list(itertools.pairwise(ends))


def is_activation(value: Any) -> bool:
    """Return whether an argument is an activation of known shape."""
    return isinstance(value, fx.Node) and isinstance(fact(value), TensorFact)

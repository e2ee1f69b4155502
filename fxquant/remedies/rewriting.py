"""The builder that a remedy receives, and the table of all remedies."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.explain import Breach
from fxquant.ir import graph as facts
from fxquant.ir.graph import Annotation, Part, TensorFact
from fxquant.ir.model import free_name
from fxquant.ops import Operator, Same
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.record import demand, shares
from fxquant.ops.core.weighted import FUSED, folded_bias, folded_weight
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
    limit      the limit it breaks; `value` is the largest number that breaks it, if these are numbers
    because    the broken limit, in words
    shape      the shape of the operand, `input`
    adapts     whether the option `adapt` is on: without it, only replacements with nearly the same accuracy are allowed
    """

    def __init__(
        self, gm: fx.GraphModule, node: fx.Node, operator: Operator, target: Target, name: str, breach: Breach, adapts: bool
    ) -> None:
        super().__init__(name, node, target.activations, "adapt.apply")
        self.target, self.adapts = target, adapts
        self.gm, self.operator, self.limit, self.because = gm, operator, breach.limit, breach.sentence
        self.arguments = operator.arguments(node)  # its canonical arguments, by name
        self.clamp: Any = self.arguments.get("clamp")  # the limits that are fused into the operator; None if there are none
        self.result: tuple[Any, ...] = facts.shape_of(node)  # the shape of the result
        self.values = list(breach.values)
        self.notes: list[str] = []
        spec = facts.annotation(node)
        assert spec is not None
        assert spec.dtype is not None
        self.spec, self.dtype = spec, spec.dtype

    @property
    def input(self) -> fx.Node:
        """Return the operand of an operator with one."""
        operand = self.arguments["input"]
        assert isinstance(operand, fx.Node)
        return operand

    @property
    def shape(self) -> tuple[Any, ...]:
        return facts.shape_of(self.input)

    @property
    def most(self) -> int:
        """Return the largest number that the limit allows."""
        assert isinstance(self.limit.high, int)
        return self.limit.high

    @property
    def pieces(self) -> int:
        """Return the least number of equal pieces of the oversized dimension that keep the limit."""
        return -(-int(max(self.values)) // self.most)

    @property
    def partial(self) -> str:
        """Return the dtype of partial sums: 16 bits if the target supports them there, for the least loss."""
        limited = any(limit.measure == "bits" and self.operator.name in limit.operators for limit in self.target.limits)
        narrow = limited and self.operator.function is not linear
        if "int16" in self.target.activations and not narrow and self.dtype != "int4":
            return "int16"
        return "int8" if self.dtype in ("int32", "int16") else self.dtype

    def __call__(self, function: Callable[..., Any], *args: Any, demand: Any = None, dtype: str | None = None, **kwargs: Any) -> fx.Node:
        """Append a call as `Builder` does, `batch_norm`, `residual` and `clamp` fused; `dtype` is its result's, by default the whole's."""
        fused = {name: value for name in FUSED if (value := kwargs.pop(name, None)) is not None}
        call: fx.Node = super().__call__(function, *args, demand=demand, **kwargs)
        call.kwargs = fused
        if (outer := facts.part(self.node)) is not None:
            facts.set_part(call, Part(outer.composite, f"{outer.role}: {facts.part(call)}"))
        source = facts.annotation(call.args[0][0] if isinstance(call.args[0], list | tuple) else call.args[0])  # type: ignore[arg-type]
        chosen = source.dtype if shares(call) and source is not None and source.dtype is not None else dtype or self.dtype
        facts.annotate(call, Annotation(chosen, f"{self.name}, since {self.because}", self.spec.config))
        return call

    def again(self, **changes: Any) -> fx.Node:
        """Append the operator itself, with all that is fused into it and with other arguments, or the `dtype` of its result, as given."""
        arguments = {**self.arguments, **changes}
        own = [arguments.pop(name) for name in self.operator.parameter_names]
        return self(self.operator.function, *own, **arguments)

    def parameter(self, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        """Append a value computed from parameters alone in every run: the parameters keep their names, and are trained."""
        added = self._node("call_function", function, args, function.__name__)
        facts.mark_parameter(added)
        value = facts.parameter_value(self.gm, added)
        facts.set_fact(added, TensorFact(tuple(value.shape), value.dtype))
        return added

    def constant(self, value: Tensor) -> fx.Node:
        """Append a constant tensor that is not in any state_dict."""
        name = free_name(self.gm, f"{self.node.name}_constant")
        self.gm.register_buffer(name, value, persistent=False)
        added = self._node("get_attr", name, (), name.removeprefix(f"{self.node.name}_"))
        facts.set_fact(added, TensorFact(tuple(value.shape), value.dtype))
        return added

    def folded(self, axis: int) -> tuple[Any, Any]:
        """Return weight and bias with the fused batch norm folded in; training then uses its running statistics, too."""
        weight, bias, batch_norm = (self.arguments.get(name) for name in ("weight", "bias", "batch_norm"))
        if batch_norm is None:
            return weight, bias
        remark = f"the batch norm of %{self.node.name} keeps its running statistics while training"
        self.notes.append(f"{remark}, since the layer is {self.name}")
        return self.parameter(folded_weight, weight, bias, batch_norm, axis), self.parameter(folded_bias, weight, bias, batch_norm, axis)

    def cut(self, value: Any, dim: int, start: int, stop: int) -> Any:
        """Return the elements start to stop of an activation along `dim`; the activation itself if that is every element; None for None."""
        if value is None or (start, stop) == (0, facts.shape_of(value)[dim]):
            return value
        index: list[Any] = [WHOLE] * len(facts.shape_of(value))
        index[dim] = slice(start, stop)
        return self(getitem, value, index)

    def narrow(self, parameter: Any, dim: int, start: int, stop: int) -> Any:
        """Return some elements of a parameter along one dimension; None for None."""
        return None if parameter is None else self.parameter(torch.narrow, parameter, dim, start, stop - start)

    def finish(self, result: fx.Node) -> None:
        """Replace the node by the result, with its name and dtype; a part that the result only moves gets what the whole demands."""
        node, source, inner = self.node, result, facts.is_inner_part(self.node)
        while isinstance(demand(source), Same) and source in self.parts and isinstance(operand := source.args[0], fx.Node):
            source = operand
        for each in {source, result}.intersection(self.parts):
            facts.set_inner(each, inner)
        if source in self.parts and source is not result and (stated := node.meta.pop("demand", None)) is not None:
            facts.state_demand(source, stated)  # a demand is about the grid, which is that of what is moved
        if result not in self.parts:  # the result is another node's value
            node.replace_all_uses_with(result)
            node.graph.erase_node(node)
            return
        node.target, node.args, node.kwargs = result.target, result.args, result.kwargs
        node.meta.update({key: result.meta[key] for key in ("demand", "ties", "part", "annotation") if key in result.meta})
        node.graph.erase_node(result)
        self.parts[self.parts.index(result)] = node


def even(size: int, pieces: int) -> list[tuple[int, int]]:
    """Return (start, stop) of this number of pieces of a size, as equal as possible."""
    return list(itertools.pairwise(size * index // pieces for index in range(pieces + 1)))


def is_activation(value: Any) -> bool:
    """Return whether an argument is an activation of known shape."""
    return isinstance(value, fx.Node) and isinstance(facts.fact(value), TensorFact)

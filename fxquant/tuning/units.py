"""The unit of tuning: a layer with the function after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter, resolve
from fxquant.ops.elementwise.table import UNARY
from fxquant.prepared.operators import QuantizedOperator
from fxquant.tuning.walk import Samples, Values, Walk, arguments_of, is_weighted, run, weight_of


@dataclass(frozen=True)
class Unit:
    """Nodes of a prepared model, in the order they run, and their roles.

    weighted  those whose rounded weight is tuned
    exits     where it is compared with the float model: the floating-point tensors that are read from outside, else the last of `weighted`
    inputs    what they read from outside, parameters included
    """

    nodes: tuple[fx.Node, ...]
    weighted: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """That of the last node with a weight."""
        return self.weighted[-1].name

    @property
    def exits(self) -> tuple[fx.Node, ...]:
        found = tuple(node for node in self.nodes if is_real(node) and any(user not in self.nodes for user in node.users))
        return found or self.weighted[-1:]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(operand for node in self.nodes for operand in node.all_input_nodes if operand not in self.nodes))


def is_real(node: fx.Node) -> bool:
    """Return whether a node gives a floating point tensor."""
    known = fact(node)
    return isinstance(known, TensorFact) and known.dtype.is_floating_point


def operator_at(prepared: fx.GraphModule, node: fx.Node) -> QuantizedOperator | None:
    """Return the quantized operator that a node calls; None if it calls none."""
    module = prepared.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, QuantizedOperator) else None


def weighted_nodes(prepared: fx.GraphModule) -> dict[fx.Node, QuantizedOperator]:
    """Return the nodes whose weight is rounded on its own with their operators, in the order they run, without those left out."""
    found = {}
    for node in prepared.graph.nodes:
        operator = operator_at(prepared, node)
        if operator is not None and not operator.left_out and is_weighted(operator, constant_arguments(prepared, node, operator)):
            found[node] = operator
    return found


def constant_weight(prepared: fx.GraphModule, node: fx.Node, operator: QuantizedOperator) -> Tensor:
    """Return the weight of a weighted node as it is rounded: channels are dimension 0."""
    weight = weight_of(operator, constant_arguments(prepared, node, operator))
    assert weight is not None
    return weight


@torch.no_grad()
def constant_arguments(prepared: fx.GraphModule, node: fx.Node, operator: QuantizedOperator) -> dict[str, Any]:
    """Return the arguments of a node by name, with the values of parameters, and nodes in place of all others."""

    def value(operand: fx.Node) -> Any:
        if not is_parameter(operand):
            return operand
        return run(prepared, operand, {inner: value(inner) for inner in operand.all_input_nodes}, exact=False)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    return operator.operator.bind_call(*operator.multiplied(args, dict(kwargs)))


def shared_weights(prepared: fx.GraphModule) -> set[fx.Node]:
    """Return the weighted nodes with a weight that others read, too: it is one constant for all, as long as all round it alike."""
    readers: dict[str, set[fx.Node]] = {}
    for node in weighted_nodes(prepared):
        left = [operand for operand in node.all_input_nodes if is_parameter(operand)]
        while left:
            operand = left.pop()
            left.extend(operand.all_input_nodes)
            value = resolve(prepared, str(operand.target)) if operand.op == "get_attr" else None
            if isinstance(value, Tensor) and value.dim() > 1:
                readers.setdefault(str(operand.target), set()).add(node)
    return {node for nodes in readers.values() if len(nodes) > 1 for node in nodes}


def layer_units(prepared: fx.GraphModule) -> list[Unit]:
    """Return a unit for every weighted node, with the function of one tensor that alone reads it, if there is one."""
    return [Unit((node, *_function_behind(prepared, node)), (node,)) for node in weighted_nodes(prepared)]


def _function_behind(prepared: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, ...]:
    users = list(node.users)
    operator = operator_at(prepared, users[0]) if len(users) == 1 else None
    return (users[0],) if operator is not None and operator.operator.name in UNARY and fact(users[0]) == fact(node) else ()


class Lesson:
    """The training data of a unit: its operands in integers and in float, and its float results, chunk by chunk."""

    def __init__(self, unit: Unit, samples: Samples, exact: Walk, real: Walk) -> None:
        self.prepared, self.unit, self.samples = exact.prepared, unit, samples
        self.operands, self.float_operands = exact.at(unit.inputs), real.at(unit.inputs)
        self.targets = real.at(unit.exits)

    def signal(self) -> float:
        """Return the mean square of the results it is to have, over what is held out."""
        return self._mean(lambda index, node: self.targets[index][node].double().square())

    @torch.no_grad()
    def error(self) -> float:
        """Return the mean squared error of the results it has in integers as it is now, over what is held out."""
        found: dict[int, Values] = {index: self.results(index) for index in self.samples.judging}
        return self._mean(lambda index, node: (found[index][node] - self.targets[index][node]).double().square())

    def results(self, index: int) -> Values:
        """Return its values in integers for one chunk."""
        values = dict(self.operands[index])
        for node in self.unit.nodes:
            values[node] = run(self.prepared, node, values, exact=True)
        return values

    def _mean(self, square: Callable[[int, fx.Node], Tensor]) -> float:
        squares = [square(index, node) for index in self.samples.judging for node in self.unit.exits]
        return float(torch.stack([s.sum() for s in squares]).sum()) / max(sum(s.numel() for s in squares), 1)


def bound_arguments(node: fx.Node, operator: QuantizedOperator, values: Values) -> dict[str, Any]:
    """Return the arguments of a node by name, with the values of what it reads, parameters as they act."""
    return operator.operator.bind_call(*operator.multiplied(*arguments_of(node, values)))

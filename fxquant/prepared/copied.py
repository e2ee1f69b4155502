"""Float operators that only copy elements, written as the primitives that copy integers, which keep the bits of floats as well."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import BatchDim, TensorFact, fact, refusal
from fxquant.lowering.lowering import Lowering, Quantized, plainly
from fxquant.numerics.grids import WEIGHT_INT8
from fxquant.ops import copies, map_operands, operator_of
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.weights import WeightQuantizer

RESULTS = (torch.float32, torch.float64)
KINDS = (torch.float32, torch.bool, torch.int64)  # the dtypes of what is copied, and of masks and places


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a primitive."""

    name: str  # its result's, which no other value has
    primitive: Callable[..., Tensor]  # the primitive
    arguments: tuple[Any, ...]  # its arguments: other steps, nodes of the graph, constant tensors, and numbers


@dataclass(frozen=True)
class Steps:
    """All calls that compute a node, in order, and the last one; a node, where there are none."""

    calls: list[Step]
    result: Step | fx.Node


class CopyLowering(Lowering):
    """Lists the primitives of one operator. Nothing has a grid: a constant stays as it is."""

    def __init__(self, name: str) -> None:
        super().__init__(name, _NO_ARITHMETIC, None, None, WeightQuantizer(WEIGHT_INT8))
        self.calls: list[Step] = []

    def call(self, primitive: Callable[..., Tensor], *arguments: Any) -> Step:
        self.calls.append(Step(f"{self.name}/{len(self.calls)}", primitive, arguments))
        return self.calls[-1]

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.detach().to("cpu", dtype).contiguous()

    def size(self, value: Any, dim: int) -> Any:
        raise ReadsSize

    def result(self, exact: Callable[[], Any], real: Callable[[], Tensor], to: Any = None) -> Quantized:
        return plainly(exact(), ())


_NO_ARITHMETIC = Arithmetic("none")


class ReadsSize(Exception):
    """A copy reads a size that varies, for which a step has no name."""


def steps_of(node: fx.Node, parameter: Callable[[fx.Node], Tensor | None]) -> Steps | None:
    """Return the primitives that compute a float node; None where it does not only copy elements.

    Nodes among their arguments are tensors, or sizes that depend on the batch. `parameter` gives the value of a constant's node, else None.
    """
    operator, node_fact = operator_of(node), fact(node)
    if operator is None or not isinstance(node_fact, TensorFact) or node_fact.dtype not in RESULTS or not copies(node):
        return None
    arguments = operator.arguments(node)
    if refusal(node) is not None or operator.expand is not None or operator.refuses(node, arguments) is not None:
        return None
    facts = {each: fact(each) for each in node.all_input_nodes if parameter(each) is None}
    if not all(isinstance(each, int | BatchDim) or (isinstance(each, TensorFact) and each.dtype in KINDS) for each in facts.values()):
        return None

    def operand(_: str, value: fx.Node) -> Any:
        return plainly(value, facts[value].shape) if value in facts else parameter(value)

    def other(value: fx.Node) -> Any:
        return value if value in facts else parameter(value)

    operands = map_operands(operator, arguments, operand)
    rest = {name: fx.map_arg(value, other) for name, value in arguments.items() if name not in operator.operands}
    lowering = CopyLowering(node.name)
    try:
        result = operator.lower(lowering, **{**operands, **rest})
    except ReadsSize:
        return None
    value = result.value if isinstance(result, Quantized) else result
    return Steps(lowering.calls, value) if isinstance(value, Step | fx.Node) else None

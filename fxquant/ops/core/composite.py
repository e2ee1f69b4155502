"""Operators that are not the user's: the parts of composites, by `Builder`, the first argument of `expand`, and quantize to requantize."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import graph
from fxquant.ir.graph import TensorFact, fact, inherit, is_parameter, mark_parameter, part, set_fact, state_demand
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.declare import lowered
from fxquant.ops.core.record import BY_NAME, OPERATORS, Demand, Operator, Own, Same, Trait, demand, operator_of
from fxquant.primitives import quantization
from fxquant.primitives.proof import inferred_call

CONSTANT = "_constant_"  # the prefix of the names of constants, as of those that the tracer holds


class Builder:
    """Builder of the parts of one operator: calls of other operators, inserted before its node.

    name         the operator's
    node         its node, which has its meaning in float
    activations  the dtypes of activations that the target computes with
    made_by      the pass that writes
    parts        the nodes that were made, in order, without those that are computed from parameters alone
    real         whether the parts compute on float values, where a change of grid does nothing and other composites are not expanded
    normalizes_items  whether norms bring the items of a batch to one magnitude; see `Target.normalizes_items`
    segments     whether 16-bit functions are computed by segments; see `Arithmetic.segments`
    """

    def __init__(
        self, name: str, node: fx.Node, activations: Sequence[str], made_by: str = "composite.expand", real: bool = False,
        normalizes_items: bool = False, segments: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.node, self.activations = name, node, activations
        self.made_by, self.real, self.normalizes_items, self.segments = made_by, real, normalizes_items, segments
        self._within = ""  # the nested composites that are being written, as the prefix of a role
        self.parts: list[fx.Node] = []
        self._made: list[fx.Node] = []  # all of them
        self._ties = 0

    def __call__(self, function: Callable[..., Any], *args: Any, demand: Demand | None = None, **kwargs: Any) -> Any:
        """Add a call of an operator of the table, by its function, with this function's arguments.

        `demand` replaces the operator's own demand of its result's grid. The call becomes an ordinary node, annotated, calibrated and
        trained as any other. A call of another composite is expanded into its parts. Return the node of the result, or the nest of
        nodes that this composite returns. A call that reads parameters alone is a parameter.
        """
        if self.real and function is requantize:
            return args[0]
        record = OPERATORS[function]
        bound: dict[str, Any] | str = record.bind(args, kwargs)
        assert isinstance(bound, dict)
        if record.expand is not None and not self.real:
            return self._nested(record, bound, demand)
        added = self._node("call_function", function, tuple(bound.values()), record.name)
        set_fact(added, inferred_call(added))
        bound = record.normalize(added, bound)
        assert isinstance(bound, dict), f"{self.name} cannot be expanded: {bound}"
        added.args = tuple(bound.values())
        if added.all_input_nodes and all(map(is_parameter, added.all_input_nodes)):
            mark_parameter(added)
            return added
        graph.set_part(added, graph.Part(self.name, self._within + record.name))
        graph.spell(added, *graph.spelling(self.node))
        if demand is not None:
            state_demand(added, demand)
        self.parts.append(added)
        return added

    def host(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call on float values or booleans, which is not quantized; a call that reads parameters alone is a parameter."""
        added = self._node("call_function", function, args, getattr(function, "__name__", "host"))
        set_fact(added, inferred_call(added))
        if all(map(is_parameter, added.all_input_nodes)):
            mark_parameter(added)
        return added

    def control(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call that begins or ends a loop; it returns a counter, or nothing."""
        return self._node("call_function", function, args, function.__name__)

    def reads(self, position: int) -> bool:
        """Return whether anything reads this member of the nest that the operator returns."""
        picks = [reader.args[1] if reader.target is operator.getitem else position for reader in self.node.users]
        return position in picks

    def constant(self, value: Tensor) -> fx.Node:
        """Add a constant tensor, held by the model: one for all constants of equal content."""
        model = self.node.graph.owning_module
        assert model is not None
        constants = {name: tensor for name, tensor in model._buffers.items() if name.startswith(CONSTANT) and tensor is not None}
        alike = (name for name, held_value in constants.items() if held_value.dtype == value.dtype and held_value.shape == value.shape)
        buffer = next((name for name in alike if torch.equal(constants[name].cpu(), value)), None)
        if buffer is None:
            buffer = next(name for number in itertools.count() if (name := f"{CONSTANT}{number}") not in constants)
            graph.attach(model, buffer, value)
        added = self._node("get_attr", buffer, (), "constant")
        set_fact(added, TensorFact(tuple(value.shape), value.dtype))
        return added

    def _node(self, op: str, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        added = self.node.graph.create_node(op, target, args, {}, name=f"{self.node.name}_{name}")
        self.node.prepend(added)
        inherit(added, self.node, self.made_by)
        self._made.append(added)
        return added

    def discard(self, *needed: fx.Node, effects: bool = False) -> None:
        """Erase the nodes that this builder inserted and no node reads, except `needed`; with `effects` also marks of loops."""
        for added in reversed(self._made):
            if added in needed or added.users or (added.is_impure() and not effects):
                continue
            target, model = str(added.target), added.graph.owning_module
            added.graph.erase_node(added)
            if added.op == "get_attr" and model is not None and not added.graph.find_nodes(op="get_attr", target=target):
                del model._buffers[target]

    def _nested(self, record: Operator, arguments: dict[str, Any], demand: Demand | None) -> Any:
        """Expand `record`, a composite inside this composite, and return its result; `demand` applies to its last part."""
        assert record.expand is not None
        outside, self._within = self._within, f"{self._within}{record.name}: "
        result = record.expand(self, **arguments)
        self._within = outside
        if demand is not None:
            state_demand(result, demand)
        return result

    def tie(self, *nodes: fx.Node) -> None:
        """Mark `nodes` to share one scale, calibrated over all the nodes: for example the state of a recurrence at all of its steps."""
        self._ties += 1
        for node in nodes:
            graph.tie(node, f"{self.node.name}.{self._ties}")

    def sizes(self, value: fx.Node) -> list[Any]:
        """Return a tensor's shape for a reshape: numbers, -1 for the first size that varies, and nodes for others."""
        return graph.reshape_sizes(self.fact(value).shape, lambda dim: self.size(value, dim))

    def size(self, value: fx.Node, dim: int) -> int | fx.Node:
        """Return the size of a tensor's dimension: a number, or the node of one that varies."""
        size = graph.size_node(value, dim, self.node, self.made_by)
        self._made += [size] if isinstance(size, fx.Node) else []
        return size

    @staticmethod
    def fact(value: Any) -> TensorFact:
        """Return the shape and dtype of an operand, or of a part."""
        tensor_fact = fact(value)
        assert isinstance(tensor_fact, TensorFact)
        return tensor_fact


# ---- Operators that only copy elements: their result holds elements of what they read, and no others -----------------
def carried(operator: Operator) -> tuple[str, ...]:
    """Return the names of the parameters whose elements the operator copies to its result unchanged; () for one that computes."""
    return operator.carries or (operator.operands if operator.moves else ())


def copies(node: fx.Node) -> bool:
    """Return whether a canonical node only copies elements of its operands, whose scales may differ from that of the result.

    A part of a composite copies only if the whole composite does: a composite that computes sets the scales of its parts itself.
    """
    operator, whole = operator_of(node), part(node)
    if operator is None or not carried(operator) or not isinstance(demand(node), Own | Same):
        return False
    if whole is None:
        return True
    composite = BY_NAME.get(whole.composite)
    return composite is not None and bool(carried(composite))  # a part of what was legalized computes


# ---- Quantize, requantize and dequantize: inserted by passes, never written by a user --------------------------------
@lowered(function=lambda input: input, by_name=False)
def quantize(lowering: Lowering, input: Tensor) -> Quantized:
    """Return the input itself, as the float model sees it; its integers are clip(round(x / s))."""
    return lowering.quantize(input)


@lowered(function=lambda input, dtype=None: input if dtype is None else input.to(dtype), by_name=False, demand=Same())
def dequantize(lowering: Lowering, input: Quantized, dtype: torch.dtype | None = None) -> Quantized:
    """Return the input itself, as the float model sees it: the integers times their scale, in `dtype` where that is not float32."""
    arguments: list[Any] = [input.value, lowering.constant("scale", input.scale, input.scale.dtype)]
    return input.with_value(lowering.call(quantization.dequantize, *arguments, *([] if dtype is None else [dtype])))


@lowered(
    function=lambda input: input, keeps=lambda arguments, after, bits: after, onnx=lambda c: c.input, traits=frozenset({Trait.HOMOGENEOUS})
)
def requantize(lowering: Lowering, input: Quantized) -> Quantized:
    """Return the input itself, as the float model sees it; its integers are on another grid than the operand's."""
    return lowering.result(lambda: lowering.rescale(input, lowering.output, ""), input.real)


QUANTIZE, DEQUANTIZE, REQUANTIZE = (OPERATORS[function] for function in (quantize, dequantize, requantize))

"""The cost of an operator: multiply-accumulates, and the bytes of its weights and of its result.

Sizes that depend on the batch are taken at batch size 1, so that costs are those of one item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ir.facts import Size, TensorFact
from fxquant.ir.graph import annotation, fact, is_parameter, resolve
from fxquant.ir.integer import Operation, Reference, operation
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME, FUNCTIONS, METHODS, MODULES, OPERATORS, Instead, Operator, Parameter, Trait
from fxquant.ops.core.weighted import shape_of
from fxquant.prepared.nodes import quantized_operator, record_of

WEIGHT, BIAS = "weight", "bias"  # the roles of the constants of an operator with a weight


def cost_of(model: fx.GraphModule, node: fx.Node, nodes: Mapping[str, fx.Node], dtype: str | None) -> tuple[int, int, int]:
    """Return multiply-accumulates, bytes of weights and bytes of the result of the operator at a node of a graph at any stage.

    `dtype` is that of its quantized result, None if it is float.
    """
    lowered = operation(node)
    if lowered is not None:
        # A loaded model may have a function of the user's that this process has not declared.
        operator: Operator | None = BY_NAME.get(lowered.name)
        values = _lowered(lowered, nodes)
        sums = operator is not None and Trait.SUMS in operator.traits
        held = [constant.node for role, constant in lowered.constants.items() if role in (WEIGHT, BIAS) or sums]
        weight_bytes = sum(_bytes(fact(nodes[name])) for name in held)
    else:
        operator, values = _written(model, node)
        integer = operator is not None and (dtype is not None or Trait.DYNAMIC in operator.traits)
        weight_bytes = _integer_bytes(model, node, operator, values) if integer else _float_bytes(model, node)
    itemsize = ACTIVATION_TYPES[dtype].storage.itemsize if dtype is not None and dtype in ACTIVATION_TYPES else None
    return _macs(operator, values, fact(node)), weight_bytes, sum(_bytes(tensor, itemsize) for tensor in _tensors(fact(node)))


# ---- products ---------------------------------------------------------------------------------------------------------


def _macs(operator: Operator | None, values: Mapping[str, Any], result: Any) -> int:
    if operator is None or operator.layer.macs is None or not isinstance(result, TensorFact):
        return 0
    shapes = {name: _at_one(shape) for name, value in values.items() if (shape := _shape(value)) is not None}
    return math.ceil(operator.layer.macs(shapes, _at_one(result.shape)))


def _lowered(lowered: Operation, nodes: Mapping[str, fx.Node]) -> dict[str, Any]:
    """Return the arguments of what has become primitives, by name, its constants among them."""
    given = {name: nodes[value.node] if isinstance(value, Reference) else value for name, value in lowered.arguments.items()}
    return given | {role: nodes[constant.node] for role, constant in lowered.constants.items()}


def _written(model: fx.GraphModule, node: fx.Node) -> tuple[Operator | None, dict[str, Any]]:
    """Return the operator at a node and its arguments by name; of one that is not canonical yet, only if it forms sums of products."""
    operator = record_of(model, node)
    if operator is not None:
        return operator, operator.arguments(node)
    module: Any = resolve(model, str(node.target)) if node.op == "call_module" else None
    take: Any
    if module is not None:
        operator, take = MODULES.get(type(module), (None, None))
    else:
        table: Mapping[Any, Any] = FUNCTIONS if node.op == "call_function" else METHODS if node.op == "call_method" else {}
        operator, take = table.get(node.target, (None, None))
    if operator is None or operator.layer.macs is None:
        return None, {}
    if module is not None:
        taken: Any = take(module)
    else:
        taken = operator.bind(node.args, node.kwargs) if take is None else take(*node.args, **node.kwargs)
    if isinstance(taken, Instead):
        operator, taken = OPERATORS[taken.function], taken.arguments
    if isinstance(taken, str):
        return None, {}
    if module is None:
        return operator, taken
    arguments = {name: getattr(module, value.name) if isinstance(value, Parameter) else value for name, value in taken.items()}
    return operator, {**arguments, **dict(zip(operator.operands, node.args, strict=False)), **node.kwargs}


def _shape(value: Any) -> tuple[Size, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else shape_of(value)


def _at_one(shape: tuple[Size, ...]) -> tuple[int | Fraction, ...]:
    """Return the sizes at batch size 1, where one that is B/2 is not an integer. Others are ints: fractions take ten times as long."""
    return tuple([_whole(size) for size in shape])


def _whole(size: Size) -> int | Fraction:
    if isinstance(size, int):
        return size
    at_one = size.coefficient + size.offset
    return at_one.numerator if at_one.denominator == 1 else at_one


# ---- bytes ------------------------------------------------------------------------------------------------------------


def bytes_of(known: Any) -> int:
    """Return the bytes of all tensors of a nest of facts, of one item."""
    return sum(map(_bytes, _tensors(known)))


def _bytes(known: TensorFact, itemsize: int | None = None) -> int:
    return math.ceil(math.prod(_at_one(known.shape))) * (itemsize or known.dtype.itemsize)


def _tensors(known: Any) -> list[TensorFact]:
    """Return all tensors of a nest of facts."""
    if isinstance(known, TensorFact):
        return [known]
    items = known.values() if isinstance(known, dict) else known if isinstance(known, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _integer_bytes(model: fx.GraphModule, node: fx.Node, operator: Operator | None, values: Mapping[str, Any]) -> int:
    """Compute the bytes of weight and bias once the operator is lowered.

    A weight is stored in the dtype of its config, a bias in that of the accumulator. A batch norm adds a bias, and a weight for each
    channel if it was not fused.
    """
    module, spec = quantized_operator(model, node), annotation(node)
    configured = None if spec is None or spec.config is None else spec.config.weight.type
    dtype = configured if module is None else module.weight_quantizer.dtype
    normalized = values.get("batch_norm") is not None
    weight = None if operator is None else operator.layer.weight(**{name: _on_meta(value) for name, value in values.items()})
    if operator is None or dtype is None or not (operator.traits & {Trait.SUMS, Trait.DYNAMIC} or normalized or weight is not None):
        return 0
    channels = fact(node).shape[1] if weight is None else len(weight)
    read = [value for name in (WEIGHT, *operator.operands) if isinstance(value := values.get(name), fx.Node) and is_parameter(value)]
    weights = [shape for value in read if (shape := _shape(value)) is not None]
    weights += [(channels,)] * (normalized and Trait.SUMS not in operator.traits)
    biases = [(channels,)] * (normalized or values.get(BIAS) is not None)
    bias = torch.int64 if dtype.bits > 8 else torch.int32
    stored = [*(TensorFact(shape, dtype.storage) for shape in weights), *(TensorFact(shape, bias) for shape in biases)]
    return sum(map(_bytes, stored))


def _on_meta(value: Any) -> Any:
    """Return a parameter as a tensor without data; anything else as it is."""
    shape = _shape(value) if isinstance(value, fx.Node) and is_parameter(value) else None
    return value if shape is None else torch.empty([size for size in shape if isinstance(size, int)], device="meta", dtype=torch.float32)


def _float_bytes(model: fx.GraphModule, node: fx.Node) -> int:
    """Return the parameters and buffers of a module, and the parameters that a function reads."""
    read = [operand for operand in node.all_input_nodes if operand.op == "get_attr"] + [node] * (node.op == "call_module")
    held = [resolve(model, str(each.target)) for each in read]
    tensors = [
        tensor for value in held for tensor in ([*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value])
    ]
    computed = [fact(operand) for operand in node.all_input_nodes if operand.op != "get_attr" and is_parameter(operand)]
    found = sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
    return found + sum(_bytes(known) for known in computed if isinstance(known, TensorFact))

"""Promote operands that an operator does not take: integers and booleans to float, and a single sample to a batch of one.

A call that reads integers or booleans is promoted as by PyTorch:

tokens + 1, places // 2, mask & other      int64 arithmetic, without a scale: `fxquant.ops.elementwise.whole`
scores * places, bytes / 255               integers converted to float and quantized: `to_real`
logical_and(scores, mask)                  whether a number is not 0, then on booleans
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxquant.ir.graph import TensorFact, fact, inherit, is_parameter, parameter_value, reads_shape_only, refusal, set_fact
from fxquant.ops.core.casting import to_integer, to_real, truncated
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.record import FUNCTIONS, METHODS, MODULES, OPERATORS, Operator, Trait, operator_of
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.ops.movement.repeating import cat, stack
from fxquant.ops.movement.shape import identity, numbers, reshape
from fxquant.primitives.comparison import RELATIONS
from fxquant.primitives.whole import DTYPES

Call = tuple[Callable[..., Any], dict[str, Any]]  # an operator's function, and its arguments by name
NEVER = 2**62  # stands for a number that no integer is equal to


def promoted(node: fx.Node, operator: Operator, arguments: dict[str, Any] | str, build: Builder) -> Call | str | None:
    """Return the call with promoted operands, which `build` converts; None if no promotion is needed, or a reason against it."""
    result = fact(node)
    if not isinstance(result, TensorFact) or isinstance(arguments, str):
        return None
    read = [value for value in _nodes(arguments) if not is_parameter(value) and isinstance(fact(value), TensorFact)]
    if Trait.COMPARES_WITH_ZERO in operator.traits and result.dtype == torch.bool:
        numbers = [arguments[name] for name in operator.reads if not isinstance(arguments[name], fx.Node)]
        if not numbers and all(fact(value).dtype == torch.bool for value in read):
            return None
        return operator.function, {name: truth(value, build) if name in operator.reads else value for name, value in arguments.items()}
    if operator.function is truncated:
        return _narrow(node, operator.function, arguments, build)
    if not read or all(fact(value).dtype.is_floating_point or fact(value).dtype.is_complex for value in read):
        return None
    if result.dtype == torch.float32:
        return _of_real_numbers(operator, arguments, build)
    if any(fact(value).dtype.is_floating_point for value in read):
        return _of_real_numbers(operator, arguments, build) if operator.name in RELATIONS else None
    if operator.function in (cat, stack):
        return _joined(node, operator, arguments, build)
    if result.dtype == torch.bool and operator.name not in RELATIONS:
        return _of_bits(operator, arguments, build)
    if operator.moves:
        return _moved(node, operator, arguments, build)
    return _of_whole_numbers(node, operator, arguments, build)


OF_AN_INDEX = "it computes with an index as a number, which a grid would round to another place"
_EACH = {Trait.ELEMENTWISE, Trait.POINTWISE, Trait.DIVIDES, Trait.EXTREMUM}
_PASSING = {to_real, to_integer, cat, stack, *WHOLE.values()}  # they return an index, or compute one exactly


def of_an_index(node: fx.Node, operator: Operator, arguments: dict[str, Any] | str) -> str | None:
    """Return why an operator on elements stays in float: one of its operands is an index, or is computed from one."""
    result = fact(node)
    if isinstance(arguments, str) or not isinstance(result, TensorFact) or operator.carries or operator.function in _PASSING:
        return None
    each = result.dtype == torch.float32 and not operator.traits.isdisjoint(_EACH)
    return OF_AN_INDEX if (each or operator.function is truncated) and any(map(_is_index, _read(operator, arguments))) else None


def _is_index(value: fx.Node) -> bool:
    """Return whether a node holds indices of elements, such as argmax returns, or integers that are computed from such indices."""
    value_fact, maker = fact(value), value
    if refusal(value) == OF_AN_INDEX:
        return True
    if operator_of(value) is None and value.args and isinstance(value.args[0], fx.Node):
        maker = value.args[0]  # of elements and their places
    record = operator_of(maker)
    if is_parameter(value) or not isinstance(value_fact, TensorFact) or record is None or record.function is truncated:
        return False
    read = _read(record, record.arguments(maker))
    if value_fact.dtype in DTYPES and any(isinstance(of := fact(each), TensorFact) and of.dtype.is_floating_point for each in read):
        return True
    return (record.moves or bool(record.carries) or record.function in _PASSING) and any(map(_is_index, read))


def _read(operator: Operator, arguments: dict[str, Any]) -> list[fx.Node]:
    return _nodes({name: arguments.get(name) for name in operator.operands or operator.reads})


def _nodes(arguments: dict[str, Any]) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(list(arguments.values()), nodes.append)
    return nodes


def truth(value: Any, build: Builder) -> Any:
    """Return whether the numbers of a tensor are not 0."""
    if not isinstance(value, fx.Node):
        return build.constant(torch.tensor(bool(value), device="cpu", dtype=torch.bool))
    if fact(value).dtype == torch.bool:
        return value
    if is_parameter(value) or fact(value).dtype.is_floating_point:
        return build.host(torch.ne, value, 0)
    return build.host(WHOLE["ne"], wide(value, build), 0)


def _of_bits(operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    """Return the logical call for arithmetic on booleans alone, or None."""
    values = [truth(arguments[name], build) for name in ("input", "other") if isinstance(arguments.get(name), fx.Node)]
    if operator.function is where and isinstance(arguments["condition"], fx.Node):
        condition, numbers = arguments["condition"], [arguments["input"], arguments["other"]]
        if len(values) == 1 and numbers[1] in (0.0, False):  # a product
            return torch.logical_and, {"input": condition, "other": values[0]}
        if len(values) == 2:
            left = build.host(torch.logical_and, condition, values[0])
            right = build.host(torch.logical_and, build.host(torch.logical_not, condition), values[1])
            return torch.logical_or, {"input": left, "other": right}
        return None
    function = {Trait.CONJUNCTION: torch.logical_and, Trait.DISJUNCTION: torch.logical_or}
    for trait in operator.traits & set(function) if len(values) == 2 else ():
        return function[trait], {"input": values[0], "other": values[1]}
    return None


def real(value: Any, build: Builder) -> Any:
    """Return booleans or integers as float values; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(real(item, build) for item in value)
    value_fact = fact(value) if isinstance(value, fx.Node) and not is_parameter(value) else None
    if not isinstance(value_fact, TensorFact) or value_fact.dtype.is_floating_point or value_fact.dtype.is_complex:
        return value
    if value_fact.dtype == torch.bool:
        return build.host(where, value, 1.0, 0.0)
    return build.host(to_real, wide(value, build))


def _of_real_numbers(operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    if operator.function is to_real:
        return None if fact(arguments["input"]).dtype == torch.int64 else (to_real, {"input": wide(arguments["input"], build)})
    if operator.moves or not operator.operands:
        return None
    converted = {name: real(value, build) if name in operator.operands else value for name, value in arguments.items()}
    return None if converted == arguments else (operator.function, converted)


def wide(value: Any, build: Builder) -> Any:
    """Return booleans or integers as int64; where a narrower tensor was only moved as int64, return it before its cast back."""
    if not isinstance(value, fx.Node) or is_parameter(value) or fact(value).dtype == torch.int64:
        return value
    record = operator_of(value)
    if record is not None and record.function is to_integer and _is_narrow_of_the_same(value):
        return value.args[0]
    return build.host(to_integer, value, torch.int64)


def _is_narrow_of_the_same(node: fx.Node) -> bool:
    """Return whether a node casts integers back to the narrow dtype that they had before they were moved."""
    source, dtype = node.args[0], fact(node).dtype
    while isinstance(source, fx.Node) and (record := operator_of(source)) is not None:
        if record.function is to_integer:
            before = source.args[0]
            return isinstance(before, fx.Node) and fact(before).dtype == dtype
        if not record.moves or not isinstance(source.args[0], fx.Node):
            return False
        source = source.args[0]
    return False


def _narrow(node: fx.Node, function: Callable[..., Any], arguments: dict[str, Any], build: Builder) -> Call:
    """Return the call, followed by a cast to the dtype of the node's result."""
    node_fact = fact(node)
    if not isinstance(node_fact, TensorFact) or node_fact.dtype not in DTYPES or node_fact.dtype == torch.int64:
        return function, arguments
    bound = OPERATORS[function].bind((), arguments)
    return to_integer, {"input": build.host(function, *bound.values()), "dtype": node_fact.dtype}


def _moved(node: fx.Node, operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    """Move narrow integers as int64."""
    if fact(node).dtype not in DTYPES or fact(node).dtype == torch.int64:
        return None
    widened = {
        name: [wide(item, build) for item in value] if isinstance(value, list | tuple) and name in operator.operands else wide(value, build)
        if name in operator.operands else value
        for name, value in arguments.items()
    }  # fmt: skip
    bound = operator.normalize(node, widened)
    return None if isinstance(bound, str) else _narrow(node, operator.function, bound, build)


def _joined(node: fx.Node, operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    """Concatenate integers or booleans."""
    node_fact, dim = fact(node), arguments["dim"]
    tensors = [value if node_fact.dtype == torch.bool else wide(value, build) for value in arguments["tensors"]]
    if operator.function is stack:
        dim %= len(node_fact.shape)
        shapes = [numbers(fact(value).shape) for value in tensors]
        if any(shape.count(-1) > 1 for shape in shapes):
            return None
        tensors = [build.host(reshape, value, [*sizes[:dim], 1, *sizes[dim:]]) for value, sizes in zip(tensors, shapes, strict=True)]
    return _narrow(node, WHOLE["cat"], {"tensors": tensors, "dim": dim}, build)


def _of_whole_numbers(node: fx.Node, operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | str | None:
    if operator.name in RELATIONS:
        return _compared(operator.name, arguments, build)
    if operator.function is where:
        widened = {each: wide(value, build) if each != "condition" else value for each, value in arguments.items()}
        if any(isinstance(value, float) and not value.is_integer() for value in widened.values()):
            return None
        widened = {each: int(value) if isinstance(value, float) else value for each, value in widened.items()}
        return _narrow(node, WHOLE["where"], widened, build)
    if operator.function is to_integer:
        dtype = arguments["dtype"]
        return to_integer, {"input": arguments["input"] if dtype == torch.int64 else wide(arguments["input"], build), "dtype": dtype}
    if not isinstance(fact(node), TensorFact) or fact(node).dtype not in DTYPES:
        return None
    if Trait.LEAVES_INTEGERS in operator.traits:
        return _narrow(node, identity, {"input": wide(arguments["input"], build)}, build)
    if operator.integers is None:
        return None
    operand = fact(arguments["input"]) if isinstance(arguments.get("input"), fx.Node) else None
    call = operator.integers({each: wide(value, build) for each, value in arguments.items()}, operand)
    return call if isinstance(call, str | None) else _narrow(node, *call, build)


def _compared(relation: str, arguments: dict[str, Any], build: Builder) -> Call:
    """Return a comparison; one with a number that is not an integer becomes one with the integer next to it."""
    operands: dict[str, Any] = {}
    for name, value in arguments.items():
        rounding = RELATIONS[relation if name == "other" else RELATIONS[relation].swapped].rounding
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, float) and math.isfinite(value):
            whole_number = math.floor(value) if rounding == "floor" else math.ceil(value)
            value = whole_number if rounding is not None or value.is_integer() else NEVER
        operands[name] = wide(value, build)
    return WHOLE[relation], operands


# ---- a layer that is called on one sample is called on a batch of one; a pool on a batch of its channels -------------
#
# %y = conv2d(%x)        [3, 8, 8]       →     %y_batch = reshape(%x, [1, 3, 8, 8])
#                                              %y = conv2d(%y_batch)
#                                              %y_sample = reshape(%y, [4, 6, 6])


LAYERS = re.compile(r"(conv|conv_transpose)(\d)d")  # which join the channels of a sample
POOLS = re.compile(r"(max_pool|avg_pool|lp_pool|adaptive_max_pool|adaptive_avg_pool)(\d)d")  # which do not
NORMS: dict[type, int] = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


def give_batch(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a layer or pool of the table read a tensor without a batch dimension; it reads one with it now."""
    place = _missing(node, modules)
    if place is None:
        return False
    operand, node_fact = node.args[0], fact(node)
    assert isinstance(operand, fx.Node)
    operand_fact = fact(operand)
    before = TensorFact((*operand_fact.shape[:place], 1, *operand_fact.shape[place:]), operand_fact.dtype)
    with node.graph.inserting_before(node):
        batch = _reshaped(node, operand, before, "batch")
    with node.graph.inserting_after(node):
        sample = _reshaped(node, node, node_fact, "sample")
    node.replace_all_uses_with(sample, lambda reader: reader is not sample)
    node.args = (batch, *node.args[1:])
    set_fact(node, TensorFact((*node_fact.shape[:place], 1, *node_fact.shape[place:]), node_fact.dtype))
    return True


def _reshaped(node: fx.Node, operand: fx.Node, to: TensorFact, name: str) -> fx.Node:
    reshaped = node.graph.create_node("call_function", reshape, (operand, numbers(to.shape)), {}, name=f"{node.name}_{name}")
    set_fact(inherit(reshaped, node, "canonical.rewrite"), to)
    return reshaped


def _missing(node: fx.Node, modules: Mapping[str, nn.Module]) -> int | None:
    """Return where a node's operand lacks a dimension; None where it does not."""
    rank, place = _rank(node, modules)
    operand = node.args[0] if node.args else None
    if not rank or not isinstance(operand, fx.Node) or is_parameter(operand):
        return None
    operand_fact, result = fact(operand), fact(node)
    if not isinstance(operand_fact, TensorFact) or not isinstance(result, TensorFact):
        return None
    depending = sum(not isinstance(size, int) for size in operand_fact.shape)
    fits = len(operand_fact.shape) == rank + 1 == len(result.shape) and not reads_shape_only(node)
    return place if fits and depending <= place and all(isinstance(size, int) for size in operand_fact.shape[place:]) else None


def _rank(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Return the dimensions of its windows, 0 where it has none, and where one sample lacks a dimension."""
    if node.op == "call_module" and type(modules[str(node.target)]) in NORMS:
        return NORMS[type(modules[str(node.target)])], 0
    operator = _operator(node, modules)
    for place, pattern in enumerate((LAYERS, POOLS)):
        match = None if operator is None else pattern.fullmatch(operator.name)
        if match is not None:
            return int(match[2]), place
    return 0, 0


def _operator(node: fx.Node, modules: Mapping[str, nn.Module]) -> Operator | None:
    tables: dict[str, Any] = {"call_module": MODULES, "call_function": FUNCTIONS, "call_method": METHODS}
    key = type(modules[str(node.target)]) if node.op == "call_module" else node.target
    entry: tuple[Operator, Any] | None = tables[node.op].get(key) if node.op in tables else None
    return None if entry is None else entry[0]


# ---- Sizes and bounds that a model computes from its constants as tensors of one integer: they are replaced by that integer ----


SIZED = frozenset((
    "pad", "_pad", "constant_pad_nd", "narrow", "view", "reshape", "expand", "repeat", "unflatten", "split",
    "new_zeros", "new_ones", "new_full",
))  # fmt: skip


def fold_sizes(node: fx.Node) -> None:
    """Replace slice bounds and sizes that are computed from constants alone by numbers, in the arguments of a raw node."""
    if node.op not in ("call_function", "call_method"):
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not any(map(is_parameter, node.all_input_nodes)):
        return
    arguments: Any = (_bounds(tuple(node.args[1:])), _bounds(dict(node.kwargs)))
    if name in SIZED:
        arguments = fx.map_arg(arguments, _number)
    node.args, node.kwargs = (*node.args[:1], *arguments[0]), dict(arguments[1])


def _bounds(value: Any) -> Any:
    """Return a nest with numbers for the bounds of its slices."""
    if isinstance(value, slice):
        return fx.map_arg(value, _number)
    if isinstance(value, list | tuple):
        items = [_bounds(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return {key: _bounds(item) for key, item in value.items()} if isinstance(value, dict) else value


def _number(value: fx.Node) -> Any:
    """Return the number that a node holds, where it is one integer that follows from constants; otherwise the node."""
    value_fact, model = fact(value), value.graph.owning_module
    if not is_parameter(value) or model is None or not isinstance(value_fact, TensorFact) or value_fact.shape:
        return value
    if value_fact.dtype.is_floating_point or value_fact.dtype.is_complex or value_fact.dtype == torch.bool:
        return value
    return int(parameter_value(model, value))

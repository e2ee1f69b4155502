"""A model at one size: every size of its inputs but the batch is a number, as are the numbers that it computes from sizes."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from fxquant.ir import loops
from fxquant.ir.graph import SIZES, BatchDim, TensorFact, at_point, attach, fact, inherit, resolve, set_fact, sizes_of_input
from fxquant.ir.integer import Reference, notes, operation, origin, qparams, set_operation, set_qparams
from fxquant.ir.model import free_name
from fxquant.ops.recurrent.loops import loop_carry
from fxquant.prepared.operators import QuantizedOperator
from fxquant.primitives import PRIMITIVES


def with_fixed_sizes(model: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Return a copy of a prepared or integer model that takes inputs of the sizes of `inputs`, in batches of any size."""
    fixed = copy.deepcopy(model)
    values: dict[fx.Node, list[Any]] = {}  # of each node, at two batch sizes
    examples, numbers = iter(inputs), dict[str, int]()  # the sizes that are fixed now, by name
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in list(fixed.graph.nodes):
        if node.op == "output":
            continue
        if node.op == "placeholder":
            _fix(node, next(examples))
        with mode, torch.no_grad():
            values[node] = [_value(fixed, node, values, point) for point in range(2)]
        if isinstance(fact(node), BatchDim) and values[node][0] == values[node][1]:
            numbers[node.name] = values[node][0]
            _replace(node, values[node][0])
        elif node.op != "placeholder" and fact(node) is not None:
            set_fact(node, _fact(*values[node]))
    for node in list(fixed.graph.nodes):
        _fold(fixed, node)
        lowered = operation(node)
        if lowered is not None:
            arguments = map_aggregate(lowered.arguments, lambda each: numbers.get(each.node, each) if isinstance(each, Reference) else each)
            set_operation(node, replace(lowered, arguments=arguments))
    for node in reversed(list(fixed.graph.nodes)):  # only sizes were read of it
        if isinstance(fact(node), TensorFact | BatchDim) and not node.users and not _stays(fixed, node):
            fixed.graph.erase_node(node)
    fixed.recompile()
    return fixed


def _stays(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node that nothing reads stays: it is an input, or carries a state on in a loop."""
    module = resolve(model, str(node.target)) if node.op == "call_module" else None
    return node.is_impure() or (isinstance(module, QuantizedOperator) and module.operator.function is loop_carry)


def _fix(node: fx.Node, example: Tensor) -> None:
    """Write the sizes of an example on an input, but for the batch."""
    varying, node_fact = sizes_of_input(node), fact(node)
    if varying:
        sizes = tuple(example.shape[dim] if dim in varying else size for dim, size in enumerate(node_fact.shape))
        set_fact(node, TensorFact(sizes, node_fact.dtype))
        node.meta["notes"] = {key: note for key, note in notes(node).items() if key != SIZES}  # other graphs share the notes


def _value(model: fx.GraphModule, node: fx.Node, values: dict[fx.Node, list[Any]], point: int) -> Any:
    """Return the value of a node at one of two batch sizes: tensors without data, and numbers."""
    if node.op == "placeholder":
        described = fact(node)
        if not isinstance(described, TensorFact):
            return described
        return torch.empty([at_point(size, point) for size in described.shape], dtype=described.dtype, device="cpu")
    if node.op == "get_attr":
        return resolve(model, str(node.target))
    if node.target in (loops.begin, loops.end):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: values[operand][point])
    function: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], str(function))(*args[1:], **kwargs)
    if node.op == "call_module":
        module = resolve(model, str(function))
        function = module.operator.function if isinstance(module, QuantizedOperator) else module
    return function(*args, **kwargs)


def _fact(one: Any, other: Any) -> Any:
    """Return the fact of what is `one` and `other` at two batch sizes."""
    if isinstance(one, Tensor):
        return TensorFact.between(one, other)
    if isinstance(one, list | tuple):
        return tuple(map(_fact, one, other))
    if isinstance(one, dict):
        return {key: _fact(value, other[key]) for key, value in one.items()}
    return BatchDim.between(one, other) if type(one) is int else one if one == other else None


def _replace(node: fx.Node, number: int) -> None:
    """Give readers of a size the number."""
    for reader in list(node.users):
        reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), lambda operand: number if operand is node else operand)


def _fold(model: fx.GraphModule, node: fx.Node) -> None:
    """Replace a primitive that reads sizes by one with constants."""
    record, arguments = PRIMITIVES.get(node.target), node.args[1:]  # type: ignore[arg-type]
    if record is not None and record.counts is not None and isinstance(arguments[0], int):
        tables = [_row(model, each, arguments[0]) if isinstance(each, fx.Node) else each for each in arguments[1:]]
        node.target, node.args = record.counts, (node.args[0], *tables)
    if record is None or record.fixed is None:
        return
    lengths = fact(node.args[0]).shape[-len(arguments[0]) :]  # type: ignore[arg-type]
    if not all(isinstance(size, int | None) for size in (*lengths, *arguments[0])):  # type: ignore[misc]
        return
    *before, last = record.fixed(lengths, *arguments)
    for function, *constants in before:
        node.args = (_call(model, node, function, node.args[0], _placed(model, node, constants)), *arguments)
    node.target, node.args = last[0], (node.args[0], *_placed(model, node, last[1:]))


def _placed(model: fx.GraphModule, node: fx.Node, constants: Sequence[Any]) -> list[Any]:
    return [_constant(model, node, each) if isinstance(each, Tensor) else each for each in constants]


def _row(model: fx.GraphModule, table: fx.Node, count: Any) -> fx.Node:
    return _constant(model, table, resolve(model, str(table.target))[count].clone(), table.name)


def _constant(model: fx.GraphModule, near: fx.Node, value: Tensor, role: str = "weights") -> fx.Node:
    """Return a node of a new constant, before `near`'s first reader."""
    path = free_name(model, f"{near.name}_{role}")
    attach(model, path, value)
    with model.graph.inserting_before(near):
        added = inherit(model.graph.get_attr(path), near, "sizes")
    set_fact(added, TensorFact(tuple(value.shape), value.dtype))
    return added


def _call(model: fx.GraphModule, node: fx.Node, function: Any, value: Any, arguments: list[Any]) -> fx.Node:
    with model.graph.inserting_before(node):
        added = inherit(model.graph.call_function(function, (value, *arguments)), node, "sizes")
    added.meta["origin"] = origin(node)
    shape = list(fact(value).shape)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(point: int) -> Tensor:
        operand = torch.empty([at_point(size, point) for size in shape], dtype=fact(value).dtype, device="cpu")
        placed = [resolve(model, str(each.target)) if isinstance(each, fx.Node) else each for each in arguments]
        return function(operand, *placed)  # type: ignore[no-any-return]

    with mode:
        set_fact(added, TensorFact.between(run(0), run(1)))
    grid = qparams(node)
    if grid is not None:
        set_qparams(added, grid)
    return added

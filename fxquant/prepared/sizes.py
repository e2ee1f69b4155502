"""A model at one size: every size of its inputs but the batch is a number; and an integer model whose loops are written out."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from fxquant.errors import ExportError
from fxquant.ir import graph as facts
from fxquant.ir import loops
from fxquant.ir.graph import SIZES, BatchDim, TensorFact, at_point, attach, fact, inherit, resolve, set_fact, sizes_of_input
from fxquant.ir.integer import Operation, Reference, notes, operation, origin, qparams, set_operation, set_qparams
from fxquant.ir.model import free_name, replace_graph
from fxquant.ops.indexing.index import getitem
from fxquant.ops.recurrent.recurrence import MARKS, loop_item, loop_stack
from fxquant.prepared.operators import QuantizedOperator
from fxquant.prepared.stage import require_integer
from fxquant.primitives import PRIMITIVES, Role, loop, role_of, shape
from fxquant.primitives.elementwise import add_constant
from fxquant.primitives.proof import inferred_call
from fxquant.support import logger
from fxquant.support.arguments import checked, instance


def at_example_sizes(model: fx.GraphModule) -> fx.GraphModule:
    """Return a model at the example's sizes, in batches of any size, with the same tensors; the model itself where no size varies.

    It is for what has one size, as a chip's program: `fxq.at_sizes` gives models of other sizes.
    """
    inputs = model.graph.find_nodes(op="placeholder")
    if not any(map(sizes_of_input, inputs)):
        return model
    logger.info("written for the example's sizes; fxq.at_sizes(model, example) gives a model of others")
    return with_fixed_sizes(model, list(map(facts.example_of_input, inputs)), copy.copy)


def with_fixed_sizes(
    model: fx.GraphModule, inputs: Sequence[Tensor | None], copied: Callable[[fx.GraphModule], fx.GraphModule] = copy.deepcopy
) -> fx.GraphModule:
    """Return a copy of a traced, prepared or integer model that takes inputs of the sizes of `inputs`, in batches of any size."""
    fixed = copied(model)
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
        if node.target is add_constant and not bool(resolve(fixed, str(node.args[1].target)).any()):
            node.replace_all_uses_with(node.args[0])
    for node in reversed(list(fixed.graph.nodes)):  # only sizes were read of it
        if isinstance(fact(node), TensorFact | BatchDim) and not node.users and not node.is_impure():
            fixed.graph.erase_node(node)
    fixed.recompile()
    return fixed


def _fix(node: fx.Node, example: Tensor | None) -> None:
    """Write the sizes of an example on an input, but for the batch."""
    varying, node_fact = sizes_of_input(node), fact(node)
    if varying and example is not None:
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
        count, *tables = arguments
        rows = fx.map_arg(tables, lambda each: _constant(model, each, resolve(model, str(each.target))[count].clone(), each.name))
        node.target, node.args = record.counts, (node.args[0], *rows)
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
    set_fact(added, inferred_call(added))
    grid = qparams(node)
    if grid is not None:
        set_qparams(added, grid)
    return added


# ---- Loops, written out step by step ---------------------------------------------------------------------------------
@checked(model=instance("an integer model", fx.GraphModule))
def unrolled(model: fx.GraphModule) -> fx.GraphModule:
    """Return an integer model without loops, which computes the same bits; the model itself where it has none.

    Raises ConfigurationError for a model that is not an integer model, and ExportError if the number of steps varies.
    """
    require_integer(model)
    bodies = loops.bodies(model.graph)
    if not bodies:
        return model
    written = _Writing(bodies)
    inside = {node for nodes in bodies.values() for node in nodes}
    for node in model.graph.nodes:
        if node in bodies:
            written.steps(node)
        elif role_of(_mark(node)) is Role.LEAVING:
            written.result(node)
        elif node not in inside:
            written.nodes[node] = written.graph.node_copy(node, written.nodes.__getitem__)
    result = model.__copy__()
    replace_graph(result, written.graph)
    result.recompile()
    return result


def with_integer_loops(model: fx.GraphModule) -> fx.GraphModule:
    """Return an integer model, with its loops written out where they compute float values between layers quantized at run time."""
    inside = (node for nodes in loops.bodies(model.graph).values() for node in nodes)
    whole = all(node.op == "get_attr" or node.target in PRIMITIVES or node.target is loops.end for node in inside)
    return model if whole else unrolled(model)


class _Writing:
    """A graph without loops while it is written from one with loops."""

    def __init__(self, bodies: dict[fx.Node, list[fx.Node]]) -> None:
        self.graph, self.bodies = fx.Graph(), bodies
        self.nodes: dict[fx.Node, fx.Node] = {}  # by the node of the graph with loops, at the step that was written last
        self.carried: dict[fx.Node, dict[int, list[fx.Node]]] = {}  # of each loop, by position, what each step but the first gave

    def steps(self, start: fx.Node) -> None:
        """Write the steps of a loop but the first, which is written already."""
        count = start.args[0]
        if not isinstance(count, int):
            because = f"its loop %{start.name} runs along a size that varies, and is to be written step by step"
            raise ExportError("the model has no fixed number of steps", because=because, remedy="pass fxq.at_sizes(model, example)")
        carried = self.carried[start] = {}
        for step in range(1, count):
            names = {node.name: f"{node.name}_step_{step}" for node in self.bodies[start]}
            for node in self.bodies[start]:
                mark = _mark(node)
                if mark is loop.item:
                    self.nodes[node] = self.item(node, count, step, names[node.name])
                elif mark is loop.state:
                    sequence, _, index = node.args
                    self.nodes[node] = carried[index][-1] if index in carried else self.nodes[sequence]  # type: ignore[index]
                elif mark is loop.carry:
                    carried.setdefault(node.args[2], []).append(self.nodes[node.args[0]])  # type: ignore[arg-type,index]
                elif node.target is not loops.end:
                    self.nodes[node] = self.copy(node, names)

    def copy(self, node: fx.Node, names: dict[str, str]) -> fx.Node:
        """Write a node of a loop's body at one step, under the name of that step."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.nodes.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, names.get(node.name, node.name))
        copied.meta = {key: value for key, value in node.meta.items() if key not in ("kernel", "kernel_results")}
        copied.meta["origin"] = names.get(origin(node), origin(node))
        lowered = operation(node)
        if lowered is not None:
            by_name = {old.name: new.name for old, new in self.nodes.items()} | {node.name: copied.name}
            arguments = map_aggregate(
                lowered.arguments, lambda each: Reference(by_name[each.node]) if isinstance(each, Reference) else each
            )
            set_operation(copied, replace(lowered, arguments=arguments))
        return copied

    def item(self, node: fx.Node, count: int, step: int, name: str) -> fx.Node:
        """Write what a sequence has at a step."""
        sequence, _, dim, backwards = node.args
        source, place = self.nodes[sequence], count - 1 - step if backwards else step  # type: ignore[index]
        sizes = facts.shape_of(source)
        index = [place if each == dim else slice(None) for each in range(len(sizes))]
        if node.target is loop_item:  # of float values
            return self.call(node, getitem, (source, index), facts.shape_of(node), name)
        part = self.call(node, shape.crop, (source, [dim], [place], [place + 1], [1]), _with(sizes, dim, 1), f"{name}_crop")
        part.meta["origin"] = name
        taken = self.reshaped(node, part, facts.shape_of(node), name)
        set_operation(taken, Operation("getitem", {"input": Reference(source.name), "index": index}, {}))
        return taken

    def result(self, node: fx.Node) -> None:
        """Write the result of a loop: the state of its last step, or of all steps."""
        first, start, index = node.args[:3]
        every = [self.nodes[first], *self.carried[start].get(index, [])]  # type: ignore[index,arg-type]
        if _mark(node) is loop.last:
            self.nodes[node] = self.reshaped(node, every[-1], facts.shape_of(node), node.name) if node.target is loop.last else every[-1]
            return
        dim, backwards = node.args[3], node.args[5]
        if node.target is loop_stack:  # of float values
            steps = every[::-1] if backwards else every
            self.nodes[node] = self.call(node, torch.stack, (steps, dim), facts.shape_of(node), node.name)
            return
        parts = [
            self.reshaped(node, each, _with(facts.shape_of(node), dim, 1), f"{node.name}_reshape_{number}")
            for number, each in enumerate(reversed(every) if backwards else every)
        ]
        self.nodes[node] = self.call(node, shape.concatenate, (parts, dim), facts.shape_of(node), node.name)
        set_operation(self.nodes[node], Operation("cat", {"tensors": [Reference(part.name) for part in parts], "dim": dim}, {}))

    def reshaped(self, node: fx.Node, value: fx.Node, sizes: Any, name: str) -> fx.Node:
        """Write the elements of a value in another shape."""
        shown = [size if isinstance(size, int) else -1 for size in sizes]
        result = self.call(node, shape.reshape, (value, shown), sizes, name)
        set_operation(result, Operation("reshape", {"input": Reference(value.name), "shape": shown}, {}))
        return result

    def call(self, node: fx.Node, function: Any, arguments: tuple[Any, ...], sizes: Any, name: str) -> fx.Node:
        """Write a call of a primitive with the facts of a node, but for its shape."""
        added = self.graph.create_node("call_function", function, arguments, name=name)
        added.meta = {**node.meta, "origin": added.name}
        added.meta.pop("operation", None)
        facts.set_fact(added, TensorFact(tuple(sizes), facts.fact(node).dtype))
        return added


def _mark(node: fx.Node) -> Any:
    """Return the primitive that a node calls between a loop's steps and the tensors around it, also of float values; or its own target."""
    return MARKS.get(node.target, node.target)


def _with(sizes: Any, dim: Any, size: int) -> tuple[Any, ...]:
    return tuple(size if each == dim else old for each, old in enumerate(sizes))

"""Run samples through a prepared model node by node, as the float model has them and as the integers have them.

The result of a node is kept for every sample until all its readers have run, so every node runs once. Memory is that of the widest cut
through the graph, twice, for all samples; no gradient is kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxquant.accuracy.ranks import require_alone
from fxquant.errors import CalibrationError
from fxquant.ir import loops
from fxquant.ir.graph import TensorFact, fact, is_parameter, resolve
from fxquant.ir.graph import arguments_of as own_arguments
from fxquant.lowering.eager import EagerLowering, constants_kept
from fxquant.lowering.lowering import Epilogue, Quantized
from fxquant.numerics.grids import INT32, INT32_MAX, Grid
from fxquant.ops import Trait, map_operands
from fxquant.ops.core.weighted import epilogue
from fxquant.ops.elementwise.table import UNARY
from fxquant.ops.recurrent.recurrence import loop_carry, loop_item, loop_state
from fxquant.options import Options
from fxquant.prepared.batches import as_batches, first_batches, length, model_inputs, no_batches
from fxquant.prepared.operators import QuantizedOperator
from fxquant.support import reached
from fxquant.support.progress import progress

Values = dict[fx.Node, Any]

HELD_OUT_OF = 4  # every fourth chunk of samples is held out


class Samples:
    """The inputs of a model in chunks of samples; every fourth chunk is held out."""

    def __init__(self, chunks: list[list[Any]]) -> None:
        self.chunks = chunks  # for each, the values of the model's inputs, in the graph's order
        self.judging = range(min(HELD_OUT_OF, len(chunks)) - 1, len(chunks), HELD_OUT_OF)  # the indices of the held-out chunks
        self.learning = [index for index in range(len(chunks)) if index not in self.judging]  # the indices of the training chunks

    @property
    def tensors(self) -> Iterable[Tensor]:
        """Iterate over the tensors of all chunks."""
        return (value for chunk in self.chunks for value in chunk if isinstance(value, Tensor))


def taken(prepared: fx.GraphModule, batches: Any, num_batches: int | None, options: Options, show_progress: bool | None = None) -> Samples:
    """Return all batches, cut into chunks of at most `batch_size` samples, of fewer where there would be less than four chunks.

    A model of one batch size alone has its batches as chunks. Raises CalibrationError without a batch, if one does not fit, or only one
    sample is there.
    """
    samples = cut(prepared, inputs_of(prepared, batches, num_batches, options, show_progress), options.batch_size)
    if len(samples.chunks) < 2:
        raise CalibrationError(
            "there is too little to tune with",
            because="`batches` yielded one sample; tuning learns from some and is judged on others",
            remedy="pass at least 2 samples; 64 to 1024 are usual",
        )
    return samples


def inputs_of(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None, options: Options, show_progress: bool | None = False
) -> list[list[Any]]:
    """Return the model's inputs of each batch. Raises CalibrationError if there is none, or one does not fit; see `require_alone`."""
    require_alone(options)
    all_inputs: list[list[Any]] = []
    source = as_batches(batches)
    for batch in progress(first_batches(source, num_batches), length(source, num_batches), "taking batches", show_progress):
        all_inputs.append(model_inputs(prepared, options.inputs(batch), len(all_inputs)))
    if not all_inputs:
        raise no_batches(num_batches)
    return all_inputs


def cut(prepared: fx.GraphModule, whole: list[list[Any]], size: int) -> Samples:
    """Return the model's inputs of some batches, cut as `taken` says."""
    axes = batch_axes(prepared)
    if any(axis is not None for axis in axes):
        count = sum(count_of(inputs, axes) for inputs in whole)
        size = max(1, min(size, count // HELD_OUT_OF))
        whole = [chunk for inputs in whole for chunk in _cut(inputs, axes, size)]
    return Samples(whole)


def batch_axes(prepared: fx.GraphModule) -> list[int | None]:
    """Return for each input of the model the dimension that is the batch; None if there is none."""
    facts = [fact(node) for node in prepared.graph.find_nodes(op="placeholder")]
    return [each.batch_axis if isinstance(each, TensorFact) else None for each in facts]


def single(inputs: Sequence[Any], axes: Sequence[int | None]) -> Iterable[list[Any]]:
    """Return the model's inputs of each sample of a chunk; a chunk of a model without a batch is one."""
    return _cut(inputs, axes, 1) if any(axis is not None for axis in axes) else [list(inputs)]


def count_of(inputs: Sequence[Any], axes: Sequence[int | None]) -> int:
    """Return the number of samples in the inputs of a model: where every size is fixed, that of the first tensor's first dimension."""
    sizes = [int(value.shape[axis]) for value, axis in zip(inputs, axes, strict=True) if axis is not None]
    shapes = [value.shape for value in inputs if isinstance(value, Tensor)]
    return sizes[0] if sizes else (shapes[0][0] if shapes and shapes[0] else len(shapes[:1]))


def _cut(inputs: Sequence[Any], axes: Sequence[int | None], size: int) -> Iterable[list[Any]]:
    for start in range(0, count_of(inputs, axes), size):
        yield [
            value if axis is None else value.narrow(axis, start, min(size, value.shape[axis] - start)).clone()
            for value, axis in zip(inputs, axes, strict=True)
        ]


class Walk:
    """The values of some chunks at the nodes of a prepared model, as far as they were asked for and are still to be read.

    Without gradients, and with every operator as it is at that moment: in its float form, or, `exact`, in the state that it is in.
    A loop runs at once, when something in it is asked for: a node there has the values of all steps, one after the other in dimension 0.
    """

    def __init__(self, prepared: fx.GraphModule, chunks: Sequence[Sequence[Any]], *, exact: bool) -> None:
        self.prepared, self.exact = prepared, exact
        self._left = {node: len(node.users) for node in prepared.graph.nodes}
        self._order = {node: index for index, node in enumerate(prepared.graph.nodes)}
        inputs = prepared.graph.find_nodes(op="placeholder")
        self._values: list[Values] = [dict(zip(inputs, chunk, strict=True)) for chunk in chunks]
        self._done: set[fx.Node] = set(inputs)
        self._loops = loops.bodies(prepared.graph)
        self._loop_of = {node: start for start, nodes in self._loops.items() for node in nodes}

    @torch.no_grad()
    def at(self, nodes: Iterable[fx.Node]) -> list[Values]:
        """Return the values of these nodes for every chunk, computing the nodes that they depend on as needed."""
        targets = list(nodes)
        for node in self._needed(targets):
            ran = [node, *self._loops.get(node, ())]
            with constants_kept():
                for values in self._values:
                    values.update(self._every_step(ran, values) if node in self._loops else {node: self._value(node, values)})
            self._done.update(ran)
            for operand in (operand for each in ran for operand in each.all_input_nodes):
                self._left[operand] -= 1
                if not self._left[operand] and operand not in (*targets, *ran):
                    self._drop(operand)
            for start in [
                start for start in self._loops if start in self._done and self._order[node] > self._order[self._loops[start][-1]]
            ]:
                for inner in self._loops.pop(start):
                    self._drop(inner)
        results = [{node: values[node] for node in targets} for values in self._values]
        for node in targets:
            if not self._left[node]:
                self._drop(node)
        return results

    def _value(self, node: fx.Node, values: Values) -> Any:
        return run(self.prepared, node, values, exact=self.exact)

    def _every_step(self, nodes: Sequence[fx.Node], before: Values) -> Values:
        """Run a loop, given the values before it, and return the frame and what each node in it gave at all steps."""
        start = nodes[0]
        values, steps = {**before, start: self._value(start, before)}, {node: list[Any]() for node in nodes}
        if self.exact:
            read = {each.name: values[each] for each in loops.reads(start) if not is_parameter(each)}
            loops.at_once(self.prepared, start.name, values[start], read)
            if values[start].carried and not values[start].more():
                return self._together(nodes, values)
        for node in loops.running(nodes, values.__getitem__):
            values[node] = values[node] if node is start else self._value(node, values)
            steps[node].append(values[node])
        joined = {node: torch.cat(each) for node, each in steps.items() if each and isinstance(each[0], Tensor) and node.op != "get_attr"}
        return {start: values[start], **{node: joined.get(node, values.get(node)) for node in nodes[1:]}}

    def _together(self, nodes: Sequence[fx.Node], values: Values) -> Values:
        """Return what the nodes of a loop give for all steps together, given the integers that each step carries."""
        carried: dict[int, list[Tensor]] = {}
        for node in nodes[1:-1]:
            operator, arguments = operator_at(self.prepared, node), cast(tuple[Any, ...], node.args)
            function = None if operator is None else operator.operator.function
            if function is loop_item:
                sequence, dim = values[arguments[0]], arguments[2]
                rest = sequence.narrow(dim, 0 if arguments[3] else 1, sequence.shape[dim] - 1)
                values[node] = (rest.flip(dim) if arguments[3] else rest).movedim(dim, 0).flatten(0, 1)
            elif operator is not None and function in (loop_state, loop_carry):
                index = arguments[2]
                carried[index] = [each * operator.output.scale for each in values[nodes[0]].carried[index]]
                before = [values[arguments[0]], *carried[index][:-1]] if function is loop_state else carried[index]
                values[node] = torch.cat(before)
            else:
                values[node] = self._value(node, values)
        return {node: values.get(node) for node in nodes}

    def _drop(self, node: fx.Node) -> None:
        for values in self._values:
            values.pop(node, None)

    def _needed(self, targets: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes that have to run for these nodes, in the order of the graph."""

        def read(node: fx.Node) -> set[fx.Node]:
            ran = [node, *self._loops.get(node, ())]
            return {operand for each in ran for operand in each.all_input_nodes}.difference(ran, self._done)

        missing = [self._loop_of.get(node, node) for node in targets if node not in self._done]
        return sorted(reached(missing, read), key=self._order.__getitem__)


def run(prepared: fx.GraphModule, node: fx.Node, values: Values, *, exact: bool) -> Any:
    """Return the value of one node: of an operator the float form, or, `exact`, that of its state."""
    if node.op == "get_attr":
        return resolve(prepared, str(node.target))
    args, kwargs = arguments_of(node, values)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    module = resolve(prepared, str(node.target))
    if isinstance(module, QuantizedOperator) and not exact:
        args, kwargs = module.multiplied(args, kwargs)
        return module.operator.function(*args, **kwargs)
    return module(*args, **kwargs)


def arguments_of(node: fx.Node, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs of a node, with the values of its operands in place of nodes."""
    return own_arguments(node, values.__getitem__)


class RealLowering(EagerLowering):
    """Forms sums of products as the integer function does, and leaves them as float values; operands need not be integers.

    It is differentiable, also with respect to the rounding of the weight.
    """

    def prove(self, bound: Tensor | float, what: str, limit: int = INT32_MAX) -> float:
        """Return 0: values that are not integers are not split into parts, so every sum is formed in one."""
        return 0.0

    def requantize_by(self, accumulator: Any, end: Epilogue) -> Quantized:
        """Return the dequantized accumulator."""
        value: Tensor = accumulator * end.ratio.approximate().to(accumulator.dtype)
        return Quantized(value.float(), Grid(INT32, torch.ones((), dtype=torch.float32, device=value.device)), tuple(value.shape))


def is_weighted(operator: QuantizedOperator, arguments: dict[str, Any]) -> bool:
    """Return whether an operator with these argument values is a layer with a constant weight."""
    return Trait.SUMS in operator.operator.traits and weight_of(operator, arguments) is not None


def weight_of(operator: QuantizedOperator, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return its weight as it is rounded: channels are dimension 0; None if there is none."""
    weight = None if operator.plain else operator.operator.layer.weight(**arguments)
    return weight if isinstance(weight, Tensor) else None


def real_result(operator: QuantizedOperator, arguments: dict[str, Any], *, whole: bool = True) -> Tensor:
    """Compute the result of a weighted operator for float operands, which are not rounded, before the result is rounded.

    The weight has its integers, or the values that its rounding gives in their place. Without `whole` the fused limits are left out.
    """
    operands = dict(arguments)
    residual, clamp = operands.pop("residual", None), operands.pop("clamp", None)
    used = {name: iter(q if isinstance(q, list) else [q]) for name, q in operator.inputs.items()}

    def take(name: str, value: Tensor) -> Quantized | Tensor:
        quantizer = next(used[name])
        if quantizer is None:
            return value
        grid = quantizer.grid
        return Quantized(value / grid.scale, grid, tuple(value.shape))

    result = operator.operator.lower(operator.lowering(RealLowering), **map_operands(operator.operator, operands, take))
    return epilogue(result.real(), residual, clamp if whole else None, None)


def by_channel(result: Tensor, channels: int, rank: int) -> Tensor | None:
    """Return a layer's result as (C, positions); None if it does not have `channels` channels. `rank` is that of the weight."""
    axis = result.dim() - 1 - max(rank - 2, 0)
    return None if axis < 0 or result.shape[axis] != channels else result.movedim(axis, 0).reshape(channels, -1)


# ---- The unit of tuning: a layer with the function after it ----------------------------------------------------------
@dataclass(frozen=True)
class Unit:
    """Nodes of a prepared model, in the order they run, and their roles.

    weighted  the nodes whose weight's rounding is tuned
    exits     the nodes compared with the float model: float tensors that are read outside of the unit, else the last of `weighted`
    inputs    the nodes outside of the unit that it reads, parameters included
    """

    nodes: tuple[fx.Node, ...]
    weighted: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """The name of the last node with a weight."""
        return self.weighted[-1].name

    @property
    def exits(self) -> tuple[fx.Node, ...]:
        exits = tuple(node for node in self.nodes if is_real(node) and any(user not in self.nodes for user in node.users))
        return exits or self.weighted[-1:]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(operand for node in self.nodes for operand in node.all_input_nodes if operand not in self.nodes))


def is_real(node: fx.Node) -> bool:
    """Return whether a node gives a floating point tensor."""
    node_fact = fact(node)
    return isinstance(node_fact, TensorFact) and node_fact.dtype.is_floating_point


def operator_at(prepared: fx.GraphModule, node: fx.Node) -> QuantizedOperator | None:
    """Return the quantized operator that a node calls; None if it calls none."""
    module = prepared.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, QuantizedOperator) else None


def weighted_nodes(prepared: fx.GraphModule) -> dict[fx.Node, QuantizedOperator]:
    """Return the nodes with a constant weight, and their operators, in the order they run, except operators with `left_out` set."""
    operators = {}
    for node in prepared.graph.nodes:
        operator = operator_at(prepared, node)
        if operator is not None and not operator.left_out and is_weighted(operator, constant_arguments(prepared, node, operator)):
            operators[node] = operator
    return operators


def constant_weight(prepared: fx.GraphModule, node: fx.Node, operator: QuantizedOperator) -> Tensor:
    """Return the float weight of a weighted node in the layout in which it is rounded: output channels are dimension 0."""
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
        for operand in reached(filter(is_parameter, node.all_input_nodes), lambda operand: operand.all_input_nodes):
            value = resolve(prepared, str(operand.target)) if operand.op == "get_attr" else None
            if isinstance(value, Tensor) and value.dim() > 1:
                readers.setdefault(str(operand.target), set()).add(node)
    return {node for nodes in readers.values() if len(nodes) > 1 for node in nodes}


def layer_units(prepared: fx.GraphModule) -> list[Unit]:
    """Return a unit for every weighted node, with the function of one tensor that alone reads it, if there is one."""
    return [Unit((node, *_function_after(prepared, node)), (node,)) for node in weighted_nodes(prepared)]


def _function_after(prepared: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, ...]:
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
        """Return the mean square of the unit's target results on held-out samples."""
        return self._mean(lambda index, node: self.targets[index][node].double().square())

    @torch.no_grad()
    @constants_kept()
    def error(self) -> float:
        """Return the mean squared error of the unit's current integer results on held-out samples."""
        results: dict[int, Values] = {index: self.results(index) for index in self.samples.judging}
        return self._mean(lambda index, node: (results[index][node] - self.targets[index][node]).double().square())

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
    """Return the arguments of a node by name, with the values of its operands; parameters are multiplied by their channel factors."""
    return operator.operator.bind_call(*operator.multiplied(*arguments_of(node, values)))

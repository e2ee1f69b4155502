"""Lower operators to integer primitives, with the current weights and scales as constants.

    %y = quantized.y(%x, %w)     →     %y_convolution = convolution(%x, [integer.y.weight], [integer.y.bias], …)
                                       %y = requantize_fixed(%y_convolution, [integer.y.multiplier], …)

The calls are those that the prepared operator makes in state VALIDATE; here they are recorded as nodes.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.errors import StageViolation
from fxquant.ir import graph as facts
from fxquant.ir import loops
from fxquant.ir.functional import stopped
from fxquant.ir.graph import POINTS, BatchDim, TensorFact, at_point
from fxquant.ir.integer import Constant, Operation, QParams, Reference, notes, qparams, set_kernel, set_operation, set_qparams, zero_point
from fxquant.ir.model import CARRIED, Model, free_name, replace_graph
from fxquant.lowering.lowering import Lowering, Place, Quantized, plainly
from fxquant.numerics.grids import WEIGHT_INT8, Grid
from fxquant.numerics.rounding import GradientRule
from fxquant.ops import map_operands, operator_of
from fxquant.ops.core.composite import DEQUANTIZE
from fxquant.ops.core.record import BY_NAME as OPERATORS_BY_NAME
from fxquant.passes.rewriting import eliminate_dead, substitute
from fxquant.pipeline import Context
from fxquant.prepared.operators import QuantizedOperator
from fxquant.prepared.stage import quantized_operator
from fxquant.primitives import PRIMITIVES, ZeroPoint, elementwise, loop
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.primitives.proof import Shapes
from fxquant.primitives.varying import COUNTED
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightQuantizer

CONTAINER = "integer"  # the path of the constants in the integer model


@dataclass(frozen=True)
class Writing:
    """The state that the lowerings of all operators share while an integer graph is written: module, graph, arithmetic, constants."""

    gm: fx.GraphModule  # the module that holds its constants
    graph: fx.Graph
    arithmetic: Arithmetic
    container: str  # the path of these
    shapes: Shapes = field(default_factory=Shapes)
    held: dict[Any, fx.Node] = field(default_factory=dict)  # constants by role and content, which several operators read


class GraphLowering(Lowering):
    """Writes the primitives of one operator into a graph; the last one takes the operator's name.

    Tensors hold stored integers, with the zero point. `call` inserts `centre` for primitives that compute on centred integers.
    """

    def __init__(self, writing: Writing, node: fx.Node, module: QuantizedOperator | None, output: Quantizer | None) -> None:
        weight = WeightQuantizer(WEIGHT_INT8) if module is None else module.weight_quantizer
        super().__init__(node.name, writing.arithmetic, output, None if module is None else module.intermediate, weight)
        self.shares = module is not None and not module.owns_output and not module.plain
        self.writing, self.graph, self.node = writing, writing.graph, node
        self.made: list[fx.Node] = []
        self.constants: dict[str, str] = {}  # node names by role
        # Scales of constants, with their axis and zero point, by role.
        self.scales: dict[str, tuple[float | tuple[float, ...], int | None, int | tuple[int, ...], int | None]] = {}
        self.centred: dict[fx.Node, fx.Node] = {}  # the centred integers of affine tensors
        self.between: QParams | None = None  # of what a residual is added to
        self.facts: dict[str, Any] = {}
        self.held: dict[Any, fx.Node] | None = None  # constants by role and content, of operators whose constants others read as well

    @property
    def place(self) -> Place:
        return {"at": facts.source(self.node), "module": facts.module_path(self.node)}

    def call(self, primitive: Callable[..., Tensor], *arguments: Any) -> fx.Node:
        zero = next((point for node in facts.nodes_in(arguments) if (point := zero_point(node))), 0)
        if self.count is not None and primitive in COUNTED:
            counted: Any = COUNTED[primitive]
            primitive, arguments = counted, (arguments[0], self.count, *arguments[1:])
        if zero and PRIMITIVES[primitive].zero_point is not ZeroPoint.CENTRED:
            arguments = PRIMITIVES[primitive].stored_arguments(arguments, zero)
        elif zero:
            arguments = fx.map_arg(arguments, self._centre)
        return self._call(primitive, *arguments)

    def _centre(self, node: fx.Node) -> fx.Node:
        """Return the centred integers of a node; the node itself where its zero point is 0."""
        zero = zero_point(node)
        if zero and node not in self.centred:
            self.centred[node] = self._call(elementwise.centre, node, zero)
        return self.centred.get(node, node)

    def _call(self, primitive: Callable[..., Tensor], *arguments: Any) -> fx.Node:
        call = self.graph.create_node("call_function", primitive, arguments, {}, name=f"{self.name}_{primitive.__name__}")
        facts.inherit(call, self.node, "integer.lower")
        call.meta["origin"] = self.name
        facts.set_fact(call, self.writing.shapes.infer(call))
        self.made.append(call)
        # A primitive that only moves or clamps integers has the scale of its operand.
        operand = arguments[0][0] if isinstance(arguments[0], list | tuple) else arguments[0]
        grid = qparams(operand) if isinstance(operand, fx.Node) else None
        if PRIMITIVES[primitive].zero_point is ZeroPoint.EQUIVARIANT and grid is not None and grid.axis is None:
            set_qparams(call, grid)
        return call

    def size(self, value: fx.Node, dim: int) -> fx.Node:
        size = facts.inherit(self.graph.call_method("size", (value, dim)), self.node, "integer.lower")
        facts.set_fact(size, facts.fact(value).shape[dim])
        return size

    def times(self, size: Any, number: int) -> Any:
        if isinstance(size, int):
            return size * number
        product = facts.inherit(self.graph.call_function(operator.mul, (size, number)), self.node, "integer.lower")
        facts.set_fact(product, BatchDim.between(*(at_point(facts.fact(size), point) * number for point in POINTS)))
        return product

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> fx.Node:
        if role in self.constants:
            because = "the second would replace the first, which its primitives still read"
            remedy = "this is a defect of the operator's `lower`; give every constant a different role"
            raise StageViolation(f"two constants of one operator have the role {role!r}", node=self.node, because=because, remedy=remedy)
        stored = value.detach().to(dtype).contiguous()
        key = (role, dtype, stored.shape, stored.numpy(force=True).tobytes()) if self.held is not None else None
        if self.held is not None and key in self.held:
            self.constants[role] = self.held[key].name
            return self.held[key]
        path = f"{self.writing.container}.{self.name}.{role}"
        facts.attach(self.writing.gm, path, stored.clone())
        # Naming the node here spares the search for a name that `graph.get_attr` makes.
        added = facts.inherit(self.graph.create_node("get_attr", path, name=f"{self.name}_{role}"), self.node, "integer.lower")
        facts.set_fact(added, TensorFact(tuple(value.shape), dtype))
        self.constants[role] = added.name
        if self.held is not None:
            self.held[key] = added
        return added

    def describe(self, role: str, scale: Tensor, axis: int | None = None, zero_point: int | Tensor = 0, times: int | None = None) -> None:
        scales = tuple(scale.detach().flatten().tolist())
        zero: int | tuple[int, ...] = zero_point if isinstance(zero_point, int) else tuple(int(z) for z in zero_point.flatten().tolist())
        if isinstance(zero, tuple) and len(zero) == 1:
            zero = zero[0]
        one = len(scales) == 1
        self.scales[role] = (scales[0] if one else scales, None if one and isinstance(zero, int) else axis, zero, times)

    def stored(self, value: Tensor, grid: Grid) -> Tensor:
        return value + grid.zero_point if grid.zero_point else value

    def offset(self, grid: Grid) -> tuple[int, ...]:
        return (grid.zero_point,) if grid.zero_point else ()

    def result(self, exact: Callable[[], Any], real: Callable[[], Tensor], to: Quantizer | None = None) -> Quantized:
        result = super().result(exact, real, to)
        if to is not None and to is self.intermediate:
            self.between = _described(to.grid)
        return result

    def holds(self, value: fx.Node, grid: Grid) -> fx.Node:
        set_qparams(value, _described(grid))
        return value

    def operation(self, name: str, arguments: dict[str, Any]) -> Operation:
        """Return the record of an operator that was lowered."""
        constants = {role: Constant(node, *self.scales[role]) for role, node in self.constants.items() if role in self.scales}
        return Operation(name, arguments, constants, self.between)

    def note(self, key: str, value: object) -> None:
        self.facts[key] = value

    def finish(self, result: Any, operation: Operation) -> Any:
        """Give the operator's name and notes to the result's node, if it is new; return the `Quantized`, or the node of a plain result."""
        node: fx.Node = result.value if isinstance(result, Quantized) else result
        if node in self.made:
            if isinstance(result, Quantized) and PRIMITIVES[node.target].kind == "quantized":  # type: ignore[index]
                set_qparams(node, _described(result.grid))
            node._rename(self.name)
            notes(node).update(self.facts)
            set_operation(node, operation)
            node.meta["fused"] = self.node.meta.get("fused", ())
            known_part = facts.part(self.node)
            if known_part is not None:
                facts.set_part(node, known_part)
        if not isinstance(result, Quantized):
            return node
        node_fact = facts.fact(node)
        return Quantized(node, result.grid, node_fact.shape if isinstance(node_fact, TensorFact) else ())


def _described(grid: Grid) -> QParams:
    scales = tuple(grid.scale.flatten().tolist())
    one = len(scales) == 1
    return QParams(scales[0] if one else scales, grid.type.name, None if one else -grid.scale.dim(), grid.zero_point)


class Environment(dict[fx.Node, fx.Node]):
    """The new node of each old one; a parameter that something still reads is copied when it is asked for."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph

    def __missing__(self, node: fx.Node) -> fx.Node:
        self[node] = self.graph.node_copy(node, self.__getitem__)
        return self[node]


def lower(gm: fx.GraphModule, context: Context) -> int:
    """Replace every quantized operator by its primitives, and remove nodes, modules and parameters that are no longer used."""
    graph = fx.Graph()
    environment = Environment(graph)
    results: dict[fx.Node, Quantized] = {}  # of the nodes that hold quantized tensors
    writing = Writing(gm, graph, context.target.arithmetic, free_name(gm, CONTAINER))
    changes = _forget_gradients(gm)
    with torch.no_grad():
        for node in gm.graph.nodes:
            if not facts.trains_only(node):
                changes += _lower_node(gm, node, writing, environment, results)
    # Parameters of the float model that were turned into constants are no longer read.
    eliminate_dead(graph.nodes, lambda node: facts.is_parameter(node) or (node.target in (*PRIMITIVES, "size") and not node.is_impure()))
    for start, nodes in loops.bodies(graph).items():  # constants are there also where no further step runs
        for node in nodes:
            if node.op == "get_attr":
                start.prepend(node)
    replace_graph(gm, graph)
    # Of the modules and tensors of the float model, copies of those alone stay that the graph reads.
    paths = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    paths.update(gm.meta[CARRIED].modules() if CARRIED in gm.meta else ())
    copies = facts.own_copies({path: facts.resolve(gm, path) for path in sorted(paths) if not path.startswith(f"{writing.container}.")})
    for name in (*gm._modules, *gm._parameters, *gm._buffers):
        if name != writing.container:
            delattr(gm, name)
    for path, value in copies.items():
        facts.attach(gm, path, value)
    return changes


def _lower_node(gm: fx.GraphModule, node: fx.Node, writing: Writing, environment: Environment, results: dict[fx.Node, Quantized]) -> bool:
    """Write the primitives of a quantized operator, or a copy of any other node; return whether it was an operator."""
    module = quantized_operator(gm, node)
    if module is None and operator_of(node) is not DEQUANTIZE:
        if not facts.is_parameter(node):  # most parameters become constants and are read no more
            environment[node] = writing.graph.node_copy(node, environment.__getitem__)
        return False
    operator = DEQUANTIZE if module is None else module.operator
    if module is not None and not module.plain:
        module.output.require()
    whose = quantized_operator(gm, node.args[0]) if module is None else module  # type: ignore[arg-type]
    lowering = GraphLowering(writing, node, module, None if whose is None or whose.plain else whose.output)
    lowering.held = writing.held if module is not None and _repeats(node) else None
    arguments = operator.bind_call(node.args, node.kwargs)
    concrete = _concrete(gm, operator, arguments, environment, results)
    if module is not None and module.factors is not None:
        concrete = module.factors.of(operator, concrete)
        if module.factors.description:
            lowering.note("equalized", module.factors.description)
    if module is not None and module.weight_quantizer.description:
        lowering.note("tuned", module.weight_quantizer.description)
    result = operator.lower(lowering, **concrete)
    if isinstance(result, Quantized) and module is not None and module.plain:
        result = result.value
    lowered = lowering.finish(result, lowering.operation(operator.name, _referring(arguments, environment)))
    if isinstance(lowered, Quantized):
        results[node] = lowered
    environment[node] = lowered.value if isinstance(lowered, Quantized) else lowered
    return True


@torch.no_grad()
def loop_alone(gm: fx.GraphModule, start: fx.Node, shapes: Shapes) -> fx.GraphModule:
    """Return an integer model of a prepared model's loop alone, which takes the integers that the loop reads, and the number of steps.

    It returns what all steps carried at each position, stored integers of shape (steps, …).
    """
    graph, outside = fx.Graph(), [read for read in loops.reads(start) if not facts.is_parameter(read)]
    model = Model(torch.nn.Module(), fx.Graph())
    model.meta["target"] = gm.meta["target"]
    environment, results = Environment(graph), dict[fx.Node, Quantized]()
    writing = Writing(model, graph, gm.meta["target"].arithmetic, CONTAINER, shapes)
    for read in outside:
        grid = quantized_operator(gm, read).output.grid  # type: ignore[union-attr]
        environment[read] = graph.placeholder(read.name)
        facts.set_fact(environment[read], TensorFact(facts.shape_of(read), grid.type.storage))
        set_qparams(environment[read], _described(grid))
        results[read] = Quantized(environment[read], grid, facts.shape_of(read))
    count = graph.placeholder("steps")
    frame = environment[start] = graph.call_function(loops.begin, (count,))
    for node in loops.body(start):
        _lower_node(gm, node, writing, environment, results)
    states = {state.args[2]: state for state in graph.nodes if state.target is loop.state}
    every = [graph.call_function(loop.stack, (states[index].args[0], frame, index, 0, count, False)) for index in sorted(states)]
    for index, stack in zip(sorted(states), every, strict=True):
        facts.set_fact(stack, TensorFact((BatchDim(), *facts.shape_of(states[index])), facts.fact(states[index]).dtype))
        set_qparams(stack, qparams(states[index]))  # type: ignore[arg-type]
    graph.output(tuple(every))
    replace_graph(model, graph)
    return model


loops.ALONE.append(loop_alone)


def _forget_gradients(gm: fx.GraphModule) -> int:
    """Remove the nodes that pass their operand on, and only change gradients."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_") and not facts.is_parameter(node)]
    rules = {node for node in calls if node.op == "call_module" and isinstance(facts.resolve(gm, str(node.target)), GradientRule)}
    stops = [node for node in calls if node in rules or (node.op == "call_function" and node.target in (torch.detach, stopped))]
    for node in stops:
        substitute(node, node.args[0])
    return len(stops)


def _repeats(node: fx.Node) -> bool:
    """Return whether other operators may read the same constants: it reads a shared parameter, or is a step of a recurrence."""
    whole = facts.part(node)
    recurs = whole is not None and whole.composite in OPERATORS_BY_NAME and OPERATORS_BY_NAME[whole.composite].recurs
    return recurs or any(len(read.users) > 1 for read in node.all_input_nodes if facts.is_parameter(read))


def _concrete(
    gm: fx.GraphModule, operator: Any, arguments: dict[str, Any], environment: dict[fx.Node, fx.Node], results: dict[fx.Node, Quantized]
) -> dict[str, Any]:
    """Return the arguments with activations as quantized nodes, parameters as tensors, and other nodes as new nodes."""

    def operand(_: str, value: fx.Node) -> Any:
        if facts.is_parameter(value):
            return facts.parameter_value(gm, value)
        return results[value] if value in results else plainly(environment[value], facts.fact(value).shape)

    def other(value: fx.Node) -> Any:
        return facts.parameter_value(gm, value) if facts.is_parameter(value) else environment[value]

    activations = {name for name in (*operator.operands, "residual") if arguments.get(name) is not None}
    rest = {name: fx.map_arg(value, other) for name, value in arguments.items() if name not in activations}
    operands = map_operands(operator, {name: arguments[name] for name in activations}, operand)
    return {**rest, **operands}


def _referring(arguments: dict[str, Any], environment: dict[fx.Node, fx.Node]) -> dict[str, Any]:
    """Return the arguments with references to the new nodes; parameters, now constants, are left out, or None in a list."""
    plain: dict[str, Any] = {}
    for name, value in arguments.items():
        nodes = facts.nodes_in(value)
        if not any(map(facts.is_parameter, nodes)) or (isinstance(value, list) and not all(map(facts.is_parameter, nodes))):
            plain[name] = facts.own(value, lambda node: None if facts.is_parameter(node) else Reference(environment[node].name))
    return plain


# ---- Kernels --------------------------------------------------------------------------------------------------------
#
# Record on each result node the kernel that may compute it, and the primitives that it covers; the graph is not changed.
#
#     %y_convolution = convolution(%x, …)
#     %y = requantize_real(%y_convolution, …)     →     %y is computed by the kernel "sum of products", with %y_convolution
#
# The kernels that are used are chosen on the machine that runs the model: see `fxquant.kernels.runner`.
def find_kernels(gm: fx.GraphModule, context: Context) -> int:
    """Write the kernel and the other nodes that it computes on every node that a kernel matches."""
    changes = 0
    for node in gm.graph.nodes:
        if node.op != "call_function" or (facts.reads_sizes(node) and node.target is not loop.stack):
            continue
        for kernel in context.kernels:
            match = kernel.match(node)
            if match is not None and not isinstance(match, str):
                covers, results = (tuple(each.name for each in nodes) for nodes in (match.covers, match.results))
                set_kernel(node, kernel.name, covers, results)
                context.say(f"%{node.name}: {kernel.name} of {', '.join(covers)}")
                changes += 1
                break
    return changes

"""Operators become integer primitives, with the weights and scales of this moment as constants.

    %y = quantized.y(%x, %w)     →     %y_convolution = convolution(%x, [integer.y.weight], [integer.y.bias], …)
                                       %y = requantize_fixed(%y_convolution, [integer.y.multiplier], …)

The calls are those the prepared operator makes itself in state VALIDATE; here they are written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.arithmetic import Arithmetic
from fxquant.copying import own_copies
from fxquant.errors import StageViolation
from fxquant.facts import TensorFact
from fxquant.graph import (
    Constant,
    Operation,
    QParams,
    Reference,
    attach,
    fact,
    inherit,
    is_parameter,
    module_path,
    notes,
    parameter_value,
    part,
    qparams,
    resolve,
    set_fact,
    set_operation,
    set_part,
    set_qparams,
    source,
)
from fxquant.lowering import Lowering, Place, Quantized
from fxquant.model import free_name, replace_graph
from fxquant.numerics import WEIGHT_INT8
from fxquant.ops import map_operands, operator_of
from fxquant.ops.boundary import DEQUANTIZE
from fxquant.pipeline import Context
from fxquant.primitives import PRIMITIVES, elementwise, pool, product, resize, shape
from fxquant.proof import Shapes
from fxquant.quantization.prepared import QuantizedOperator
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightQuantizer

ON_THE_OPERANDS_SCALE: frozenset[Any] = frozenset((
    shape.reshape, shape.permute, shape.concatenate, shape.crop, shape.select, shape.expand, shape.tile, shape.pad, pool.max_pool,
    elementwise.clamp, product.maximum, product.minimum, resize.resize_linear,
))  # fmt: skip
CONTAINER = "integer"  # where the constants stand in the integer model


class GraphLowering(Lowering):
    """Writes the primitives of one operator into a graph; the last one takes the operator's name."""

    def __init__(
        self,
        gm: fx.GraphModule,
        graph: fx.Graph,
        node: fx.Node,
        module: QuantizedOperator | None,
        output: Quantizer,
        arithmetic: Arithmetic,
        shapes: Shapes,
        container: str,
    ) -> None:
        weight = WeightQuantizer(WEIGHT_INT8) if module is None else module.weight_quantizer
        super().__init__(node.name, arithmetic, output, None if module is None else module.intermediate, weight)
        self.shares = module is not None and not module.owns_output
        self.gm, self.graph, self.node, self.shapes, self.container = gm, graph, node, shapes, container
        self.made: list[fx.Node] = []
        self.constants: dict[str, str] = {}  # node names by role
        self.scales: dict[str, tuple[float | tuple[float, ...], int | None]] = {}  # of constants, with the axis they run along
        self.between: QParams | None = None  # of what a residual is added to
        self.facts: dict[str, Any] = {}
        self.held: dict[Any, fx.Node] | None = None  # constants by content, of operators whose parameters others read as well

    @property
    def place(self) -> Place:
        return {"at": source(self.node), "module": module_path(self.node)}

    def call(self, primitive: Callable[..., Tensor], *arguments: Any) -> fx.Node:
        made = self.graph.create_node("call_function", primitive, arguments, {}, name=f"{self.name}_{primitive.__name__}")
        inherit(made, self.node, "integer.lower")
        made.meta["origin"] = self.name
        set_fact(made, self.shapes.infer(made))
        self.made.append(made)
        return made

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> fx.Node:
        if role in self.constants:
            raise StageViolation(
                f"two constants of one operator have the role {role!r}",
                node=self.node,
                because="the second would take the place of the first, which its primitives still read",
                remedy="this is a defect of the operator's `lower`; give every constant a role of its own",
            )
        held = value.detach().to(dtype).contiguous()
        key = (dtype, held.shape, held.cpu().numpy().tobytes()) if self.held is not None else None
        if self.held is not None and key in self.held:
            self.constants[role] = self.held[key].name
            return self.held[key]
        path = f"{self.container}.{self.name}.{role}"
        attach(self.gm, path, held.clone())
        # Naming the node here spares the search for a name that `graph.get_attr` makes.
        made = inherit(self.graph.create_node("get_attr", path, name=f"{self.name}_{role}"), self.node, "integer.lower")
        set_fact(made, TensorFact(tuple(value.shape), dtype))
        self.constants[role] = made.name
        if self.held is not None:
            self.held[key] = made
        return made

    def describe(self, role: str, scale: Tensor, axis: int | None = None) -> None:
        scales = tuple(scale.detach().flatten().tolist())
        self.scales[role] = (scales[0], None) if len(scales) == 1 else (scales, axis)

    def result(self, exact: Callable[[], Any], real: Callable[[], Tensor], to: Quantizer | None = None) -> Quantized:
        result = super().result(exact, real, to)
        if to is not None and to is self.intermediate:
            self.between = QParams(float(to.scale), to.dtype.name)
        return result

    def holds(self, value: fx.Node, quantizer: Quantizer) -> fx.Node:
        set_qparams(value, QParams(float(quantizer.scale), quantizer.dtype.name))
        return value

    def operation(self, name: str, arguments: dict[str, Any]) -> Operation:
        """What was lowered, as a fact."""
        constants = {role: Constant(node, *self.scales[role]) for role, node in self.constants.items() if role in self.scales}
        return Operation(name, arguments, constants, self.between)

    def note(self, key: str, value: object) -> None:
        self.facts[key] = value

    def finish(self, result: Quantized, operation: Operation) -> Quantized:
        """The result, on a node that takes the operator's name and facts."""
        node: fx.Node = result.value
        for inner in self.made:
            _inherit_scale(inner)
        if node in self.made:
            if PRIMITIVES[node.target].kind == "quantized":  # type: ignore[index]
                scales = tuple(result.scale.flatten().tolist())
                one = len(scales) == 1
                set_qparams(node, QParams(scales[0] if one else scales, result.dtype.name, None if one else -result.scale.dim()))
            node._rename(self.name)
            notes(node).update(self.facts)
            set_operation(node, operation)
            node.meta["fused"] = self.node.meta.get("fused", ())
            known_part = part(self.node)
            if known_part is not None:
                set_part(node, known_part)
        known = fact(node)
        return Quantized(node, result.scale, result.dtype, known.shape if isinstance(known, TensorFact) else ())


def _inherit_scale(node: fx.Node) -> None:
    """A primitive that only moves or limits integers leaves them on the scale they are on."""
    operand = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
    known = qparams(operand) if isinstance(operand, fx.Node) else None
    if qparams(node) is None and known is not None and known.axis is None and node.target in ON_THE_OPERANDS_SCALE:
        set_qparams(node, known)


class Environment(dict[fx.Node, fx.Node]):
    """The new node of each old one; a parameter that something still reads is copied when it is asked for."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph

    def __missing__(self, node: fx.Node) -> fx.Node:
        self[node] = self.graph.node_copy(node, self.__getitem__)
        return self[node]


def lower(gm: fx.GraphModule, context: Context) -> int:
    """Every quantized operator is replaced by its primitives; what nothing uses any more is gone."""
    graph = fx.Graph()
    environment = Environment(graph)
    results: dict[fx.Node, Quantized] = {}  # of the nodes that hold quantized tensors
    outputs: dict[fx.Node, Quantizer] = {}  # and their quantizers
    shapes = Shapes()
    container = free_name(gm, CONTAINER)
    held: dict[Any, fx.Node] = {}
    changes = 0
    with torch.no_grad():
        for node in gm.graph.nodes:
            module = resolve(gm, str(node.target)) if node.op == "call_module" else None
            if isinstance(module, QuantizedOperator):
                module.output.require()
                lowering = GraphLowering(gm, graph, node, module, module.output, context.target.arithmetic, shapes, container)
                arguments = module.operator.bind_call(node.args, node.kwargs)
                lowering.held = held if any(len(read.users) > 1 for read in node.all_input_nodes if is_parameter(read)) else None
                outputs[node] = module.output
            elif operator_of(node) is DEQUANTIZE:
                lowering = GraphLowering(gm, graph, node, None, outputs[node.args[0]], context.target.arithmetic, shapes, container)
                arguments = DEQUANTIZE.bind_call(node.args, node.kwargs)
            else:
                if not is_parameter(node):  # most parameters become constants and are read no more
                    environment[node] = graph.node_copy(node, environment.__getitem__)
                continue
            operator = module.operator if isinstance(module, QuantizedOperator) else DEQUANTIZE
            result = operator.lower(lowering, **_concrete(gm, operator, arguments, environment, results))
            results[node] = lowering.finish(result, lowering.operation(operator.name, _referring(arguments, environment)))
            environment[node] = results[node].value
            changes += 1
    _eliminate_unused(graph)
    replace_graph(gm, graph)
    _drop_unused(gm, container)
    return changes


def _concrete(
    gm: fx.GraphModule, operator: Any, arguments: dict[str, Any], environment: dict[fx.Node, fx.Node], results: dict[fx.Node, Quantized]
) -> dict[str, Any]:
    """The arguments with activations as quantized nodes, parameters as tensors, and other nodes as new nodes."""

    def operand(name: str, value: fx.Node) -> Quantized | Tensor:
        if is_parameter(value):
            constant: Tensor = parameter_value(gm, value)
            return constant
        return results[value]

    def other(value: fx.Node) -> Any:
        return parameter_value(gm, value) if is_parameter(value) else environment[value]

    activations = {name for name in (*operator.operands, "residual") if arguments.get(name) is not None}
    rest = {name: fx.map_arg(value, other) for name, value in arguments.items() if name not in activations}
    taken = map_operands(operator, {name: arguments[name] for name in activations}, operand)
    return {**rest, **taken}


def _referring(arguments: dict[str, Any], environment: dict[fx.Node, fx.Node]) -> dict[str, Any]:
    """The arguments with references to the new nodes; parameters, which have become constants, are left out."""
    plain: dict[str, Any] = {}

    def refer(value: Any) -> Any:
        return Reference(environment[value].name) if isinstance(value, fx.Node) else value

    for name, value in arguments.items():
        nodes: list[fx.Node] = []
        fx.map_arg(value, nodes.append)
        if not any(is_parameter(node) for node in nodes):
            plain[name] = fx.node.map_aggregate(value, refer) if nodes else value
    return plain


def _eliminate_unused(graph: fx.Graph) -> None:
    """Parameters of the float model that were turned into constants are no longer read."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (is_parameter(node) or (node.op == "call_function" and node.target in PRIMITIVES)):
            graph.erase_node(node)


def _drop_unused(gm: fx.GraphModule, container: str) -> None:
    """Keep of the float model only what the graph reads, as copies; the constants, made just now, are all read."""
    paths = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    kept = own_copies({path: resolve(gm, path) for path in sorted(paths) if not path.startswith(container + ".")})
    for name in (*gm._modules, *gm._parameters, *gm._buffers):
        if name != container:
            delattr(gm, name)
    for path, value in kept.items():
        attach(gm, path, value)

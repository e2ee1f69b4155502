"""Float operators as ONNX, by PyTorch's own exporter: those that stay in float, one region at a time, and single functions."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.backends.onnx.exportable import replacement
from fxquant.backends.onnx.sizes import emit_size, sizes_for_primitives
from fxquant.backends.onnx.translations import built_once
from fxquant.errors import ExportError
from fxquant.facts import BATCH_SIZES, BatchDim, TensorFact
from fxquant.graph import attach, fact, qparams, resolve
from fxquant.primitives import PRIMITIVES

OLDEST_OPSET = 18  # that PyTorch's exporter writes in every version


class FloatRegions:
    """The maximal runs of consecutive float nodes of an integer graph, each exported when its first node is met.

    Consecutive in the graph's order means that no value leaves a region and comes back.
    """

    def __init__(self, integer: fx.GraphModule, opset: int) -> None:
        self.integer, self.opset = integer, opset
        self.opsets: list[onnx.OperatorSetIdProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.exported: dict[Any, onnx.ModelProto] = {}  # of regions that differ in nothing but names
        self.region_of: dict[fx.Node, list[fx.Node]] = {}
        self.sizes = sizes_for_primitives(integer.graph)  # no regions: each is written by itself
        current: list[fx.Node] = []
        for node in integer.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.op == "call_function" and node.target in PRIMITIVES:
                current = []
                continue
            if node in self.sizes:
                continue
            current.append(node)
            self.region_of[node] = current

    def emit(self, node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> None:
        """Append the region that begins with this node; nothing for any later node of it. A size is appended by itself."""
        if node in self.sizes:
            values[node] = emit_size(node, emitter, values)
            return
        region = self.region_of[node]
        if node is not region[0]:
            return
        inside = set(region)
        inputs = list(dict.fromkeys(o for n in region for o in n.all_input_nodes if o not in inside and o.op != "get_attr"))
        outputs = [n for n in region if any(user not in inside for user in n.users)]
        key = _key(self.integer, region, inputs, outputs)
        if key is None or key not in self.exported:
            self.exported[key] = self._export(region, inputs, outputs)
        exported = self.exported[key]
        self._append(exported, emitter, [values[i] for i in inputs], {output.name: fact(output) for output in outputs}, outputs[0])
        for output in outputs:
            values[output] = output.name

    def emit_function(
        self,
        node: fx.Node,
        function: Callable[..., Tensor],
        arguments: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        emitter: Any,
        real: Callable[[str], str],
    ) -> str:
        """Append a float function whose result a node of the graph holds as integers; returns the name of the real value.

        Nodes among the arguments stand for real values, which `real` gives by their names; `parameters` are further arguments. Raises
        ExportError if the exporter cannot write the function.
        """
        operands: list[fx.Node] = []
        fx.map_arg(dict(arguments), operands.append)
        facts = {operand: _real(operand) for operand in operands}
        index = {operand: position for position, operand in enumerate(facts)}
        key = (
            None
            if parameters
            else repr((function, fx.map_arg(dict(arguments), index.__getitem__), [str(known) for known in facts.values()]))
        )
        if key is None or key not in self.exported:
            self.exported[key] = self._export_function(node, function, arguments, parameters, facts)
        name = f"{node.name}/float"
        known = _real(node)
        self._append(self.exported[key], emitter, [real(operand.name) for operand in facts], {name: known}, node)
        return name

    def _export_function(
        self,
        node: fx.Node,
        function: Callable[..., Tensor],
        arguments: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        facts: dict[fx.Node, TensorFact],
    ) -> onnx.ModelProto:
        graph, root = fx.Graph(), torch.nn.Module()
        environment = {operand: graph.placeholder(operand.name) for operand in facts}
        for name, value in parameters.items():
            root.register_buffer(f"held_{name}", value)
        held = {name: graph.create_node("get_attr", f"held_{name}") for name in parameters}
        graph.output((graph.call_function(function, (), {**fx.map_arg(dict(arguments), environment.__getitem__), **held}),))
        try:
            with _quiet():
                model = self._exported(fx.GraphModule(root, graph).eval(), list(facts.values()), 1)
        except Exception as error:
            raise ExportError(
                "an operator cannot be written in style 'qdq'",
                node=node,
                because=f"there is no ONNX form in its record, and of its float function PyTorch's ONNX exporter says: {_reason(error)}",
                remedy="export with style='exact', or keep this operator in float",
            ) from error
        self._check_opset(model, node, "an operator")
        return model

    def _export(self, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> onnx.ModelProto:
        """The region as an ONNX model. Raises ExportError, about the node that cannot be written where one alone cannot."""
        try:
            with _quiet():
                model = self._written(region, inputs, outputs)
        except Exception as error:
            found = self._culprit(region)
            raise ExportError(
                "an operator that stays in float cannot be exported",
                node=found or region[0],
                because=("" if found else "together with those behind it: ") + f"PyTorch's ONNX exporter says: {_reason(error)}",
                remedy="replace the operator, or cut the model before it",
            ) from error
        self._check_opset(model, region[0], "an operator that stays in float")
        return model

    def _check_opset(self, model: onnx.ModelProto, node: fx.Node, what: str) -> None:
        written = next(entry.version for entry in model.opset_import if entry.domain == "")
        if written != self.opset:  # the conversion says nothing if it cannot
            raise ExportError(
                f"{what} cannot be exported with opset={self.opset}",
                node=node,
                because=f"PyTorch's ONNX exporter writes opset {written}, and cannot convert it",
                remedy=f"export with opset={written} or later",
            )

    def _part(self, graph: fx.Graph) -> fx.GraphModule:
        """A model of this graph, which holds only what the graph reads."""
        root = torch.nn.Module()
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                held = resolve(self.integer, str(node.target))
                # The exporter reads attributes by name, so names that mean something else in Python do not reach it.
                node.target = "held_" + re.sub(r"\W", "_", str(node.target))
                attach(root, node.target, held)
        return fx.GraphModule(root, graph).eval()

    def _culprit(self, region: list[fx.Node]) -> fx.Node | None:
        """The first node of a region that cannot be exported by itself."""
        for node in region:
            inputs = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
            if not all(isinstance(fact(operand), TensorFact | int | BatchDim) for operand in inputs):
                continue  # an element of a sequence: what made that is looked at
            try:
                with _quiet():
                    self._written([node], inputs, [node])
            except Exception:  # whatever it is, it is said of the region
                return node
        return None

    def _written(self, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> onnx.ModelProto:
        graph = fx.Graph()
        environment = {node: graph.placeholder(node.name) for node in inputs}
        for node in region:
            for operand in node.all_input_nodes:
                if operand.op == "get_attr" and operand not in environment:
                    environment[operand] = graph.node_copy(operand)
            copied = environment[node] = graph.node_copy(node, environment.__getitem__)
            other = replacement(node)
            if other is not None:
                copied.op, copied.target = "call_function", other
        graph.output(tuple(environment[node] for node in outputs))
        return self._exported(self._part(graph), [fact(node) for node in inputs], len(outputs))

    def _exported(self, part: fx.GraphModule, inputs: list[Any], outputs: int) -> onnx.ModelProto:
        """A model with inputs of these facts and so many outputs, by PyTorch's exporter. Raises whatever that raises."""
        program: Any = torch.onnx.export(
            part,
            tuple(_example(known) for known in inputs),
            dynamo=True,
            opset_version=max(self.opset, OLDEST_OPSET),
            dynamic_shapes=tuple(_dynamic(known) for known in inputs),
            verbose=False,
            input_names=[f"region_input_{i}" for i in range(len(inputs))],
            output_names=[f"region_output_{i}" for i in range(outputs)],  # no value inside has such a name
        )
        if self.opset < OLDEST_OPSET:
            from onnxscript.version_converter import convert_version  # takes a second, and is seldom wanted

            convert_version(program.model, self.opset, fallback=True)
        model: onnx.ModelProto = program.model_proto
        for entry in model.opset_import:
            if entry.domain == "" and entry.version > self.opset and _unchanged(model, entry.version, self.opset):
                entry.version = self.opset
        return model

    def _append(self, model: onnx.ModelProto, emitter: Any, inputs: list[str], outputs: dict[str, Any], node: fx.Node) -> None:
        """Add a model's nodes, with its inputs and outputs, of which the facts are given, under these names."""
        renamed = dict(zip((i.name for i in model.graph.input), inputs, strict=True))
        renamed.update({o.name: output for o, output in zip(model.graph.output, outputs, strict=True)})

        def name(value: str) -> str:
            return renamed.setdefault(value, f"{next(iter(outputs))}/{value}") if value else value

        copied = onnx.GraphProto()
        copied.CopyFrom(model.graph)
        _rename(copied, name)
        emitter.initializers.extend(copied.initializer)
        emitter.nodes.extend(copied.node)
        known = {(f.domain, f.name, f.overload): f for f in self.functions}
        for function in model.functions:
            other = known.get((function.domain, function.name, function.overload))
            if other is None:
                self.functions.append(function)
            elif other != function:
                raise ExportError(
                    "operators that stay in float cannot be exported together",
                    node=node,
                    because=f"PyTorch's ONNX exporter writes two different functions named {function.name}",
                    remedy="replace one of the operators, or cut the model between them",
                )
        domains = {o.domain for o in self.opsets} | {""}
        self.opsets.extend(helper.make_opsetid(o.domain, o.version) for o in model.opset_import if o.domain not in domains)
        emitter.types.update({name: known.dtype if isinstance(known, TensorFact) else torch.int64 for name, known in outputs.items()})


def _unchanged(model: onnx.ModelProto, written: int, wanted: int) -> bool:
    """Whether every operator of a model is in an older opset what it is in the one that was written."""

    def since(operator: str, opset: int) -> int:
        try:
            found: int = onnx.defs.get_schema(operator, opset).since_version
        except onnx.defs.SchemaError:  # it came later
            return 0
        return found

    nodes = model.graph.node
    plain = not model.functions and all(node.domain == "" and not any(a.HasField("g") for a in node.attribute) for node in nodes)
    return plain and all(since(node.op_type, written) == since(node.op_type, wanted) for node in nodes)


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause, where the exporter says what it stumbled over."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _rename(graph: onnx.GraphProto, name: Callable[[str], str]) -> None:
    """Give every value and node of a graph, and of the graphs inside of its nodes, which see its values, another name."""
    for tensor in graph.initializer:
        tensor.name = name(tensor.name)
    for info in (*graph.input, *graph.output, *graph.value_info):
        info.name = name(info.name)
    for node in graph.node:
        node.input[:] = [name(value) for value in node.input]
        node.output[:] = [name(value) for value in node.output]
        node.name = name(node.name)
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                _rename(inner, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's remarks about its own insides are kept from the user; its errors are not.

    One thread exports at a time: what is set here, and what the exporter sets, all threads see.
    """
    with _exporting, built_once():
        yield from _levels_raised()


_exporting = threading.Lock()


def _levels_raised() -> Iterator[None]:
    loggers = {logging.getLogger(name): level for name, level in (("torch.onnx", logging.ERROR), ("onnxscript", logging.CRITICAL))}
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def _key(integer: fx.GraphModule, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Any:
    """What determines a region's export besides names; None for a region that reads parameters or buffers."""
    index = {node: position for position, node in enumerate([*inputs, *region])}
    modules = {node: resolve(integer, str(node.target)) for node in region if node.op == "call_module"}
    settings = {node: _settings(module) for node, module in modules.items()}
    if None in settings.values() or any(o not in index for node in region for o in node.all_input_nodes):
        return None
    calls = [
        (node.op, settings.get(node, node.target), fx.map_arg((node.args, node.kwargs), lambda operand: index[operand])) for node in region
    ]
    return repr([calls, [str(fact(node)) for node in inputs], [index[node] for node in outputs]])


def _settings(module: torch.nn.Module) -> Any:
    """Its class and attributes, all that a module computes by; None for one that has tensors, modules or hooks, too."""
    if any((module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks)):
        return None
    return type(module), sorted((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training")


def _example(value: Any) -> Tensor | int:
    if isinstance(value, TensorFact):
        return torch.zeros(value.at(BATCH_SIZES[0]), dtype=value.dtype, device="cpu")
    return value.at(BATCH_SIZES[0]) if isinstance(value, BatchDim) else int(value)


def _dynamic(value: Any) -> Any:
    if not isinstance(value, TensorFact):
        return torch.export.Dim.DYNAMIC if isinstance(value, BatchDim) else None
    return {index: torch.export.Dim.DYNAMIC for index, size in enumerate(value.shape) if isinstance(size, BatchDim)} or None


def _real(node: fx.Node) -> TensorFact:
    """The real value of a node of an integer graph: float32 where it is a quantized tensor, else what it is."""
    known: TensorFact = fact(node)
    return known if qparams(node) is None else replace(known, dtype=torch.float32)

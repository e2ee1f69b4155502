"""Float operators as ONNX by PyTorch's own exporter: operators that stay in float, one region at a time, and single functions."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.backends.onnx.agreement import agrees
from fxquant.backends.onnx.direct import Direct, Plan, is_size
from fxquant.backends.onnx.exportable import replacement
from fxquant.backends.onnx.independent_parts import split
from fxquant.backends.onnx.opsets import by_the_older_exporter, dynamic_of, example_of, opset_of, unchanged
from fxquant.backends.onnx.picks import emit_pick, is_pick
from fxquant.backends.onnx.quiet import quiet
from fxquant.backends.onnx.regions import Region, region_of
from fxquant.backends.onnx.sizes import emit_size, sizes_for_primitives
from fxquant.errors import ExportError
from fxquant.ir.facts import BatchDim, TensorFact
from fxquant.ir.graph import attach, fact, is_python, resolve
from fxquant.ir.integer import qparams
from fxquant.primitives import PRIMITIVES

OLDEST_OPSET = 18  # that every version of PyTorch's exporter writes


class FloatRegions:
    """The maximal runs of consecutive float nodes of an integer graph, exported together when the first of all nodes is met.

    One call of PyTorch's exporter serves a model, because most of a call's time does not depend on what it exports.
    """

    def __init__(self, integer: fx.GraphModule, opset: int) -> None:
        self.integer, self.opset = integer, opset
        self.opsets: list[onnx.OperatorSetIdProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.exported: dict[Any, onnx.ModelProto] = {}  # by the key of regions
        self.tried = False  # whether exporting them together was tried
        self.sizes = sizes_for_primitives(integer.graph)  # not in regions: each is written by itself
        runs: list[list[fx.Node]] = [[]]
        home: dict[fx.Node, list[fx.Node]] = {}
        for node in integer.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.op == "call_function" and node.target in PRIMITIVES:
                runs.append([])
            elif node not in self.sizes and not is_pick(node):
                # One of several results belongs to the node that returns them: only tensors pass from one region to another.
                whole = node.args[0] if node.target is operator.getitem else None
                home[node] = home.get(whole, runs[-1])  # type: ignore[arg-type]
                home[node].append(node)
        self.regions = {run[0]: region_of(integer, run) for run in runs if run}
        self.direct = Direct(integer, opset)
        self.plans = self._plans()

    def _plans(self) -> dict[fx.Node, list[tuple[fx.Node, Plan]] | None]:
        """Return, by each region's first node, how it is written without the exporter, if it can be and none of its sizes is used."""
        found = {first: self.direct.plans(region.nodes, region.outputs) for first, region in self.regions.items()}
        planned = {node for first, region in self.regions.items() if found[first] is not None for node in region.nodes}
        for first, region in reversed(self.regions.items()):
            if any(is_size(node) and not planned.issuperset(node.users) for node in region.outputs):
                found[first] = None
                planned.difference_update(region.nodes)
        return found

    def emit(self, node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> None:
        """Append the region that begins with this node; later nodes of it append nothing. A size or a pick is appended by itself."""
        if node in self.sizes:
            values[node] = emit_size(node, emitter, values)
            return
        if is_pick(node):
            emit_pick(node, emitter, values)
            return
        region = self.regions.get(node)
        if region is None:
            return
        for value in filter(is_pick, region.inputs):
            emit_pick(value, emitter, values)
        plans = self.plans[node]
        if plans is not None:
            self.direct.emit(plans, region.outputs, emitter, values)
            return
        if region.key not in self.exported:
            self._export_together()
        if region.key not in self.exported:
            self.exported[region.key] = self._export(region)
        outputs = region.outputs
        named = {output.name: fact(output) for output in outputs}
        self._append(self.exported[region.key], emitter, [values[i] for i in region.inputs], named, outputs[0])
        for output in outputs:
            values[output] = output.name

    def _export_together(self) -> None:
        """Fill `exported` with all regions' models by one call of the exporter; if that fails, leave it and do not try again."""
        left = {region.key: region for first, region in self.regions.items() if self.plans[first] is None}
        if self.tried or len(left) < 2 or self.opset < OLDEST_OPSET:  # in an old opset each model is compared by itself
            return
        self.tried = True
        graph = fx.Graph()
        results = [self._copied(graph, region, f"part{index}_") for index, region in enumerate(left.values())]
        graph.output(tuple(itertools.chain(*results)))
        facts = [fact(node) for region in left.values() for node in region.inputs]
        counts = [(len(region.inputs), len(region.outputs)) for region in left.values()]
        try:
            with quiet():
                program = self._program(self._part(graph), facts, sum(outputs for _, outputs in counts))
                models = [self._at_opset(model) for model in split(program, counts)]
        except Exception:  # exporting them one by one reports the operator
            return
        self.exported.update(zip(left, models, strict=True))

    def emit_function(
        self,
        node: fx.Node,
        function: Callable[..., Tensor],
        arguments: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        emitter: Any,
        real: Callable[[str], str],
    ) -> str:
        """Append a float function whose result a node of the graph holds as integers; return the name of the float value.

        Nodes among the arguments stand for their float values, whose names `real` returns; `parameters` are further arguments. Raises
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
            with quiet():
                model = self._exported(fx.GraphModule(root, graph).eval(), list(facts.values()), 1)
        except Exception as error:
            raise ExportError(
                "an operator cannot be written in style 'qdq'",
                node=node,
                because=f"its record has no ONNX form, and PyTorch's ONNX exporter says of its float function: {_reason(error)}",
                remedy="export with style='exact', or keep this operator in float",
            ) from error
        self._check_opset(model, node, "an operator")
        return model

    def _export(self, region: Region) -> onnx.ModelProto:
        """Return the region as an ONNX model. Raises ExportError, about the node that cannot be written if a single one cannot."""
        try:
            with quiet():
                model = self._written(region)
        except Exception as error:
            found = self._culprit(region.nodes)
            raise ExportError(
                "an operator that stays in float cannot be exported",
                node=found or region.nodes[0],
                because=("" if found else "together with those after it: ") + f"PyTorch's ONNX exporter says: {_reason(error)}",
                remedy="call it on the model's inputs or outputs instead, outside of forward"
                if found is not None and is_python(found)
                else "replace the operator, or cut the model before it",
            ) from error
        self._check_opset(model, region.nodes[0], "an operator that stays in float")
        return model

    def _check_opset(self, model: onnx.ModelProto, node: fx.Node, what: str) -> None:
        written = opset_of(model)
        if written != self.opset:  # the conversion does not report a failure
            raise ExportError(
                f"{what} cannot be exported with opset={self.opset}",
                node=node,
                because=f"PyTorch's ONNX exporter writes opset {written}, and cannot convert it",
                remedy=f"export with opset={written} or later",
            )

    def _part(self, graph: fx.Graph) -> fx.GraphModule:
        """Return a model of this graph, which holds only what the graph reads."""
        root = torch.nn.Module()
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                held = resolve(self.integer, str(node.target))
                # The exporter reads attributes by name, so names that have another meaning in Python must not reach it.
                node.target = "held_" + re.sub(r"\W", "_", str(node.target))
                attach(root, node.target, held)
        return fx.GraphModule(root, graph).eval()

    def _culprit(self, region: list[fx.Node]) -> fx.Node | None:
        """Return the first node of a region that cannot be exported by itself."""
        for node in region:
            inputs = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
            if is_python(node) and fact(node) is None:
                return node
            if not all(isinstance(fact(operand), TensorFact | int | BatchDim) for operand in inputs):
                continue  # an element of a sequence: the node that made the sequence is examined
            try:
                with quiet():
                    self._written(Region([node], inputs, [node], node))
            except Exception:  # the region's error reports it
                return node
        return None

    def _written(self, region: Region) -> onnx.ModelProto:
        graph = fx.Graph()
        graph.output(tuple(self._copied(graph, region)))
        return self._exported(self._part(graph), [fact(node) for node in region.inputs], len(region.outputs))

    def _copied(self, graph: fx.Graph, region: Region, prefix: str = "") -> list[fx.Node]:
        """Append placeholders for the region's inputs and copies of its nodes to a graph; return the region's outputs in it."""
        environment = {node: graph.placeholder(prefix + node.name) for node in region.inputs}
        for node in region.nodes:
            for operand in node.all_input_nodes:
                if operand.op == "get_attr" and operand not in environment:
                    environment[operand] = graph.node_copy(operand)
            copied = environment[node] = graph.node_copy(node, environment.__getitem__)
            other = replacement(node)
            if other is not None:
                copied.op, copied.target = "call_function", other
        return [environment[node] for node in region.outputs]

    def _exported(self, part: fx.GraphModule, inputs: list[Any], outputs: int) -> onnx.ModelProto:
        """Return a model with inputs of these facts and this number of outputs, by PyTorch's exporter. Raises whatever that raises."""
        model = self._at_opset(self._program(part, inputs, outputs))
        if self.opset < OLDEST_OPSET and not (opset_of(model) == self.opset and agrees(model, part, inputs)):
            older = by_the_older_exporter(part, inputs, outputs, self.opset)
            if older is not None and agrees(older, part, inputs):
                return older
            if opset_of(model) == self.opset:
                raise ValueError(f"its form in opset {self.opset} does not compute the same")
        return model

    def _program(self, part: fx.GraphModule, inputs: list[Any], outputs: int) -> onnx.ModelProto:
        """Return the exported model in the opset that the exporter writes."""
        program: Any = torch.onnx.export(
            part,
            tuple(example_of(known) for known in inputs),
            dynamo=True,
            opset_version=max(self.opset, OLDEST_OPSET),
            dynamic_shapes=tuple(dynamic_of(known) for known in inputs),
            verbose=False,
            input_names=[f"region_input_{i}" for i in range(len(inputs))],
            output_names=[f"region_output_{i}" for i in range(outputs)],  # no inner value has such a name
        )
        if self.opset < OLDEST_OPSET:
            from onnxscript.version_converter import convert_version  # the import takes a second, and is seldom needed

            convert_version(program.model, self.opset, fallback=True)
        model: onnx.ModelProto = program.model_proto
        return model

    def _at_opset(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the model, declared with the wanted opset if its meaning is unchanged in that."""
        for entry in model.opset_import:
            if entry.domain == "" and entry.version > self.opset and unchanged(model, entry.version, self.opset):
                entry.version = self.opset
        return model

    def _append(self, model: onnx.ModelProto, emitter: Any, inputs: list[str], outputs: dict[str, Any], node: fx.Node) -> None:
        """Add a model's nodes under these names of its inputs and outputs; the facts of the outputs are given."""
        renamed = dict(zip((i.name for i in model.graph.input), inputs, strict=True))
        renamed.update({o.name: output for o, output in zip(model.graph.output, outputs, strict=True)})

        def name(value: str) -> str:
            return renamed.setdefault(value, f"{next(iter(outputs))}/{value}") if value else value

        copied = onnx.GraphProto()
        copied.CopyFrom(model.graph)
        rename_values(copied, name)
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


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause, in which the exporter names the problem."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def rename_values(graph: onnx.GraphProto, name: Callable[[str], str]) -> None:
    """Rename every value and node of a graph, and of the graphs inside its nodes, which see its values."""
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
                rename_values(inner, name)


def _real(node: fx.Node) -> TensorFact:
    """Return the float value's fact for a node of an integer graph: float32 if it is quantized, otherwise unchanged."""
    known: TensorFact = fact(node)
    return known if qparams(node) is None else replace(known, dtype=torch.float32)

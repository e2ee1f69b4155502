"""Float operators as ONNX by PyTorch's own exporter: operators that stay in float, one region at a time, and single functions."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import math
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import onnx
import onnx.inliner
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.backends.onnx.replacements import replacement
from fxquant.backends.onnx.runtime import RUNTIMES, Runner, values_read
from fxquant.errors import ExportError
from fxquant.ir import graph as facts
from fxquant.ir import loops
from fxquant.ir.graph import BATCH_SIZES, POINTS, BatchDim, TensorFact, at_point, attach, fact, is_python, nodes_in, resolve
from fxquant.ir.integer import qparams
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.primitives import PRIMITIVES
from fxquant.support import log_levels

OLDEST_OPSET = 18  # that every version of PyTorch's exporter writes


class FloatRegions:
    """The maximal runs of consecutive float nodes of an integer graph, exported together when the first of all nodes is met.

    One call of PyTorch's exporter serves a model, because most of a call's time does not depend on what it exports.
    """

    def __init__(self, integer: fx.GraphModule, opset: int) -> None:
        self.integer, self.opset = integer, opset
        self.opsets: list[onnx.OperatorSetIdProto] = []
        self.sizes = sizes_for_primitives(integer.graph)  # not in regions: each is written by itself
        runs: list[list[fx.Node]] = [[]]
        home: dict[fx.Node, list[fx.Node]] = {}
        for node in integer.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.op == "call_function" and (node.target in PRIMITIVES or node.target in (loops.begin, loops.end)):
                runs.append([])
            elif node not in self.sizes and not is_pick(node):
                # One of several results belongs to the node that returns them: only tensors pass from one region to another.
                whole = node.args[0] if node.target is operator.getitem else None
                home[node] = home.get(whole, runs[-1])  # type: ignore[arg-type]
                home[node].append(node)
        self.regions = {run[0]: region_of(integer, run) for run in runs if run}

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
        if region.key not in self.exported:
            self.exported[region.key] = self._export(region)
        named = {output.name: fact(output) for output in region.outputs}
        self._append(self.exported[region.key], emitter, [values[i] for i in region.inputs], named, region.outputs[0])
        values.update((output, output.name) for output in region.outputs)

    @cached_property
    def exported(self) -> dict[Any, onnx.ModelProto]:
        """Return all regions' models, by their keys, from one call of the exporter; nothing if that fails."""
        pending = {region.key: region for region in self.regions.values()}
        if len(pending) < 2 or self.opset < OLDEST_OPSET:  # in an old opset each model is compared by itself
            return {}
        graph = fx.Graph()
        results = [self._copied(graph, region, f"part{index}_") for index, region in enumerate(pending.values())]
        graph.output(tuple(itertools.chain(*results)))
        facts = [fact(node) for region in pending.values() for node in region.inputs]
        counts = [(len(region.inputs), len(region.outputs)) for region in pending.values()]
        try:
            with quiet():
                program = self._program(self._part(graph), facts, sum(outputs for _, outputs in counts))
                models = [self._at_opset(model) for model in split(program, counts)]
        except Exception:  # exporting them one by one reports the operator
            return {}
        return dict(zip(pending, models, strict=True))

    def emit_function(
        self, node: fx.Node, function: Callable[..., Tensor], arguments: Mapping[str, Any], parameters: Mapping[str, Tensor], emitter: Any,
        real: Callable[[str], str],
    ) -> str:  # fmt: skip
        """Append a float function whose result a node of the graph holds as integers; return the name of the float value.

        Nodes among the arguments stand for their float values, whose names `real` returns; `parameters` are further arguments. Raises
        ExportError if the exporter cannot write the function.
        """
        facts = {operand: _real(operand) for operand in nodes_in(dict(arguments))}
        index = {operand: position for position, operand in enumerate(facts)}
        placed = fx.map_arg(dict(arguments), index.__getitem__)
        key = None if parameters else repr((function, placed, [str(each) for each in facts.values()]))
        if key is None or key not in self.exported:
            self.exported[key] = self._export_function(node, function, arguments, parameters, facts)
        name = f"{node.name}/float"
        self._append(self.exported[key], emitter, [real(operand.name) for operand in facts], {name: _real(node)}, node)
        return name

    def _export_function(
        self, node: fx.Node, function: Callable[..., Tensor], arguments: Mapping[str, Any], parameters: Mapping[str, Tensor],
        facts: dict[fx.Node, TensorFact],
    ) -> onnx.ModelProto:  # fmt: skip
        graph, root = fx.Graph(), torch.nn.Module()
        environment = {operand: graph.placeholder(operand.name) for operand in facts}
        for name, value in parameters.items():
            root.register_buffer(f"held_{name}", value)
        tensors = {name: graph.create_node("get_attr", f"held_{name}") for name in parameters}
        graph.output((graph.call_function(function, (), {**fx.map_arg(dict(arguments), environment.__getitem__), **tensors}),))
        try:
            with quiet():
                model = self._exported(fx.GraphModule(root, graph).eval(), list(facts.values()), 1)
        except Exception as error:
            because = f"its record has no ONNX form, and PyTorch's ONNX exporter says of its float function: {_reason(error)}"
            remedy = "export with style='exact', or keep this operator in float"
            raise ExportError("an operator cannot be written in style 'qdq'", node=node, because=because, remedy=remedy) from error
        self._check_opset(model, node, "an operator")
        return model

    def _export(self, region: Region) -> onnx.ModelProto:
        """Return the region as an ONNX model. Raises ExportError, about the node that cannot be written if a single one cannot."""
        try:
            with quiet():
                model = self._written(region)
        except Exception as error:
            culprit = self._culprit(region.nodes)
            raise ExportError(
                "an operator that stays in float cannot be exported",
                node=culprit or region.nodes[0],
                because=("" if culprit else "together with those after it: ") + f"PyTorch's ONNX exporter says: {_reason(error)}",
                remedy="call it on the model's inputs or outputs instead, outside of forward"
                if culprit is not None and is_python(culprit)
                else "replace the operator, or cut the model before it",
            ) from error
        self._check_opset(model, region.nodes[0], "an operator that stays in float")
        return model

    def _check_opset(self, model: onnx.ModelProto, node: fx.Node, what: str) -> None:
        written = opset_of(model)
        if written != self.opset:  # the conversion does not report a failure
            because = f"PyTorch's ONNX exporter writes opset {written}, and cannot convert it"
            remedy = f"export with opset={written} or later"
            raise ExportError(f"{what} cannot be exported with opset={self.opset}", node=node, because=because, remedy=remedy)

    def _part(self, graph: fx.Graph) -> fx.GraphModule:
        """Return a model of this graph, with only the modules and tensors that the graph reads."""
        root = torch.nn.Module()
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                resolved = resolve(self.integer, str(node.target))
                # The exporter reads attributes by name, so names that have another meaning in Python must not reach it.
                node.target = "held_" + re.sub(r"\W", "_", str(node.target))
                attach(root, node.target, resolved)
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
            if (other := replacement(node)) is not None:
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
        if any(map(facts.varies_beyond_batch, inputs)) and not agrees(model, part, inputs, POINTS[-1]):
            raise ValueError("its form does not compute the same for other sizes than the example's; fix these with fxq.at_sizes")
        return model

    def _program(self, part: fx.GraphModule, inputs: list[Any], outputs: int) -> onnx.ModelProto:
        """Return the exported model in the opset that the exporter writes."""
        program: Any = torch.onnx.export(
            part,
            tuple(example_of(each) for each in inputs),
            dynamo=True,
            opset_version=max(self.opset, OLDEST_OPSET),
            dynamic_shapes=tuple(dynamic_of(each) for each in inputs),
            verbose=False,
            input_names=[f"region_input_{i}" for i in range(len(inputs))],
            output_names=[f"region_output_{i}" for i in range(outputs)],  # no inner value has such a name
        )
        if self.opset < OLDEST_OPSET:
            from onnxscript.version_converter import convert_version  # the import takes a second, and is seldom needed

            convert_version(program.model, self.opset, fallback=True)
        model: onnx.ModelProto = program.model_proto
        return onnx.inliner.inline_local_functions(model) if model.functions else model

    def _at_opset(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the model, declared with the wanted opset if its meaning is unchanged in that."""
        for entry in model.opset_import:
            if entry.domain == "" and entry.version > self.opset and unchanged(model, entry.version, self.opset):
                entry.version = self.opset
        return model

    def _append(self, model: onnx.ModelProto, emitter: Any, inputs: list[str], outputs: dict[str, Any], node: fx.Node) -> None:
        """Add a model's nodes with these names of its inputs and outputs; `outputs` maps names to facts."""
        renamed = dict(zip((i.name for i in model.graph.input), inputs, strict=True))
        renamed.update({o.name: output for o, output in zip(model.graph.output, outputs, strict=True)})

        def name(value: str) -> str:
            return renamed.setdefault(value, f"{next(iter(outputs))}/{value}") if value else value

        copied = copy.deepcopy(model.graph)
        rename_values(copied, name)
        emitter.initializers.extend(copied.initializer)
        emitter.nodes.extend(copied.node)
        domains = {o.domain for o in self.opsets} | {""}
        self.opsets.extend(helper.make_opsetid(o.domain, o.version) for o in model.opset_import if o.domain not in domains)
        emitter.types.update({name: each.dtype if isinstance(each, TensorFact) else torch.int64 for name, each in outputs.items()})


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
    node_fact: TensorFact = fact(node)
    return node_fact if qparams(node) is None else replace(node_fact, dtype=torch.float32)


# ---- what determines the export of a region --------------------------------------------------------------------------
class Region(NamedTuple):
    """A run of consecutive float nodes of an integer graph: no value leaves it and returns."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    key: Any  # what determines its export besides names; the first node itself if the region reads parameters or buffers


def region_of(integer: fx.GraphModule, nodes: list[fx.Node]) -> Region:
    """Return the region of these nodes, with its inputs (nodes outside that it reads) and outputs (nodes that others read)."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in inside and o.op != "get_attr"))
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    key = _key(integer, nodes, inputs, outputs)
    return Region(nodes, inputs, outputs, nodes[0] if key is None else key)


def _key(integer: fx.GraphModule, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Any:
    """Return the key that determines a region's export besides names; None for a region that reads parameters or buffers."""
    index = {node: position for position, node in enumerate([*inputs, *region])}
    modules = {node: resolve(integer, str(node.target)) for node in region if node.op == "call_module"}
    settings = {node: settings_of(module) for node, module in modules.items()}
    if None in settings.values() or any(o not in index for node in region for o in node.all_input_nodes):
        return None
    calls = [(node.op, settings.get(node, node.target), fx.map_arg((node.args, node.kwargs), index.__getitem__)) for node in region]
    return repr([calls, [str(fact(node)) for node in inputs], [index[node] for node in outputs]])


def settings_of(module: torch.nn.Module) -> Any:
    """Return a module's class and attributes if they alone determine its results; None if it has tensors, modules or hooks."""
    if any((module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks)):
        return None
    return type(module), sorted((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training")


# ---- PyTorch's exporter, called without its remarks and by one thread at a time --------------------------------------
_built: dict[Any, Any] = {}


@contextmanager
def built_once() -> Iterator[None]:
    """Within the context, `torch.onnx.export` takes a copy of the table that an earlier export built for the same opset.

    The exporter has no argument for the table, so the method that builds it is replaced during the context. If a version of PyTorch has
    no such method, nothing happens. One thread at a time may be inside.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        original = ONNXRegistry.__dict__["from_torchlib"]
    except (ImportError, KeyError):  # it is not PyTorch's public interface
        yield
        return

    def from_torchlib(cls: type, *arguments: Any, **keywords: Any) -> Any:
        key = (cls, arguments, tuple(sorted(keywords.items())))
        if key not in _built:
            _built[key] = original.__func__(cls, *arguments, **keywords)
        table = copy.copy(_built[key])
        table.functions = {operator: list(functions) for operator, functions in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporter's remarks about its internals from the user; its errors stay visible.

    One thread exports at a time, because the settings changed here and by the exporter are visible to all threads. It may do so
    again within: the exporter imports modules of the user's, which may export when they are imported.
    """
    levels = {"torch.onnx": logging.ERROR, "onnxscript": logging.CRITICAL, **dict.fromkeys(_OF_THE_EXPORTER, logging.CRITICAL)}
    with _exporting, built_once(), log_levels(levels), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints whole graphs of what it cannot export
            yield


_exporting = threading.RLock()
_OF_THE_EXPORTER = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.export", "torch._export", "torch._logging")


# ---- inputs of these facts for the exporter --------------------------------------------------------------------------
def example_of(value: Any) -> Tensor | int:
    """Return the exporter's example for an input of this fact."""
    if isinstance(value, TensorFact):
        return torch.zeros(value.at(BATCH_SIZES[0]), dtype=value.dtype, device="cpu")
    return value.at(BATCH_SIZES[0]) if isinstance(value, BatchDim) else int(value)


def dynamic_of(value: Any) -> Any:
    """Return the dimensions of an input that depend on the batch, in the form that torch.export takes."""
    if not isinstance(value, TensorFact):
        return torch.export.Dim.DYNAMIC if isinstance(value, BatchDim) else None
    return {index: torch.export.Dim.DYNAMIC for index, size in enumerate(value.shape) if isinstance(size, BatchDim)} or None


# ---- opsets, and the exporter for old ones ---------------------------------------------------------------------------
def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset of ONNX's own operators in a model."""
    return int(next(entry.version for entry in model.opset_import if entry.domain == ""))


def unchanged(model: onnx.ModelProto, written: int, older: int) -> bool:
    """Return whether every operator of a model has the same definition in an older opset as in the one that was written."""

    def since(operator: str, opset: int) -> int:
        try:
            return int(onnx.defs.get_schema(operator, opset).since_version)
        except onnx.defs.SchemaError:  # the operator was added later
            return 0

    nodes = model.graph.node
    plain = all(node.domain == "" and not any(a.HasField("g") for a in node.attribute) for node in nodes)
    return plain and all(since(node.op_type, written) == since(node.op_type, older) for node in nodes)


def by_the_older_exporter(part: fx.GraphModule, inputs: list[Any], outputs: int, opset: int) -> onnx.ModelProto | None:
    """Return a model of a module with inputs of these facts, by PyTorch's older exporter, which writes old opsets.

    Return None if the exporter fails, or PyTorch has it no more.
    """
    names = [f"region_input_{i}" for i in range(len(inputs))], [f"region_output_{i}" for i in range(outputs)]
    written = io.BytesIO()
    try:
        torch.onnx.export(
            part,
            tuple(torch.as_tensor(example_of(each)) for each in inputs),
            written,  # type: ignore[arg-type]  # this exporter takes a buffer
            dynamo=False,
            opset_version=opset,
            input_names=names[0],
            output_names=names[1],
            dynamic_axes={name: list(axes) for name, each in zip(names[0], inputs, strict=True) if (axes := dynamic_of(each))},
        )
    except Exception:  # the reported reason is that of the newer exporter
        return None
    return onnx.load_from_string(written.getvalue())


# ---- whether a model computes what PyTorch does, which translation between opsets may change -------------------------
LARGEST_DEVIATION = 1e-3  # relative to the largest value of an output: float32 sums in another order differ by some millionths of it


def apart(actual: Tensor, expected: Tensor) -> float:
    """Return the difference of two results relative to the largest expected value; infinity if shape or dtype differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    if expected.numel() == 0:
        return 0.0
    largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return (actual.double() - expected.double()).nan_to_num(0.0).abs().max().item() / max(largest, 1e-30)


def agrees(model: onnx.ModelProto, part: fx.GraphModule, inputs: Sequence[Any], point: int = 0) -> bool:
    """Return whether onnxruntime and a module agree up to rounding on random inputs of these facts, at a point of sizes."""
    generator = torch.Generator().manual_seed(0)
    samples = [random_value(each, generator, point) for each in inputs]
    try:
        with torch.no_grad():
            results = part(*samples)
        expected = [torch.as_tensor(value) for value in (results if isinstance(results, tuple | list) else [results]) if value is not None]
        feeds = dict(zip([info.name for info in model.graph.input], (torch.as_tensor(value) for value in samples), strict=True))
        _, level, threads = RUNTIMES[0]
        actual = list(Runner(copy.deepcopy(model), level, threads)(feeds).values())
    except (ExportError, ValueError):
        return False
    return len(actual) == len(expected) and all(apart(one, other) <= LARGEST_DEVIATION for one, other in zip(actual, expected, strict=True))


def random_value(described: Any, generator: torch.Generator, point: int = 0) -> Any:
    """Return a random tensor of this fact at a point: normal values, integers 0 or 1; for a size, the integer itself."""
    if not isinstance(described, TensorFact):
        return at_point(described, point)
    size = [at_point(each, point) for each in described.shape]
    if not described.dtype.is_floating_point:
        return torch.randint(0, 2, size, generator=generator, device="cpu").to(described.dtype)
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(described.dtype)


# ---- one model for each of several independent parts -----------------------------------------------------------------
def split(model: onnx.ModelProto, parts: Sequence[tuple[int, int]]) -> list[onnx.ModelProto]:
    """Return one model for each pair (number of inputs, number of outputs), in the order of the model's own inputs and outputs.

    Constants that several parts read are in each of them; the order of nodes is kept. Unlike `onnx.utils.extract_model`, this searches
    the graphs inside nodes, and does not need shapes. Raises ValueError if a part reads an input of another.
    """
    models: list[onnx.ModelProto] = []
    maker = {name: index for index, node in enumerate(model.graph.node) for name in node.output if name}
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    model_inputs = {entry.name for entry in model.graph.input}
    inputs, outputs = iter(model.graph.input), iter(model.graph.output)
    for many, results in parts:
        mine, ends = [next(inputs) for _ in range(many)], [next(outputs) for _ in range(results)]
        own, used, tensors = {entry.name for entry in mine}, set[int](), dict[str, onnx.TensorProto]()
        waiting = [entry.name for entry in ends]
        while waiting:
            name = waiting.pop()
            if name in own:
                continue
            if name in initializers:
                tensors[name] = initializers[name]
            elif name in model_inputs:
                raise ValueError(f"a part reads {name!r}, which is an input of another")
            elif maker[name] not in used:
                used.add(maker[name])
                waiting.extend(values_read(model.graph.node[maker[name]]))
        graph = helper.make_graph([model.graph.node[index] for index in sorted(used)], model.graph.name, mine, ends, list(tensors.values()))
        models.append(helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version))
    return models


# ---- sizes that depend on the batch, from which primitives make shapes, as int64 -------------------------------------
#
# Float intermediate values are doubles, as in Python.

# For sizes, which are never negative, ONNX's integer division equals Python's.
_ARITHMETIC: dict[Callable[..., Any], str] = {
    operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul", operator.floordiv: "Div", min: "Min", max: "Max",
}  # fmt: skip
_REAL: dict[Callable[..., Any], str] = {operator.truediv: "Div", math.sqrt: "Sqrt", float: "Identity"}
_ROUNDED: dict[Callable[..., Any], str] = {int: "", math.trunc: "", round: "Round", math.floor: "Floor", math.ceil: "Ceil"}


def sizes_for_primitives(graph: fx.Graph) -> set[fx.Node]:
    """Return the sizes, and sums and products of sizes, that only primitives read, and no float operator."""
    sizes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        readers = node.users
        if _is_size(node) and readers and all(reader in sizes or reader.target in (*PRIMITIVES, loops.begin) for reader in readers):
            sizes.add(node)
    return sizes


def _is_size(node: fx.Node) -> bool:
    node_fact = fact(node)
    if node.kwargs or not (node_fact is None or isinstance(node_fact, int | BatchDim)):
        return False
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 2 and isinstance(node.args[1], int)
    if node.op != "call_function" or not all(isinstance(each, fx.Node | int | float) for each in node.args):
        return False
    if node_fact is None and not all(fact(each) is None or isinstance(fact(each), int | BatchDim) for each in node.all_input_nodes):
        return False
    known_form = node.target in _ARITHMETIC or node.target in _REAL or (node.target in _ROUNDED and len(node.args) == 1)
    return known_form and (node_fact is not None or node.target is not operator.floordiv)


def emit_size(node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> str:
    """Append the nodes that compute a size; return the name of its value, a scalar of int64, or of double for an intermediate value."""
    if node.op == "call_method":
        tensor: Any = node.args[0]
        return str(emitter.node("Gather", emitter.node("Shape", values[tensor]), emitter.constant(node.args[1], torch.int64), axis=0))

    def named(value: Any) -> str:
        if isinstance(value, fx.Node):
            return str(values[value])
        return str(emitter.constant(value, torch.float64 if isinstance(value, float) else torch.int64))

    def as_dtype(value: str, dtype: torch.dtype) -> str:
        return value if emitter.dtype(value) == dtype else str(emitter.node("Cast", value, to=dtype))

    target: Any = node.target
    operands = [named(value) for value in node.args]
    if target in _ROUNDED:
        real = emitter.dtype(operands[0]) == torch.float64 and _ROUNDED[target]
        return as_dtype(emitter.node(_ROUNDED[target], *operands) if real else operands[0], torch.int64)
    if target in _REAL or any(emitter.dtype(value) == torch.float64 for value in operands):
        operands = [as_dtype(value, torch.float64) for value in operands]
    return str(emitter.node((_REAL if target in _REAL else _ARITHMETIC)[target], *operands))


# ---- selections of one index of a dimension: one step of a sequence --------------------------------------------------
#
# The steps of a recurrence differ only in this index. The selections are left out of float regions, so that the regions of all steps are
# equal, and exported once.
def is_pick(node: fx.Node) -> bool:
    """Return whether a node selects one index of one dimension from the result of a primitive, or from an input."""
    if node.op != "call_function" or node.target is not getitem or node.kwargs or len(node.args) != 2:
        return False
    operand, index = node.args
    if not isinstance(operand, fx.Node) or not isinstance(index, list | tuple):
        return False
    readable = operand.op == "placeholder" or (operand.op == "call_function" and operand.target in PRIMITIVES)
    numbers = [each for each in index if type(each) is int]
    return readable and len(numbers) == 1 and all(each == WHOLE for each in index if type(each) is not int)


def emit_pick(node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> None:
    """Append the selection under the node's name, unless it exists."""
    if node in values:
        return
    operand, index = node.args
    axis = next(position for position, each in enumerate(index) if type(each) is int)  # type: ignore[arg-type]
    read = str(values[operand])  # type: ignore[index]
    number = emitter.constant(torch.tensor(index[axis], dtype=torch.int64, device="cpu"))  # type: ignore[index]
    values[node] = emitter.named(emitter.node("Gather", read, number, axis=axis), node.name)

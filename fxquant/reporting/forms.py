"""The public functions that look at models beside each other: `verify` compares their bits, `record` gives their values.

`form_of` opens whatever people pass: a float model, a graph at any stage, the path of an ONNX file.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from fxquant import backends
from fxquant.analysis import recording
from fxquant.analysis.layers import layers
from fxquant.analysis.recording import DYNAMIC, OUTPUTS, QUANTIZED, Facts, Form, GraphForm, Values, Wanted, float_outputs, real_values
from fxquant.analysis.report import Deviation, DeviationReport, Difference, FloatDifference, Report, different, differing
from fxquant.errors import ConfigurationError, ExportError, Interrupted
from fxquant.frontend import trace
from fxquant.ir import loops
from fxquant.ir.graph import TensorFact, argument_name, fact, is_deployed, sizes_of_input, source, stage_of
from fxquant.ir.integer import QParams
from fxquant.options import Options
from fxquant.prepared.batches import as_batches, bad_batch, example_inputs, length, model_inputs
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.sizes import with_integer_loops
from fxquant.prepared.stage import called
from fxquant.quantization.spec import State
from fxquant.serialization import load_file
from fxquant.support.arguments import PATH, accepted, checked
from fxquant.support.progress import progress


class OnnxForm(Form):
    """An exported file in one runtime; the values named in `feed` are taken from `given` instead of being computed."""

    def __init__(self, onnx_model: Any, runtime: str, feed: Sequence[str] = ()) -> None:
        self.onnx, self.runtime, self.feed = onnx_model, runtime, feed
        self.label, self.input_names = runtime, list(onnx_model.input_names)
        graph = onnx_model.model.graph
        shown = {info.name for info in (*graph.value_info, *graph.output)}
        kinds = {name: recording.PRIMITIVE_KINDS[entry["kind"]] for name, entry in onnx_model.tensors.items()}
        self.tensors = {name: kind for name, kind in kinds.items() if onnx_model.value(name) in shown}
        self.runners: dict[tuple[str, ...], Any] = {}
        self.given: Values = {}

    @cached_property
    def facts(self) -> Mapping[str, Facts]:
        from fxquant.backends.onnx import runtime

        made_of = {entry["tensor"]: entry["name"] for entry in self.onnx.metadata["inputs"] if entry.get("tensor")}
        operators, provenance = runtime.operators(self.onnx), self.onnx.metadata.get("provenance", {})
        facts = {}
        for name, kind in self.tensors.items():
            entry = self.onnx.tensors[name]
            if kind == QUANTIZED and "scale" in entry:
                operator = "quantize" if name in made_of else operators.get(self.onnx.value(name), "")
                grid = described_grid(entry, self._zero_point(name) if entry.get("storage") == entry["dtype"] else 0)
                fused = tuple(provenance.get(name, {}).get("fused", ()))
                facts[name] = Facts(operator, grid=grid, fused=fused, reads=made_of.get(name, ""))
        return facts

    @cached_property
    def exponents(self) -> Mapping[str, Tensor]:
        exponents = {name: entry.get("exponents") for name, entry in self.onnx.metadata.get("provenance", {}).items()}
        return {name: torch.tensor(value, device="cpu", dtype=torch.int64) for name, value in exponents.items() if value}

    def inputs(self, batch: Any, index: int) -> list[Any]:
        """Return the inputs of a batch: the first tensors, or a dict's tensors of the inputs' names."""
        names = self.input_names
        tensors = [batch.get(name) for name in names] if isinstance(batch, Mapping) else pytree.tree_leaves(batch)[: len(names)]
        if len(tensors) < len(names) or not all(isinstance(value, Tensor) for value in tensors):
            because = f"the inputs of {self.onnx.path} are {', '.join(names)}"
            raise bad_batch(index, because, "yield a tensor for each, in this order or by name")
        return tensors

    def run(self, inputs: Sequence[Any], selection: Wanted) -> Values:
        names = selection.among(self.tensors)
        feeds = dict(zip(self.input_names, inputs, strict=True))
        feeds.update({self.onnx.value(name): self._stored(name) for name in self.feed})
        results = self._runner(names)(feeds) if names else {}
        values = {name: self._shown(name, results[value], selection.real) for name in names if (value := self.onnx.value(name)) in results}
        if OUTPUTS not in selection.kinds:
            return values
        # Exposing inner values keeps the runtime from some fusions, so the outputs come from the file as it is.
        plain = self._runner([])(feeds)
        return values | {f"output {index}": plain[name] for index, name in enumerate(self.onnx.output_names) if name in plain}

    def _shown(self, name: str, value: Tensor, real: bool) -> Tensor:
        entry = self.onnx.tensors[name]
        if self.tensors[name] in (recording.FLOAT, DYNAMIC):
            return value
        integers = value.to(torch.int64) - self._zero_point(name)
        return real_values(integers, described_grid(entry, 0)) if real and "scale" in entry else integers

    def step(self, name: str | None) -> Tensor | None:
        """Return the float value of one step of a tensor, shaped to broadcast; None where it has no scale."""
        entry = self.onnx.tensors.get(name, {})
        return real_values(torch.ones((), dtype=torch.float32, device="cpu"), described_grid(entry, 0)) if "scale" in entry else None

    def _zero_point(self, name: str) -> int:
        return int(self.onnx.tensors[name].get("zero_point", 0))

    def _stored(self, name: str) -> Tensor:
        """Return a given value as the file stores it; booleans and integers of float operators are unchanged."""
        if "storage" not in self.onnx.tensors.get(name, {}):
            return self.given[name]
        return (self.given[name] + self._zero_point(name)).to(_STORAGE[self.onnx.tensors[name]["storage"]])

    def _runner(self, expose: Sequence[str]) -> Any:
        key = tuple(expose)
        if key not in self.runners:
            self.runners[key] = self.onnx.runner(self.runtime, [*map(self.onnx.value, expose)], [*map(self.onnx.value, self.feed)])
        return self.runners[key]


_STORAGE = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}


def described_grid(entry: Mapping[str, Any], zero_point: int) -> QParams:
    """Return the grid of a tensor that the metadata of an ONNX file describes."""
    scale = entry["scale"]
    return QParams(tuple(scale) if isinstance(scale, list) else scale, entry["dtype"], entry.get("axis"), zero_point)


def form_of(model: Any, batch: Any, state: State | str | None, beside: Any = None) -> Form:
    """Return the form of a float model, a graph, a path of one or of an ONNX file. Raises ConfigurationError for anything else.

    `beside` is the other form of a comparison: if it is a graph, a float model is traced with its batch dimensions.
    """
    model = _opened(model)
    if isinstance(model, str | os.PathLike):
        form = _file_form(model, state, None)
        if form.onnx.io != "float":
            because = f"it was exported with io={form.onnx.io!r}, and takes integers where other forms take float tensors"
            raise ConfigurationError(f"{form.onnx.path} cannot be compared", because=because, remedy="export with io='float'")
        return form
    if not isinstance(model, nn.Module | torch.export.ExportedProgram):
        because = "it is neither a model, nor a graph of one, nor the path of a saved model or an ONNX file"
        remedy = "pass a float model, the result of fxq.trace, fxq.prepare or fxq.convert, or a path"
        raise ConfigurationError(f"a {type(model).__name__} cannot be compared", because=because, remedy=remedy)
    graph = model
    if not (isinstance(model, fx.GraphModule) and (stage_of(model) == "PREPARED" or is_deployed(model))):
        inputs = list(beside.graph.find_nodes(op="placeholder")) if isinstance(beside, fx.GraphModule) else []
        example = _example(model, batch, len(inputs)) if isinstance(model, nn.Module) else batch
        graph = trace(model, example, options=Options(dynamic_shapes=_dynamic_shapes(example, inputs)))
    assert isinstance(graph, fx.GraphModule)
    return _graph_form(graph, state)


def _file_form(path: str | os.PathLike[str], state: State | str | None, runtime: str | None) -> OnnxForm:
    from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel

    _refuse("state", state, "an ONNX file has no states")
    return OnnxForm(OnnxModel(path), runtime or RUNTIME_NAMES[0])


def _graph_form(graph: fx.GraphModule, state: State | str | None) -> GraphForm:
    if stage_of(graph) != "PREPARED":
        _refuse("state", state, "only prepared models have states")
    return GraphForm(graph, None if state is None else State(state))


def _refuse(name: str, value: Any, because: str) -> None:
    """Raise ConfigurationError for an argument that has no meaning, unless it is None."""
    if value is not None:
        raise ConfigurationError(f"{name}={value!r} means nothing here", because=because, remedy=f"leave {name} out, or pass None")


def _tensors(nest: Any) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(nest))


def _example(model: nn.Module, batch: Any, count: int) -> Any:
    """Return a float model's arguments from a batch: the required ones, and optional ones until they hold `count` tensors."""
    example = example_inputs(model, batch)
    if isinstance(example, tuple) and isinstance(batch, list | tuple) and _tensors(example) < count:
        longer = (tuple(batch[:number]) for number in range(len(example) + 1, len(batch) + 1))
        return next((arguments for arguments in longer if _tensors(arguments) == count), example)
    return example


def _dynamic_shapes(example: Any, inputs: Sequence[fx.Node]) -> Any:
    """Return `dynamic_shapes` for example inputs, from the sizes of a graph's inputs that vary; None if that is dimension 0 of each."""
    marks = {argument_name(node): _varying(node) for node in inputs}
    arguments = (example,) if isinstance(example, Tensor) else example
    if not any(mark and set(mark) != {0} for mark in marks.values()) or _tensors(arguments) != len(marks):
        return None
    named = isinstance(arguments, Mapping) and marks.keys() == arguments.keys()
    order = iter(marks[str(name)] for name in arguments) if named else iter(marks.values())
    return pytree.tree_map(lambda leaf: next(order) if isinstance(leaf, Tensor) else None, arguments)


def _varying(node: fx.Node) -> dict[int, Any] | None:
    """Return the entry of `dynamic_shapes` for an input."""
    node_fact = fact(node)
    axis = node_fact.batch_axis if isinstance(node_fact, TensorFact) else None
    others = {dim: Dim(name, min=smallest, max=largest) for dim, (name, smallest, largest, _) in sizes_of_input(node).items()}
    return {**({} if axis is None else {axis: "batch"}), **others} or None


def saved_model(path: str | os.PathLike[str]) -> fx.GraphModule:
    """Return the model in a file that `save` wrote. Raises ExportError if it holds none."""
    loaded = load_file(path, backends.get)
    if not isinstance(loaded, fx.GraphModule):
        raise ExportError(f"{path} holds no model", because="it holds observations, not a graph", remedy="pass a file with a saved model")
    return loaded


def _opened(model: Any) -> Any:
    """Return the saved model at a path with the suffix .fxq; anything else is returned as it is."""
    return saved_model(model) if isinstance(model, str | os.PathLike) and Path(model).suffix.lower() == ".fxq" else model


COMPARED = Wanted.of(QUANTIZED, DYNAMIC, OUTPUTS)
IN_DEPTH = Wanted.of(QUANTIZED, DYNAMIC, recording.ACCUMULATORS, OUTPUTS)


def exact_form(model: Any) -> GraphForm:
    """Return the form of a model object. Raises ConfigurationError if it is neither prepared nor integer."""
    if isinstance(model, fx.GraphModule) and (is_deployed(model) or stage_of(model) == "PREPARED"):
        return GraphForm(model, State.VALIDATE)
    because = "it is neither a prepared model, nor an integer model, nor the path of a saved model or an ONNX file"
    remedy = "pass the results of fxq.prepare, fxq.convert or fxq.export_onnx"
    raise ConfigurationError(f"{type(model).__name__} cannot be verified", because=because, remedy=remedy)


def check_same_model(left: GraphForm, opened: Any) -> None:
    """Raise ExportError if a file cannot be compared with a model: another model's, or one that takes integers."""
    if opened.io != "float":
        because = f"it was exported with io={opened.io!r}, and takes integers where the model takes float tensors"
        remedy = "export with io='float'; the inner nodes of both files are the same"
        raise ExportError(f"{opened.path} cannot be verified", because=because, remedy=remedy)
    sizes = (sum(node.op == "placeholder" for node in left.model.graph.nodes), len(recording.returned(left.model)))
    counts = (len(opened.input_names), len(opened.output_names))
    if is_deployed(left.model):
        names = [layer.name for layer in layers(left.model) if layer.grid is not None]
    else:
        names = [name for name, operator in quantized_operators(left.model).items() if operator.owns_output]
    inside = {node.name for nodes in loops.bodies(left.model.graph).values() for node in nodes}  # of which files show nothing
    missing = [name for name in names if name not in opened.tensors and name not in inside]
    if sizes != counts or missing:
        because = f"it has no {', '.join('%' + name for name in missing[:5])}{' …' if len(missing) > 5 else ''}"
        if sizes != counts:
            because = f"it has {counts[0]} inputs and {counts[1]} outputs, and this model has {sizes[0]} and {sizes[1]}"
        remedy = "pass the file that fxq.export_onnx wrote of this model"
        raise ExportError(f"{opened.path} is the file of another model", because=because, remedy=remedy)


def walk(
    a: Form, others: Sequence[Form], batches: Iterable[list[Tensor]], handed: Sequence[str] = ()
) -> Iterator[tuple[list[Tensor], Values, Form, Values]]:
    """Yield for each batch and each other form: the inputs, the compared tensors of `a`, the other form and its tensors.

    The tensors named by `handed` are compared as well, and a file is given what its `feed` names.
    """
    for inputs in batches:
        values = a.run(inputs, replace(COMPARED, names=frozenset(handed)))
        for b in others:
            if isinstance(b, OnnxForm):
                b.given = values
            yield inputs, values, b, b.run(inputs, COMPARED)


def compare(
    a: GraphForm, others: Sequence[Form], batches: Iterable[list[Tensor]], integer: fx.GraphModule | None, report: Report,
    whole: OnnxForm | None = None,
) -> Iterator[None]:  # fmt: skip
    """Compare the bits of a form with others' on batches, adding to the report; stops looking deeper once a difference is located.

    The outputs that float operators compute must be equal where PyTorch computes both; those of a file are measured. `whole` is the file
    as it runs on its own, and the report counts its flips: differences after float operators, and in outputs that they compute.
    A step of the iteration is one batch in one of the other forms.
    """
    report.pairs += [f"{a.label} = {b.label}" for b in others]
    floats, handed = float_outputs(a.model), recording.crossings(a.model)
    for inputs, values, b, right in walk(a, others, batches, handed):
        measured = floats if isinstance(b, OnnxForm) else set()
        shared = [name for name in values if name in right]
        report.names.update(shared)
        report.elements += sum(values[name].numel() for name in shared)
        for name in sorted(measured):
            report.floats.setdefault(name, FloatDifference(name)).add(values[name], right[name])
        apart = sum(differing(values[name], right[name]) for name in shared if name not in measured)
        report.mismatches += apart
        if apart and report.first is None:
            exact = {name: value for name, value in a.run(inputs, IN_DEPTH).items() if name not in measured}
            report.first = _locate(exact, b.run(inputs, IN_DEPTH), (a.label, b.label), integer)
        yield
        if whole is not None and b is others[-1]:
            alone = whole.run(inputs, COMPARED)
            report.flips += sum(differing(values[name], alone[name]) for name in (*handed, *floats) if name in alone)


def measure(a: Form, others: Sequence[OnnxForm], batches: Iterable[list[Tensor]], report: DeviationReport) -> Iterator[None]:
    """Add the distance of the outputs of a file in style "qdq" from the model's; a step is one batch in one of the file's runtimes."""
    for _, expected, b, actual in walk(a, others, batches):
        assert isinstance(b, OnnxForm)
        if b.label not in report.outputs:
            report.pairs.append(f"{a.label} ≈ {b.label}")
            report.outputs[b.label] = [Deviation(entry["name"], b.step(entry.get("tensor"))) for entry in b.onnx.metadata["outputs"]]
        for index, output in enumerate(report.outputs[b.label]):
            output.add(expected[f"output {index}"], actual[f"output {index}"])
        outputs = [output for runtime in report.outputs.values() for output in runtime]
        report.names.update(output.name for output in outputs)
        report.elements, report.mismatches = (sum(getattr(each, name) for each in outputs) for name in ("elements", "differing"))
        yield


def _locate(left: Values, right: Values, labels: tuple[str, str], integer: fx.GraphModule | None) -> Difference | None:
    nodes = {node.name: node for node in integer.graph.nodes} if integer is not None else {}
    shared = [name for name in left if name in right]
    name = next((name for name in shared if differing(left[name], right[name])), None)
    if name is None:
        return None
    one, other, node = left[name], right[name], nodes.get(name)
    apart, equal = different(one, other), shared[: shared.index(name)]
    comparable = one.shape == other.shape and one.dtype == other.dtype and not one.is_complex()
    index = tuple(torch.nonzero(apart)[0].tolist()) if comparable else ()
    values = (float(one[index]), float(other[index])) if comparable else (float("nan"), float("nan"))
    operands = tuple(_compared_operands(node, set(shared))) if node is not None else ()
    operator, line = ("value", "") if node is None or integer is None else (called(integer, node), source(node))
    inputs_equal = all(each in equal or (each in nodes and nodes[each].op == "placeholder") for each in operands)
    return Difference(name, operator, line, operands, index, values, labels, int(apart.sum()), inputs_equal)


def _compared_operands(node: fx.Node, compared: Set[str]) -> Iterator[str]:
    """Yield the nearest values before a node that both forms show, or that are inputs of the model."""
    for operand in node.all_input_nodes:
        if operand.name in compared or operand.op == "placeholder":
            yield operand.name
        elif operand.op != "get_attr":
            yield from _compared_operands(operand, compared)


Batches = Iterable[Any]
PROGRAMS = (".bin", ".hbm")  # files of the vendor's compiler


@checked()
def verify(first: Any, second: Any, batches: Batches, *, runtime: str | None = None, show_progress: bool | None = None) -> Report:
    """Compare two forms of a model bit for bit: prepared, integer, or the path of a saved model, an ONNX file or a BPU program.

    An ONNX file is run with all optimisations, with none, with one thread and two, and by the reference evaluator. With `runtime` it is run
    in that alone: one of these four ("onnxruntime", "onnxruntime, 2 threads", "onnxruntime, no optimisation", "reference"), or
    "openvino", "tvm", "iree" or "litert", extras of this package, with the settings that keep bits.
    Inputs may be NaN and infinite. An integer model is run with its primitives and with its kernels.
    Every quantized tensor is compared, not only the outputs, byte for byte: 0.0 is not -0.0. If float
    operators lie between integer segments, each segment is fed from PyTorch and must be equal; elements that differ because of
    float operators, in later segments or in float outputs, are counted in `flips`, and `floats` holds the error of such outputs.

    The report is true if something was compared and nothing differed, so never for no batches; `mismatches` counts
    differing elements; `first` locates the first.
    A .bin that `compile_horizon` made is run in the vendor's simulator, a row of a batch at a time: every BPU program in it is given the
    integers that the integer model has at its inputs, and the integers at its outputs are compared. Operators that run on the CPU before,
    between and after the programs are not compared; the report's `given` and `unseen` name them. The first difference is located inside
    of the programs, too. Raises ConfigurationError if the tool is not installed, and CompilationError if it fails.

    A file in style "qdq" is not exact by nature: its outputs are measured, and the `DeviationReport` is never true.

    A KeyboardInterrupt is raised as `Interrupted`, whose `result` is the report of what was compared until then.
    """
    first, second = _opened(first), _opened(second)
    if isinstance(first, str | os.PathLike):
        first, second = second, first
    if isinstance(first, str | os.PathLike):
        because = "inputs, and where a difference is, are known from the graph of a model"
        remedy = "pass the integer model that one of them was exported from, or its file: fxq.save(integer, 'model.fxq')"
        raise ConfigurationError("two exported files cannot be verified against each other", because=because, remedy=remedy)
    left, report = exact_form(first), Report()
    all_batches = as_batches(batches)
    inputs: Iterable[list[Any]] = (model_inputs(left.model, batch, index, finite=False) for index, batch in enumerate(all_batches))
    inputs = list(inputs) if isinstance(all_batches, Sequence) else inputs  # what is there is checked before anything is run
    integer = next((model for model in (first, second) if isinstance(model, fx.GraphModule) and is_deployed(model)), None)
    whole: OnnxForm | None = None
    others: Sequence[Form]
    if not isinstance(second, str | os.PathLike) or Path(second).suffix in PROGRAMS:
        _refuse("runtime", runtime, "only ONNX files are run in one")
    if not isinstance(second, str | os.PathLike):
        others = [exact_form(second), *recording.kernel_forms(first, second)]
    elif Path(second).suffix in PROGRAMS:
        others = [_simulated(left, Path(second), report)]
    else:
        from fxquant.backends.onnx.export import STYLES
        from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, RUNTIME_NAMES, OnnxModel

        opened = OnnxModel(accepted("verify", "path", second, PATH))
        if is_deployed(first) and loops.bodies(first.graph):
            left = exact_form(with_integer_loops(first))
        check_same_model(left, opened)
        mine = left.model.meta["target"].name
        targets = (mine, opened.target) if opened.target not in (mine, "") else None
        if opened.style in STYLES and not STYLES[opened.style].exact:
            deviations = DeviationReport(targets=targets)
            files = [OnnxForm(opened, name, []) for name in (MEASURED_RUNTIMES if runtime is None else [runtime])]
            _complete(measure(left, files, inputs, deviations), deviations, length(all_batches, None), len(files), show_progress)
            return deviations
        report.targets, handed = targets, recording.crossings(left.model)
        others = [OnnxForm(opened, runtime or RUNTIME_NAMES[0], handed)]
        if runtime is None:
            others = [*(OnnxForm(opened, name, handed) for name in RUNTIME_NAMES), *recording.kernel_forms(first)]
        whole = OnnxForm(opened, runtime or RUNTIME_NAMES[0], []) if handed or float_outputs(left.model) else None
    _complete(compare(left, others, inputs, integer, report, whole), report, length(all_batches, None), len(others), show_progress)
    return report


def _simulated(left: GraphForm, path: Path, report: Report) -> Form:
    """Return the form of a .bin in the vendor's simulator, for an integer model; list in the report the tensors it cannot compare."""
    if not is_deployed(left.model):
        because = "programs are fed the integers of an integer model"
        remedy = "pass fxq.convert(prepared)"
        raise ConfigurationError("a prepared model cannot be verified against a BPU program", because=because, remedy=remedy)
    from fxquant.backends.horizon.compiled_program import SimulatedForm

    form = SimulatedForm(path, left.model)
    report.given, report.unseen = form.fed, report.unseen | form.unseen
    return form


def _complete(steps: Iterator[None], report: Report, batches: int | None, forms: int, show: bool | None) -> None:
    """Take all steps, which add to the report; a KeyboardInterrupt is raised with the report."""
    count, total = 0, None if batches is None else batches * forms
    try:
        for _ in progress(steps, total, "verifying", show):
            count += 1
    except KeyboardInterrupt:
        of = "" if total is None else f" of {total}"
        raise Interrupted(f"verify was interrupted after {count}{of} comparisons", report) from None


@checked()
def record(
    model: Any, batches: Batches, kinds: str | Sequence[str] = ("quantized",), *, real: bool = False, state: State | str | None = None,
    runtime: str | None = None,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """Yield the values of chosen tensors, a dict by name for each batch; a batch is taken, and run, when its values are asked for.

    `model` is a graph at any stage (a float model as `trace` returns it) or the path of a saved one, or of an ONNX file. `kinds`
    are any of these, and names of tensors:

        "quantized"     the integers of quantized tensors, as int64
        "accumulators"  the sums between them, as int64; of an integer model or a file
        "float"         the results of float operators
        "outputs"       the model's outputs, flattened: "output 0", "output 1", …

    Tensors are in the order they are computed, outputs last, and have one name in all forms (see `layers`). `real` gives quantized tensors
    as the float32 numbers they stand for. A prepared model is run in `state`, or in the state its operators are in, and is
    left as it was: CALIBRATE is recorded as FLOAT and TRAIN as VALIDATE, the same numbers while nothing observes. In FLOAT, and of a
    32-bit output, it has no integers, so there are none without `real`. A file is run by `runtime`: "onnxruntime", or any other that
    `verify` uses; of its float operators only the ends of integer segments are shown.

    Raises ConfigurationError for a name that no tensor has, and while iterating CalibrationError for a batch that does not fit.
    """
    selection, model = Wanted.of(*kinds, real=real), _opened(model)
    form: Form
    if isinstance(model, str | os.PathLike):
        form = _file_form(accepted("record", "path", model, PATH), state, runtime)
    elif isinstance(model, fx.GraphModule):
        _refuse("runtime", runtime, "this model is run by PyTorch")
        form = _graph_form(model, state)
    else:
        because = "only traced, prepared and integer models, and ONNX files, name them"
        remedy = "pass fxq.trace(model, example_inputs)"
        raise ConfigurationError(f"the tensors of a {type(model).__name__} cannot be recorded", because=because, remedy=remedy)
    all_batches = as_batches(batches)
    selection.check(form)
    return (form.run(form.inputs(batch, index), selection) for index, batch in enumerate(all_batches))

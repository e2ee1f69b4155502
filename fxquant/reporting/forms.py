"""The public functions that look at models beside each other: `verify` compares their bits, `record` gives their values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.layers import layers
from fxquant.analysis.recording import (
    ACCUMULATORS,
    DYNAMIC,
    OUTPUTS,
    QUANTIZED,
    Form,
    GraphForm,
    Values,
    Wanted,
    crossings,
    float_outputs,
    kernel_forms,
    returned,
)
from fxquant.analysis.report import Deviation, DeviationReport, Difference, FloatDifference, Report, different, differing
from fxquant.errors import ConfigurationError, ExportError, Interrupted
from fxquant.ir.graph import is_deployed, source, stage_of
from fxquant.prepared.batches import as_batches, length
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.stage import called
from fxquant.quantization.spec import State
from fxquant.reporting.model_forms import OnnxForm, refuse
from fxquant.support.arguments import PATH, accepted, checked
from fxquant.support.progress import progress

COMPARED = Wanted.of(QUANTIZED, DYNAMIC, OUTPUTS)
IN_DEPTH = Wanted.of(QUANTIZED, DYNAMIC, ACCUMULATORS, OUTPUTS)


def exact_form(model: Any) -> GraphForm:
    """Return the form of a model object. Raises ConfigurationError if it is neither prepared nor integer."""
    if isinstance(model, fx.GraphModule) and (is_deployed(model) or stage_of(model) == "PREPARED"):
        return GraphForm(model, State.VALIDATE)
    raise ConfigurationError(
        f"{type(model).__name__} cannot be verified",
        because="it is neither a prepared model, nor an integer model, nor the path of an ONNX file",
        remedy="pass the results of fxq.prepare, fxq.convert or fxq.export_onnx",
    )


def check_same_model(left: GraphForm, opened: Any) -> None:
    """Raise ExportError if a file cannot be compared with a model: another model's, or one that takes integers."""
    if opened.io != "float":
        raise ExportError(
            f"{opened.path} cannot be verified",
            because=f"it was exported with io={opened.io!r}, and takes integers where the model takes float tensors",
            remedy="export with io='float'; the inner nodes of both files are the same",
        )
    sizes = (sum(node.op == "placeholder" for node in left.model.graph.nodes), len(returned(left.model)))
    found = (len(opened.input_names), len(opened.output_names))
    if is_deployed(left.model):
        names = [layer.name for layer in layers(left.model) if layer.grid is not None]
    else:
        names = [name for name, operator in quantized_operators(left.model).items() if operator.owns_output]
    missing = [name for name in names if name not in opened.tensors]
    if sizes != found or missing:
        because = f"it has no {', '.join('%' + name for name in missing[:5])}{' …' if len(missing) > 5 else ''}"
        if sizes != found:
            because = f"it has {found[0]} inputs and {found[1]} outputs, and this model has {sizes[0]} and {sizes[1]}"
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
    a: GraphForm,
    others: Sequence[Form],
    batches: Iterable[list[Tensor]],
    integer: fx.GraphModule | None,
    report: Report,
    whole: OnnxForm | None = None,
) -> Iterator[None]:
    """Compare the bits of a form with others' on batches, adding to the report; stops looking deeper once a difference is located.

    The outputs that float operators compute must be equal where PyTorch computes both; those of a file are measured. `whole` is the file
    as it runs on its own, and the report counts its flips: differences after float operators, and in outputs that they compute.
    A step of the iteration is one batch in one of the other forms.
    """
    report.pairs += [f"{a.label} = {b.label}" for b in others]
    floats, handed = float_outputs(a.model), crossings(a.model)
    for inputs, values, b, right in walk(a, others, batches, handed):
        measured = floats if isinstance(b, OnnxForm) else set()
        for name in sorted(measured):
            report.names.add(name)
            report.elements += values[name].numel()
            report.floats.setdefault(name, FloatDifference(name)).add(values[name], right.pop(name))
        if _count(values, right, report) and report.first is None:
            exact = {name: value for name, value in a.run(inputs, IN_DEPTH).items() if name not in measured}
            report.first = _locate(exact, b.run(inputs, IN_DEPTH), (a.label, b.label), integer)
        yield
        if whole is not None and b is others[-1]:
            alone = whole.run(inputs, COMPARED)
            report.flips += sum(differing(values[name], alone[name]) for name in (*handed, *floats) if name in alone)


def measure(a: Form, others: Sequence[OnnxForm], batches: Iterable[list[Tensor]], report: DeviationReport) -> Iterator[None]:
    """Add the distance of the outputs of a file in style "qdq" from the model's; a step is one batch in one of the file's runtimes."""
    for _, wanted, b, found in walk(a, others, batches):
        assert isinstance(b, OnnxForm)
        if b.label not in report.outputs:
            report.pairs.append(f"{a.label} ≈ {b.label}")
            entries = b.onnx.metadata["outputs"]
            report.outputs[b.label] = [Deviation(entry["name"], _step(b.onnx.tensors.get(entry.get("tensor")))) for entry in entries]
        for index, output in enumerate(report.outputs[b.label]):
            output.add(wanted[f"output {index}"], found[f"output {index}"])
        outputs = [output for runtime in report.outputs.values() for output in runtime]
        report.names.update(output.name for output in outputs)
        report.elements, report.mismatches = (sum(getattr(each, name) for each in outputs) for name in ("elements", "differing"))
        yield


def _step(entry: dict[str, Any] | None) -> Tensor | None:
    """Return the scale of a described tensor, shaped to broadcast."""
    if entry is None or "scale" not in entry:
        return None
    scale = torch.tensor(entry["scale"], dtype=torch.float32, device="cpu")
    return scale.reshape(-1, *[1] * (-entry["axis"] - 1)) if "axis" in entry else scale


def _count(left: Values, right: Values, report: Report) -> int:
    apart = 0
    for name in left:
        if name in right:
            report.names.add(name)
            report.elements += left[name].numel()
            apart += differing(left[name], right[name])
    report.mismatches += apart
    return apart


def _locate(left: Values, right: Values, labels: tuple[str, str], integer: fx.GraphModule | None) -> Difference | None:
    nodes = {node.name: node for node in integer.graph.nodes} if integer is not None else {}
    equal: set[str] = set()
    for name in left:
        if name not in right:
            continue
        count = differing(left[name], right[name])
        if count == 0:
            equal.add(name)
            continue
        node = nodes.get(name)
        operands = tuple(_compared_operands(node, left.keys() & right.keys())) if node is not None else ()
        comparable = left[name].shape == right[name].shape and left[name].dtype == right[name].dtype and not left[name].is_complex()
        index = tuple(int(i) for i in torch.nonzero(different(left[name], right[name]))[0]) if comparable else ()
        values = (float(left[name][index]), float(right[name][index])) if comparable else (float("nan"), float("nan"))
        operator, line = ("value", "") if node is None or integer is None else (called(integer, node), source(node))
        inputs_equal = all(o in equal or (o in nodes and nodes[o].op == "placeholder") for o in operands)
        return Difference(name, operator, line, operands, index, values, labels, count, inputs_equal)
    return None


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
def verify(first: Any, second: Any, batches: Batches, *, show_progress: bool | None = None) -> Report:
    """Compare two forms of a model bit for bit: prepared, integer, or the path of an exported ONNX file or BPU program.

    An ONNX file is run with all optimisations, with none, with one thread and two, and by the reference
    evaluator. An integer model is compared as its primitives and as its kernels compute it.
    Every quantized tensor is compared, not only the outputs, byte for byte: 0.0 is not -0.0. Where float
    operators stand between integer segments, each segment is fed from PyTorch and must be equal; what the float operators
    flipped, there or in outputs of their own, is counted apart, as `flips`, and `floats` says how far such outputs are apart.

    The report is true if something was compared and nothing differed, so never for no batches; `mismatches` counts
    differing elements; `first` locates the first.
    A .bin that `compile_horizon` made is run in the vendor's simulator, a row of a batch at a time: every BPU program in it is given the
    integers that the integer model has at its inputs, and the integers at its outputs are compared. What the processor computes before,
    between and behind the programs is not; the report's `given` and `unseen` name it. The first difference is located inside of the
    programs, too. Raises ConfigurationError where the tool is not installed, and CompilationError where it fails.

    A file in style "qdq" is not exact by nature: its outputs are measured, and the `DeviationReport` is never true.

    A KeyboardInterrupt is raised as `Interrupted`, whose `result` is the report of what was compared until then.
    """
    if isinstance(first, str | os.PathLike):
        first, second = second, first
    left, report = exact_form(first), Report()
    given = as_batches(batches)
    inputs: Iterable[list[Any]] = (left.inputs(batch, index) for index, batch in enumerate(given))
    inputs = list(inputs) if isinstance(given, Sequence) else inputs  # what is there is checked before anything is run
    integer = next((model for model in (first, second) if isinstance(model, fx.GraphModule) and is_deployed(model)), None)
    whole: OnnxForm | None = None
    others: Sequence[Form]
    if not isinstance(second, str | os.PathLike):
        others = [exact_form(second), *kernel_forms(first, second)]
    elif Path(second).suffix in PROGRAMS:
        others = [_simulated(left, Path(second), report)]
    else:
        from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, RUNTIME_NAMES, OnnxModel

        opened = OnnxModel(accepted("verify", "path", second, PATH))
        check_same_model(left, opened)
        mine = left.model.meta["target"].name
        targets = (mine, opened.target) if opened.target not in (mine, "") else None
        if opened.style == "qdq":
            deviations = DeviationReport(targets=targets)
            files = [OnnxForm(opened, runtime, []) for runtime in MEASURED_RUNTIMES]
            _complete(measure(left, files, inputs, deviations), deviations, length(given, None), len(files), show_progress)
            return deviations
        report.targets, handed = targets, crossings(left.model)
        others = [*(OnnxForm(opened, runtime, handed) for runtime in RUNTIME_NAMES), *kernel_forms(first)]
        whole = OnnxForm(opened, RUNTIME_NAMES[0], []) if handed or float_outputs(left.model) else None
    _complete(compare(left, others, inputs, integer, report, whole), report, length(given, None), len(others), show_progress)
    return report


def _simulated(left: GraphForm, path: Path, report: Report) -> Form:
    """Return the program of an integer model in the vendor's simulator; the report names what of it cannot be compared."""
    if not is_deployed(left.model):
        raise ConfigurationError(
            "a prepared model cannot be verified against a BPU program",
            because="programs are fed the integers of an integer model",
            remedy="pass fxq.convert(prepared)",
        )
    from fxquant.backends.horizon.simulated import SimulatedForm

    form = SimulatedForm(path, left.model)
    report.unseen.update(form.unseen)
    report.given = form.fed
    return form


def _complete(steps: Iterator[None], report: Report, batches: int | None, forms: int, show: bool | None) -> None:
    """Take all steps, which add to the report; a KeyboardInterrupt is raised with the report."""
    done, total = 0, None if batches is None else batches * forms
    try:
        for _ in progress(steps, total, "verifying", show):
            done += 1
    except KeyboardInterrupt:
        of = "" if total is None else f" of {total}"
        raise Interrupted(f"verify was interrupted after {done}{of} comparisons", report) from None


@checked()
def record(
    model: Any,
    batches: Batches,
    kinds: str | Sequence[str] = ("quantized",),
    *,
    real: bool = False,
    state: State | str | None = None,
    runtime: str | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the values of chosen tensors, a dict by name for each batch; a batch is taken, and run, when its values are asked for.

    `model` is a graph at any stage (a float model as `trace` returns it) or the path of an exported ONNX file. `kinds` are any of these,
    and names of tensors:

        "quantized"     the integers of quantized tensors, as int64
        "accumulators"  the sums between them, as int64; of an integer model or a file
        "float"         the results of float operators
        "outputs"       what the model returns, flattened: "output 0", "output 1", …

    Tensors are in the order they are computed, outputs last, and have one name in all forms (see `layers`). `real` gives quantized tensors
    as the float32 numbers they stand for. A prepared model is run in `state`, or in the state its operators are in, and is
    left as it was: CALIBRATE is recorded as FLOAT and TRAIN as VALIDATE, the same numbers while nothing observes. In FLOAT, and of a
    32-bit output, it has no integers, so there are none without `real`. A file is run by `runtime`: "onnxruntime", or any other that
    `verify` uses; of its float operators only the ends of integer segments are shown.

    Raises ConfigurationError for a name that no tensor has, and while iterating CalibrationError for a batch that does not fit.
    """
    wanted = Wanted.of(*kinds, real=real)
    form, taken = _recorded(model, state, runtime), as_batches(batches)
    wanted.check(form)
    return (form.run(form.inputs(batch, index), wanted) for index, batch in enumerate(taken))


def _recorded(model: Any, state: State | str | None, runtime: str | None) -> Form:
    """Return the form of a graph or a file whose tensors are recorded. Raises ConfigurationError for anything else."""
    if isinstance(model, str | os.PathLike):
        from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel

        refuse("state", state, "an ONNX file has no states")
        return OnnxForm(OnnxModel(accepted("record", "path", model, PATH)), runtime or RUNTIME_NAMES[0])
    if not isinstance(model, fx.GraphModule):
        raise ConfigurationError(
            f"the tensors of a {type(model).__name__} cannot be recorded",
            because="only traced, prepared and integer models, and ONNX files, name them",
            remedy="pass fxq.trace(model, example_inputs)",
        )
    refuse("runtime", runtime, "this model is run by PyTorch")
    if stage_of(model) != "PREPARED":
        refuse("state", state, "only prepared models have states")
    return GraphForm(model, None if state is None else State(state))

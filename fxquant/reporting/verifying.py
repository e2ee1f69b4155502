"""Proof by running: whether two forms of a model can be verified against each other, their bits, and the place where they first differ.

The forms are the prepared model (in VALIDATE), the integer model, and an exported ONNX file, which is run every way there is.
Exposing inner values can keep a runtime from fusing, so the outputs of the unchanged file are compared, too. Where float operators run
between integer segments, each segment of a file is fed from PyTorch. What the float operators flip when the file runs alone is counted
separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
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
    returned,
)
from fxquant.analysis.report import Deviation, DeviationReport, Difference, FloatDifference, Report, different, differing
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import is_deployed, source, stage_of
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.stage import called
from fxquant.quantization.spec import State
from fxquant.reporting.model_forms import OnnxForm

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
    if sizes != found:
        raise ExportError(
            f"{opened.path} is the file of another model",
            because=f"it has {found[0]} inputs and {found[1]} outputs, and this model has {sizes[0]} and {sizes[1]}",
            remedy="pass the file that fxq.export_onnx wrote of this model",
        )
    if is_deployed(left.model):
        names = [layer.name for layer in layers(left.model) if layer.grid is not None]
    else:
        names = [name for name, operator in quantized_operators(left.model).items() if operator.owns_output]
    missing = [name for name in names if name not in opened.tensors]
    if missing:
        raise ExportError(
            f"{opened.path} is the file of another model",
            because=f"it has no {', '.join('%' + name for name in missing[:5])}{' …' if len(missing) > 5 else ''}",
            remedy="pass the file that fxq.export_onnx wrote of this model",
        )


# ---- the walk ---------------------------------------------------------------------------------------------------------


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

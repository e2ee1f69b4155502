"""Two forms of one model compared bit for bit at every tensor they share, and the place where they first differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.recording import ACCUMULATORS, DYNAMIC, OUTPUTS, QUANTIZED, Form, GraphForm, OnnxForm, Values, Wanted
from fxquant.analysis.report import Deviation, DeviationReport, Difference, FloatDifference, Report, different, differing
from fxquant.analysis.segments import crossings, float_outputs
from fxquant.ir.graph import source
from fxquant.prepared.nodes import called

COMPARED = Wanted.of(QUANTIZED, DYNAMIC, OUTPUTS)
IN_DEPTH = Wanted.of(QUANTIZED, DYNAMIC, ACCUMULATORS, OUTPUTS)


def compare(
    a: GraphForm,
    others: Sequence[Form],
    batches: Iterable[list[Tensor]],
    integer: fx.GraphModule | None,
    report: Report,
    whole: OnnxForm | None = None,
) -> Iterator[None]:
    """Compare a form with others on batches, adding to the report; stops looking deeper once a difference is located.

    The outputs that float operators compute must be equal where PyTorch computes both; those of a file are measured. `whole` is the file
    as it runs on its own, and the report counts its flips: differences after float operators, and in outputs that they compute.
    A step of the iteration is one batch in one of the other forms.
    """
    report.pairs += [f"{a.label} = {b.label}" for b in others]
    floats, handed = float_outputs(a.model), crossings(a.model)
    for inputs in batches:
        values = a.run(inputs, replace(COMPARED, names=frozenset(handed)))
        for b in others:
            left, measured = dict(values), floats if isinstance(b, OnnxForm) else set()
            if isinstance(b, OnnxForm):
                b.given = left
            right = b.run(inputs, COMPARED)
            for name in sorted(measured):
                report.names.add(name)
                report.elements += left[name].numel()
                report.floats.setdefault(name, FloatDifference(name)).add(left.pop(name), right.pop(name))
            if _count(left, right, report) and report.first is None:
                deep_left, deep_right = a.run(inputs, IN_DEPTH), b.run(inputs, IN_DEPTH)
                exact = {name: value for name, value in deep_left.items() if name not in measured}
                report.first = _locate(exact, deep_right, (a.label, b.label), integer)
            yield
        if whole is not None:
            alone = whole.run(inputs, COMPARED)
            report.flips += sum(differing(values[name], alone[name]) for name in (*handed, *floats) if name in alone)


def measure(a: Form, others: Sequence[OnnxForm], batches: Iterable[list[Tensor]], report: DeviationReport) -> Iterator[None]:
    """Add the distance of the outputs of a file in style "qdq" from the model's; a step is one batch in one of the file's runtimes."""
    for inputs in batches:
        wanted = a.run(inputs, COMPARED)
        for b in others:
            found = b.run(inputs, COMPARED)
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

"""The contents of a saved model or an exported ONNX file, for the command line: a description, and the difference of two."""

import difflib
import html
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.layers import Layer, layers, left_in_float
from fxquant.analysis.text import aligned, text
from fxquant.backends.onnx import runtime
from fxquant.backends.onnx.runtime import OnnxModel
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import DTYPE_NAMES, TensorFact, fact, is_deployed, model_meta, nodes_in, stage_of
from fxquant.ir.integer import QParams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.prepared.stage import called
from fxquant.quantization.observers import Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.reporting.forms import described_grid, saved_model
from fxquant.support.arguments import checked


@dataclass(frozen=True)
class Row:
    """A quantized tensor: its name, the operator that computes it, its grid, and its shape as text."""

    name: str
    operator: str
    grid: QParams
    shape: str

    @property
    def scale(self) -> tuple[float, ...]:
        """One number; one for each channel of a 32-bit output; none where `unknown` says why."""
        scales = self.grid.scale if isinstance(self.grid.scale, tuple) else (self.grid.scale,)
        return tuple(scale for scale in scales if math.isfinite(scale))

    @property
    def unknown(self) -> str:
        """Why there is no scale."""
        return "its sum's" if isinstance(self.grid.scale, tuple) else "not calibrated"

    @property
    def zero_point(self) -> int | None:
        """The integer of 0.0; None if the dtype is symmetric, or there is no scale."""
        return self.grid.zero_point if self.scale and ACTIVATION_TYPES[self.grid.dtype].affine else None


@dataclass(frozen=True)
class Contents:
    """The contents of a file."""

    path: Path
    kind: str  # "saved model" or "ONNX file"
    stage: str  # "traced", …, "prepared", "integer"; "exported" for an ONNX file
    target: str
    inputs: tuple[str, ...]  # the inputs and outputs, one line each
    outputs: tuple[str, ...]
    nodes: Mapping[str, int]  # the number of nodes, by operator
    rows: tuple[Row, ...]  # the quantized tensors, in the order they are computed
    floats: tuple[str, ...]  # the operators that run in float, and why
    tensors: Mapping[str, Tensor]  # weights, tables and constants by name; neither scales nor statistics
    text: str  # the graph as text

    @property
    def scales(self) -> dict[str, tuple[float, ...]]:
        """The scale of every quantized tensor, by name."""
        return {row.name: row.scale for row in self.rows}

    @property
    def zero_points(self) -> dict[str, int]:
        """The zero point of every affine tensor, by name."""
        return {row.name: row.zero_point for row in self.rows if row.zero_point is not None}


def read(path: str | os.PathLike[str]) -> Contents:
    """Read the contents of a file: an ONNX file if its name ends so, else a saved model. Raises ExportError if it is neither."""
    return _of_onnx(OnnxModel(path)) if Path(path).suffix.lower() == ".onnx" else of_model(Path(path), saved_model(path))


def _of_onnx(opened: OnnxModel) -> Contents:
    operators = runtime.operators(opened)

    def row(name: str, entry: Mapping[str, Any]) -> Row:
        value, grid = opened.value(name), described_grid(entry, entry.get("zero_point", 0))
        return Row(name, operators.get(value, "input"), grid, runtime.shape(opened, value))

    # Tensors quantized inside of an operator have no entry.
    return Contents(
        opened.path,
        "ONNX file",
        "exported",
        opened.target,
        tuple(f"{name} {runtime.shape(opened, name)}" for name in opened.input_names),
        tuple(f"{name} {runtime.shape(opened, name)}" for name in opened.output_names),
        Counter(operators.values()),
        tuple(row(name, entry) for name, entry in opened.tensors.items() if "scale" in entry),
        tuple(f"%{name}: {because}" for name, because in opened.in_float.items()),
        runtime.constants(opened),
        runtime.text(opened),
    )


def of_model(path: Path, model: fx.GraphModule) -> Contents:
    """Return the contents of a graph; `path` is its name."""
    target, all_layers = model_meta(model).get("target"), layers(model)
    nodes = {node.name: node for node in model.graph.nodes}
    (output,) = model.graph.find_nodes(op="output")
    quantized = [each for layer in all_layers for each in _quantized(layer)]
    return Contents(
        path,
        "saved model",
        "integer" if is_deployed(model) else (stage_of(model) or "traced").lower(),  # a file holds no kernels
        "" if target is None else target.name,
        tuple(f"{node.target} {_shape(node)}" for node in model.graph.nodes if node.op == "placeholder"),
        tuple(f"{node.name} {_shape(node)}" for node in nodes_in(output.args)),
        Counter(called(model, node) for node in model.graph.nodes if node.op not in ("placeholder", "get_attr", "output")),
        tuple(Row(name, operator, grid, _shape(nodes[name])) for name, operator, grid in quantized),
        tuple(f"%{layer.name}: {layer.reason}" + (f"   [{layer.source}]" if layer.source else "") for layer in left_in_float(all_layers)),
        _tensors(model),
        text(model, kernels="reference"),
    )


def _quantized(layer: Layer) -> list[tuple[str, str, QParams]]:
    """Return the quantized tensors of a layer as (name, operator or primitive, scale and dtype), its inner tensors first."""
    inside = [(each.name, each.primitive, each.grid) for each in layer.intermediates]
    return inside if layer.grid is None else [*inside, (layer.name, layer.operator, layer.grid)]


def _shape(node: fx.Node) -> str:
    value = fact(node)
    return str(value) if isinstance(value, TensorFact) else ""


def _tensors(model: fx.GraphModule) -> dict[str, Tensor]:
    owners = [path for path, module in model.named_modules() if isinstance(module, Quantizer | Observer)]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors.items() if name.rpartition(".")[0] not in owners}


def describe(contents: Contents) -> str:
    """Return a text about a file: a few lines, a table of its quantized tensors, and the operators that stay in float."""
    where = f" for {contents.target}" if contents.target else ""
    lines = [f"{contents.path}: {contents.kind}, {contents.stage}{where}, {contents.path.stat().st_size:,} bytes"]
    sizes: Counter[str] = Counter()
    for tensor in contents.tensors.values():
        sizes[DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))] += tensor.numel() * tensor.element_size()
    operators = Counter(contents.nodes).most_common()
    stored = ", ".join(f"{number:,} {dtype}" for dtype, number in sizes.most_common())
    dtypes = Counter(row.grid.dtype for row in contents.rows)
    floats = f"{len(contents.floats)} operator{'' if len(contents.floats) == 1 else 's'}" if contents.floats else "none"
    facts = [
        ("inputs", ", ".join(contents.inputs)),
        ("outputs", ", ".join(contents.outputs)),
        ("nodes", f"{sum(contents.nodes.values())}: " + ", ".join(f"{count} {name}" for name, count in operators)),
        ("dtypes", ", ".join(f"{count} {name}" for name, count in dtypes.most_common())),
        ("scales", _range(contents.rows)),
        ("tensors", f"{len(contents.tensors)} of {sum(sizes.values()):,} bytes: {stored}"),
        ("in float", "" if contents.stage == "traced" else floats),
    ]
    lines.extend(f"  {label:<9} {value}" for label, value in facts if value)
    lines.extend(f"            {line}" for line in contents.floats)
    if contents.rows:
        cells = [("tensor", "operator", "dtype", "scale", "shape")]
        cells += [(f"%{row.name}", row.operator, row.grid.dtype, _grid(row) or row.unknown, row.shape) for row in contents.rows]
        lines += ["", *("  " + line for line in aligned(cells))]
    return "\n".join(lines)


def _range(rows: Sequence[Row]) -> str:
    scales = [(scale, row.name) for row in rows for scale in row.scale]
    unknown = [f"{count} {reason}" for reason, count in Counter(row.unknown for row in rows if not row.scale).items()]
    ends = [f"{scale:.9g} (%{name})" for scale, name in (min(scales), max(scales))] if scales else []
    return ", ".join([*([" to ".join(ends)] if ends else []), *unknown])


def _scale(values: Sequence[float]) -> str:
    """Return one scale, or the range of several; empty if there is none."""
    return " to ".join(f"{value:.9g}" for value in dict.fromkeys((min(values), max(values)))) if values else ""


def _grid(row: Row) -> str:
    return _scale(row.scale) + ("" if row.zero_point is None else f", zero point {row.zero_point}")


def difference(a: Contents, b: Contents) -> str:
    """Return the differences of two files (graphs, scales, tensors) as text, or "". Raises ConfigurationError for files of two kinds."""
    if a.kind != b.kind:
        because = f"one is a {a.kind}, the other a {b.kind}"
        remedy = "compare their outputs: fxquant verify"
        raise ConfigurationError(f"{a.path} and {b.path} cannot be compared as text", because=because, remedy=remedy)
    heads = (("stage", a.stage, b.stage), ("target", a.target, b.target))
    lines = [f"{name}: {x or 'none'} | {y or 'none'}" for name, x, y in heads if x != y]
    lines.extend(difflib.unified_diff(a.text.splitlines(), b.text.splitlines(), str(a.path), str(b.path), lineterm="", n=1))
    paths = str(a.path), str(b.path)
    lines.extend(_different("scale", a.scales, b.scales, paths, _scale_difference))
    lines.extend(_different("zero point", a.zero_points, b.zero_points, paths, lambda x, y: "" if x == y else f"{x} | {y}"))
    lines.extend(_different("tensor", a.tensors, b.tensors, paths, _tensor_difference))
    return "\n".join(lines)


def _different(what: str, a: Mapping[str, Any], b: Mapping[str, Any], paths: tuple[str, str], between: Any) -> Iterable[str]:
    rows = [f"  {name}: {difference}" for name in a if name in b and (difference := between(a[name], b[name]))]
    shared = sum(name in b for name in a)
    if rows:
        yield f"{len(rows)} of {shared} {what}s differ"
        yield from rows
    for path, mine, others in ((paths[0], a, b), (paths[1], b, a)):
        if alone := [name for name in mine if name not in others]:
            yield f"{what}s only in {path}: {', '.join(alone)}"


def _scale_difference(a: Sequence[float], b: Sequence[float]) -> str:
    if a == b:
        return ""
    count = sum(x != y for x, y in zip(a, b, strict=False)) if len(a) == len(b) > 1 else 0
    return f"{_scale(a) or 'unknown'} | {_scale(b) or 'unknown'}" + (f", in {count} of {len(a)} channels" if count else "")


def _tensor_difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{_form(a)} | {_form(b)}"
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() else a == b
    count = int((~same).sum())
    if not count:
        return ""
    largest = float((a.double() - b.double())[~same].abs().max())
    return f"{count} of {a.numel()} elements differ, by up to {largest:g}"


def _form(tensor: Tensor) -> str:
    return f"{DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}"


@dataclass(frozen=True)
class GraphDifference:
    """The difference of two graphs: text, scales, zero points and tensors; prints as lines, with - for the first and + for the second.

    text  the lines; "" where they are equal
    """

    text: str

    @property
    def equal(self) -> bool:
        """Whether both hold the same."""
        return not self.text

    def __str__(self) -> str:
        return self.text or "equal: the same graph, scales and tensors"

    def _repr_html_(self) -> str:
        colours = {"+": "#dafbe1", "-": "#ffebe9", "@": "#ddf4ff"}
        lines = [f"<span style='background:{colours.get(line[:1], 'none')}'>{html.escape(line)}</span>" for line in str(self).splitlines()]
        return "<pre style='line-height:1.3'>" + "\n".join(lines) + "</pre>"


@checked()
def diff(a: Any, b: Any) -> GraphDifference:
    """Compare two graphs at any stage, or two files that `save` wrote, or two that `export_onnx` wrote.

    Raises ConfigurationError for other arguments, and for a graph and an ONNX file. Raises ExportError for a file that cannot be read.
    """
    return GraphDifference(difference(_contents(a, "a"), _contents(b, "b")))


def _contents(value: Any, name: str) -> Contents:
    if isinstance(value, fx.GraphModule):
        return of_model(Path(name), value)
    if isinstance(value, str | os.PathLike):
        return read(value)
    because = "graphs are traced, prepared and integer models, and files of them"
    remedy = "pass the result of fxq.trace, fxq.prepare or fxq.convert, or a path"
    raise ConfigurationError(f"{name} is a {type(value).__name__}, which has no graph", because=because, remedy=remedy)

"""Graphs as text: readable, deterministic, diffable.

%conv1 = conv2d(%x, %conv1_weight, stride=2, padding=1)   f32[B,8,4,4]   int8 s=0.02351 g1   # conv1, bn1, relu
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from fxquant.ir.graph import annotation, fact, origins, resolve, stage_of, step_of
from fxquant.ir.integer import kernel, origin
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import Operator
from fxquant.prepared.stage import called, grid_of, is_dynamic, primitive_of, record_of
from fxquant.primitives import Primitive
from fxquant.support.arguments import checked, instance


@checked(gm=instance("a traced, prepared or integer model", fx.GraphModule))
def text(gm: fx.GraphModule, *, steps: bool = False, kernels: str = "auto") -> str:
    """Return the graph, one line per node; equal graphs give equal text. Raises ConfigurationError for a model that is not a graph.

    The first two steps and the last one of a recurrence are written out, and with `steps` all of them: the others are like the second.
    With kernels="reference" an integer model is shown as a file holds it, by its primitives alone.
    """
    left_out = {} if steps else _alike(gm)
    shows = kernels == "auto"
    shown = [node for node in gm.graph.nodes if left_out.get(node) != ""]
    rows = [_row(gm, node, shows) if node not in left_out else (left_out[node], "", "", "") for node in shown]
    stage = (stage_of(gm) or "traced").lower()
    stage = "integer" if stage == "fused" and not shows else stage
    return "\n".join([f"graph   # {stage}", *("  " + line for line in aligned(rows, most=100))]) + "\n"


def aligned(rows: Sequence[Sequence[str]], most: int | None = None, left: int | None = None) -> list[str]:
    """Return rows of cells as lines of columns, two spaces apart; the first column is as wide as its longest cell, at most `most`.

    Cells are aligned to the left; if `left` is given, only those of the first `left` columns and of the last one.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if most is not None and widths:
        widths[0] = min(widths[0], most)
    texts = range(len(widths)) if left is None else (*range(left), len(widths) - 1)

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.ljust(width) if place in texts else cell.rjust(width) for place, (cell, width) in cells).rstrip()

    return list(map(line, rows))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows under their head; the first `left` columns and the last are aligned to the left, all others to the right."""
    return "\n".join(aligned([head, *rows], left=left))


def _alike(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the nodes of all steps of recurrences but the first two and the last: a line for the first of them, nothing for the others."""
    names = {node.name: step_of(node) for node in gm.graph.nodes}
    runs: list[list[tuple[fx.Node, int]]] = [[]]  # the steps of each recurrence, as they follow each other
    for node in gm.graph.nodes:
        step = names.get(origin(node))
        if step is None or (runs[-1] and step < runs[-1][-1][1]):
            runs.append([])
        if step is not None:
            runs[-1].append((node, step))
    replaced: dict[fx.Node, str] = {}
    for run in runs:
        middle = [node for node, step in run if 1 < step < run[-1][1]]
        if middle:
            replaced |= dict.fromkeys(middle, "")
            replaced[middle[0]] = f"…   # steps 2 to {run[-1][1] - 1}: {len(middle)} lines like those of step 1"
    return replaced


def _row(gm: fx.GraphModule, node: fx.Node, kernels: bool) -> tuple[str, str, str, str]:
    if node.op == "output":
        return f"return {_value(node.args[0])}", "", "", ""
    return f"%{node.name} = {_call(gm, node)}", _fact_text(fact(node)), _quantization(gm, node), _comment(node, kernels)


def _call(gm: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return _attribute(gm, str(node.target))
    record = record_of(gm, node) or primitive_of(node)
    name, arguments = called(gm, node), _arguments(record, node)
    if record is None and node.op == "call_module":
        return f"{name}[{node.target}]({arguments})"
    return f"{'.' if node.op == 'call_method' else ''}{name}({arguments})"


def _arguments(record: Operator | Primitive | None, node: fx.Node) -> str:
    """Return the arguments as text, by name after the first, without arguments that equal their default."""
    parameters = _parameters(record)
    shown = []
    for index, value in enumerate(node.args):
        name, default = parameters[index] if index < len(parameters) else ("", inspect.Parameter.empty)
        if default is not inspect.Parameter.empty and _plain(default) == _plain(value):
            continue
        named = name and index > 0 and not isinstance(value, fx.Node)
        shown.append(f"{name}={_value(value)}" if named else _value(value))
    shown.extend(f"{name}={_value(value)}" for name, value in node.kwargs.items())
    return ", ".join(shown)


def _parameters(record: Operator | Primitive | None) -> list[tuple[str, Any]]:
    """Return the names and defaults of positional arguments, from the record's `parameters` or its function's signature."""
    if isinstance(record, Operator) and record.parameters:
        return list(record.parameters.items())
    try:
        parameters = [] if record is None else list(inspect.signature(record.function).parameters.values())
    except ValueError:
        parameters = []
    return [(each.name, each.default) for each in parameters]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value).__name__ + "(" + ", ".join(f"{n}={_value(v)}" for n, v in zip(value._fields, value, strict=True)) + ")"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def _attribute(gm: fx.GraphModule, path: str) -> str:
    value = resolve(gm, path)
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}[{path}]"
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return f"[{path}] #{hashlib.sha256(value.contiguous().numpy(force=True).tobytes()).hexdigest()[:8]}"
    return f"[{path}]"


def _fact_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_fact_text(item) for item in value) + ")"
    return "" if value is None else str(value)


def _quantization(gm: fx.GraphModule, node: fx.Node) -> str:
    spec, grid = annotation(node), grid_of(gm, node)
    if spec is None:
        return ""
    if spec.dtype is None:
        return "dynamic" if is_dynamic(gm, node) else "float"
    scale = ""
    if grid is not None and isinstance(grid.scale, float):
        scale = f" s={grid.scale:.4g}" + (f" z={grid.zero_point}" if ACTIVATION_TYPES[grid.dtype].affine else "")
    return f"{spec.dtype}{scale}" + ("" if spec.group is None else f" g{spec.group}")


def _comment(node: fx.Node, kernels: bool) -> str:
    names, runs = origins(node), kernel(node) if kernels else None
    remarks = [f"was: {', '.join(names)}"] if len(names) > 1 else []
    remarks += [f"kernel: {runs[0]}"] if runs is not None else []
    return f"# {'; '.join(remarks)}" if remarks else ""

"""Why every node is integer or float, with which dtype and scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxquant.arguments import checked
from fxquant.errors import ConfigurationError
from fxquant.frontend import assumptions
from fxquant.graph import QParams, annotation, fused, is_inner, module_path, notes, origin, qparams, resolve, source
from fxquant.numerics import ACTIVATION_TYPES
from fxquant.ops.boundary import DEQUANTIZE, QUANTIZE
from fxquant.primitives import PRIMITIVES, boundary
from fxquant.quantization.prepared import QuantizedOperator

SHOWN_REASONS = 4  # in the line of the summary; the table has them all

NOTES = {"accumulator_bits": "accumulator of {} bits", "residual": "residual {}", "wide": "{}", "narrowed": "{}"}


@checked()
def explain(model: fx.GraphModule) -> str:
    """A table of every operator: integer or float, dtype, scale, and the reason; then what is fixed, and what was asked and is not done.

    For a prepared or an integer model, and any graph between.
    """
    if not isinstance(model, fx.GraphModule):
        raise ConfigurationError(
            f"{type(model).__name__} has no graph",
            because="only traced, prepared and integer models do",
            remedy="pass the result of fxq.prepare",
        )
    results = {node.name: qparams(node) for node in model.graph.nodes}
    rows = [row for node in model.graph.nodes if (row := _row(model, node, results)) is not None]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]
    lines.append("")
    lines.append(summary(model))
    lines.extend(f"fixed by the model's Python: {text}" for text in assumptions(model))
    lines.extend(model.meta.get("unheard", ()))
    return "\n".join(lines) + "\n"


def _row(model: fx.GraphModule, node: fx.Node, results: Mapping[str, QParams | None]) -> tuple[str, str, str, str, str] | None:
    record = PRIMITIVES.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    if record is not None:
        known = qparams(node)
        if known is None or (is_inner(node) and known == results.get(origin(node))):
            return None
        recorded = "; ".join(NOTES[key].format(value) for key, value in notes(node).items() if key in NOTES)
        details = f"inside of %{origin(node)}" if is_inner(node) else recorded
        scale = f"{known.scale:.6g}" if isinstance(known.scale, float) else f"{min(known.scale):.6g}…{max(known.scale):.6g}"
        return f"%{node.name}", "integer", known.dtype, scale + _zero_point(known.dtype, known.zero_point), _where(node, details)
    spec = annotation(node)
    if spec is None:
        return None
    also = f"; holds {', '.join(fused(node))}" if fused(node) else ""
    if spec.dtype is None:
        return f"%{node.name}", "float", "", "", _where(node, spec.because + also)
    scale = ""
    if node.op == "call_module" and isinstance(module := resolve(model, str(node.target)), QuantizedOperator):
        value = float(module.output.scale)
        shown = f"{value:.6g}" + _zero_point(spec.dtype, module.output.grid.zero_point)
        scale = "its sum's" if module.output.follows_sum else "not calibrated" if math.isnan(value) else shown
    return f"%{node.name}", "integer", spec.dtype, scale, _where(node, spec.because + also)


def _zero_point(dtype: str, zero_point: int) -> str:
    """What is shown behind a scale."""
    return f", zero point {zero_point}" if ACTIVATION_TYPES[dtype].affine else ""


def _where(node: fx.Node, reason: str) -> str:
    place = source(node) or module_path(node)
    return f"{reason}   [{place}]" if place and reason else reason or place


def left_in_float(model: fx.GraphModule) -> list[tuple[fx.Node, str]]:
    """The operators that stay in float, and why; the boundary is not among them."""
    found: list[tuple[fx.Node, str]] = []
    for node in model.graph.nodes:
        spec: Any = annotation(node)
        if spec is not None and spec.dtype is None and not _is_boundary(model, node):
            found.append((node, spec.because))
    return found


def _is_boundary(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node is a quantize or a dequantize, before or after it became a module or a primitive."""
    if node.op == "call_module" and isinstance(module := resolve(model, str(node.target)), QuantizedOperator):
        return module.operator in (QUANTIZE, DEQUANTIZE)
    return node.op == "call_function" and node.target in (QUANTIZE.function, DEQUANTIZE.function, boundary.quantize, boundary.dequantize)


def _is_integer(node: fx.Node) -> bool:
    """Whether a node is an integer operator, or the result of one."""
    spec = annotation(node)
    return (qparams(node) is not None and not is_inner(node)) or (spec is not None and spec.dtype is not None)


def summary(model: fx.GraphModule) -> str:
    """One line: how many operators are integer, how many are left in float, and why. The boundary between the two is not counted."""
    integer = sum(_is_integer(node) and not _is_boundary(model, node) for node in model.graph.nodes)
    left = left_in_float(model)
    counted = f"{integer} operator is integer" if integer == 1 else f"{integer} operators are integer"
    if not left:
        return f"{counted}, none is left in float"
    reasons = Counter(reason for _, reason in left)
    told = reasons.most_common(SHOWN_REASONS)
    listed = [f"{count} because {reason}" for reason, count in told]
    others = len(left) - sum(count for _, count in told)
    listed += [f"{others} for other reasons"] if others else []
    return f"{counted}, {len(left)} {'is' if len(left) == 1 else 'are'} left in float: {'; '.join(listed)}"

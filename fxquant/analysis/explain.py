"""Why every node is integer or float, with which dtype and scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from torch import fx

from fxquant.analysis import fused
from fxquant.analysis.fused import alike
from fxquant.analysis.layers import HOST, Layer, description, layers, left_in_float
from fxquant.analysis.text import aligned
from fxquant.frontend import assumptions, moved_by_forward
from fxquant.ir.graph import model_meta
from fxquant.ir.integer import QParams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.support.arguments import checked

SHOWN_REASONS = 4  # in the line of the summary; the table has them all


@checked()
def explain(model: fx.GraphModule, *, steps: bool = False, machine: bool = False) -> str:
    """Return a table of all operators: integer or float, dtype, scale, and the reason; then what is fixed, and which requests were not met.

    Operations of a recurrence that are alike at each of its steps have one row, under the name of the first; with `steps`, one for each.

    For an integer model that has run, kernels that are not used on this machine follow, with the reason. With `machine` a line for every
    operator says which kernels compute it, or why its primitives do; a model that has not run yet is run once.

    For a prepared or an integer model, and any graph between. Raises ConfigurationError for a model that is not a graph.
    """
    known = layers(model)
    rows = [row for layer, again in (((layer, ()) for layer in known) if steps else alike(known)) for row in _rows(layer, again)]
    lines = [*aligned(rows), "", summary(known)]
    fixed = [*assumptions(model)]
    for name, line in moved_by_forward(model).items():
        if not any(text.startswith(f"{name} is changed in place") for text in fixed):
            fixed.append(f"{name} is changed by forward in train mode, and not here" + f" ({line})" * bool(line))
    lines.extend(f"fixed by the model's Python: {text}" for text in fixed)
    lines.extend(model_meta(model).get("not_done", ()))
    lines.extend(fused.description(model, machine, steps))
    return "\n".join(lines) + "\n"


def _rows(layer: Layer, again: Sequence[Layer]) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of inner tensors on another scale, then the operator's, once it is decided; `again` are its like at other steps."""
    inner = [tensor for tensor in layer.intermediates if tensor.grid != layer.grid]
    rows = [(f"%{each.name}", "integer", each.grid.dtype, _scale(each.grid), _where(layer, f"inside of %{layer.name}")) for each in inner]
    if layer.reason or layer.grid is not None or layer.dynamic:
        reason = layer.reason or "; ".join([layer.part, *layer.notes] if layer.part else layer.notes)
        also = f"; holds {', '.join(layer.fused)}" if layer.reason and layer.fused else ""
        also += f"; at {len(again) + 1} steps, up to %{again[-1].name}" if again else ""
        also += f"{'; ' if reason + also else ''}{coarse}" if (coarse := description(layer.parts)) else ""
        if layer.dynamic and layer.reason and layer.part:
            reason = f"{layer.part}; {reason}"
        kind = "integer" if layer.integer else "dynamic" if layer.dynamic else "float"
        half = kind == "float" and layer.device != HOST and not layer.boundary
        dtype = layer.dtype if layer.integer else "float16" if half else ""
        rows.append((f"%{layer.name}", kind, dtype, _scale(layer.grid), _where(layer, reason + also)))
    return rows


def _scale(grid: QParams | None) -> str:
    """Return one scale, or the smallest and the largest of several; or why there is none."""
    if grid is None:
        return ""
    if isinstance(grid.scale, float):
        zero_point = f", zero point {grid.zero_point}" if ACTIVATION_TYPES[grid.dtype].affine else ""
        return "not calibrated" if math.isnan(grid.scale) else f"{grid.scale:.6g}{zero_point}"
    return f"{min(grid.scale):.6g}…{max(grid.scale):.6g}" if grid.scale else "its sum's"


def _where(layer: Layer, reason: str) -> str:
    place = layer.source or layer.module
    return f"{reason}   [{place}]" if place and reason else reason or place


def summary(known: tuple[Layer, ...]) -> str:
    """Return one line: how many layers are integer or float, and why; a composite counts as one, a boundary not at all."""
    integer = sum(layer.integer and not layer.inner and not layer.boundary for layer in known)
    dynamic = sum(layer.dynamic for layer in known)
    left = left_in_float(known)
    counted = f"{integer} operator is integer" if integer == 1 else f"{integer} operators are integer"
    if dynamic:
        counted += f", {dynamic} {'is' if dynamic == 1 else 'are'} dynamic"
    if not left:
        return f"{counted}, none is left in float"
    reasons = Counter(layer.reason for layer in left)
    told = reasons.most_common(SHOWN_REASONS)
    listed = [f"{count} because {reason}" for reason, count in told]
    others = len(left) - sum(count for _, count in told)
    listed += [f"{others} for other reasons"] if others else []
    return f"{counted}, {len(left)} {'is' if len(left) == 1 else 'are'} left in float: {'; '.join(listed)}"

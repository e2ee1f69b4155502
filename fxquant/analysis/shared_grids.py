"""Of an operator that holds several tensors on one grid: by how much this grid is coarser than theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxquant.ir.graph import is_parameter
from fxquant.ir.integer import Reference, operation
from fxquant.ops import BY_NAME, carried
from fxquant.prepared.nodes import grid_of, quantized_operator

CLEARLY = 6.0  # dB: half of the steps


def coarser(model: fx.GraphModule, node: fx.Node, nodes: Mapping[str, fx.Node]) -> tuple[tuple[str, float], ...]:
    """Return the tensors that a node of a prepared or an integer model holds, with what each loses in dB by the step of the common grid.

    Nothing where it holds one alone, or where a grid is not known yet.
    """
    module, lowered, grid = quantized_operator(model, node), operation(node), grid_of(model, node)
    if grid is None or not isinstance(grid.scale, float) or math.isnan(grid.scale):
        return ()
    if module is not None:
        operator, arguments = module.operator, module.operator.bind_call(node.args, dict(node.kwargs))
    elif lowered is not None and (found := BY_NAME.get(lowered.name)) is not None:
        operator, arguments = found, lowered.arguments
    else:
        return ()
    held = [value for name in carried(operator) for value in _listed(arguments.get(name))]
    tensors = [nodes[value.node] if isinstance(value, Reference) else value for value in held]
    tensors = [value for value in dict.fromkeys(tensors) if isinstance(value, fx.Node) and not is_parameter(value)]
    scales = {value.name: known.scale for value in tensors if (known := grid_of(model, value)) is not None}
    if len(scales) < 2 or not all(isinstance(scale, float) and scale > 0 for scale in scales.values()):
        return ()
    return tuple((name, max(20 * math.log10(grid.scale / scale), 0.0)) for name, scale in scales.items())  # type: ignore[operator]


def description(parts: tuple[tuple[str, float], ...]) -> str:
    """Return a sentence about those that lose clearly; "" if none does."""
    lose = [f"%{name} loses {loss:.0f} dB" for name, loss in parts if loss >= CLEARLY]
    return f"all its tensors share one scale: {' and '.join(lose)}; a rule that names it can give it more bits, or None" if lose else ""


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]

"""Operators that must share a scale are put in one group.

The demands form a graph whose vertices are nodes and whose edges say "same scale"; a group is a connected
component, so the result does not depend on any order. Two members that ask for different fixed scales or
dtypes are a conflict, and the shortest path between them is its explanation.
"""

import math
from dataclasses import replace

import networkx as nx
from torch import fx

from fxquant.errors import ScaleConflict
from fxquant.ir.graph import annotate, annotation, observed, set_observed, ties
from fxquant.numerics.grids import ACTIVATION_TYPES, EVERYTHING
from fxquant.ops import Own, demand, matters, on_grid_of, operands_of, operator_of, shares, sharing_operands
from fxquant.ops.core.composite import DEQUANTIZE
from fxquant.passes.rewriting import decide, result_config
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer, is_quantized
from fxquant.primitives.arithmetic import READ_ONCE, Arithmetic
from fxquant.quantization.spec import ActivationConfig

Asked = tuple[str, tuple[float, int] | None]  # the dtype a node asks for, and the scale and zero point if they are fixed


def share(gm: fx.GraphModule, context: Context) -> int:
    """Assign a group to every integer node; nodes of one group have one dtype and at most one fixed scale."""
    demands = nx.Graph()
    tied: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        operator = operator_of(node)
        if operator is None or not (is_quantized(node) or operator is DEQUANTIZE):
            continue
        demands.add_node(node)
        demands.add_edges_from((node, operand) for operand in sharing_operands(node, context.target.arithmetic))
        demands.add_edges_from((node, operand) for operand in _read_once(node, context.target.arithmetic))
        demands.add_edges_from((node, tied.setdefault(name, node)) for name in ties(node))
    _observe(gm, context)
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    groups = sorted((sorted(group, key=order.__getitem__) for group in nx.connected_components(demands)), key=lambda group: order[group[0]])
    for index, group in enumerate(groups):
        _check(group, demands)
        for node in group:
            spec = annotation(node)
            assert spec is not None
            annotate(node, replace(spec, group=index))
    return sum(len(group) - 1 for group in groups)


def _read_once(node: fx.Node, arithmetic: Arithmetic) -> list[fx.Node]:
    """Return the operands that share the grid of a node because it alone reads them and nothing else determines their grid."""
    demanded = demand(node)
    where = demanded.shared_where if is_quantized(node) and isinstance(demanded, Own) else None
    if where is None or getattr(arithmetic, where) != READ_ONCE:
        return []
    return [operand for operand in operands_of(node) if len(operand.users) == 1 and _is_free(operand, result_config(node))]


def _is_free(node: fx.Node, config: ActivationConfig) -> bool:
    """Return whether a node with this config has a separate calibrated scale, or shares it only with operands that no other node reads."""
    if not is_quantized(node) or ties(node) or result_config(node) != config or config.fixed_grid is not None:
        return False
    if shares(node):
        return all(len(operand.users) == 1 and _is_free(operand, config) for operand in on_grid_of(node))
    return isinstance(demand(node), Own)


def _observe(gm: fx.GraphModule, context: Context) -> None:
    """Find for every integer node which of its values affect any of its readers.

    A clamp discards values beyond its limits, and a sigmoid hardly changes beyond 7. A scale that covered these as well would be too coarse
    for the others.
    """
    for node in reversed(gm.graph.nodes):
        if not is_quantized(node) or not node.users:
            continue
        spec = annotation(node)
        assert spec is not None
        bits = None if spec.dtype is None else ACTIVATION_TYPES[spec.dtype].bits
        intervals = [
            matters(reader, observed(reader) or EVERYTHING, bool(sharing_operands(reader, context.target.arithmetic)), bits)
            if is_integer(reader)
            else EVERYTHING
            for reader in node.users
        ]
        demanded = demand(node)
        limit = demanded.limit if isinstance(demanded, Own) and demanded.limit is not None else math.inf
        interval = max(-limit, min(low for low, _ in intervals)), min(limit, max(high for _, high in intervals))
        if interval == EVERYTHING:
            continue
        set_observed(node, interval)
        if not shares(node):
            low, high = interval
            within = f"above {low:g}" if high == math.inf else f"below {high:g}" if low == -math.inf else f"from {low:g} to {high:g}"
            annotate(node, replace(spec, because=f"{spec.because}; only its values {within} make a difference"))


def _check(group: list[fx.Node], demands: nx.Graph) -> None:
    """Raise ScaleConflict if two members of a group cannot have one scale."""
    asked: dict[fx.Node, Asked] = {}
    for node in group:
        spec = annotation(node)
        if spec is None or spec.dtype is None or operator_of(node) is None:
            continue
        # An operator that shares its operand's scale gets a separate scale only if a rule names it.
        asks = not shares(node) or decide(node).asked
        asked[node] = (spec.dtype, result_config(node).fixed_grid if asks else None)
    first: fx.Node | None = None
    for node, (dtype, grid) in asked.items():
        if first is None:
            first = node if grid is not None else None
        elif dtype != asked[first][0] or (grid is not None and grid != asked[first][1]):
            raise _conflict(first, node, asked, demands)
    dtypes = {dtype for dtype, _ in asked.values()}
    if len(dtypes) > 1:
        one, other = (next(node for node in asked if asked[node][0] == dtype) for dtype in sorted(dtypes)[:2])
        raise _conflict(one, other, asked, demands)


def _conflict(one: fx.Node, other: fx.Node, asked: dict[fx.Node, Asked], demands: nx.Graph) -> ScaleConflict:
    def asks_for(node: fx.Node) -> str:
        dtype, grid = asked[node]
        scale, zero_point = grid or (0.0, 0)
        suffix = f" with scale {scale:g}" + (f" and zero point {zero_point}" if zero_point else "")
        return f"%{node.name} asks for {dtype}" + ("" if grid is None else suffix)

    path = " – ".join(f"%{node.name}" for node in nx.shortest_path(demands, one, other))
    what = f"%{one.name} and %{other.name} must share one scale but ask for different ones"
    because = f"{asks_for(one)}, {asks_for(other)}; they are tied by {path}"
    remedy = "give both the same scale and dtype, or keep an operator between them in float"
    return ScaleConflict(what, node=other, because=because, remedy=remedy)

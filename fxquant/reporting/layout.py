"""A graph's operators as a networkx graph, and where each is drawn: a row for every step of the longest path, from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import networkx
from torch import fx

from fxquant.analysis.fused import alike
from fxquant.analysis.layers import Layer, layers
from fxquant.errors import ConfigurationError

SWEEPS = 4  # in which the places in a row follow those of the neighbours
SIDE, LANE = 0.6, 0.2  # how far an edge that passes rows bends to the side, and how much further each that passes beside it
TURN = 0.4  # of a row: how far below a box's middle an edge turns
LANES = 8  # after which edges share the last one


@dataclass(frozen=True)
class Drawing:
    """A graph with the places of its nodes.

    graph   an edge for every value that one operator reads of another; nodes are names
    layers  the facts of each operator, by name; inputs and the output have none
    places  x and y of each; rows are one apart, and the first is at y = 0, the next at -1
    times   of what a recurrence does alike at several steps, where only the first is drawn: at how many
    lanes   of each edge that passes rows: the x at which it passes them, beside every box in them
    """

    graph: networkx.DiGraph
    layers: Mapping[str, Layer]
    places: Mapping[str, tuple[float, float]]
    lanes: Mapping[tuple[str, str], float]
    times: Mapping[str, int]

    def path(self, one: str, other: str) -> list[tuple[float, float]]:
        """Return the points of an edge: straight to the next row, to the side around what stands between."""
        (x, y), (to_x, to_y) = self.places[one], self.places[other]
        side = self.lanes.get((one, other))
        if side is None:
            return [(x, y), (to_x, to_y)]
        # Where a lane is far, an edge leaves its row before it turns, so that it does not cross the boxes beside it.
        leave = [(x, y - TURN)] if abs(side - x) > 1 else []
        enter = [(to_x, to_y + TURN)] if abs(side - to_x) > 1 else []
        return [(x, y), *leave, (side, y - 0.6), (side, to_y + 0.6), *enter, (to_x, to_y)]


def drawing(model: fx.GraphModule) -> Drawing:
    """Return the operators of a graph at any stage, with the inputs and the output. Linear in nodes, edges and the rows that these pass.

    What a recurrence does alike at several steps is one node, and what a step reads of the one before has no edge.
    """
    every = layers(model)
    groups = [(layer, others) for layer, others in alike(every) if others]
    firsts = {other.name: layer.name for layer, others in groups for other in others}
    graph = operator_graph(model, every, firsts)
    places = _places(graph)
    known = {layer.name: layer for layer in every if layer.name not in firsts}
    times = {layer.name: len(others) + 1 for layer, others in groups}
    return Drawing(graph, known, places, _lanes(graph, places), times)


def operator_graph(model: fx.GraphModule, every: tuple[Layer, ...], firsts: Mapping[str, str] = MappingProxyType({})) -> networkx.DiGraph:
    """Return the graph of names of operators, inputs and the output, with an edge for each value that one reads of another.

    `firsts` names, for operators that have no node of their own, the earlier one that stands for them.
    """
    known = {layer.name for layer in every}
    graph = networkx.DiGraph()
    order: dict[str, int] = {}
    shown: dict[fx.Node, frozenset[str]] = {}  # the operators that a node's value comes from
    for node in model.graph.nodes:
        read = frozenset[str]().union(*(shown.get(operand, frozenset()) for operand in node.all_input_nodes))
        if node.name in firsts:
            first = firsts[node.name]
            graph.add_edges_from((name, first) for name in sorted(read) if order[name] < order[first])
            shown[node] = frozenset([first])
        elif node.name in known or node.op in ("placeholder", "output"):
            graph.add_node(node.name)
            order[node.name] = len(order)
            graph.add_edges_from((name, node.name) for name in sorted(read))
            shown[node] = frozenset([node.name])
        else:
            shown[node] = read
    return graph.copy()  # in which predecessors are in the order they run


def _lanes(graph: networkx.DiGraph, places: Mapping[str, tuple[float, float]]) -> dict[tuple[str, str], float]:
    """Edges that pass rows, the shortest first, each beside the boxes of these rows, in the innermost lane that no other one is in."""
    boxes: dict[int, list[float]] = {}
    for x, y in places.values():
        boxes.setdefault(round(-y), []).append(x)
    passing = [(one, other) for one, other in graph.edges if places[one][1] - places[other][1] > 1]
    taken: dict[tuple[float, int], set[int]] = {}  # the rows of a lane
    found = {}
    for one, other in sorted(passing, key=lambda edge: places[edge[0]][1] - places[edge[1]][1]):
        (x, y), (to_x, to_y) = places[one], places[other]
        rows = set(range(round(-y), round(-to_y)))
        side = round(_beside([each for row in rows - {round(-y)} for each in boxes.get(row, ())], max(x, to_x) + SIDE), 2)
        lane = next((each for each in range(LANES - 1) if rows.isdisjoint(taken.get((side, each), ()))), LANES - 1)
        taken.setdefault((side, lane), set()).update(rows)
        found[one, other] = side + LANE * lane
    return found


def _beside(boxes: list[float], x: float) -> float:
    """Return the nearest place to the right of x, or x itself, that lies beside every box."""
    for box in sorted(boxes):
        if abs(box - x) < SIDE - 0.01:
            x = box + SIDE
    return x


def _places(graph: networkx.DiGraph) -> dict[str, tuple[float, float]]:
    for row, names in enumerate(networkx.topological_generations(graph)):
        for name in names:
            graph.nodes[name]["row"] = row
    # An input stands right above the first that reads it.
    for name in [name for name in graph if not graph.in_degree(name) and graph.out_degree(name)]:
        graph.nodes[name]["row"] = min(graph.nodes[reader]["row"] for reader in graph.successors(name)) - 1
    rows: dict[int, list[str]] = {}
    for name, data in graph.nodes(data=True):
        rows.setdefault(data["row"], []).append(name)
    x: dict[str, float] = {}
    for names in rows.values():
        x.update({name: index - (len(names) - 1) / 2 for index, name in enumerate(names)})
    for sweep in range(SWEEPS):
        for row in sorted(rows, reverse=bool(sweep % 2)):
            near = graph.successors if sweep % 2 else graph.predecessors
            names = rows[row]
            wish = {name: _mean([x[other] for other in near(name)], x[name]) for name in names}
            names.sort(key=wish.__getitem__)
            middle = sum(wish.values()) / len(wish)
            x.update({name: middle + index - (len(names) - 1) / 2 for index, name in enumerate(names)})
    return {name: (x[name], -float(graph.nodes[name]["row"])) for name in graph}


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def needs(package: str, error: ImportError) -> ConfigurationError:
    """Return the error for a missing package of the extra "report"."""
    return ConfigurationError(
        f"{package} is needed for this, and is not installed", because=str(error), remedy='pip install "fxquant[report]"'
    )

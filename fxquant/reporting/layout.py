"""A graph's operators as a networkx graph, and where each is drawn: a row for every step of the longest path, from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx
from torch import fx

from fxquant.analysis.layers import Layer, layers
from fxquant.analysis.steps import alike
from fxquant.errors import ConfigurationError

SWEEPS = 4  # in which the places in a row follow those of the neighbours
SIDE, LANE = 0.6, 0.2  # how far an edge that passes rows bends to the side, and how much further each that passes beside it
LANES = 8  # after which edges share the last one


@dataclass(frozen=True)
class Drawing:
    """A graph with the places of its nodes.

    graph   an edge for every value that one operator reads of another; nodes are names
    layers  the facts of each operator, by name; inputs and the output have none
    places  x and y of each; rows are one apart, and the first is at y = 0, the next at -1
    times   of what a recurrence does alike at several steps, where only the first is drawn: at how many
    lanes   of each edge that passes rows of its own column: how many others lie between it and the column
    """

    graph: networkx.DiGraph
    layers: Mapping[str, Layer]
    places: Mapping[str, tuple[float, float]]
    lanes: Mapping[tuple[str, str], int]
    times: Mapping[str, int] = field(default_factory=dict)

    def path(self, one: str, other: str) -> list[tuple[float, float]]:
        """Return the points of an edge: straight to the next row, to the side around what stands between."""
        (x, y), (to_x, to_y) = self.places[one], self.places[other]
        lane = self.lanes.get((one, other))
        if lane is None:
            return [(x, y), (to_x, to_y)]
        side = SIDE + LANE * lane
        return [(x, y), (x + side, y - 0.6), (to_x + side, to_y + 0.6), (to_x, to_y)]


def drawing(model: fx.GraphModule, *, steps: bool = True) -> Drawing:
    """Return the operators of a graph at any stage, with the inputs and the output. Linear in nodes and edges.

    Without `steps`, what a recurrence does alike at several steps is one node, and what a step reads of the one before has no edge.
    """
    every = layers(model)
    groups = [] if steps else [(layer, others) for layer, others in alike(every) if others]
    firsts = {other.name: layer.name for layer, others in groups for other in others}
    known = {layer.name: layer for layer in every if layer.name not in firsts}
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
    places = _places(graph)
    return Drawing(graph, known, places, _lanes(graph, places), {layer.name: len(others) + 1 for layer, others in groups})


def _lanes(graph: networkx.DiGraph, places: Mapping[str, tuple[float, float]]) -> dict[tuple[str, str], int]:
    """Edges that pass rows, the shortest first, each in the innermost lane of its column where no other one is beside it."""
    passing = [(one, other) for one, other in graph.edges if places[one][1] - places[other][1] > 1]
    near = [edge for edge in passing if abs(places[edge[0]][0] - places[edge[1]][0]) <= SIDE]
    taken: dict[tuple[int, int], set[int]] = {}  # the rows of a column's lane
    found = {}
    for one, other in sorted(near, key=lambda edge: places[edge[0]][1] - places[edge[1]][1]):
        column, rows = round(places[one][0]), set(range(round(-places[one][1]), round(-places[other][1])))
        lane = next((each for each in range(LANES - 1) if rows.isdisjoint(taken.get((column, each), ()))), LANES - 1)
        taken.setdefault((column, lane), set()).update(rows)
        found[one, other] = lane
    return found


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

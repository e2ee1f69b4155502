"""A graph's operators as a networkx graph, and where each is drawn: a row for every step of the longest path, from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx
from torch import fx

from fxquant.analysis.layers import Layer, layers
from fxquant.errors import ConfigurationError

SWEEPS = 4  # in which the places in a row follow those of the neighbours
SIDE = 0.45  # how far an edge that passes rows bends to the side, for each of the first rows


@dataclass(frozen=True)
class Drawing:
    """A graph with the places of its nodes.

    graph   an edge for every value that one operator reads of another; nodes are names
    layers  the facts of each operator, by name; inputs and the output have none
    places  x and y of each; rows are one apart, and the first is at y = 0, the next at -1
    """

    graph: networkx.DiGraph
    layers: Mapping[str, Layer]
    places: Mapping[str, tuple[float, float]]

    def path(self, one: str, other: str) -> list[tuple[float, float]]:
        """The points of an edge: straight to the next row, to the side around what stands between."""
        (x, y), (to_x, to_y) = self.places[one], self.places[other]
        rows = y - to_y
        if rows <= 1 or abs(x - to_x) > SIDE:
            return [(x, y), (to_x, to_y)]
        side = SIDE * min(rows, 4) ** 0.5
        return [(x, y), (x + side, y - 0.6), (to_x + side, to_y + 0.6), (to_x, to_y)]


def drawing(model: fx.GraphModule) -> Drawing:
    """The operators of a graph at any stage, with the inputs and the output. Linear in nodes and edges."""
    known = {layer.name: layer for layer in layers(model)}
    graph = networkx.DiGraph()
    shown: dict[fx.Node, frozenset[str]] = {}  # the operators that a node's value comes from
    for node in model.graph.nodes:
        read = frozenset[str]().union(*(shown.get(operand, frozenset()) for operand in node.all_input_nodes))
        if node.name in known or node.op in ("placeholder", "output"):
            graph.add_node(node.name)
            graph.add_edges_from((name, node.name) for name in sorted(read))
            shown[node] = frozenset([node.name])
        else:
            shown[node] = read
    return Drawing(graph, known, _places(graph))


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
    """What is said where a package of the extra "report" is missing."""
    return ConfigurationError(
        f"{package} is needed for this, and is not installed", because=str(error), remedy='pip install "fxquant[report]"'
    )

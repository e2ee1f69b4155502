"""Partition of a model into segments, run one after another, each on one device: the target for integers, or the host for float.

Segments are convex: data that leaves one does not come back into it. There are as few as possible, in either order of the devices: every
operator is in the first segment of its device at which all its operands are available.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx

from fxquant.analysis.layers import HOST, QUANTIZED
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import TensorFact, computes_tensor, fact, fused, is_parameter, module_path
from fxquant.ir.integer import is_inner, origin
from fxquant.prepared.stage import in_float16, is_dequantize, primitive_of, quantized_operator
from fxquant.support.arguments import checked


@dataclass(frozen=True)
class Segment:
    """One segment.

    device   where it runs: the target's name ("bayes-e"), or "host" for float operators that the target does not compute in float16
    nodes    the names of its operators, in the order they run
    inputs   the names of the tensors it takes: inputs of the model, and outputs of segments before it
    outputs  the names of the tensors that later segments take, or that the model returns
    """

    device: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@checked(model=QUANTIZED)
def segments(model: fx.GraphModule, cut: Sequence[str | Sequence[str]] = ()) -> tuple[Segment, ...]:
    """Return the segments of a prepared or an integer model, in the order they run.

    `cut` names tensors, in order, after which the model is cut as well: the operators that such a tensor depends on, without those of an
    earlier cut, are before the cut, all others after it. A path of the user's module means its last tensor. A nested list of
    names is one cut. Raises ConfigurationError for a model at another stage, and for a name that no tensor has.
    """
    groups = grouped(model, cut)
    place = {node: number for number, (_, nodes) in enumerate(groups) for node in nodes}
    readers = [node for node in model.graph.nodes if _works(node) or node.op == "output"]
    leaving = {read for node in readers for read in _reads(node) if place.get(read) != place.get(node)}
    all_segments = []
    for number, (device, nodes) in enumerate(groups):
        entering = dict.fromkeys(read for node in nodes for read in _reads(node) if place.get(read) != number)
        all_segments.append(Segment(device, _names(nodes), _names(entering), _names(node for node in nodes if node in leaving)))
    return tuple(all_segments)


def grouped(model: fx.GraphModule, cut: Sequence[str | Sequence[str]]) -> list[tuple[str, list[fx.Node]]]:
    """Return the device and the nodes of every segment, in the order they run."""
    working = [node for node in model.graph.nodes if _works(node)]
    stage = _stages(model, working, cut)
    device = {node: _device(model, node) for node in working}
    groups: list[tuple[str, list[fx.Node]]] = []
    for number in sorted(set(stage.values())):
        mine = [node for node in working if stage[node] == number]
        tried = [_levels(mine, device, first) for first in dict.fromkeys(device[node] for node in mine)]
        levels = min(tried, key=lambda levels: len(set(levels.values())))
        for level in sorted(set(levels.values())):
            nodes = [node for node in mine if levels[node] == level]
            groups.append((device[nodes[0]], nodes))
    return groups


def _works(node: fx.Node) -> bool:
    """Return whether a node is an operator. Sizes and functions of parameters are none: every segment that reads one computes it again."""
    return node.op not in ("placeholder", "get_attr", "output") and not is_parameter(node) and computes_tensor(node)


def _device(model: fx.GraphModule, node: fx.Node) -> str:
    integer = primitive_of(node) is not None or quantized_operator(model, node) is not None or is_dequantize(model, node)
    return str(model.meta["target"].name) if integer or in_float16(model, node) else HOST


def _levels(nodes: list[fx.Node], device: Mapping[fx.Node, str], first: str) -> dict[fx.Node, int]:
    """Return the segment number of every node, with segment 0 on device `first`; the primitives of an operator stay together."""
    levels: dict[fx.Node, int] = {}
    for _, together in itertools.groupby(nodes, origin):
        operator = list(together)
        before = [levels[read] + (device[read] != device[node]) for node in operator for read in _reads(node) if read in levels]
        level = max(before, default=int(device[operator[0]] != first))
        levels.update(dict.fromkeys(operator, level))
    return levels


def _reads(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operators and inputs that a node reads, also through numbers and computed parameters."""
    for operand in node.all_input_nodes:
        if _works(operand) or operand.op == "placeholder":
            yield operand
        else:
            yield from _reads(operand)


def _stages(model: fx.GraphModule, working: list[fx.Node], cut: Sequence[str | Sequence[str]]) -> dict[fx.Node, int]:
    """Return the number of cuts before every operator."""
    edges = nx.DiGraph()
    edges.add_nodes_from(working)
    edges.add_edges_from((read, node) for node in working for read in _reads(node))
    stage: dict[fx.Node, int] = {}
    for number, names in enumerate(cut):
        for name in [names] if isinstance(names, str) else names:
            node = _named(model, working, name)
            for one in (node, *nx.ancestors(edges, node)):
                stage.setdefault(one, number)
    for node in working:
        # Dequantized values are in the stage of their integers, and a part of a value that is not a tensor is in the stage of that value.
        reads = [read for read in _reads(node) if read in stage and (is_dequantize(model, node) or not isinstance(fact(read), TensorFact))]
        if reads:
            stage[node] = stage[reads[0]]
        stage.setdefault(node, len(cut))
    return {node: stage[node] for node in working}


def _named(model: fx.GraphModule, working: list[fx.Node], name: str) -> fx.Node:
    records = {node: primitive_of(node) for node in working if isinstance(fact(node), TensorFact)}
    between = {node for node, record in records.items() if record is not None and (record.kind == "accumulator" or is_inner(node))}
    tensors = {node.name: node for node in records if node not in between}  # of the model
    if name in tensors:
        return tensors[name]
    inside = [node for node in tensors.values() if module_path(node) == name or module_path(node).startswith(f"{name}.")]
    inside = [node for node in inside if not is_dequantize(model, node)]
    inside = inside or [node for node in tensors.values() if name.replace(".", "_") in fused(node)]
    if name and inside:
        return inside[-1]
    near = difflib.get_close_matches(name, [*tensors, *dict.fromkeys(map(module_path, working))], n=1)
    because = "a cut is named after a tensor that the model computes, or the path of a module in the user's model"
    remedy = f"did you mean {near[0]!r}?" if near else "fxq.inspect.layers and fxq.text list the names"
    raise ConfigurationError(f"the model has no tensor {name!r} to cut after", because=because, remedy=remedy)


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)

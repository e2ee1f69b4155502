"""Block reconstruction: roundings and scales of activations are learned together, block by block (see `learning`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import networkx
from torch import fx

from fxquant.ir.graph import is_parameter
from fxquant.support.arguments import POSITIVE, checked
from fxquant.tuning.checkpoint import CHECKPOINT
from fxquant.tuning.choices import tuning
from fxquant.tuning.course import learn
from fxquant.tuning.learning import Settings
from fxquant.tuning.result import TuningResult
from fxquant.tuning.walk import Unit, layer_units, taken

ROUNDED = 0.5


@checked(steps=POSITIVE, checkpoint=CHECKPOINT)
def reconstruct(
    prepared: fx.GraphModule,
    batches: Any,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    steps: int = 2000,
    batch_size: int = 16,
    seed: int = 0,
    checkpoint: str | None = None,
    show_progress: bool | None = None,
) -> TuningResult:
    """Learn the roundings of weights and the scales of activations of each block, so that it returns its float result.

    BRECQ (Li et al. 2021) with QDrop (Wei et al. 2022): a block is a residual block, or a few layers in a row. While it learns, each
    element of an activation is rounded with probability one half. Scales that are given, frozen, powers of two, or shared with an operator
    outside of the block stay. Held-out samples judge each block, whether it takes both the learned roundings and the learned
    scales, and the outputs of the model.
    `seed`, `checkpoint`, memory, errors and everything else are as in `adaround`.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, batch_fn, batch_size, show_progress)
        call = {"method": "reconstruct", "steps": steps, "seed": seed, "batch_size": batch_size}
        settings = Settings(steps, rounded=ROUNDED, scales=True)
        return learn(tuned, block_units(prepared), samples, settings, seed, call, checkpoint, show_progress)


# ---- Blocks of a graph: stretches with one entry and one exit, between which nothing passes them by ------------------
#
# Li, Gong, Tan, Yang, Hu, Zhang, Yu, Wang, Gu: BRECQ, ICLR 2021, section 3.2: what is reconstructed together are layers that depend on each
# other, those of a residual block. Here a block is what lies between two nodes that every path through the graph passes; where these
# follow each other directly, up to `LAYERS_IN_A_ROW` layers; and where more than `LAYERS_TOGETHER` lie between two, as inside of a
# skip connection around a whole network, the blocks of what lies there.


LAYERS_IN_A_ROW = 3
LAYERS_TOGETHER = 6

Nodes = tuple[fx.Node, ...]


def block_units(prepared: fx.GraphModule) -> list[Unit]:
    """Units that together hold every weighted node, in an order in which each reads nothing of one behind it."""
    order = {node: index for index, node in enumerate(prepared.graph.nodes)}
    layers = {unit.weighted[0]: unit for unit in layer_units(prepared)}
    flow = networkx.DiGraph()
    for node in prepared.graph.nodes:
        if node.op not in ("placeholder", "output") and not is_parameter(node):
            flow.add_node(node)
            flow.add_edges_from((operand, node) for operand in node.all_input_nodes if operand in flow)
    found = []
    for block in _blocks(flow, set(layers)):
        weighted = tuple(sorted((node for node in block if node in layers), key=order.__getitem__))
        nodes = tuple(sorted(block, key=order.__getitem__))
        if weighted:
            found.append(layers[weighted[0]] if block == {weighted[0]} else Unit(nodes, weighted))
    return sorted(found, key=lambda unit: order[unit.nodes[-1]])


def _blocks(flow: networkx.DiGraph, layers: set[fx.Node]) -> Iterator[set[fx.Node]]:
    """Yield the blocks of a part of the graph."""
    for part in networkx.weakly_connected_components(flow):
        yield from _of_part(flow.subgraph(part), layers)


def _of_part(flow: networkx.DiGraph, layers: set[fx.Node]) -> Iterator[set[fx.Node]]:
    whole = networkx.DiGraph(flow)
    whole.add_edges_from(("in", node) for node, degree in flow.in_degree() if not degree)
    whole.add_edges_from((node, "out") for node, degree in flow.out_degree() if not degree)
    chain = _passed_by_all(whole)
    row: list[set[fx.Node]] = []
    for entry, exit in itertools.pairwise(chain):
        between = (networkx.descendants(whole, entry) & networkx.ancestors(whole, exit)) - {"in", "out"}
        region = between | ({exit} - {"out"})
        if not between:
            row.append(region)
            continue
        yield from _rows(row, layers)
        row = []
        if len(region & layers) <= LAYERS_TOGETHER:
            yield region
        elif len(chain) == 2:  # no node that all paths pass
            yield from ({node} for node in region)
        else:
            yield from _blocks(flow.subgraph(between), layers)
            yield region - between
    yield from _rows(row, layers)


def _passed_by_all(whole: networkx.DiGraph) -> list[object]:
    """Return the nodes that every path from in to out passes, these two included, in order."""
    above = networkx.immediate_dominators(whole, "in")
    found: list[object] = ["out"]
    while found[-1] != "in":
        found.append(above[found[-1]])
    return found[::-1]


def _rows(row: Sequence[set[fx.Node]], layers: set[fx.Node]) -> Iterator[set[fx.Node]]:
    """Nodes that follow each other directly, in stretches of about as many layers each."""
    count = sum(len(region & layers) for region in row)
    pieces = -(-count // LAYERS_IN_A_ROW)
    found: set[fx.Node] = set()
    taken = 0
    for region in row:
        if found and len(region & layers) and taken * pieces // max(count, 1) != (taken - 1) * pieces // max(count, 1) and taken:
            yield found
            found = set()
        taken += len(region & layers)
        found = found | region
    if found:
        yield found

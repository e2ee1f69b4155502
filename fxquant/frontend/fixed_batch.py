"""A graph at one batch size: every size in it is a number."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxquant.errors import ConfigurationError
from fxquant.frontend.batch_limits import noted_limits
from fxquant.ir.facts import BatchDim, TensorFact
from fxquant.ir.graph import fact, set_fact
from fxquant.ir.model import Model


def with_fixed_batch(model: fx.GraphModule, batch_size: int) -> Model:
    """Return a traced or integer model at `batch_size`, as if traced with `dynamic_shapes={}`; it shares the parameters.

    Raises ConfigurationError for a batch size that the graph does not hold for: one beyond the limits of its batch, or another than the
    one it was traced with, where that is fixed.
    """
    _check(model, batch_size)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in model.graph.nodes:
        known = _at(fact(node), node, batch_size)
        if isinstance(fact(node), BatchDim) and node.op != "placeholder":
            copies[node] = known
            continue
        made = copies[node] = graph.node_copy(node, copies.__getitem__)
        if known is not None:
            set_fact(made, known)
    for node in reversed(model.graph.nodes):
        made = copies[node]
        if isinstance(made, fx.Node) and node.users and not made.users and made.op != "placeholder":
            graph.erase_node(made)  # only sizes were read of it
    fixed = Model.of(model, graph)
    fixed.recompile()
    return fixed


def _at(known: Any, node: fx.Node, batch_size: int) -> Any:
    """Return the facts of a node at this batch size."""

    def fixed(value: Any) -> Any:
        if isinstance(value, BatchDim):
            return value.at(batch_size)
        return TensorFact(value.at(batch_size), value.dtype) if isinstance(value, TensorFact) else value

    try:
        return fx.node.map_aggregate(known, fixed)
    except ValueError as error:
        raise ConfigurationError(
            f"batch_size={batch_size} cannot be used",
            node=node,
            because=f"here {error}",
            remedy="pass a batch size that this line can divide",
        ) from None


def _check(model: fx.GraphModule, batch_size: int) -> None:
    limits = noted_limits(model.graph)
    if not limits.smallest <= batch_size <= (limits.largest or batch_size):
        raise ConfigurationError(
            f"batch_size={batch_size} cannot be used",
            because=f"the model slices its batch at a fixed index, and takes from {limits.smallest} to {limits.largest or 'any'} rows",
            remedy="pass a batch size between these",
        )
    shapes = [known.shape for node in model.graph.find_nodes(op="placeholder") if isinstance(known := fact(node), TensorFact)]
    if not any(isinstance(size, BatchDim) for shape in shapes for size in shape):
        traced = next((shape[0] for shape in shapes if shape), batch_size)
        if traced != batch_size:
            raise ConfigurationError(
                f"batch_size={batch_size} cannot be used",
                because=f"the model was traced with fixed sizes, and a batch of {traced}",
                remedy=f"leave it out, or trace with an example of {batch_size} rows, or without dynamic_shapes={{}}",
            )

"""Loops in a flat graph: the nodes between `begin` and `end` run once for each further step of a sequence, after the first one.

    %frame = begin(%steps)                         the number of steps, of which the first was computed before
    %item = item(%sequence, %frame, …)             what the sequence has at this step
    %state = state(%first, %frame, 0)              what was carried at the step before, at the second step what the first one gave
    …
    %next = carry(%value, %frame, 0)               what the next step is given
    %done = end(%frame)
    %every = stack(%first, %frame, 0, …)           what was carried at all steps, along a dimension
    %last = last(%first, %frame, 0)                what was carried at the last step

The functions besides `begin` and `end` are primitives (`primitives.loop`). Whatever runs a graph node by node takes the nodes from
`running`, and generated code has a Python loop.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, fx


class Frame:
    """The counter of one run of a loop, from 1, and what its steps carried, by the position of the state."""

    def __init__(self, count: int) -> None:
        self.count, self.step = count, 1
        self.carried: dict[int, list[Tensor]] = {}
        self.ended: Callable[[], None] | None = None  # called after the last step
        self.again = False  # whether the caller computes all steps again: compares the results, and lets scales follow the values

    def more(self) -> bool:
        """Return whether another step is to run."""
        return self.step < self.count

    def advance(self, steps: int = 1) -> None:
        """Count steps that have run."""
        self.step += steps
        if self.ended is not None and not self.more():
            self.ended()


def begin(count: int) -> Frame:
    """Return the frame of a loop over the steps 1 to `count` - 1; step 0 stands before the loop."""
    return Frame(count)


AT_ONCE: list[Callable[..., None]] = []  # what runs a loop of a prepared model at once, where it can; backends offer it
ALONE: list[Callable[..., Any]] = []  # what returns the integer model of such a loop alone; the pass that lowers offers it


def at_once(model: Any, name: str, frame: Frame, values: dict[str, Any]) -> None:
    """Run all steps of the loop `name` by a function of `AT_ONCE`, given the tensors that the loop reads, if one accepts it."""
    start = next(node for node in model.graph.find_nodes(op="call_function", target=begin) if node.name == name)
    for run in AT_ONCE:
        run(model, start, frame, values)


@fx.node.has_side_effect
def end(frame: Frame) -> None:
    """Advance the frame of a loop by one step."""
    frame.advance()


def body(start: fx.Node) -> list[fx.Node]:
    """Return the nodes of a loop from the node after `begin` to its `end`, or to the last node of the graph if it has no `end`."""
    nodes, node = [], start.next
    while node is not start.graph._root:
        nodes.append(node)
        if node.target is end and node.args[0] is start:
            break
        node = node.next
    return nodes


def reads(start: fx.Node) -> list[fx.Node]:
    """Return the nodes outside of a loop that its body reads, parameters included."""
    inside = {start, *body(start)}
    return list(dict.fromkeys(each for node in body(start) for each in node.all_input_nodes if each not in inside))


def bodies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes of each loop of a graph by its `begin`."""
    return {start: body(start) for start in graph.find_nodes(op="call_function", target=begin)}


def running(nodes: Iterable[fx.Node], value: Callable[[fx.Node], Any]) -> Iterator[fx.Node]:
    """Yield nodes in the order in which they run, a loop's nodes repeatedly; `value` returns what a node gave: the frame of a loop."""
    order = list(nodes)
    places = {node: place for place, node in enumerate(order) if node.target in (begin, end)}
    ends = {node.args[0]: place for node, place in places.items() if node.target is end}
    place = 0
    while place < len(order):
        node = order[place]
        yield node
        if node in ends and not value(node).more():
            place = ends[node]  # without further steps
        elif node in places and node.target is end and value(node.args[0]).more():  # type: ignore[arg-type]
            place = places[node.args[0]]  # type: ignore[index]
        place += 1

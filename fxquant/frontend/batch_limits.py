"""Between which batch sizes the facts of a traced graph hold.

Facts are found at four batch sizes, of which the smallest is 4. What cuts off can be something else at others: `x[:2]` has one row of
a batch of one, `x[-20:]` has no more than 20 of a large one. Such operators are run again, without data, until the limits are found.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.errors import TraceError
from fxquant.ir import graph
from fxquant.ir.graph import BATCH_SIZES, BatchDim, TensorFact
from fxquant.ir.integer import noted, notes

SMALLEST, LARGEST = "smallest_batch", "largest_batch"  # in the notes of the inputs
LARGE = 2**16  # stands for every batch size above: nobody cuts off at more

# These keep the first dimension as it is for some batch sizes only.
_CUT = frozenset((operator.getitem, "split", "tensor_split", "narrow", "chunk", "split_with_sizes", "__getitem__"))


@dataclass(frozen=True)
class BatchLimits:
    """The smallest and the largest batch size for which all facts hold, each with a node that ends them; None where none does."""

    smallest: int = 1
    largest: int | None = None
    at_smallest: fx.Node | None = None
    at_largest: fx.Node | None = None

    def another(self, batch: int) -> int | None:
        """Return a batch size beside this one, small and within the limits; None where there is none."""
        sizes = (2, 4, self.smallest, self.smallest + 1)
        return next((size for size in sizes if size != batch and size >= self.smallest and size <= (self.largest or size)), None)


def note_batch_limits(traced: fx.Graph, batch: int) -> None:
    """Note the limits of a traced graph on its inputs. Raises TraceError where the example's own batch size is beyond them."""
    limits = batch_limits(traced)
    if batch < limits.smallest:
        _refuse(limits.at_smallest, f"the batch size of the example, {batch}, is too small", f"from a batch of {limits.smallest} on")
    if limits.largest is not None and batch > limits.largest:
        _refuse(limits.at_largest, f"the batch size of the example, {batch}, is too large", f"up to a batch of {limits.largest}")
    for node in traced.find_nodes(op="placeholder"):
        if limits.smallest > 1:
            notes(node)[SMALLEST] = limits.smallest
        if limits.largest is not None:
            notes(node)[LARGEST] = limits.largest


def noted_limits(made: fx.Graph) -> BatchLimits:
    """Return the limits that `note_batch_limits` noted on the graph that this one was made from."""
    for node in made.find_nodes(op="placeholder"):
        return BatchLimits(noted(node, SMALLEST) or 1, noted(node, LARGEST))
    return BatchLimits()


def _refuse(node: fx.Node | None, what: str, where: str) -> None:
    raise TraceError(
        what,
        node=node,
        because=f"the size of what this line computes follows the batch evenly only {where}",
        remedy="trace with an example of such a size, or with dynamic_shapes={} to fix the batch size",
    )


def batch_limits(traced: fx.Graph) -> BatchLimits:
    """Return the limits of a traced graph; linear in its operators, of which few are run."""
    runner, limits, known = _Runner(), BatchLimits(), set()
    for node in traced.nodes:
        if not _may_cut(node) or (key := _key(node)) in known:
            continue
        known.add(key)
        if not runner.holds(node, BATCH_SIZES[0]):
            continue  # it depends on more than sizes
        small = [size for size in range(limits.smallest, BATCH_SIZES[0]) if not runner.holds(node, size)]
        if small:
            limits = BatchLimits(small[-1] + 1, limits.largest, node, limits.at_largest)
        large = LARGE if limits.largest is None else limits.largest
        if runner.differs(node, large):
            sizes = range(BATCH_SIZES[1], large)
            first = bisect.bisect_left(sizes, True, key=lambda size: runner.differs(node, size))
            limits = BatchLimits(limits.smallest, sizes[0] + first - 1, limits.at_smallest, node)
    return limits


def _may_cut(node: fx.Node) -> bool:
    """Return whether a node's result can be another one than its fact says: not where every size follows the first one of an operand."""
    result = graph.fact(node)
    if node.op not in ("call_function", "call_method") or not isinstance(result, TensorFact):
        return False
    operands = [known for operand in node.all_input_nodes if (known := graph.fact(operand)) is not None]
    if not any(_varies(known) for known in operands):
        return False
    tensors = [known.shape for known in operands if isinstance(known, TensorFact)]
    plain = all(_plain(shape) for shape in (result.shape, *tensors)) and bool(result.shape) and result.shape[0] == BatchDim()
    return not plain or node.target in _CUT or graph.target_name(node) in _CUT


def _plain(shape: tuple[Any, ...]) -> bool:
    return not any(isinstance(size, BatchDim) for size in shape[1:]) and all(
        size == BatchDim() for size in shape[:1] if isinstance(size, BatchDim)
    )


def _varies(known: Any) -> bool:
    return isinstance(known, BatchDim) or not isinstance(known, TensorFact) or any(isinstance(size, BatchDim) for size in known.shape)


def _key(node: fx.Node) -> Any:
    """Equal for calls that have the same limits: the same function of operands with the same facts."""

    def described(operand: fx.Node) -> str:
        known = graph.fact(operand)
        return str(known) if isinstance(known, TensorFact | BatchDim) else operand.name

    return node.target, repr(fx.map_arg((node.args, node.kwargs), described))


def _size(size: int | BatchDim, batch: int) -> int:
    try:
        return size if isinstance(size, int) else size.at(batch)
    except ValueError:
        raise _Uneven from None


def _shape(known: TensorFact, batch: int) -> tuple[int, ...]:
    return tuple(_size(size, batch) for size in known.shape)


class _Uneven(Exception):
    """A size is not an integer at this batch size, as B/2 at an odd one: its fact says nothing there."""


class _Runner:
    """Runs single nodes of a graph on tensors without data."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def holds(self, node: fx.Node, batch: int, *, failed: bool = False) -> bool:
        """Return whether the node's result at a batch size is what its fact says; `failed` where PyTorch raises an error."""
        try:
            result, said = self._run(node, batch), graph.fact(node)
            return tuple(result.shape) == _shape(said, batch) and result.dtype == said.dtype
        except _Uneven:
            return True
        except Exception:  # whatever PyTorch raises
            return failed

    def differs(self, node: fx.Node, batch: int) -> bool:
        """Return whether its result is something else than its fact says; an operator that fails at a batch size says so itself."""
        return not self.holds(node, batch, failed=True)

    def _run(self, node: fx.Node, batch: int) -> Any:
        def example(operand: fx.Node) -> Any:
            known = graph.fact(operand)
            if isinstance(known, BatchDim):
                return _size(known, batch)
            if isinstance(known, TensorFact):
                return torch.empty(_shape(known, batch), dtype=known.dtype, device="cpu")
            return known if isinstance(known, int | float) else self._run(operand, batch)  # several results

        with self.mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), example)
            function: Callable[..., Any] = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
            return function(*args, **kwargs)

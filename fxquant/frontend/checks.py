"""Checks that a trace means what the model means, at every batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxquant.errors import TraceError
from fxquant.frontend.batch_limits import noted_limits
from fxquant.frontend.environment import source_of_error, undisturbed
from fxquant.frontend.handler import Handler
from fxquant.frontend.inputs import ExampleInputs
from fxquant.frontend.outputs import nest_of
from fxquant.frontend.snapshot import Snapshot
from fxquant.frontend.tracer import RETRACE_SIZES
from fxquant.ir import graph
from fxquant.ir.graph import BatchDim, TensorFact
from fxquant.numerics.gradient import GradientRule
from fxquant.support import logger

_FIX = "keep batch sizes as x.shape[0] or x.size(0) gives them, or trace with dynamic_shapes={} to fix the batch size"


def compare_recordings(first: Handler, second: Handler) -> None:
    """Raise a TraceError if two traces at different batch sizes are not the same graph."""
    counterpart: dict[fx.Node, fx.Node] = {}
    second_nodes = iter(second.graph.nodes)
    for node in first.graph.nodes:
        other: fx.Node | None = next(second_nodes, None)
        if other is None:
            _refuse(node, "the operation is missing at another batch size")
        if node.op != other.op or (node.target is not other.target and node.target != other.target):
            _refuse(node, f"it calls {graph.target_name(node)} at one batch size and {graph.target_name(other)} at another")
        counterpart[node] = other
        for mine, theirs in ((node.args, other.args), (node.kwargs, other.kwargs)):
            difference = _difference(mine, theirs, counterpart)
            if difference is not None:
                _refuse(
                    node, f"an argument of {graph.target_name(node)} is {difference[0]} at one batch size and {difference[1]} at another"
                )
        _compare_facts(node, other)
    extra = next(second_nodes, None)
    if extra is not None:
        _refuse(extra, "the operation is there at one batch size only")
    for name, constant in first.constants.items():
        if name in second.constants and not same_tensor(constant, second.constants[name]):
            _refuse(first.graph.find_nodes(op="get_attr", target=name)[0], "the content of a constant depends on the batch size")


def _difference(mine: Any, theirs: Any, counterpart: dict[fx.Node, fx.Node]) -> tuple[Any, Any] | None:
    """Return the first place where two arguments differ."""
    if isinstance(mine, fx.Node):
        return None if counterpart.get(mine) is theirs else (mine, theirs)
    if isinstance(mine, (tuple, list)):
        if not isinstance(theirs, (tuple, list)) or len(mine) != len(theirs):
            return mine, theirs
        return next(filter(None, (_difference(a, b, counterpart) for a, b in zip(mine, theirs, strict=True))), None)
    if isinstance(mine, dict):
        if not isinstance(theirs, dict) or list(mine) != list(theirs):
            return mine, theirs
        return next(filter(None, (_difference(mine[key], theirs[key], counterpart) for key in mine)), None)
    if isinstance(mine, slice) and isinstance(theirs, slice):
        return _difference((mine.start, mine.stop, mine.step), (theirs.start, theirs.stop, theirs.step), counterpart)
    same = type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs))
    return None if same else (mine, theirs)


def _compare_facts(node: fx.Node, other: fx.Node) -> None:
    """Compare the facts of two traces: those of the second are exact at its batch sizes, and the first trace's formula gives them, too."""
    mine, theirs = graph.fact(node), graph.fact(other)
    if mine is theirs or not isinstance(mine, (TensorFact, BatchDim)):
        return
    sizes = zip(mine.shape, theirs.shape, strict=True) if isinstance(mine, TensorFact) else ((mine, theirs),)
    for size, other_size in sizes:
        # Facts are written for the first pair of batch sizes, also those of the second trace.
        if _at(size, RETRACE_SIZES) != _at(other_size, graph.BATCH_SIZES):
            if isinstance(mine, BatchDim):
                graph.set_fact(node, None)
                return
            _refuse(node, f"a size of its result is {size} at small batch sizes, and something else at larger ones")


def _at(size: int | BatchDim, batches: Sequence[int]) -> list[Any]:
    return [size if isinstance(size, int) else size.coefficient * batch + size.offset for batch in batches]


def _refuse(node: fx.Node, because: str) -> NoReturn:
    raise TraceError("Python code in the model turned the batch size into a constant", node=node, because=because, remedy=_FIX)


# ---- comparison with the model itself ------------------------------------------------------------------------------


def compare_with_model(model: nn.Module, traced: fx.GraphModule, inputs: ExampleInputs) -> None:
    """Raise a TraceError if the graph and the model do not give the same bits on the example inputs, at two batch sizes."""
    _compare_at(model, traced, inputs, inputs.tensors(), required=True)
    if inputs.batch is not None:
        other = noted_limits(traced.graph).another(inputs.batch)
        if other is not None:
            _compare_at(model, traced, inputs, inputs.with_batch(other), required=False)


def _compare_at(
    model: nn.Module, traced: fx.GraphModule, inputs: ExampleInputs, tensors: dict[str, torch.Tensor], *, required: bool
) -> None:
    args, kwargs = inputs.arguments({name: tensor.clone() for name, tensor in tensors.items()})
    shells = Snapshot(model, own_buffers=True)
    hooked = any(isinstance(module, GradientRule) for module in traced.modules())  # PyTorch refuses a hook where gradients are off
    with torch.set_grad_enabled(hooked), undisturbed():
        try:
            expected = shells.root(*args, **kwargs)
        except Exception as error:
            if not required:
                return
            where = source_of_error(error, _compare_at.__code__)
            note = "raised by the float model, which fxquant calls on the example inputs to compare its graph with it"
            getattr(error, "add_note", logger.error)(note + (f", at {where}" if where else ""))  # Python 3.10 has no notes
            raise
    with torch.no_grad(), undisturbed():
        found = traced(**{name: tensor.clone() for name, tensor in tensors.items()})
    results = [[leaf for leaf in tree_leaves(nest_of(each)) if isinstance(leaf, torch.Tensor)] for each in (found, expected)]
    for index, (mine, theirs) in enumerate(zip(*results, strict=True)):
        if not same_tensor(mine, theirs):
            _refuse_numbers(index, mine, theirs, next(iter(tensors.values())).shape)


def same_tensor(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits; any two NaN count as the same."""
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    return torch.equal(mine, theirs) or bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())


def _refuse_numbers(index: int, mine: torch.Tensor, theirs: torch.Tensor, shape: torch.Size) -> NoReturn:
    difference = ""
    if mine.shape == theirs.shape:
        difference = f" by up to {(mine.double() - theirs.double()).abs().max().item():.3g}"
    raise TraceError(
        f"output {index} of the graph is not the model's output",
        because=f"on the example input of shape {tuple(shape)} the two differ{difference}; forward keeps state between calls, "
        "draws random numbers, or has an effect that is not an operation of the graph",
        remedy="make forward a function of its inputs and parameters alone",
    )

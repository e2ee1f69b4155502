"""One trace of a model at one pair of batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxquant.errors import FxQuantError, TraceError
from fxquant.frontend.environment import prepared_environment, raised_in, source_of_error
from fxquant.frontend.fake import Evaluator
from fxquant.frontend.handler import Handler
from fxquant.frontend.inputs import ExampleInputs
from fxquant.frontend.leaves import LeafRule, ModuleCalls
from fxquant.frontend.outputs import Returned
from fxquant.frontend.snapshot import Snapshot
from fxquant.frontend.state import NOTHING_MOVED, Draws, MovedState
from fxquant.frontend.values import TracedTensor, tracing
from fxquant.ir import graph
from fxquant.ir.graph import BATCH_SIZES

RETRACE_SIZES = (10, 14)


class _Mode(TorchFunctionMode):
    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not self._handler.paused:
            self._handler.gradients.switched = True
        return self._handler.call(func, args, kwargs or {})


def record(
    model: nn.Module,
    inputs: ExampleInputs,
    leaf: LeafRule,
    qconfigs: Mapping[str, Any] = MappingProxyType({}),
    *,
    again: bool = False,
    training: bool = False,
    modes: Mapping[str, bool] = MappingProxyType({}),
    random: MovedState = NOTHING_MOVED,
) -> Handler:
    """Trace a model in eval mode, or with its own Python in train mode; return the handler, with its graph. The model is not changed.

    qconfigs  the QConfigs that the nodes of calls inside of a module get, by the module's path
    again     trace at two other batch sizes, to compare with, and without source lines
    modes     source lines, and whether they have gradients whatever the mode is
    random    what is random in train mode: modules that are noise, and calls of attention that drop
    """
    snapshot = Snapshot(model, training=training)
    batches = (*RETRACE_SIZES, *BATCH_SIZES) if again else (*BATCH_SIZES, *RETRACE_SIZES)
    handler = Handler(snapshot, Evaluator(static=inputs.batch is None), batches, _run.__code__, locate=not again)
    handler.gradients.modes, handler.random, numbers = modes, random, Draws(snapshot, _run.__code__)
    axes = dict(zip(inputs.names, inputs.axes, strict=True))
    traced = {name: _placeholder(handler, name, example, axes[name], inputs) for name, example in inputs.tensors().items()}
    args, kwargs = inputs.arguments(traced)
    handler.call_module = ModuleCalls(handler, leaf, qconfigs)
    with tracing(handler):
        with prepared_environment(model, numbers), torch.enable_grad(), _Mode(handler):  # in which mode forward computes is recorded
            result, handler.form = _run(handler, args, kwargs)
        graph.describe(handler.graph.output(result), fx.map_arg(result, graph.fact), "", "")
        handler.gradients.finish(handler.graph)
        for node in reversed(handler.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                handler.graph.erase_node(node)
    handler.draws = frozenset(numbers.places)
    return handler


def _run(handler: Handler, args: Any, kwargs: Any) -> Any:
    """Return the model's result as a nest of nodes, and its form; frames outside of this one are not the model's."""
    try:
        output = handler.snapshot.root(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return Returned(lambda tensor: _returned(handler, tensor), handler.note).convert(output)
    except FxQuantError:
        raise
    except Exception as error:
        where = source_of_error(error, _run.__code__)
        if raised_in(error, "torch/_functorch/"):
            raise TraceError(
                "a transform of torch.func cannot be traced here",
                at=where,
                because=f"vmap, grad, jvp and the like look into tensors, which have no content in a trace: {type(error).__name__}",
                remedy="write what it computes for the whole batch, by broadcasting or torch.bmm; or keep the function as Python: fxq.wrap",
            ) from None
        message = str(error)
        remedy = "call the model on the example inputs first; if that works, move what fails out of forward"
        if isinstance(error, TypeError) and message.endswith(("not _Int", "not _Float")):  # what stands in for Python's while tracing
            message = message.replace("not _Int", "not Python's int").replace("not _Float", "not Python's float")
            remedy = "name PyTorch's dtype: torch.int64 for int, torch.float64 for float"
        raise TraceError(f"the model's forward raised {type(error).__name__}", at=where, because=message, remedy=remedy) from error


def _returned(handler: Handler, tensor: torch.Tensor) -> fx.Node:
    """Return the node of a tensor that forward returned."""
    tensor = handler.memory.current(tensor)
    if not isinstance(tensor, TracedTensor):
        return handler.attribute(tensor)[0]
    handler.memory.refresh(tensor)
    return tensor.node


def _placeholder(handler: Handler, name: str, example: torch.Tensor, axis: int | None, inputs: ExampleInputs) -> TracedTensor:
    """Return an input at two batch sizes; where none of its dimensions is the batch, `axis` is None, and both have the example's shape."""
    last = example.dim() == 4 and not example.is_contiguous() and example.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    with handler.evaluator.mode:
        a, b = (
            torch.empty(
                [batch if dim == axis else size for dim, size in enumerate(example.shape)],
                dtype=example.dtype,
                device=example.device,
                memory_format=layout,
            )
            for batch in handler.batches[:2]
        )
    value = handler.evaluator.intern(a, b)
    node = handler.graph.placeholder(name)
    graph.describe(node, value.fact, "", "")
    if name in inputs.renamed:
        graph.set_argument_name(node, inputs.renamed[name])
    return TracedTensor(node, value)

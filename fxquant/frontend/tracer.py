"""One trace of a model at one pair of batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxquant.errors import FxQuantError, TraceError
from fxquant.frontend.environment import prepared_environment
from fxquant.frontend.fake import Evaluator
from fxquant.frontend.handler import Handler
from fxquant.frontend.inputs import ExampleInputs
from fxquant.frontend.leaves import LeafRule, ModuleCalls
from fxquant.frontend.outputs import Returned
from fxquant.frontend.snapshot import Snapshot
from fxquant.frontend.source import raised_in, source_of_error
from fxquant.frontend.state import NOTHING_MOVED, Draws, MovedState, Place
from fxquant.frontend.values import TracedTensor, Value, tracing
from fxquant.ir import graph
from fxquant.numerics.gradient import GradientRule


@dataclass(frozen=True)
class Recording:
    """The findings of one trace.

    graph       the graph, without unused nodes
    constants   tensors that are neither parameters nor buffers, by target
    notes       what was fixed while tracing
    snapshot    the shells the trace ran on
    signature   how the model was called
    form        what it returned
    draws       the places where random numbers are drawn: the path of the module, and the line of the user's code
    read        where tensors were found that became constants, and that are attributes of the model
    calls       what calls of modules read and returned: `hooks.Call`
    settings    what forward read of the attributes of modules, by path and name
    methods     what is called at such a path: a method, kept as Python, of a shell
    rules       what is called at such a path and changes gradients
    lines       source lines, and whether they were computed with gradients; none where forward switches nothing
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    notes: list[str]
    snapshot: Snapshot
    signature: list[list[Any]]
    form: Any
    draws: frozenset[Place]
    read: frozenset[str]
    calls: tuple[tuple[Any, ...], ...]
    settings: dict[str, dict[str, Any]]
    methods: dict[str, tuple[nn.Module, Any]]
    rules: dict[str, GradientRule]
    lines: dict[str, bool]


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
    batches: tuple[int, ...],
    leaf: LeafRule,
    qconfigs: Mapping[str, Any] = MappingProxyType({}),
    *,
    locate: bool,
    training: bool = False,
    modes: Mapping[str, bool] = MappingProxyType({}),
    random: MovedState = NOTHING_MOVED,
) -> Recording:
    """Trace a model in eval mode, or with its own Python in train mode. Nothing of the model is changed.

    batches   the two batch sizes to trace at, and two others that tell numbers which depend on the batch from those that do not
    qconfigs  the QConfigs that the nodes of calls inside of a module get, by the module's path
    locate    whether nodes get their source lines
    modes     source lines, and whether they have gradients whatever the mode is
    random    what is random in train mode: modules that are noise, and calls of attention that drop
    """
    snapshot = Snapshot(model, training=training)
    handler = Handler(snapshot, Evaluator(static=inputs.batch is None), batches, _run.__code__, locate)
    handler.gradients.modes, handler.random, numbers = modes, random, Draws(snapshot, _run.__code__)
    args, kwargs = inputs.arguments([
        leaf_ if name is None else _placeholder(handler, name, leaf_, axis, inputs, batches)
        for name, leaf_, axis in zip(inputs.names, inputs.leaves, inputs.axes, strict=True)
    ])  # fmt: skip
    handler.call_module = ModuleCalls(handler, leaf, qconfigs)
    with tracing(handler):
        with prepared_environment(model, numbers), torch.enable_grad(), _Mode(handler):  # in which mode forward computes is recorded
            result, form = _run(handler, args, kwargs)
        graph.describe(handler.graph.output(result), fx.map_arg(result, graph.fact), "", "")
        handler.gradients.finish(handler.graph)
        _erase_unused(handler.graph)
    return Recording(
        handler.graph,
        handler.constants,
        list(handler.notes),
        snapshot,
        inputs.signature,
        form,
        frozenset(numbers.places),
        frozenset(handler.read),
        tuple(handler.calls),
        handler.settings,
        handler.methods,
        handler.gradients.rules,
        handler.gradients.lines if handler.gradients.switched else {},
    )


def _run(handler: Handler, args: Any, kwargs: Any) -> Any:
    """Return the model's result as a nest of nodes, and its form; frames outside of this one are not the model's."""
    try:
        output = handler.snapshot.root(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return Returned(lambda tensor: _returned(handler, tensor), handler.note).convert(output)
    except FxQuantError:
        raise
    except Exception as error:
        if raised_in(error, "torch/_functorch/"):
            raise TraceError(
                "a transform of torch.func cannot be traced here",
                at=_raised_at(error),
                because=f"vmap, grad, jvp and the like look into tensors, which have no content in a trace: {type(error).__name__}",
                remedy="write what it computes for the whole batch, by broadcasting or torch.bmm; or keep the function as Python: fxq.wrap",
            ) from None
        message = str(error)
        remedy = "call the model on the example inputs first; if that works, move what fails out of forward"
        if isinstance(error, TypeError) and message.endswith(("not _Int", "not _Float")):  # what stands in for Python's while tracing
            message = message.replace("not _Int", "not Python's int").replace("not _Float", "not Python's float")
            remedy = "name PyTorch's dtype: torch.int64 for int, torch.float64 for float"
        raise TraceError(
            f"the model's forward raised {type(error).__name__}", at=_raised_at(error), because=message, remedy=remedy
        ) from error


def _returned(handler: Handler, tensor: torch.Tensor) -> fx.Node:
    """Return the node of a tensor that forward returned."""
    tensor = handler.memory.current(tensor)
    if not isinstance(tensor, TracedTensor):
        return handler.attribute(tensor)[0]
    handler.memory.refresh(tensor)
    return tensor.node


def _raised_at(error: BaseException) -> str | None:
    return source_of_error(error, _run.__code__)


def _placeholder(
    handler: Handler, name: str, example: torch.Tensor, axis: int | None, inputs: ExampleInputs, batches: tuple[int, ...]
) -> TracedTensor:
    value = _input_value(handler.evaluator, example, axis, batches[:2])
    node = handler.graph.placeholder(name)
    graph.describe(node, value.fact, "", "")
    if name in inputs.renamed:
        graph.set_argument_name(node, inputs.renamed[name])
    return TracedTensor(node, value)


def _input_value(evaluator: Evaluator, example: torch.Tensor, axis: int | None, batches: tuple[int, ...]) -> Value:
    """Return an input at two batch sizes; where none of its dimensions is the batch, `axis` is None, and both have the example's shape."""
    last = example.dim() == 4 and not example.is_contiguous() and example.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    with evaluator.mode:
        a, b = (
            torch.empty(
                [batch if dim == axis else size for dim, size in enumerate(example.shape)],
                dtype=example.dtype,
                device=example.device,
                memory_format=layout,
            )
            for batch in batches
        )
    return evaluator.intern(a, b)


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)

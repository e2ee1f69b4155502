"""Activation checkpointing around a prepared model: its second forward pass, inside backward, sees the statistics of the first one.

A pass in state TRAIN moves scales and running statistics. A pass that repeats it must start from the same buffers, and must move
nothing. Gradients are then those without checkpointing, and statistics move once a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError

PASSES = "_fxquant_passes"  # what a model remembers of its passes
MOST = 32  # passes that are remembered; of more micro-batches before one backward pass, the first could not be computed again
_STILL = (".observer.", ".others.", ".learned.")  # buffers that calibration moves, and a start that is taken once


def run(model: nn.Module, call: Callable[[], Any], inputs: Any) -> Any:
    """Run a prepared model and return its result; a pass inside of backward starts from the buffers of the pass that it repeats.

    Raises ConfigurationError for a pass inside of backward that repeats none, and moves something; and for a transform of torch.func
    that is not possible.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed(model, call)
    if not model.training:
        return call()
    if torch._C._current_graph_task_id() != -1:
        return _again(model, call, inputs)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or not torch.is_grad_enabled():  # may be computed again
        passes = model.__dict__.setdefault(PASSES, Passes())
        started = {(path, name): value.clone() for path, name, value in _moving(model)}
        storages = [StorageWeakRef(each.untyped_storage()) for each in _tensors(inputs)]  # type: ignore[no-untyped-call]
        passes.taken.append(Taken(_key(inputs), storages, started))
    return call()


class Taken(NamedTuple):
    """One pass: its key, the storages of its inputs, and the buffers that it started from by the path of the module and the name."""

    key: Any
    storages: list[StorageWeakRef]
    buffers: dict[tuple[str, str], Tensor]

    def repeated_by(self, key: Any) -> bool:
        """Return whether a pass has the same inputs. Where one has been freed, another tensor may have its address."""
        return bool(self.key == key) and not any(storage.expired() for storage in self.storages)  # type: ignore[no-untyped-call]


class Passes:
    """The buffers that each of the last passes started from, with the key of the pass. A copy of a model has had no passes."""

    def __init__(self) -> None:
        self.taken: deque[Taken] = deque(maxlen=MOST)

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return Passes()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, ()


def _again(model: nn.Module, call: Callable[[], Any], inputs: Any) -> Any:
    key, passes = _key(inputs), model.__dict__.get(PASSES, Passes())
    started = next((taken.buffers for taken in reversed(passes.taken) if taken.repeated_by(key)), None)
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for path, name, value in list(_moving(model)):
            registry = model.get_submodule(path)._buffers
            before.append((registry, name, value))
            registry[name] = (value if started is None else started[path, name]).clone()
        result = call()
        if started is None and any(not torch.equal(registry[name], value) for registry, name, value in before if not value.isnan().any()):
            raise ConfigurationError(
                "the prepared model is called inside of backward, on inputs that it was not called on before",
                because="recomputation starts from the scales and statistics of the first pass, which are not known;"
                f" those of the last {MOST} passes under activation checkpointing are",
                remedy="checkpoint only the call of the prepared model, on tensors that do not change until backward,"
                " or call fxq.freeze(prepared) first",
            )
        return result
    finally:
        for registry, name, value in before:
            registry[name] = value


def _transformed(model: nn.Module, call: Callable[[], Any]) -> Any:
    """Run the pass under a transform of torch.func, which lets no tensor outside of it move, and no number be read from one inside."""
    with torch._C._DisableFuncTorch():
        before = [(value, value.clone()) for value in model.buffers()] if model.training else []
    try:
        return call()
    except RuntimeError as error:
        with torch._C._DisableFuncTorch(), torch.no_grad():
            for value, held in before:
                value.copy_(held)
        raise ConfigurationError(
            "torch.func cannot transform this pass of the prepared model",
            because="in train mode, scales and statistics change in place, and numbers are read from batched or differentiated tensors; "
            f"PyTorch says: {str(error).splitlines()[0]}",
            remedy="call fxq.freeze(prepared), and the model once, before the transform; take vmap over inputs, not over parameters",
        ) from error


def _moving(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Return the buffers that training may move: of each the path of its module, its name, and the tensor."""
    return [
        (path, name, value)
        for path, module in model.named_modules()
        if not any(part in f".{path}." for part in _STILL)
        for name, value in module._buffers.items()
        if value is not None
    ]


def _key(inputs: Any) -> Any:
    """Return the key of a pass: the addresses, shapes and versions of its inputs."""
    return tuple((each.data_ptr(), tuple(each.shape), None if each.is_inference() else each._version) for each in _tensors(inputs))


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]

"""In-place operations: a graph changes nothing, so the Python object stands for another node from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fxquant.trace.values import Aliases, TracedTensor, refuse

if TYPE_CHECKING:
    from fxquant.trace.handler import Handler


class Memory:
    """What in-place operations have changed during one trace."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._rebound: dict[int, TracedTensor] = {}  # plain tensors that were changed with a traced value, by identity

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """The traced tensor that a plain one stands for since it was changed in place; otherwise the tensor itself."""
        return self._rebound.get(id(tensor), tensor)

    def advance(self, target: torch.Tensor, result: Any) -> torch.Tensor:
        """Let a tensor that is changed in place stand for `result` from now on."""
        if not isinstance(target, TracedTensor):
            return self._rebind(target, result)
        result = self._as(target.dtype, result)
        target.node, target.value = result.node, result.value
        aliases = target.aliases
        if aliases is not None:
            aliases.version += 1
            aliases.latest = (target.place, result.node, result.value)
            target.version = aliases.version
        return target

    def _rebind(self, target: torch.Tensor, result: Any) -> torch.Tensor:
        previous = self._rebound.get(id(target))
        if previous is not None:
            self.advance(previous, result)
            return target
        name = self._handler.snapshot.tensors.get(id(target))
        if name is not None:
            self._handler.note(f"{name} is changed in place by forward: the change is not kept between calls")
        elif _is_shared(target):
            _refuse_shared()
        self._rebound[id(target)] = self._as(target.dtype, result)
        self._handler.known[id(target)] = target
        return target

    def _as(self, dtype: torch.dtype, result: TracedTensor) -> TracedTensor:
        if result.dtype == dtype:
            return result
        converted: TracedTensor = self._handler.record("call_method", "to", torch.Tensor.to, (result, dtype), {})
        return converted

    def refresh(self, tensor: TracedTensor) -> None:
        """Let a tensor whose memory was changed through another one stand for the changed value."""
        aliases = tensor.aliases
        if aliases is None or tensor.version == aliases.version:
            return
        place, node, value = aliases.latest
        if place is not tensor.place:
            _refuse_shared()
        tensor.node, tensor.value, tensor.version = node, value, aliases.version


def share_memory(base: TracedTensor, result: Any, same_place: bool) -> None:
    """Note that `result` (a tensor or a sequence of them) is a view of `base`."""
    if base.aliases is None:
        base.aliases, base.place, base.version = Aliases(), object(), 0
    for view in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(view, TracedTensor):
            view.aliases, view.version = base.aliases, base.aliases.version
            view.place = base.place if same_place else object()


def _is_shared(tensor: torch.Tensor) -> bool:
    # The storage object that is asked for here holds a reference as well.
    return tensor._is_view() or bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)


def _refuse_shared() -> NoReturn:
    refuse(
        "a tensor is read after its memory was changed through a view",
        because="a graph computes new tensors and changes none, so views do not follow an in-place operation",
        remedy="replace the in-place operation by its out-of-place form (x = x + y), or clone() the tensor first",
    )

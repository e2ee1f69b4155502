"""The arguments of one call: as graph arguments, and as a key under which its result is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fxquant.frontend.memory import Memory
from fxquant.frontend.values import BatchFloat, BatchInt, BatchNumber, TracedTensor, Unknown, Value, refuse

ATOMS = frozenset((
    int, float, bool, str, complex, bytes, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip


class Arguments:
    """Converts the arguments of one call to `function`.

    `memory` says what was changed in place; `attribute` gives the node and the value of a tensor that is not traced.

    key      what the shapes and types of the result depend on
    fake     whether the content of any of the tensors is unknown while tracing
    known    whether the content of any of the tensors is known while tracing
    traced   the traced tensors among the arguments, in order
    unknown  whether there is something of which nothing is known
    """

    __slots__ = ("attribute", "fake", "key", "known", "memory", "substitutes", "traced", "unknown")

    def __init__(self, function: Any, memory: Memory, attribute: Callable[[torch.Tensor], tuple[fx.Node, Value]]) -> None:
        self.memory, self.attribute = memory, attribute
        self.key: list[Any] = [function]
        self.fake = self.known = self.unknown = False
        self.traced: list[TracedTensor] = []
        self.substitutes: dict[int, Value] = {}

    def convert(self, arg: Any) -> Any:
        """Return the argument as it stands in the graph."""
        kind = type(arg)
        if kind is TracedTensor:
            return self._traced(arg)
        if kind in ATOMS:
            self.key.append(kind)
            self.key.append(arg)
            return arg
        if isinstance(arg, torch.Tensor):
            return self._plain(arg)
        if isinstance(arg, BatchNumber):
            self.key.append((arg.a, arg.b))
            return arg.node
        if isinstance(arg, (tuple, list)):
            self.key.append((kind, len(arg)))
            items = [self.convert(item) for item in arg]
            return items if isinstance(arg, list) else tuple(items)
        if isinstance(arg, dict):
            self.key.append((kind, tuple(arg)))
            return {name: self.convert(item) for name, item in arg.items()}
        if isinstance(arg, slice):
            self.key.append(slice)
            return slice(self.convert(arg.start), self.convert(arg.stop), self.convert(arg.step))
        return self._other(arg)

    def _traced(self, tensor: TracedTensor) -> Any:
        if tensor.aliases is not None:
            self.memory.refresh(tensor)
        self._see(tensor.value)
        self.traced.append(tensor)
        return tensor.node

    def _see(self, value: Value) -> None:
        if value.real:
            self.known = True
        else:
            self.fake = True
        self.key.append(value.abstract)

    def _plain(self, tensor: torch.Tensor) -> Any:
        current = self.memory.current(tensor)
        if isinstance(current, TracedTensor):
            node = self._traced(current)
            self.substitutes[id(tensor)] = current.value
            return node
        node, value = self.attribute(tensor)
        self._see(value)
        self.substitutes[id(tensor)] = value
        return node

    def _other(self, arg: Any) -> Any:
        if isinstance(arg, Unknown):
            self.fake = self.unknown = True
            self.key.append(id(arg))
            return arg.node
        if isinstance(arg, (bool, int, float, str)):  # numpy scalars, str and int enums
            plain = next(base for base in (bool, int, float, str) if isinstance(arg, base))(arg)
            self.key.append(plain)
            return plain
        if isinstance(arg, type(torch.FloatTensor)):  # x.type(torch.FloatTensor): the name means the same
            return self.convert(f"{arg.__module__}.{arg.__name__}")
        if isinstance(arg, range):
            return self.convert(list(arg))
        if hasattr(arg, "item") and getattr(arg, "shape", None) == ():
            return self.convert(arg.item())
        refuse(
            f"an argument of type {type(arg).__name__} cannot be part of a graph",
            because="graphs hold tensors, numbers, strings, None, dtypes, devices, and tuples, lists, dicts and slices of them",
            remedy="pass such values to modules at construction, not to operators in forward",
        )


def is_tracked(args: Iterable[Any], known: dict[int, Any]) -> bool:
    """Return whether a traced tensor, a batch number, or a tensor in `known` (by identity) is among the arguments."""
    for arg in args:
        kind = type(arg)
        if kind is TracedTensor or kind is BatchInt or kind is BatchFloat or kind is Unknown:
            return True
        if kind in ATOMS:
            continue
        if isinstance(arg, torch.Tensor):
            if id(arg) in known:
                return True
        elif isinstance(arg, (tuple, list)):
            if is_tracked(arg, known):
                return True
        elif isinstance(arg, dict):
            if is_tracked(arg.values(), known):
                return True
        elif isinstance(arg, slice) and is_tracked((arg.start, arg.stop, arg.step), known):
            return True
    return False

"""What a float model's class and instance hold besides its computation: names of classes, sizes, methods behind the network."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_ABSENT = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Method:
    """A method of a module that is preserved: it is bound to what stands in that module's place."""

    function: FunctionType


class Carried:
    """The attributes of a float model, and its class, for the models made from it.

    kind         its class; None where that cannot be told, as in another process
    attributes   its own, as they were; containers and tensors are copies, anything else is shared. What holds a module is left out:
                 it belongs to forward, which is a graph now.
    preserved    what the user has asked for by name, "head.stride": the value; a `Method`; None for a module, which is registered under
                 that name
    """

    def __init__(self, kind: type | None, attributes: dict[str, Any], preserved: dict[str, Any] | None = None) -> None:
        self.kind, self.attributes, self.preserved = kind, attributes, preserved or {}

    @staticmethod
    def of(model: nn.Module, preserve: Sequence[str] = ()) -> Carried:
        """What a model carries. Raises AttributeError if it has none of a name to be preserved."""
        found = {name: value for name, value in vars(model).items() if name not in _OF_EVERY_MODULE and not _holds_module(value)}
        return Carried(type(model), _copied(found), {name: _preserved(model, name) for name in preserve})

    def modules(self) -> list[str]:
        """The paths of the modules that are to be preserved whole."""
        return [name for name, value in self.preserved.items() if value is None]

    def dress(self, model: nn.Module) -> None:
        """Put what is preserved of submodules where it was: on modules without any code, which are made where there are none."""
        for name, value in self.preserved.items():
            path, _, last = name.rpartition(".")
            if value is None or not path:
                continue
            holder = model
            for part in path.split("."):
                if holder._modules.get(part) is None:
                    holder._modules[part] = nn.Module()
                holder = holder._modules[part]  # type: ignore[assignment]
            if type(holder) is nn.Module:
                holder.__dict__[last] = MethodType(value.function, holder) if isinstance(value, Method) else _copied(value)

    def find(self, owner: nn.Module, name: str) -> Any:
        """An attribute, or a method or property bound to `owner`. Raises AttributeError if the model had none, or one of PyTorch's own."""
        value = self.preserved.get(name, _ABSENT)
        if isinstance(value, Method):
            return MethodType(value.function, owner)
        if value is not _ABSENT:
            return value
        value = self.attributes.get(name, _ABSENT)
        if value is not _ABSENT:
            return value
        for base in () if self.kind is None else self.kind.__mro__:
            if name in base.__dict__ and base is not object and not base.__module__.startswith("torch."):
                found = base.__dict__[name]
                return found.__get__(owner, self.kind) if hasattr(found, "__get__") else found
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        return Carried(self.kind, _copied(self.attributes), _copied(self.preserved))

    def __reduce__(self) -> tuple[Any, ...]:
        # What another process cannot read does not keep the model from it.
        kept = {name: value for name, value in self.attributes.items() if _can_be_pickled(value)}
        preserved = {name: value for name, value in self.preserved.items() if _can_be_pickled(value)}
        return Carried, (self.kind if _can_be_pickled(self.kind) else None, kept, preserved)


def _preserved(model: nn.Module, name: str) -> Any:
    """What is kept of an attribute, or a method, at a dotted path. Raises AttributeError if there is none."""
    path, _, last = name.rpartition(".")
    holder = model.get_submodule(path)
    value = getattr(holder, last)
    if isinstance(value, nn.Module):
        return None
    if isinstance(value, MethodType) and value.__self__ is holder and isinstance(value.__func__, FunctionType):
        return Method(value.__func__)
    return _copied(value)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item) for item in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _holds_module(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_holds_module, value.values()))
    if type(value) in (list, tuple, set):
        return any(map(_holds_module, value))
    return isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own code raises
        return False
    return True

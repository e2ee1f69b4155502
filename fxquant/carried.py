"""What a float model's class and instance hold besides its computation: names of classes, sizes, methods behind the network."""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor, nn

_ABSENT = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Carried:
    """The attributes of a float model, and its class, for the models made from it.

    kind         its class; None where that cannot be told, as in another process
    attributes   its own, as they were; containers and tensors are copies, anything else is shared. What holds a module is left out:
                 it belongs to forward, which is a graph now.
    """

    def __init__(self, kind: type | None, attributes: dict[str, Any]) -> None:
        self.kind, self.attributes = kind, attributes

    @staticmethod
    def of(model: nn.Module) -> Carried:
        """What a model carries."""
        found = {name: value for name, value in vars(model).items() if name not in _OF_EVERY_MODULE and not _holds_module(value)}
        return Carried(type(model), _copied(found))

    def find(self, owner: nn.Module, name: str) -> Any:
        """An attribute, or a method or property bound to `owner`. Raises AttributeError if the model had none, or one of PyTorch's own."""
        value = self.attributes.get(name, _ABSENT)
        if value is not _ABSENT:
            return value
        for base in () if self.kind is None else self.kind.__mro__:
            if name in base.__dict__ and base is not object and not base.__module__.startswith("torch."):
                found = base.__dict__[name]
                return found.__get__(owner, self.kind) if hasattr(found, "__get__") else found
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        return Carried(self.kind, _copied(self.attributes))

    def __reduce__(self) -> tuple[Any, ...]:
        # What another process cannot read does not keep the model from it.
        kept = {name: value for name, value in self.attributes.items() if _can_be_pickled(value)}
        return Carried, (self.kind if _can_be_pickled(self.kind) else None, kept)


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

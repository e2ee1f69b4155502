"""The settings of a float model's modules that its graph was made with, and the changes of them that no graph follows.

A trace reads an attribute once: a number, a string, a function, the class of a layer. A prepared model that is given another one would
compute with the first, so it raises an error: where the attribute is assigned to the model itself, else when it is next called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fxquant.errors import ConfigurationError
from fxquant.ir.carried import calling_line

SETTINGS = "fxquant.settings"  # in `meta` of a traced and of a prepared model: what `of_layer` and `note` recorded, by path and name
_CLASS = "__class__"
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward"))
_ATOMS = frozenset((type(None), bool, int, float, str))
_FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType))
PLAIN = _ATOMS | _FUNCTIONS | {tuple, list}  # the types of values that a setting may have
_READ_LATER = ((nn.modules.batchnorm._BatchNorm, ("eps", "momentum", "track_running_stats")), (nn.modules.dropout._DropoutNd, ("p",)))
Settings = Mapping[str, Mapping[str, Any]]


def form(value: Any) -> Any:
    """Return the value of a setting as it is recorded, or NotImplemented for an object: a function is recorded by its name."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in _FUNCTIONS:
        return f"{value.__module__}.{value.__qualname__}"
    if kind in (tuple, list) and _ATOMS.issuperset(map(type, value)):
        return tuple(value)
    return NotImplemented


def note(settings: dict[str, Any], name: str, value: Any) -> None:
    """Record the first value that forward read of an attribute of a module."""
    if name not in settings and name not in _OF_EVERY_MODULE and (recorded := form(value)) is not NotImplemented:
        settings[name] = recorded


def of_layer(layer: nn.Module) -> dict[str, Any]:
    """Return the class, the attributes and the shapes of the parameters of a layer of PyTorch, without attributes read when it runs.

    A dropout that drops nothing becomes no operator, so its p is not read again.
    """
    later = next((names for kind, names in _READ_LATER if isinstance(layer, kind)), ())
    found: dict[str, Any] = {_CLASS: f"{type(layer).__module__}.{type(layer).__qualname__}"}
    for name, value in vars(layer).items():
        if name[0] != "_" and name != "inplace" and (name not in later or (name == "p" and value == 0)):
            note(found, name, value)
    found.update((name, tuple(value.shape)) for name, value in layer._parameters.items() if value is not None)
    return found


def refuse_changes(model: nn.Module, settings: Settings, name: str = "", value: Any = None) -> None:
    """Raise ConfigurationError if a setting has changed; with a name, if assigning the value to that attribute of the model changes one."""
    for path, attribute, before, now in _assigned(model, settings, name, value) if name else _changes(model, settings):
        where = f"{path}.{attribute}".strip(".")
        raise ConfigurationError(
            f"{where.removesuffix('.' + _CLASS)} is {now}, and was {before} when the model was prepared",
            at=calling_line(),
            because="the graph was made with the former value, and does not read it again",
            remedy="change the float model and prepare it again; what was trained moves there by load_state_dict",
        )


def _assigned(model: nn.Module, settings: Settings, name: str, value: Any) -> Iterator[tuple[str, str, Any, Any]]:
    if isinstance(value, nn.Module):
        inside = {path.removeprefix(name).removeprefix("."): known for path, known in settings.items() if f"{path}.".startswith(f"{name}.")}
        for path in inside:
            if _at(value, path) is None and _at(model, f"{name}.{path}".strip(".")) is not None:
                yield f"{name}.{path}", _CLASS, "a module", "none"
        yield from ((f"{name}.{path}".strip("."), *change) for path, *change in _changes(value, inside))
    elif name in settings.get("", {}):
        before, now = settings[""][name], form(value)
        if not _equal(before, now):
            yield "", name, before, now


def _changes(model: nn.Module, settings: Settings) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield the path, the name, the recorded and the present value of every setting that has changed."""
    for path, known in settings.items():
        module = _at(model, path)
        if module is None:  # a batch norm that is folded into its layer
            continue
        state = vars(module)
        if _CLASS in known and isinstance(state.get("forward"), MethodType | FunctionType):
            yield path, "forward", "that of its class", "another function"
        if _CLASS not in known or type(module) is not nn.Module:  # of a file, a layer that is part of an operator has no class
            for name, before in known.items():
                now = _present(module, state, name, before)
                if not _equal(before, now):
                    yield path, name, before, now


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path, or None if there is none."""
    module: nn.Module | None = model
    for part in path.split(".") if path else ():
        module = None if module is None else module._modules.get(part)
    return module


def _present(module: nn.Module, state: Mapping[str, Any], name: str, before: Any) -> Any:
    if name == _CLASS:
        classes = [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]
        return before if before in classes else classes[0]
    if name in module._parameters:
        parameter = module._parameters[name]
        return before if parameter is None else tuple(parameter.shape)  # a layer without its bias is followed
    return form(state[name]) if name in state and not isinstance(state[name], Tensor) else before


def _equal(before: Any, now: Any) -> bool:
    return type(before) is type(now) and bool(before == now)

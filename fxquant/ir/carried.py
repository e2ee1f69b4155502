"""Attributes of a float model besides its computation, which its models keep, and the settings that its graph was made with."""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.errors import ConfigurationError, MissingModule

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the library
_FOREIGN = (
    os.path.dirname(torch.__file__),
    *(os.path.join(_HERE, name) for name in ("ir/carried.py", "ir/model.py", "prepared/hooks.py")),
    "<eval_with_key>",
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Method:
    """A preserved method of a module: it is bound to the module that takes its place."""

    function: FunctionType


class Carried:
    """The attributes of a float model, and its class, for the models made from it.

    kind         its class; None if it is unknown, as in another process
    attributes   its instance attributes; containers and tensors are copies, other objects are shared. Attributes that hold modules are
                 left out: they belong to forward, which is a graph now.
    preserved    attributes that the user asked for by name, "head.stride": the value; a `Method`; None for a module, which is registered
                 under that name
    left         names of modules, and of attributes that hold modules, which belong to forward
    """

    def __init__(
        self, kind: type | None, attributes: dict[str, Any], preserved: dict[str, Any] | None = None, omitted: Sequence[str] = ()
    ) -> None:
        self.kind, self.attributes, self.preserved, self.left = kind, attributes, preserved or {}, tuple(omitted)

    @staticmethod
    def of(model: nn.Module, preserve: Sequence[str] = ()) -> Carried:
        """Return the attributes that a model carries. Raises AttributeError if a name in `preserve` is missing."""
        own = {name: value for name, value in vars(model).items() if name not in _OF_EVERY_MODULE}
        attributes = {name: value for name, value in own.items() if not _holds_module(value)}
        omitted = [*model._modules, *(name for name in own if name not in attributes)]
        return Carried(type(model), _copied(attributes), {name: _preserved(model, name) for name in preserve}, omitted)

    def modules(self) -> list[str]:
        """Return the paths of the modules that are to be preserved whole."""
        return [name for name, value in self.preserved.items() if value is None]

    def dress(self, model: nn.Module) -> None:
        """Put preserved attributes of submodules at their paths: on modules without any code, which are made where they are missing."""
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
        """Return an attribute, or a method or property bound to `owner`.

        Raises AttributeError if the model had none, or one of PyTorch's own.
        """
        if name in self.preserved:
            value = self.preserved[name]
            return MethodType(value.function, owner) if isinstance(value, Method) else value
        if name in self.attributes:
            return self.attributes[name]
        for base in () if self.kind is None else self.kind.__mro__:
            if name in base.__dict__ and base is not object and not base.__module__.startswith("torch."):
                attribute = base.__dict__[name]
                return attribute.__get__(owner, self.kind) if hasattr(attribute, "__get__") else attribute
        if name in self.left:
            raise MissingModule(
                f"this model has no module {name}",
                at=calling_line(),
                because="what the float model computes in its modules is one graph of operators here, so methods that call modules"
                " cannot run",
                remedy="call the method of the float model; prepare a module whose forward is that method; or use the option preserve;"
                " grids are in fxq.inspect.layers(model), and weights in model.state_dict()",
            )
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        return Carried(self.kind, _copied(self.attributes), _copied(self.preserved), self.left)

    def __reduce__(self) -> tuple[Any, ...]:
        # Attributes that cannot be pickled are left out, so that the model can be.
        attributes = {name: value for name, value in self.attributes.items() if _can_be_pickled(value)}
        preserved = {name: value for name, value in self.preserved.items() if _can_be_pickled(value)}
        return Carried, (self.kind if _can_be_pickled(self.kind) else None, attributes, preserved, self.left)


def calling_line() -> str | None:
    """Return the innermost line outside of torch and of the code of models, with its place."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        frame = frame.f_back
    return None if frame is None else line_of(frame.f_code, frame.f_lineno)


def line_of(code: CodeType, line: int) -> str:
    """Return a line of a function's file after its place: "model.py:41 in encode:  return self.e(x)"."""
    statement = linecache.getline(code.co_filename, line).strip()
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}" + f":  {statement}" * bool(statement)


def _preserved(model: nn.Module, name: str) -> Any:
    """Return the value kept for an attribute, or a method, at a dotted path. Raises AttributeError if there is none."""
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
    if type(value) in (dict, list, tuple, set):
        return any(map(_holds_module, value.values() if type(value) is dict else value))
    return isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own code raises
        return False
    return True


# ---- settings of modules, and changes of them that no graph follows --------------------------------------------------
#
# A trace reads an attribute once: a number, a string, a function, the class of a layer. A prepared model that is given another one would
# compute with the first, so it raises an error: where the attribute is assigned to the model itself, else when it is next called.
SETTINGS = "fxquant.settings"  # in `meta` of a traced and of a prepared model: what `of_layer` and `note` recorded, by path and name
_CLASS = "__class__"
_NO_SETTINGS = frozenset((*vars(nn.Module()), "forward"))
_ATOMS = frozenset((type(None), bool, int, float, str))
_FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType))
PLAIN = _ATOMS | _FUNCTIONS | {tuple, list}  # the types of values that a setting may have
_READ_LATER = ((nn.modules.batchnorm._NormBase, ("eps", "momentum", "track_running_stats")), (nn.modules.dropout._DropoutNd, ("p",)))
Settings = Mapping[str, Mapping[str, Any]]


def form(value: Any) -> Any:
    """Return the value of a setting as it is recorded, or NotImplemented for an object: a function is recorded by its name."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in _FUNCTIONS:
        return f"{value.__module__}.{value.__qualname__}"
    return tuple(value) if kind in (tuple, list) and _ATOMS.issuperset(map(type, value)) else NotImplemented


def note(settings: dict[str, Any], name: str, value: Any) -> None:
    """Record the first value that forward read of an attribute of a module."""
    if name not in settings and name not in _NO_SETTINGS and (recorded := form(value)) is not NotImplemented:
        settings[name] = recorded


def of_layer(layer: nn.Module) -> dict[str, Any]:
    """Return the class, the attributes and the shapes of the parameters of a layer of PyTorch, without attributes read when it runs.

    A dropout that drops nothing becomes no operator, so its p is not read again.
    """
    later = next((names for kind, names in _READ_LATER if isinstance(layer, kind)), ())
    attributes: dict[str, Any] = {_CLASS: f"{type(layer).__module__}.{type(layer).__qualname__}"}
    for name, value in vars(layer).items():
        if name[0] != "_" and name != "inplace" and (name not in later or (name == "p" and value == 0)):
            note(attributes, name, value)
    attributes.update((name, tuple(value.shape)) for name, value in layer._parameters.items() if value is not None)
    return attributes


def refuse_changes(model: nn.Module, settings: Settings, name: str = "", value: Any = None) -> None:
    """Raise ConfigurationError if a setting has changed; with a name, if assigning the value to that attribute of the model changes one."""
    for path, attribute, before, now in _assigned(model, settings, name, value) if name else _changes(model, settings):
        where = f"{path}.{attribute}".strip(".")
        what = f"{where.removesuffix('.' + _CLASS)} is {now}, and was {before} when the model was prepared"
        because = "the graph was made with the former value, and does not read it again"
        remedy = "change the float model and prepare it again; what was trained moves there by load_state_dict"
        raise ConfigurationError(what, at=calling_line(), because=because, remedy=remedy)


def _assigned(model: nn.Module, settings: Settings, name: str, value: Any) -> Iterator[tuple[str, str, Any, Any]]:
    if isinstance(value, nn.Module):
        inside = {path.removeprefix(name).removeprefix("."): each for path, each in settings.items() if f"{path}.".startswith(f"{name}.")}
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
    for path, recorded in settings.items():
        module = _at(model, path)
        if module is None:  # a batch norm that is folded into its layer
            continue
        state = vars(module)
        if _CLASS in recorded and isinstance(state.get("forward"), MethodType | FunctionType):
            yield path, "forward", "that of its class", "another function"
        if _CLASS not in recorded or type(module) is not nn.Module:  # of a file, a layer that is part of an operator has no class
            for name, before in recorded.items():
                now = _present(module, state, name, before)
                if not _equal(before, now):
                    yield path, name, before, now


def _at(model: nn.Module, path: str) -> nn.Module | None:
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

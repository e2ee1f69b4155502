"""The result of a model: a graph returns tensors, numbers, and tuples, lists and dicts of them; calling it returns the model's own type.

A `ModelOutput` of two tensors is a dict of two nodes in the graph. A forward hook turns the dict of a run into a ModelOutput again. This
works if PyTorch's pytree knows the class, or if it is a dataclass that a model traced in this process returned. A file holds the class's
name, which is looked up there and never imported; where it is not known, the model returns the dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxquant.errors import TraceError
from fxquant.frontend.selected import Selected
from fxquant.frontend.values import BatchNumber, Unknown, refuse

_RETURNED = "fxquant.returned"  # in `meta`: {"form": the form of what forward returned}
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_DEEPEST = 8  # of attributes of objects within objects

# A form says what stands at a place of the nest that the graph returns:
#   None                           what is there
#   ["items", [form]]              a tuple or a list
#   ["keys", [form]]               a dict, or a mapping
#   ["class", name, context, [form]]   a class that pytree knows or a dataclass, of whose parts the graph returns a list or a dict
Form = Any


class Returned:
    """The result of forward, as the nest that a graph returns.

    leaf   makes the entry of the nest for a tensor: its node
    note   records what was fixed
    """

    def __init__(self, leaf: Callable[[torch.Tensor], Any], note: Callable[[str], None]) -> None:
        self._leaf, self._note = leaf, note

    def convert(self, output: Any) -> tuple[Any, Form]:
        """Return the nest, and its form."""
        if isinstance(output, torch.Tensor):
            return self._leaf(output), None
        if isinstance(output, Selected):
            output.refuse_as_output()
        if isinstance(output, BatchNumber | Unknown):
            return output.node, None
        registered = pytree.SUPPORTED_NODES.get(type(output))
        if registered is not None and type(output).__module__.partition(".")[0] not in ("builtins", "collections", "torch"):
            return self._class(output, registered)
        if isinstance(output, Mapping):
            parts = {key: self.convert(item) for key, item in output.items()}
            return {key: part for key, (part, _) in parts.items()}, ["keys", [form for _, form in parts.values()]]
        if isinstance(output, tuple) and hasattr(output, "_fields"):
            return type(output)(*(self.convert(item)[0] for item in output)), None
        if isinstance(output, (tuple, list)):
            items = [self.convert(item) for item in output]
            nest = [item for item, _ in items]
            return nest if isinstance(output, list) else tuple(nest), ["items", [form for _, form in items]]
        if isinstance(output, _PLAIN):
            return output, None
        found = self._dataclass(output) if is_dataclass(output) else None
        return (self._object(output), None) if found is None else found

    def _class(self, output: Any, registered: Any) -> tuple[Any, Form]:
        children, context = registered.flatten_fn(output)
        parts = [self.convert(child) for child in children]
        forms = [form for _, form in parts]
        entries = registered.flatten_with_keys_fn(output)[0] if registered.flatten_with_keys_fn is not None else ()
        keys = [getattr(key, "key", getattr(key, "name", None)) for key, _ in entries]
        named = len(keys) == len(parts) and all(isinstance(key, str) for key in keys)
        nest = dict(zip(keys, (part for part, _ in parts), strict=True)) if named else [part for part, _ in parts]
        name = _name_of(type(output))
        if not _is_plain(context):
            self._note(f"forward returned a {type(output).__name__}, whose parts are returned as a {'dict' if named else 'list'}")
            return nest, ["keys" if named else "items", forms]
        return nest, ["class", name, context, forms]

    def _dataclass(self, output: Any) -> tuple[Any, Form] | None:
        """Return the fields as a dict; None where they are not all of what a graph returns, or not what the class is made of."""
        own = fields(output)
        if not all(each.init for each in own) or self._attributes(output, _DEEPEST) is None:
            return None
        try:
            parts = {each.name: self.convert(getattr(output, each.name)) for each in own}
        except TraceError:
            return None
        name = _name_of(type(output))
        _DATACLASSES[name] = type(output)
        return {key: part for key, (part, _) in parts.items()}, ["class", name, None, [form for _, form in parts.values()]]

    def _object(self, output: Any) -> Any:
        """Return the attributes of an object that hold tensors, as a dict. Raises TraceError if there are none."""
        nest = self._attributes(output, _DEEPEST)
        if nest is None:
            refuse(
                f"forward returned a {type(output).__name__}",
                because="a graph returns tensors, numbers, and tuples, lists and dicts of them, and this object holds none",
                remedy="return a tuple or a dict, or wrap the model in a module whose forward does",
            )
        left = [name for name in getattr(output, "__dict__", {}) if name not in nest and not name.startswith("_")]
        without = f", without {', '.join(map(repr, left))}" if left else ""
        self._note(f"forward returned a {type(output).__name__}, whose tensors are returned as a dict of its attributes{without}")
        return nest

    def _attributes(self, value: Any, depth: int) -> Any:
        """Return a nest of the tensors an object holds; None if it holds none."""
        if isinstance(value, (torch.Tensor, BatchNumber, Selected)):
            return self.convert(value)[0]
        if isinstance(value, (type, nn.Module)) or depth == 0:
            return None
        if isinstance(value, (list, tuple)):
            items = [self._attributes(item, depth - 1) for item in value]
            return items if any(item is not None for item in items) else None
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        found = {key: self._attributes(item, depth - 1) for key, item in held.items() if isinstance(key, str)}
        return {key: item for key, item in found.items() if item is not None} or None


def nest_of(output: Any) -> Any:
    """Return the result of a model as the nest of tensors that its graph returns."""
    return Returned(lambda tensor: tensor, lambda text: None).convert(output)[0]


def _is_plain(context: Any) -> bool:
    if isinstance(context, (list, tuple)):
        return all(map(_is_plain, context))
    return context is None or isinstance(context, (bool, int, float, str))


@dataclass(frozen=True)
class ReturnForm:
    """A forward hook: what forward returned, out of the nest that the graph does."""

    form: Form

    def __call__(self, module: Any, args: Any, result: Any) -> Any:
        return rebuilt(self.form, result)


def return_form(module: fx.GraphModule) -> ReturnForm | None:
    """Return the hook that makes the result of the float model of a graph's; None where they are the same."""
    form = module.meta.get(_RETURNED, {}).get("form")
    return None if form is None else ReturnForm(form)


def set_form(module: fx.GraphModule, form: Form) -> None:
    """Write the form on a traced module, if any class is to be made again; what is made from it inherits it with `meta`."""
    if next(_classes(form), None) is not None:
        module.meta[_RETURNED] = {"form": form}


def is_form(meta: dict[str, Any]) -> bool:
    """Return whether what `meta` of a loaded model holds is a form; none at all counts as well."""
    try:
        return _RETURNED not in meta or all(isinstance(name, str) for name in _classes(meta[_RETURNED]["form"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return False


def _classes(form: Form) -> Iterator[str]:
    if form is None:
        return
    kind, *content = form
    if kind == "class":
        yield content[0]
    elif kind not in ("items", "keys"):
        raise ValueError(kind)
    for inner in content[-1]:
        yield from _classes(inner)


def rebuilt(form: Form, value: Any) -> Any:
    """Return the nest with the classes made again that pytree knows in this process."""
    if form is None or not isinstance(value, (dict, list, tuple)):
        return value
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    if len(parts) != len(form[-1]):
        return value
    parts = [rebuilt(inner, part) for inner, part in zip(form[-1], parts, strict=True)]
    made = _maker(form[1]) if form[0] == "class" else None
    if made is not None:
        return made(parts, form[2])
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else type(value)(parts)


_DATACLASSES: dict[str, type] = {}  # that models which were traced in this process returned


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _maker(name: str) -> Callable[[list[Any], Any], Any] | None:
    """Return a function that builds an object of the class of this name from its parts; None if the class is not known."""
    known = next((each for each in pytree.SUPPORTED_NODES if _name_of(each) == name), None)
    if known is not None:
        return pytree.SUPPORTED_NODES[known].unflatten_fn
    kind = _DATACLASSES.get(name)
    if kind is None:
        return None
    return lambda parts, context: kind(**dict(zip((each.name for each in fields(kind)), parts, strict=True)))

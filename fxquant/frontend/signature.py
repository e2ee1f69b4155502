"""How a model is called: like the float model it was made from.

A graph takes the tensors among the arguments, one after the other. A `forward(x, pair, mask=None)` that was traced with a
tuple of two tensors and no mask takes x, pair_0 and pair_1; called with x and a pair, positional or by name, with `mask=None`
or without, the model takes them apart. An argument that is not a tensor is fixed in the graph, so it must be what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError

_SIGNATURE = "fxquant.signature"  # in `meta`: {"parameters": [[name, kind, may be left out, form], …]}, as plain values

# A form says what an argument was in the trace:
#   ["tensor", name]   a tensor, which became the input of that name
#   ["value", v]       a number, a string or None
#   ["items", [form]]  a tuple or a list
#   ["keys", [[key, form]]]  a dict
#   ["leaves", [form]] another container that PyTorch can flatten
#   ["object", kind]   anything else
Form = list[Any]

_ATOMS = (type(None), bool, int, float, str)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Iterator[str | None]) -> list[list[Any]]:
    """Return the signature of `model.forward` as called; `names` are those of the arguments' leaves, None for those without a tensor."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    given = {name: _form(value, names) for name, value in bound.arguments.items()}
    entries = []
    for parameter in inspect.signature(model.forward).parameters.values():
        default = _default(parameter)
        form = given.get(parameter.name, default)
        optional = form == default or form[0] == "object"
        entries.append([parameter.name, int(parameter.kind), optional, form])
    return entries


def _default(parameter: inspect.Parameter) -> Form:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return ["items", []]
    if parameter.kind is parameter.VAR_KEYWORD:
        return ["keys", []]
    if parameter.default is parameter.empty:
        return ["nothing"]
    return _form(parameter.default, iter(()))


def _form(value: Any, names: Iterator[str | None]) -> Form:
    """Return the form of an argument; takes as many names as it has leaves."""
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return ["items", [_form(item, names) for item in value]]
    if isinstance(value, dict) and type(value) in pytree.SUPPORTED_NODES and all(type(key) in _ATOMS for key in value):
        return ["keys", [[key, _form(item, names)] for key, item in value.items()]]
    leaves = pytree.tree_leaves(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return ["leaves", [_form(leaf, names) for leaf in leaves]]
    name = next(names, None)
    if name is not None:
        return ["tensor", name]
    return ["value", value] if type(value) in _ATOMS else ["object", type(value).__name__]


@dataclass(frozen=True)
class CallSignature:
    """A forward pre-hook that finds the inputs of the graph in the arguments of a call.

    They may also be given as the graph takes them: by the inputs' names, or, where arguments hold several, one after the other.
    Raises ConfigurationError if they are not what forward takes, or if an argument that is not a tensor has changed.

    parameters  those of forward, as `signature_of` gives them
    names       the inputs of the graph
    placed      those of them that are an argument each, and can be given by their places
    """

    parameters: tuple[list[Any], ...]
    names: tuple[str, ...]
    placed: tuple[str, ...]

    @staticmethod
    def of(parameters: Sequence[list[Any]], names: Sequence[str]) -> CallSignature:
        """That of a graph with these inputs."""
        placed = [form[1] for _, kind, _, form in parameters if form[0] == "tensor" and kind != inspect.Parameter.KEYWORD_ONLY]
        return CallSignature(tuple(parameters), tuple(names), tuple(placed))

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        names = self.names
        if not kwargs and self.placed == names and len(args) == len(names) == len(self.parameters):
            return None
        if kwargs and not args and kwargs.keys() == set(names):
            return tuple(kwargs[name] for name in names), {}
        inputs: dict[str, Any] = {}
        try:
            _bind(list(self.parameters), args, kwargs, inputs)
        except ConfigurationError:
            plain = not kwargs and len(args) == len(names) and all(isinstance(arg, torch.Tensor) for arg in args)
            if plain and not set(self.placed) >= set(names):
                return None
            raise
        return tuple(inputs[name] for name in names), {}


def call_signature(module: fx.GraphModule) -> CallSignature | None:
    """Return the hook that lets a graph be called like the float model; None where no signature was noted."""
    if _SIGNATURE not in module.meta:
        return None
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    return CallSignature.of(module.meta[_SIGNATURE]["parameters"], names)


def _bind(signature: list[list[Any]], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[str, Any]) -> None:
    parameters = [
        inspect.Parameter(name, inspect._ParameterKind(kind), **({"default": None} if optional and kind not in _VARIADIC else {}))
        for name, kind, optional, _ in signature
    ]
    # A parameter that may be left out can stand before one that may not, which Python does not know.
    declared = inspect.Signature(parameters, __validate_parameters__=False)
    try:
        given = declared.bind(*args, **kwargs).arguments
    except TypeError as error:
        written = ", ".join(name for name, *_ in signature)
        raise ConfigurationError(
            "the arguments do not fit the model's forward",
            because=f"{error}; it was traced as forward({written})",
            remedy="call it like the float model; arguments that had their default value may be left out",
        ) from None
    for name, kind, optional, form in signature:
        if name in given:
            _take(name, form, given[name], inputs)
        elif not optional and kind in _VARIADIC:
            _take(name, form, () if kind == inspect.Parameter.VAR_POSITIONAL else {}, inputs)


def _take(path: str, form: Form, value: Any, inputs: dict[str, Any]) -> None:
    """Collect the inputs in an argument of that form."""
    kind = form[0]
    if kind == "tensor":
        if isinstance(value, (tuple, list, Mapping, type(None))):
            _refuse(path, f"it is {_said(value)}", "it was a tensor in the trace")
        inputs[form[1]] = value
    elif kind == "value":
        if type(value) not in _ATOMS or isinstance(value, bool) != isinstance(form[1], bool) or value != form[1]:
            _refuse(path, f"it is {_said(value)}", f"it was {form[1]!r} in the trace, and values other than tensors are fixed in a graph")
    elif kind == "object":
        _refuse(path, f"it is {_said(value)}", f"it was a {form[1]} in the trace; its content is fixed in the graph, so leave it out")
    elif kind == "keys":
        if not isinstance(value, Mapping) or value.keys() != {key for key, _ in form[1]}:
            _refuse(path, f"it is {_said(value)}", f"it was {_said(dict(form[1]))} in the trace")
        for key, inner in form[1]:
            _take(f"{path}[{key!r}]", inner, value[key], inputs)
    else:
        items = pytree.tree_leaves(value) if kind == "leaves" else list(value) if isinstance(value, (tuple, list)) else None
        if items is None or len(items) != len(form[1]):
            _refuse(path, f"it is {_said(value)}", f"it held {len(form[1])} items in the trace, and a graph takes as many")
        for index, (inner, item) in enumerate(zip(form[1], items, strict=True)):
            _take(f"{path}[{index}]", inner, item, inputs)


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} items"
    return repr(value) if type(value) in _ATOMS else f"a {type(value).__name__}"


def _refuse(path: str, what: str, because: str) -> NoReturn:
    raise ConfigurationError(
        f"argument {path} does not fit the graph: {what}",
        because=because,
        remedy="pass what the example inputs had there, or trace the model again with an example of the new one",
    )


def set_signature(module: fx.GraphModule, signature: list[list[Any]]) -> None:
    """Write a signature on a traced module; what is made from it inherits it with `meta`."""
    module.meta[_SIGNATURE] = {"parameters": signature}


def is_signature(meta: dict[str, Any], inputs: list[str]) -> bool:
    """Return whether what `meta` of a loaded model holds is a signature whose tensors are the inputs; none at all counts as well."""
    if _SIGNATURE not in meta:
        return True
    try:
        parameters = meta[_SIGNATURE]["parameters"]
        found = [name for _, _, _, form in parameters for name in _names(form)]
        sound = all(name.isidentifier() and kind in range(5) and type(optional) is bool for name, kind, optional, _ in parameters)
        return sound and sorted(found) == sorted(inputs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False


def _names(form: Form) -> Iterator[str]:
    kind, *content = form
    if kind == "tensor":
        yield content[0]
    elif kind in ("items", "leaves"):
        for item in content[0]:
            yield from _names(item)
    elif kind == "keys":
        for _, item in content[0]:
            yield from _names(item)
    elif kind not in ("value", "object", "nothing"):
        raise ValueError(kind)

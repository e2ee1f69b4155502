"""Shallow copies of a module tree: the trace runs on one, and the graph is built on another.

A shell shares its parameters with the module it was made from, is in eval mode, and owns everything that forward may
change: its attributes, its lists and dicts, and the plain tensors in them. What forward leaves behind, it leaves on the shell.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from fxquant.frontend.arguments import ATOMS

_HOOKS = frozenset((
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
))  # fmt: skip
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")  # a trace has no backward, and a graph does not call the modules
_CONTAINERS = (dict, list, tuple, set, collections.OrderedDict, collections.defaultdict)


class Snapshot:
    """A shell of every module of a model, in eval mode; where `training`, the user's own modules are in train mode.

    root         the shell of the model itself
    paths        the first dotted path of every shell, by identity
    tensors      the first dotted name of every parameter and buffer, by identity
    attributes   where every tensor was found that is neither, by identity
    names        the names taken by parameters, buffers and the model's children
    """

    def __init__(self, model: nn.Module, own_buffers: bool = False, training: bool = False) -> None:
        self.paths: dict[int, str] = {}
        self.tensors: dict[int, str] = {}
        self.attributes: dict[int, str] = {}
        self._own_buffers = own_buffers
        self._training = training
        self._shells: dict[int, nn.Module] = {}
        self._originals: list[tuple[nn.Module, nn.Module, str]] = []  # keeps the originals alive, so that ids stay taken
        self._copies: dict[int, Any] = {}
        self.root = self._tree(model, "")
        for original, shell, path in self._originals:
            self._fill(original, shell, path)
        self.names = {*self.tensors.values(), *model._modules}

    def shell(self, module: nn.Module) -> nn.Module:
        """Return the shell that stands for a module of the model; any other module itself."""
        return self._shells.get(id(module), module)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The shells of all modules that were found, also of those that are registered nowhere."""
        return self._shells.values()

    def _tree(self, module: nn.Module, path: str) -> nn.Module:
        known = self._shells.get(id(module))
        if known is not None:
            return known
        if isinstance(module, torch.jit.ScriptModule):
            self._shells[id(module)] = module
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self.tensors.setdefault(id(tensor), f"{path}.{name}" if path else name)
            return module
        shell: nn.Module = object.__new__(type(module))
        self._shells[id(module)] = shell
        self.paths[id(shell)] = path
        self._originals.append((module, shell, path))
        prefix = path + "." if path else ""
        state = shell.__dict__
        state["_modules"] = {name: None if child is None else self._tree(child, prefix + name) for name, child in module._modules.items()}
        state["_parameters"] = dict(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.tensors.setdefault(id(parameter), prefix + name)
        state["_buffers"] = {name: self._buffer(buffer, prefix + name) for name, buffer in module._buffers.items()}
        return shell

    def _buffer(self, buffer: torch.Tensor | None, name: str) -> torch.Tensor | None:
        if buffer is None:
            return None
        own: torch.Tensor = self._copies.setdefault(id(buffer), buffer.detach().clone()) if self._own_buffers else buffer
        self.tensors.setdefault(id(own), name)
        return own

    def _fill(self, original: nn.Module, shell: nn.Module, path: str) -> None:
        state = shell.__dict__
        state["training"] = self._training and not type(original).__module__.startswith("torch.nn.modules.")
        for name, value in original.__dict__.items():
            if name in state or name == "_compiled_call_impl":  # which `module.compile()` leaves
                continue
            kind = type(value)
            if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, value))):
                state[name] = value
            elif name in _BACKWARD_HOOKS or (name in _HOOKS and not value):
                state[name] = kind()
            else:
                state[name] = self._attribute(value, name, path)

    def _attribute(self, value: Any, name: str, path: str) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, f"{path}.{name}" if path else name)
        if isinstance(value, nn.Module):
            return self._shells.get(id(value)) or self._hidden(value)
        if kind in _CONTAINERS:
            return self._container(value, name, path)
        if kind is MethodType and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.shell(value.__self__))
        if kind is functools.partial:
            keywords = {key: self._attribute(item, name, path) for key, item in value.keywords.items()}
            return functools.partial(self._attribute(value.func, name, path), *self._container(value.args, name, path), **keywords)
        return value

    def _tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if id(tensor) in self.tensors:
            return tensor
        if id(tensor) in self._copies:
            copy: torch.Tensor = self._copies[id(tensor)]
            return copy
        copy = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        self._copies[id(tensor)] = copy
        self.attributes[id(copy)] = where
        return copy

    def _hidden(self, module: nn.Module) -> nn.Module:
        """Return the shell of a module that is reachable, but is not registered as a child."""
        first = len(self._originals)
        shell = self._tree(module, "")
        for original, copy, _ in self._originals[first:]:
            del self.paths[id(copy)]
            for tensor in (*copy._parameters.values(), *copy._buffers.values()):
                if tensor is not None and self.tensors.pop(id(tensor), None) is not None:
                    self.attributes[id(tensor)] = type(original).__name__
        return shell

    def _container(self, value: Any, name: str, path: str) -> Any:
        copy = self._copies.get(id(value))
        if copy is not None:
            return copy
        if isinstance(value, dict):
            copy = self._copies[id(value)] = value.copy()
            if _is_cache(name, value):
                copy.clear()
            for key, item in copy.items():
                copy[key] = self._attribute(item, name, path)
        elif isinstance(value, list):
            copy = self._copies[id(value)] = []
            copy.extend(self._attribute(item, name, path) for item in value)
        elif isinstance(value, tuple):
            items = [self._attribute(item, name, path) for item in value]
            copy = value if all(old is new for old, new in zip(value, items, strict=True)) else tuple(items)
        else:
            copy = value.copy()
        return copy


def with_backward_hooks(model: nn.Module) -> list[str]:
    """Return the paths of the modules that have backward hooks."""
    return [path for path, module in model.named_modules() if any(module.__dict__.get(hooks) for hooks in _BACKWARD_HOOKS)]


def _is_cache(name: str, value: dict[Any, Any]) -> bool:
    """Return whether a dict holds tensors that forward computed from parameters: left in place, it would hide them from the trace."""
    tensors = [item for item in value.values() if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)]
    return bool(tensors) and ("cache" in name.lower() or any(tensor.grad_fn is not None for tensor in tensors))

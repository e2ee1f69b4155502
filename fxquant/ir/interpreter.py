"""Run a graph node by node, with the arguments that its generated code would give each call; copy the modules that it calls."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxquant.ir.graph import resolve


def computed(model: nn.Module, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Call a node's function, method or module with the values of the nodes it reads; return the result."""
    args, kwargs = arguments_of(node, value)
    if node.op == "call_method":
        first, *others = args
        return getattr(first, str(node.target))(*others, **kwargs)
    function: Any = resolve(model, str(node.target)) if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def arguments_of(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node with the values of the nodes it reads, in lists and dicts of this call's own.

    The arguments of a node itself are immutable, and a user's function may write into its arguments.
    """
    return own(node.args, value), own(node.kwargs, value)


def own(argument: Any, value: Callable[[Any], Any], leaf: type | tuple[type, ...] = fx.Node) -> Any:
    """Return an argument, or the output, of a graph in plain containers of its own, with `value` applied to nodes, or to another `leaf`."""
    if isinstance(argument, leaf):
        return value(argument)
    if isinstance(argument, dict):
        return {key: own(item, value, leaf) for key, item in argument.items()}
    if isinstance(argument, list):
        return [own(item, value, leaf) for item in argument]
    if isinstance(argument, tuple):
        items = [own(item, value, leaf) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, slice):
        return slice(*(own(end, value, leaf) for end in (argument.start, argument.stop, argument.step)))
    return argument


class Interpreter(fx.Interpreter):
    """Runs a graph as its generated code does. An error is the model's own, without PyTorch's notes."""

    def __init__(self, model: nn.Module, graph: fx.Graph | None = None) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments_of(n, self.env.__getitem__)

    def fetch_attr(self, target: str) -> Any:
        return resolve(self.module, target)


# ---- copies of module trees: tensors of their own, everything once ---------------------------------------------------


def copy_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the module tree with tensors and containers of its own; other objects are shared. Its root has no hooks.

    A tensor or module that is used in several places is one tensor or module in the copy as well.
    """
    copied: torch.nn.Module = _Copier()(module)
    return copied


def own_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return lasting copies of modules and tensors, made as `copy_parameters` makes them, with modules in eval mode.

    Parameters keep `requires_grad`: PyTorch chooses kernels by it, which round differently, also where no gradients are recorded.
    """
    copier = _Copier()
    copies = {name: copier(value) for name, value in values.items()}
    for copied in copies.values():
        if isinstance(copied, torch.nn.Module):
            copied.eval()
    return copies


_SHARED = frozenset((type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device))  # most of what a module holds


class _Copier:
    """Copies modules, tensors and the containers that hold them, everything once; what else there is stays what it is."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if type(value) in _SHARED:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.Tensor):
            return self._keep(value, self._tensor(value))
        if type(value) in (dict, OrderedDict):
            copied = self._keep(value, type(value)())
            copied.update((key, self(item)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple, set):
            return self._keep(value, type(value)(self(item) for item in value))
        return value

    def _keep(self, value: Any, copied: Any) -> Any:
        self._known[id(value)] = copied
        return copied

    def _module(self, module: torch.nn.Module) -> Any:
        if isinstance(module, torch.jit.ScriptModule):  # its tensors are not in its dictionary
            return self._keep(module, copy.deepcopy(module))
        root = isinstance(module, fx.GraphModule)
        copied: torch.nn.Module = self._keep(module, torch.nn.Module() if root else copy.copy(module))
        parts = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set") if root else module.__dict__
        for name in list(parts):
            value = module.__dict__[name]
            if type(value) not in _SHARED or root:  # what is shared is in the copy already, unless that is a new module
                no_hooks = type(value) is OrderedDict and not value  # of most modules and most kinds of hooks
                copied.__dict__[name] = OrderedDict() if no_hooks else self(value)
        if isinstance(copied, torch.nn.RNNBase):  # holds its parameters a second time, in lists, one of them of weak references
            copied._init_flat_weights()
        return copied

    @staticmethod
    def _tensor(tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.detach().clone()
        return torch.nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else data

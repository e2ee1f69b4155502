"""Modules that stay whole: which ones do, how they are recorded, and what their results depend on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxquant.errors import ConfigurationError
from fxquant.frontend.arguments import ATOMS, is_tracked
from fxquant.frontend.entry import refuse_scripted, uncompiled
from fxquant.frontend.gradients import called_again
from fxquant.frontend.handler import Handler
from fxquant.frontend.opaque import record
from fxquant.frontend.values import TracedTensor
from fxquant.ir import graph
from fxquant.ir.carried import of_layer
from fxquant.ir.functional import stub_of
from fxquant.ir.graph import LEAF, spell
from fxquant.ir.integer import Reference
from fxquant.numerics.gradient import GradientRule
from fxquant.support import logger

LeafRule = Callable[[nn.Module, str], bool]

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
_HOME = "torch.nn.modules."


def default_leaf(module: nn.Module, path: str) -> bool:
    """Return whether a module is one of PyTorch's own layers, and not a container of others."""
    return type(module).__module__.startswith(_HOME) and not isinstance(module, _CONTAINERS)


Leaves = Any  # a LeafRule, a class of modules, the path of one, or several of these


def leaf_rule(leaf: Leaves, model: nn.Module) -> LeafRule:
    """Return the rule that is meant: besides PyTorch's layers, modules of these classes, and those at these paths, stay whole.

    Raises ConfigurationError for a class or a path that no module of the model has.
    """
    if leaf is None:
        return default_leaf
    if callable(leaf) and not isinstance(leaf, type):
        rule: LeafRule = leaf
        return rule
    wanted = [leaf] if isinstance(leaf, type | str) else list(leaf)
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): path for path, module in model.named_modules()}
    for one in wanted:
        there = one in modules if isinstance(one, str) else any(isinstance(module, one) for module in modules.values())
        if not there:
            near = difflib.get_close_matches(one, modules, n=1) if isinstance(one, str) else []
            raise ConfigurationError(
                f"leaf={one!r} names no module" if isinstance(one, str) else f"leaf={one.__name__} names no module",
                because=f"the model has none {'at that path' if isinstance(one, str) else 'of that class'}",
                remedy=f"did you mean {near[0]!r}?" if near else "its modules are what model.named_modules() lists",
            )
    names = {first[id(modules[one])] for one in wanted if isinstance(one, str)}
    kinds = tuple(one for one in wanted if isinstance(one, type))
    return lambda module, path: path in names or isinstance(module, kinds) or default_leaf(module, path)


class ModuleCalls:
    """Handle the calls of modules while the model is traced."""

    def __init__(self, handler: Handler, leaf: LeafRule, qconfigs: Mapping[str, Any]) -> None:
        self._handler = handler
        self._qconfigs = qconfigs
        self._rule = leaf
        self._entries = 0  # how many calls have begun
        self._keys: dict[int, Any] = {}  # of leaves by identity; None for other modules

    def __call__(self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = self._handler
        if handler.paused:
            return original(module, *args, **kwargs)
        module = uncompiled(handler.snapshot.shell(module))
        if isinstance(module, torch.jit.ScriptModule) and is_tracked((args, kwargs), handler.known):
            refuse_scripted("a module that forward calls", handler.source())
        path = handler.snapshot.paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        if isinstance(module, GradientRule) and is_tracked(args, handler.known):
            return called_again(handler, module, args)
        stub = stub_of(module) if len(args) == 1 and not kwargs and isinstance(args[0], TracedTensor) else None
        if isinstance(module, nn.TransformerEncoder):
            _say_padding(handler, module, path, args, kwargs)
        previous, handler.path = handler.path, path
        around = handler.qconfig
        if path in self._qconfigs:
            handler.qconfig = ((path, self._qconfigs[path]), *around)
        if stub is not None:
            try:
                function: Any = stub[0]
                placed = handler.record("call_function", function, function, (args[0], *stub[1:]), {})
                spell(placed.node, type(module))
                return placed
            finally:
                handler.path, handler.qconfig = previous, around
        entry, read = self._entries, (self._nest(args), self._nest(kwargs)) if path else ((), {})
        self._entries += 1
        try:
            noisy = path in handler.random.noise and not default_leaf(module, path)
            result = (self._noise if noisy else self._called)(original, module, path, args, kwargs)
        finally:
            handler.path = previous
            handler.qconfig = around
        if path:
            handler.calls.append((path, entry, *read, self._nest(result)))
        return result

    def _noise(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Record a module that draws in train mode, and returns its argument in eval mode, as one node; others as their Python."""
        training, module.__dict__["training"] = module.training, False
        try:
            result = original(module, *args, **kwargs)
        finally:
            module.__dict__["training"] = training
        if result is not args[0]:
            return original(module, *args, **kwargs) if training else result
        result = self._handler.record("call_module", path, lambda input: input, args, {})
        graph.set_noise(result.node, path)
        return result

    def _called(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        handler = self._handler
        key = self._key(module, path)
        trained = next(module.parameters(), None) is not None
        if key is None or not (trained or is_tracked(args, handler.known) or is_tracked(kwargs.values(), handler.known)):
            return original(module, *args, **kwargs)
        if not module._forward_hooks:
            return self._record(module, path, key, args, kwargs)
        module.__dict__["forward"] = lambda *a, **k: self._record(module, path, key, a, k)
        try:
            return original(module, *args, **kwargs)
        finally:
            del module.__dict__["forward"]

    def _nest(self, value: Any) -> Any:
        """Return what is read or returned, with a reference for each tensor; None for a value that a file cannot hold."""
        if isinstance(value, torch.Tensor):
            value = self._handler.memory.current(value)
            return Reference(value.node.name) if isinstance(value, TracedTensor) else None
        if isinstance(value, tuple | list):
            return [self._nest(item) for item in value] if isinstance(value, list) else tuple(map(self._nest, value))
        if isinstance(value, dict):
            return {key: self._nest(item) for key, item in value.items() if isinstance(key, str)}
        if type(value) in (type(None), bool, int, float, str):
            return value
        return Reference("")  # of an object, nothing is known

    def _key(self, module: nn.Module, path: str) -> Any:
        key = self._keys.get(id(module), self)
        if key is self:
            is_leaf = path != "" and not module._forward_pre_hooks and self._rule(module, path)
            with torch._C.DisableTorchFunction():
                key = self._keys[id(module)] = configuration(module) if is_leaf else None
        return key

    def _record(self, module: nn.Module, path: str, key: Any, args: Any, kwargs: Any) -> Any:
        if not default_leaf(module, path):
            return record(self._handler, "call_module", path, type(module).forward.__get__(module), args, kwargs, None, LEAF)
        self._handler.settings[path] = of_layer(module)
        in_place = module.__dict__.get("inplace") is True
        function = _OutOfPlace(module) if in_place else type(module).forward.__get__(module)
        result = self._handler.record("call_module", path, function, args, kwargs, key=key)
        return self._handler.memory.advance(args[0], result) if in_place else result


def _say_padding(handler: Handler, module: nn.TransformerEncoder, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what padded positions hold, where PyTorch's path for inference would leave them out of a nested tensor."""
    given = {**dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)), **kwargs}
    if given.get("src_key_padding_mask") is None or given.get("mask") is not None or not getattr(module, "use_nested_tensor", False):
        return
    text = (
        f"positions of {path or 'the model'} that src_key_padding_mask masks hold what its layers compute there, as in training; "
        "PyTorch's path for inference writes 0 there (enable_nested_tensor=False turns that off): no output should depend on them"
    )
    handler.note(text)
    if handler.locate:
        logger.warning("%s", text)


class _OutOfPlace:
    """The forward of a module with `inplace=True`, without changing its input."""

    def __init__(self, module: nn.Module) -> None:
        self.__self__ = module  # as a method has it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copy = object.__new__(type(self.__self__))
        copy.__dict__.update(self.__self__.__dict__, inplace=False)
        return copy.forward(*args, **kwargs)


def configuration(module: nn.Module) -> tuple[Any, ...]:
    """Return everything besides its arguments that the shapes and types of a module's results depend on: equal for like modules."""
    items: list[Any] = [type(module)]
    for name, value in module.__dict__.items():
        if type(value) in ATOMS:
            items.append((name, type(value), value))
        elif name == "_parameters" or name == "_buffers":
            tensors = ((key, tensor) for key, tensor in value.items() if tensor is not None)
            items.extend((key, tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for key, tensor in tensors)
        elif name == "_modules":
            items.extend((key, None if child is None else configuration(child)) for key, child in value.items())
        elif isinstance(value, tuple):
            items.append((name, value))
        elif name[0] != "_":
            items.append((name, id(value)))
    return tuple(items)

"""What is replaced in Python while a model is traced, and put back afterwards.

`int`, `len` and the functions of `math` would turn a number that depends on the batch into a plain one without a word.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from fxquant.trace.source import is_library
from fxquant.trace.values import BatchFloat, BatchInt, BatchNumber, TracedTensor, active, is_tracing, refuse

_MATH = ("sqrt", "log", "log2", "log10", "log1p", "exp", "floor", "ceil", "trunc", "pow", "fabs", "gcd", "isqrt", "sin", "cos", "atan")


class _AnswersLike(type):
    """A class that stands in for a built-in one: it is asked about instances of that class, and constructs those."""

    stands_for: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stands_for)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stands_for)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)


class _Int(_AnswersLike):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], BatchInt) and is_tracing():
            return args[0]
        if len(args) == 1 and isinstance(args[0], BatchFloat) and is_tracing():
            return active().arithmetic(builtins.int, args)
        return builtins.int(*args, **kwargs)


class _Float(_AnswersLike):
    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], BatchNumber) and is_tracing():
            return args[0] if isinstance(args[0], BatchFloat) else active().arithmetic(builtins.float, args)
        return builtins.float(*args)


class _Range(_AnswersLike):
    def __call__(cls, *args: Any) -> Any:
        if any(isinstance(arg, BatchNumber) for arg in args):
            refuse(
                "a loop runs over the batch",
                because="a graph has a fixed number of operations, and range() was given a number that depends on the batch size",
                remedy="write the loop as operations on the whole tensor, or trace with dynamic_shapes={} to fix the batch size",
            )
        return builtins.range(*args)


class _IntStandIn(builtins.int, metaclass=_Int):
    stands_for = builtins.int


class _FloatStandIn(builtins.float, metaclass=_Float):
    stands_for = builtins.float


class _RangeStandIn(metaclass=_Range):
    stands_for = builtins.range


def _len(sized: Any) -> Any:
    return sized.size(0) if isinstance(sized, TracedTensor) and is_tracing() else builtins.len(sized)


def _math_stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any) -> Any:
        if is_tracing() and any(isinstance(arg, BatchNumber) for arg in args):
            return active().arithmetic(function, args)
        return function(*args)

    return stand_in


_MATH_STAND_INS = {getattr(math, name): _math_stand_in(getattr(math, name)) for name in _MATH}
_BUILTIN_STAND_INS = {"int": _IntStandIn, "float": _FloatStandIn, "range": _RangeStandIn, "len": _len}


@contextlib.contextmanager
def prepared_environment(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Inside, modules are called through `call(original, module, args, kwargs)`, and Python keeps batch numbers as they are."""
    original = nn.Module.__call__

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    with undisturbed(), contextlib.ExitStack() as undo:
        undo.callback(setattr, nn.Module, "__call__", original)
        for name, stand_in in zip(_MATH, _MATH_STAND_INS.values(), strict=True):
            undo.callback(setattr, math, name, getattr(math, name))
            setattr(math, name, stand_in)
        for module in _python_modules(model):
            _patch_globals(module, undo)
        nn.Module.__call__ = call_module  # type: ignore[method-assign]
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, random numbers are drawn from a copy of the generator, and attention layers compute what their code says."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)


def _patch_globals(module: ModuleType, undo: contextlib.ExitStack) -> None:
    names = module.__dict__
    for name, stand_in in _BUILTIN_STAND_INS.items():
        if name not in names:
            names[name] = stand_in
            undo.callback(names.pop, name, None)
    for name, value in list(names.items()):
        if type(value) is type(math.sqrt) and value in _MATH_STAND_INS:
            undo.callback(names.__setitem__, name, value)
            names[name] = _MATH_STAND_INS[value]


def _python_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the model's classes, and those whose functions and classes these use."""
    classes = {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    direct = {kind.__module__ for kind in classes}
    used = set(direct)
    for name in direct:
        module = sys.modules.get(name)
        if module is not None and not _is_foreign(module):
            used |= {value.__module__ for value in module.__dict__.values() if isinstance(value, (FunctionType, type))}
    modules = [sys.modules[name] for name in sorted(filter(None, used)) if name in sys.modules]
    return [module for module in modules if not _is_foreign(module)]


def _is_foreign(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ != "__main__"
    return is_library(file) or (file.startswith(_STANDARD_LIBRARY) and "-packages" not in file)


_STANDARD_LIBRARY = contextlib.__file__.removesuffix("contextlib.py")

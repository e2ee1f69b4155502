"""The plugin's markers for code that its tracer does not read: here it is traced, unless it is kept whole on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

import fxquant as fxq
from fxquant.errors import ConfigurationError
from fxquant.frontend import default_leaf

_WHOLE: set[type] = set()  # classes of modules that `wrap(skip_compile=True)` has marked


def wrap(skip_compile: Any = False) -> Any:
    """Decorate a function, a method or a module's class.

    skip_compile  False: the decorated object is traced as anything else, so that its operators become integers; True: it is kept whole,
                  in float, on the host, as `fxquant.wrap` keeps a function, and `leaf=` of `fxquant.prepare` a module

    Raises ConfigurationError if any other object is decorated.
    """
    if not isinstance(skip_compile, bool):  # @wrap, without a call
        return wrap()(skip_compile)

    def mark(what: Any) -> Any:
        if not callable(what) and not isinstance(what, str):
            raise ConfigurationError(
                f"a {type(what).__name__} cannot be wrapped",
                because="wrap decorates functions, methods and classes of modules",
                remedy="decorate one of these",
            )
        if not skip_compile:
            return what
        if isinstance(what, type) and issubclass(what, nn.Module):
            _WHOLE.add(what)
            return what
        return fxq.wrap(what)

    return mark


def leaves(model: nn.Module) -> Callable[[nn.Module, str], bool] | None:
    """Return which modules of a model stay whole; None if none of its classes was marked."""
    if not any(type(module) in _WHOLE for module in model.modules()):
        return None
    return lambda module, path: type(module) in _WHOLE or default_leaf(module, path)


class Tracer:
    """The plugin's tracer, of which programs use one marker."""

    @staticmethod
    @contextlib.contextmanager
    def dynamic_block(model: nn.Module, name: str) -> Iterator[None]:
        """Mark a part of forward whose Python depends on data. It is traced like the rest, with TraceError if that is impossible."""
        yield


def typechecked(function: Any) -> Any:
    """Return the function unchanged: arguments are checked where they are used."""
    return function

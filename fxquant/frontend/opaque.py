"""Opaque functions and modules: one call in the graph, run as Python.

    @fxq.wrap
    def boxes(scores, deltas): ...            %boxes = call_function boxes(%scores, %deltas)

The shapes and dtypes of the result are inferred by running the call: on fake tensors, which have no content, or, if it reads content
(numpy, a branch, a non-maximum suppression), on tensors of zeros, of ones and of random numbers. If these runs disagree on a shape,
the result is `Unknown`: it can be passed to other wrapped functions, and be returned.
"""

from __future__ import annotations

import builtins
import functools
import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any, overload

import torch
from torch import nn

from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.frontend.environment import frames
from fxquant.frontend.fake import Evaluator, Sequenced
from fxquant.frontend.values import UNKNOWN, Arguments, Number, Value, active, is_tracing, is_tracked, refuse
from fxquant.ir import graph
from fxquant.support.arguments import CALLABLE, checked, such

WRAPPED: dict[str, Wrapped] = {}  # what `wrap` has returned, by module and name
_SAMPLES = (0, 1, 0x5EED)  # what tensors are filled with to learn a shape: zeros, ones, and numbers drawn from this seed


FUNCTION = such(
    "a function, or the name of one of the module that calls fxq.wrap",
    lambda value: value,
    lambda value: (callable(value) or (isinstance(value, str) and value.isidentifier())) and not isinstance(value, nn.Module | type),
)


@overload
def wrap(function: Callable[..., Any] | str, *, fake: Callable[..., Any] | None = None) -> Callable[..., Any]: ...
@overload
def wrap(function: None = None, *, fake: Callable[..., Any] | None = None) -> Callable[..., Callable[..., Any]]: ...
@checked(function=FUNCTION.or_none("fxq.wrap returns a decorator"), fake=CALLABLE.or_none("the function itself is called"))
def wrap(function: Any = None, *, fake: Callable[..., Any] | None = None) -> Any:
    """Keep a user's function out of the graph: each call of it in a traced model is one node, which runs the function in float as Python.

    Use it as a decorator of a function or of a method of a module; call it with a function, of a library for example; or, in a module,
    with the name of one of its globals, which is replaced: `fxq.wrap("decode")`. Outside of tracing the function is unchanged.

    Its arguments and results may be tensors, numbers, strings and nests of them; sizes of results may depend on content.
    `fake`, called with the same arguments while the model is traced, returns tensors of the same shapes and dtypes without computing
    anything; it is needed if the function cannot run on arbitrary numbers. Gradients pass through PyTorch's functions inside.
    A file that `save` wrote can be loaded where the function has been wrapped.

    Raises ConfigurationError for an argument that is not a function, and for a name that the calling module does not have.
    """
    if function is None:
        return functools.partial(wrap, fake=fake)
    if isinstance(function, Wrapped):
        return function
    if isinstance(function, str):
        callers = (frame.f_globals for frame in frames())
        space = next(names for names in callers if not names.get("__name__", "").startswith("fxquant."))
        value = space.get(function, getattr(builtins, function, None))
        if not callable(value):
            because = f"the module {space.get('__name__')} has no global of that name yet"
            remedy = "call fxq.wrap after the function's definition or import, at the top level of the module"
            raise ConfigurationError(f"the function {function!r} to wrap was not found", because=because, remedy=remedy)
        wrapped = space[function] = value if isinstance(value, Wrapped) else Wrapped(value, fake, f"{space.get('__name__')}:{function}")
        return wrapped
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    return Wrapped(function, fake, f"{home}:{name}")


class Wrapped:
    """A function that is one call in a graph; outside of tracing it calls the function, and binds to objects like it.

    function   the wrapped function
    fake       a function that returns tensors of its result's shapes and dtypes; None: the function itself
    key        its name "module:qualname", by which files and other processes look it up
    """

    def __init__(self, function: Callable[..., Any], fake: Callable[..., Any] | None, key: str) -> None:
        functools.update_wrapper(self, function)
        self.function, self.fake, self.key = function, fake, key
        WRAPPED[key] = self  # the last of a name, as where a notebook's cell runs again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = active() if is_tracing() else None
        if handler is None or handler.paused or not is_tracked((args, kwargs), handler.known):
            return self.function(*args, **kwargs)
        if args and isinstance(args[0], nn.Module):
            module = handler.snapshot.shell(args[0])
            shape_of = None if self.fake is None else functools.partial(self.fake, module)
            bound = functools.partial(self.function, module)
            return record(handler, "call_module", handler.method(module, self), bound, args[1:], kwargs, shape_of, graph.WRAPPED)
        return record(handler, "call_function", self, self.function, args, kwargs, self.fake, graph.WRAPPED)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self.key,)


def _found(key: str) -> Wrapped:
    """Return the wrapped function of that name; import its module if necessary."""
    if key not in WRAPPED:
        importlib.import_module(key.partition(":")[0])
    return WRAPPED[key]


class Holder(nn.Module):
    """A module that calls another one, `held[0]`, without owning it: its parameters are registered where they were."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = (module,)  # in a tuple: not a child, whose parameters would have a second name

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Holder:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.held[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class Method(Holder):
    """A wrapped method of a module, which it holds, as a module that is called."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__(owner)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.held[0], *args, **kwargs)

    def train(self, mode: bool = True) -> Method:
        """Set the mode of this module and of the method's owner, whose code may depend on it."""
        super().train(mode)
        self.held[0].train(mode)
        return self


def record(handler: Any, op: str, target: Any, function: Any, args: Any, kwargs: Any, fake: Callable[..., Any] | None, because: str) -> Any:
    """Add the node of an opaque call; return the traced tensors, numbers or `Unknown` of its result."""
    with handler.pausing():
        arguments = Arguments(function, handler.memory, handler.attribute)
        node_args = tuple(arguments.convert(arg) for arg in args)
        node_kwargs = {name: arguments.convert(arg) for name, arg in kwargs.items()}
        name = target if isinstance(target, str) else target.__name__
        guessed = arguments.unknown and fake is None
        template = UNKNOWN if guessed else _template(handler.evaluator, fake or function, args, kwargs, arguments, name)
        node = handler.graph.create_node(op, target, node_args, node_kwargs)
        handler.describe(node, template)
        graph.refuse(node, because, python=True)
        return handler.wrap(node, template)


def _template(evaluator: Evaluator, function: Any, args: Any, kwargs: Any, arguments: Arguments, name: str) -> Any:
    """Return the template of the result (shapes and dtypes) from runs on fake tensors, or else on the sample numbers."""
    try:
        return evaluator.run(function, args, kwargs, None, arguments.substitutes).template
    except Exception:  # whatever it does with a tensor that has no content
        pass
    templates: list[Any] = []
    error: Exception | None = None
    for sample in _SAMPLES:
        try:
            templates.append(_without_numbers(evaluator.run(function, args, kwargs, sample, arguments.substitutes).template))
        except FxQuantError:  # it returns something else at another batch size
            templates.append(UNKNOWN)
        except Exception as raised:
            error = raised
    if len(templates) < 2:
        because = f"it is kept as Python, and on tensors of zeros, ones and arbitrary numbers it raises {type(error).__name__}: {error}"
        remedy = "describe its result by a function: fxq.wrap(…, fake=lambda x: x.new_empty(…))"
        refuse(f"the result of {name} cannot be determined", because=because, remedy=remedy)
    return functools.reduce(_agreed, templates)


def _without_numbers(template: Any) -> Any:
    """Return the template of a run on sample numbers without its content: shapes and dtypes only."""
    if isinstance(template, Sequenced):
        return Sequenced(template.kind, [_without_numbers(item) for item in template.items], template.keys)
    if isinstance(template, Value):
        return template.abstract
    return template if template is None or isinstance(template, Number) else UNKNOWN


def _agreed(first: Any, second: Any) -> Any:
    if isinstance(first, Sequenced) and isinstance(second, Sequenced):
        same = first.kind is second.kind and first.keys == second.keys and len(first.items) == len(second.items)
        return Sequenced(first.kind, list(map(_agreed, first.items, second.items)), first.keys) if same else UNKNOWN
    return first if first is second or (isinstance(first, Number) and first == second) else UNKNOWN

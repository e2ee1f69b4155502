"""Users' own functions: a function of one tensor as a lookup table, a function of several tensors as an operator with a new record."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from fxquant.errors import ConfigurationError
from fxquant.ops.core.declare import spelled
from fxquant.ops.core.record import BY_NAME, Operator, register
from fxquant.ops.elementwise.functions import by_torch
from fxquant.ops.elementwise.table import unary as declare
from fxquant.support.arguments import CALLABLE, NAMES, checked, instance, such

MEANING = CALLABLE.or_none("the other argument then defines the operator")
NAME = such("a valid Python identifier", instance("", str).take, str.isidentifier)


@checked(name=NAME, function=CALLABLE, number=CALLABLE.or_none("the function in float64"))
def unary(name: str, function: Callable[[Tensor], Tensor], number: Callable[[float], float] | None = None) -> Callable[[Tensor], Tensor]:
    """Declare a function of one tensor, element by element, that is one table in integers, and one operator, `name`, in every graph.

    `function` is its float meaning, differentiable; `number` the same for one Python float, which decides the entries of the table that
    lie near a tie, and is `function` in float64 where it is None. What is returned is called in a model's forward in place of `function`.
    A file that `save` wrote of such a model can be loaded where the function has been declared. Raise ConfigurationError if the name is
    taken, by an operator or by PyTorch.
    """
    _require_free(name)

    @functools.wraps(function)
    def called(input: Tensor) -> Tensor:
        if has_torch_function_unary(input):  # it is traced: one call, whatever it is made of
            traced: Tensor = handle_torch_function(called, (input,), input)
            return traced
        return function(input)

    _give_name(called, name)
    called.__signature__ = inspect.Signature([inspect.Parameter("input", inspect.Parameter.POSITIONAL_OR_KEYWORD)])  # type: ignore[attr-defined]
    declare(name, called, number or by_torch(function))
    return called


@checked(name=NAME, function=CALLABLE, operands=NAMES, expand=MEANING, lower=MEANING)
def operator(
    name: str,
    function: Callable[..., Tensor],
    operands: Sequence[str],
    *,
    expand: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    **fields: Any,
) -> Callable[..., Tensor]:
    """Declare a function of several tensors that is one operator, `name`, in every graph, and has the integer meaning that you give it.

    function  its float meaning, differentiable, made of functions of PyTorch; what it does inside is not looked into
    operands  the parameters of it that take activations
    expand    its meaning in other operators: expand(build, **arguments) calls them, `build(F.relu, x)`, and returns what the last gives
    lower     or its meaning in primitives: lower(lowering, **arguments)
    fields    whatever else `fxquant.ops.core.record.Operator` has: `demand`, `refuses`, `onnx`, …

    What is returned is called in a model's forward in place of `function`. While a model is traced, `function` is run on tensors that have
    shapes and dtypes and no values, to learn those of its result; so it may branch on shapes and on its other arguments, and a branch on
    what a tensor holds (`if x.sum() > 0`, `float(x.max())`, `.numpy()`) is a TraceError there: torch.where takes its place. A file that
    `save` wrote of such a model can be loaded where the operator has been declared. Raise ConfigurationError if the name is taken, for a
    parameter that there is not, and where neither meaning is given, or both.
    """
    _require_free(name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = MappingProxyType({})
    unknown = [f"it has no parameter {each!r}" for each in operands if each not in parameters]
    unknown += [f"an operator has no field {each!r}" for each in fields if each not in Operator.__dataclass_fields__]
    if unknown:
        raise ConfigurationError(
            f"the operator {name!r} cannot be declared", because=unknown[0], remedy="see fxquant.ops.core.record.Operator"
        )
    if (expand is None) == (lower is None):
        raise ConfigurationError(
            f"the operator {name!r} has {'no integer form' if expand is None else 'two integer forms'}",
            because="it is defined either by other operators (expand=) or by primitives (lower=)",
            remedy="pass one of the two; an elementwise function of one tensor needs neither: declare it by fxq.extend.unary",
        )

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if has_torch_function(tensors):  # it is traced: one call, whatever it is made of
            traced: Tensor = handle_torch_function(called, tensors, *args, **kwargs)
            return traced
        return function(*args, **kwargs)

    _give_name(called, name)
    called.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    meaning = {"expand": expand} if lower is None else {"lower": lower}
    register(Operator(name, called, tuple(operands), **meaning, **fields))
    return called


def _give_name(called: Callable[..., Any], name: str) -> None:
    """Rename a wrapper: set its `__name__` and drop `__wrapped__`, so that generated code does not call the wrapped function."""
    called.__name__ = called.__qualname__ = name
    called.__dict__.pop("__wrapped__", None)
    if (called.__module__ or "").partition(".")[0] == "torch":  # generated code would look for it there
        called.__module__ = __name__


def _require_free(name: str) -> None:
    known = name in BY_NAME
    if known or spelled(name):
        raise ConfigurationError(
            f"the function {name!r} cannot be declared",
            because="an operator of that name is registered already" if known else "PyTorch has a function of that name",
            remedy="give it another name, and declare it once, where its module is imported",
        )

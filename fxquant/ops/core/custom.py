"""Users' own functions: a function of one tensor as a lookup table, a function of several tensors as an operator with a new record."""

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
from fxquant.ops.elementwise.table import by_torch
from fxquant.ops.elementwise.table import unary as declare
from fxquant.support.arguments import CALLABLE, NAMES, checked, instance, such

MEANING = CALLABLE.or_none("the other argument then defines the operator")
NAME = such("a valid Python identifier", instance("", str).take, str.isidentifier)


@checked(name=NAME, function=CALLABLE, number=CALLABLE.or_none("the function in float64"))
def unary(name: str, function: Callable[[Tensor], Tensor], number: Callable[[float], float] | None = None) -> Callable[[Tensor], Tensor]:
    """Declare an elementwise function of one tensor as an operator, `name`, which lowers to one lookup table; return it.

    `function` computes it on float tensors, differentiably; `number` on one Python float, for table entries near a tie, by default
    `function` in float64. Call the returned function in a model's forward in place of `function`.
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
    name: str, function: Callable[..., Tensor], operands: Sequence[str], *, expand: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None, **fields: Any,
) -> Callable[..., Tensor]:  # fmt: skip
    """Declare a function of several tensors as an operator, `name`, with an integer form in operators or primitives; return it.

    function  the float function, differentiable, made of functions of PyTorch; it is not traced into
    operands  its parameters that take activations
    expand    its form in other operators: expand(build, **arguments) calls them, `build(F.relu, x)`, and returns the last one's result
    lower     or its form in primitives: lower(lowering, **arguments)
    fields    other fields of `fxquant.ops.core.record.Operator`: `demand`, `refuses`, `onnx`, …

    Call the returned function in a model's forward in place of `function`. While a model is traced, `function` is run on tensors that have
    shapes and dtypes and no values, to infer those of its result; so it may branch on shapes and on its other arguments, and a branch on
    a tensor's values (`if x.sum() > 0`, `float(x.max())`, `.numpy()`) is a TraceError there: use torch.where. A file that
    `save` wrote of such a model can be loaded where the operator has been declared. Raise ConfigurationError if the name is taken, for an
    unknown parameter, and unless exactly one of `expand` and `lower` is passed.
    """
    _require_free(name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = MappingProxyType({})
    unknown = [f"it has no parameter {each!r}" for each in operands if each not in parameters]
    unknown += [f"an operator has no field {each!r}" for each in fields if each not in Operator.__dataclass_fields__]
    if unknown:
        remedy = "see fxquant.ops.core.record.Operator"
        raise ConfigurationError(f"the operator {name!r} cannot be declared", because=unknown[0], remedy=remedy)
    if (expand is None) == (lower is None):
        forms = "no integer form" if expand is None else "two integer forms"
        because = "it is defined either by other operators (expand=) or by primitives (lower=)"
        remedy = "pass one of the two; an elementwise function of one tensor needs neither: declare it by fxq.extend.unary"
        raise ConfigurationError(f"the operator {name!r} has {forms}", because=because, remedy=remedy)

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
    register(name, called, tuple(operands), **meaning, **fields)
    return called


def _give_name(called: Callable[..., Any], name: str) -> None:
    """Rename a wrapper: set its `__name__` and drop `__wrapped__`, so that generated code does not call the wrapped function."""
    called.__name__ = called.__qualname__ = name
    called.__dict__.pop("__wrapped__", None)
    if (called.__module__ or "").partition(".")[0] == "torch":  # generated code would look for it there
        called.__module__ = __name__


def _require_free(name: str) -> None:
    registered = name in BY_NAME
    if registered or spelled(name):
        because = "an operator of that name is registered already" if registered else "PyTorch has a function of that name"
        remedy = "give it another name, and declare it once, where its module is imported"
        raise ConfigurationError(f"the function {name!r} cannot be declared", because=because, remedy=remedy)

"""A user's own function of one tensor, as one table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from fxquant.arguments import CALLABLE, checked, instance, such
from fxquant.errors import ConfigurationError
from fxquant.ops.record import OPERATORS
from fxquant.ops.unary import spelled
from fxquant.ops.unary import unary as declare

NAME = such("a name as a variable of Python may have", instance("", str).take, str.isidentifier)


@checked(name=NAME, function=CALLABLE, number=CALLABLE.or_none("the function in float64"))
def unary(name: str, function: Callable[[Tensor], Tensor], number: Callable[[float], float] | None = None) -> Callable[[Tensor], Tensor]:
    """A function of one tensor, element by element, that is one table in integers, and one operator, `name`, in every graph.

    `function` is its float meaning, differentiable; `number` the same for one Python float, which decides the entries of the table that
    lie near a tie, and is `function` in float64 where it is None. What is returned is called in a model's forward in place of `function`.
    A file that `save` wrote of such a model can be loaded where the function has been declared. Raises ConfigurationError if the name is
    taken, by an operator or by PyTorch.
    """
    known = any(record.name == name for record in OPERATORS.values())
    if known or spelled(name):
        raise ConfigurationError(
            f"the function {name!r} cannot be declared",
            because="an operator of that name is in the table already" if known else "PyTorch has a function of that name",
            remedy="give it another name, and declare it once, where its module is imported",
        )

    @functools.wraps(function)
    def called(input: Tensor) -> Tensor:
        if has_torch_function_unary(input):  # it is traced: one call, whatever it is made of
            traced: Tensor = handle_torch_function(called, (input,), input)
            return traced
        return function(input)

    def on_number(x: float) -> float:
        return float(function(torch.tensor(x, dtype=torch.float64, device="cpu")))

    called.__name__ = called.__qualname__ = name
    called.__dict__.pop("__wrapped__", None)
    called.__signature__ = inspect.Signature([inspect.Parameter("input", inspect.Parameter.POSITIONAL_OR_KEYWORD)])  # type: ignore[attr-defined]
    declare(name, called, number or on_number)
    return called

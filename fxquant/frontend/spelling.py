"""The call form of a PyTorch function in the graph: a method, an operator or a function."""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxquant.frontend.values import refuse
from fxquant.ir import functional


@dataclass(frozen=True)
class Spelling:
    """One entry of the graph's vocabulary.

    op, target   as in an `fx.Node`
    function     what is run to learn the shape of the result
    swapped      the two arguments change places
    mutates      the original changes its first argument; `target` does not
    content      whether the result's content follows from the arguments
    flag         position of an argument named `inplace`, or None
    """

    op: str
    target: Any
    function: Callable[..., Any]
    swapped: bool = False
    mutates: bool = False
    content: bool = True
    flag: int | None = None


# Python's operators, and those that PyTorch reports by these names when the left operand is not a traced tensor.
_DUNDERS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, f"__{name}__")
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "invert"),
        *("neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge", "getitem"),
    )
} | {"div": operator.truediv}
_OPERATORS = {name: _DUNDERS[name] for name in ("add", "sub", "mul", "div", "matmul", "pow", "gt", "ge", "lt", "le", "neg")} | {
    "true_divide": operator.truediv,
    "remainder": operator.mod,
}
_FUNCTIONAL: dict[str, Callable[..., Any]] = {"copy_": functional.copy, "fill_": functional.fill, "zero_": functional.zero}
_NOT_MUTATING = frozenset(("requires_grad_", "retain_grad", "share_memory_"))
_REFUSED = frozenset((
    "resize_", "resize_as_", "set_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "apply_", "map_", "as_strided_", "fill_diagonal_",
))  # fmt: skip
_RANDOM = frozenset((
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli", "multinomial", "poisson",
))  # fmt: skip
_WITHOUT_CONTENT = _RANDOM | frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
))  # fmt: skip


def python_operator(func: Any) -> Callable[..., Any] | None:
    """Return the operator a tensor method stands for if it was called with as many operands as the operator has."""
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    found = _OPERATORS.get(name[:-1] if in_place else name)
    return found if found is not None and is_method(func) else None


def is_random(func: Any) -> bool:
    """Return whether a function draws random numbers, so that it must be recorded even if its arguments are constants."""
    return getattr(func, "__name__", None) in _RANDOM


def is_method(func: Any) -> bool:
    """Return whether a function is a method of `torch.Tensor`, or wrapped for an operator by PyTorch: for `**` it reports `pow`."""
    found = getattr(torch.Tensor, func.__name__, None)
    return found is not None and bool(found == func or found == getattr(func, "__wrapped__", None))


@functools.cache
def spelling_of(func: Any) -> Spelling:
    """Return the call form of a function as `__torch_function__` or `__torch_dispatch__` reported it."""
    if isinstance(func, torch._ops.OpOverload):
        return _overload(func)
    name: str = getattr(func, "__name__", str(func))
    content = name not in _WITHOUT_CONTENT
    if name in _REFUSED:
        _refuse_in_place(name)
    if name.startswith("__") and name.endswith("__"):
        return _dunder(func, name[2:-2])
    if name.endswith("_") and not name.startswith("_") and name not in _NOT_MUTATING:
        return _in_place(func, name)
    if is_method(func):
        return Spelling("call_method", name, func, content=content)
    return Spelling("call_function", func, func, content=content, flag=_inplace_position(func))


def _dunder(func: Any, name: str) -> Spelling:
    if name == "setitem":
        return Spelling("call_function", functional.setitem, functional.setitem, mutates=True)
    if name in _DUNDERS:
        return Spelling("call_function", _DUNDERS[name], _DUNDERS[name])
    if name[0] == "r" and name[1:] in _DUNDERS:
        return Spelling("call_function", _DUNDERS[name[1:]], _DUNDERS[name[1:]], swapped=True)
    if name[0] == "i" and name[1:] in _DUNDERS:
        return Spelling("call_function", _DUNDERS[name[1:]], _DUNDERS[name[1:]], mutates=True)
    return Spelling("call_method", f"__{name}__", func)


def _in_place(func: Any, name: str) -> Spelling:
    if name in _FUNCTIONAL and is_method(func):
        return Spelling("call_function", _FUNCTIONAL[name], _FUNCTIONAL[name], mutates=True)
    if is_method(func):
        function = getattr(torch.Tensor, name[:-1], None)
        if function is not None:
            return Spelling("call_method", name[:-1], function, mutates=True)
    for home in (torch, torch.nn.functional):
        if getattr(home, name, None) is func and hasattr(home, name[:-1]):
            function = getattr(home, name[:-1])
            return Spelling("call_function", function, function, mutates=True)
    return _refuse_in_place(name)


def _overload(func: torch._ops.OpOverload) -> Spelling:
    if not func._schema.is_mutable:
        return Spelling("call_function", func, func)
    packet, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    found = getattr(getattr(torch.ops.aten, packet[:-1], None), overload or "default", None) if packet.endswith("_") else None
    if found is None or found._schema.is_mutable:
        return _refuse_in_place(str(func))
    return Spelling("call_function", found, found, mutates=True)


def _refuse_in_place(name: str) -> Spelling:
    refuse(
        f"the in-place operation {name} cannot be traced",
        because="a graph computes new tensors and changes none, and this operation has no out-of-place form",
        remedy="compute a new tensor instead of changing one",
    )


def _inplace_position(func: Any) -> int | None:
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


# ---- properties ----------------------------------------------------------------------------------------------------

_NODE_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))


def property_name(func: Any) -> str | None:
    """Return the name of the tensor property `func` reads, or None if it is not a property getter."""
    if getattr(func, "__name__", None) != "__get__":
        return None
    owner = func.__self__
    name: str = owner.fget.__name__ if isinstance(owner, property) and owner.fget is not None else owner.__name__
    return name


@functools.cache
def property_spelling(name: str) -> Spelling | None:
    """Return how reading a property is recorded; None if it is answered while tracing."""
    if name in _NODE_PROPERTIES:
        return Spelling("call_function", builtins.getattr, lambda tensor, _: getattr(tensor, name))
    return Spelling("call_method", "detach", torch.Tensor.detach) if name == "data" else None

"""Call forms that mean one function: torch.softmax, F.softmax, x.softmax() and nn.Softmax; torch.add, +, += and x.add()."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fxquant.ops.core.record import FUNCTIONS, METHODS, MODULES, Operator


class _Entry(NamedTuple):
    """An entry of the operator table: the record, what makes its arguments canonical, and the name without the marks of a call form."""

    operator: Operator
    adapt: Any
    name: str


def is_meant(asked: Any, written: Any) -> bool:
    """Return whether a rule for one call form applies to another: `asked` as the user gives it to a rule, `written` as a node has it.

    A module's class means itself alone. A function, or the name of a method, means the function, however it is called. Several
    functions may be call forms of one operator (relu, relu6 and clamp). They match where they have the same name, or where the
    same code reads their arguments.
    """
    if asked == written:
        return True
    one, other = _entry(asked), _entry(written)
    if one is None or other is None or _is_module(asked) or one.operator is not other.operator:
        return False
    if one.name == other.name or (one.adapt is other.adapt and not _is_module(written)):
        return True
    return _is_module(written) and len(_names(one.operator)) == 1


def _is_module(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def _entry(kind: Any) -> _Entry | None:
    if _is_module(kind):
        return _Entry(*MODULES[kind], _bare(kind.__name__)) if kind in MODULES else None
    name = kind if isinstance(kind, str) else _function_name(kind)
    if not isinstance(kind, str) and kind in FUNCTIONS:
        return _Entry(*FUNCTIONS[kind], _bare(name))
    if isinstance(kind, str) or getattr(torch.Tensor, name, None) in (kind, getattr(kind, "__wrapped__", kind)):
        return _Entry(*METHODS[name], _bare(name)) if name in METHODS else None
    if isinstance(kind, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        homes = (getattr(home, name, None) for home in (torch, F))
        return next((_Entry(*FUNCTIONS[found], _bare(name)) for found in homes if found in FUNCTIONS), None)
    return None


def _function_name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    return str(getattr(function, "__name__", ""))


def _bare(name: str) -> str:
    """LogSoftmax, log_softmax, log_softmax_ and special_log_softmax are one name."""
    return name.removeprefix("special_").replace("_", "").lower()


def _names(operator: Operator) -> frozenset[str]:
    """Return one name for each function that is a call form of an operator: of those whose arguments the same code reads, the first."""
    first: dict[Any, str] = {}
    for function, (owner, adapt) in FUNCTIONS.items():
        if owner is operator and function is not operator.function:
            first.setdefault(adapt, _bare(_function_name(function)))
    return frozenset(first.values())

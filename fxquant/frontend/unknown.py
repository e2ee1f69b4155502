"""A placeholder in a trace for a result whose facts are not known before the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import fx

from fxquant.frontend.values import active, refuse

UNKNOWN = object()  # the template of a result of which nothing is known before the graph runs


class Unknown:
    """The result of a function kept as Python whose sizes, or even whether it is a tensor, are known only when the graph runs."""

    def __init__(self, node: fx.Node) -> None:
        object.__setattr__(self, "node", node)

    def __getitem__(self, index: Any) -> Any:
        return active().unknown_item(self, index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_unknown(f"given to {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse_unknown(f"asked for its .{name}")


def _refuse_unknown(what: str) -> NoReturn:
    refuse(
        f"the result of a function that is kept as Python is {what}",
        because="its sizes depend on content, or it is not a tensor, so nothing is known of it before the graph runs",
        remedy="do that inside the function, or in another function under fxq.wrap, or describe its result by fxq.wrap(…, fake=…)",
    )


def _unknown(name: str) -> Callable[..., Any]:
    return lambda self, *args: _refuse_unknown(f"used by Python ({name})")


for _name in (
    *("bool", "len", "iter", "int", "float", "index", "contains", "call", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv"),
    *("rtruediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "neg", "abs", "invert", "lt", "le", "gt", "ge", "setitem"),
):
    setattr(Unknown, f"__{_name}__", _unknown(_name))

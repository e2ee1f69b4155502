"""Run a graph node by node, with the arguments that its generated code would give each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fxquant.ir.graph import resolve


def called(model: nn.Module, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Call a node's function, method or module with the values of the nodes it reads; return the result."""
    args, kwargs = arguments_of(node, value)
    if node.op == "call_method":
        first, *others = args
        return getattr(first, str(node.target))(*others, **kwargs)
    function: Any = resolve(model, str(node.target)) if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def arguments_of(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node with the values of the nodes it reads, in lists and dicts of this call's own.

    The arguments of a node itself are immutable, and a user's function may write into its arguments.
    """
    return own(node.args, value), own(node.kwargs, value)


def own(argument: Any, value: Callable[[Any], Any], leaf: type = fx.Node) -> Any:
    """Return an argument, or the output, of a graph in plain containers of its own, with `value` applied to nodes, or to another `leaf`."""
    if isinstance(argument, leaf):
        return value(argument)
    if isinstance(argument, dict):
        return {key: own(item, value, leaf) for key, item in argument.items()}
    if isinstance(argument, list):
        return [own(item, value, leaf) for item in argument]
    if isinstance(argument, tuple):
        items = [own(item, value, leaf) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, slice):
        return slice(*(own(end, value, leaf) for end in (argument.start, argument.stop, argument.step)))
    return argument


class Interpreter(fx.Interpreter):
    """Runs a graph as its generated code does. An error is the model's own, without PyTorch's notes."""

    def __init__(self, model: nn.Module, graph: fx.Graph | None = None) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments_of(n, self.env.__getitem__)

    def fetch_attr(self, target: str) -> Any:
        return resolve(self.module, target)

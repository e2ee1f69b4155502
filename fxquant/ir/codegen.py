"""Generate the Python that runs a graph, also for names of the user's model that are not Python names or are GraphModule's own."""

from __future__ import annotations

import functools
import keyword
from typing import Any

from torch import fx, nn
from torch.fx.graph import CodeGen, PythonCode

_REGISTERED = "_fxquant_registered"  # what reads such a name, in the generated code


def registered(root: nn.Module, path: str) -> Any:
    """Return the module, parameter or buffer at a dotted path, or else the attribute. Raises AttributeError if there is none."""
    value: Any = root
    for part in path.split("."):
        value = _member(value, part)
    return value


def _member(holder: Any, name: str) -> Any:
    if isinstance(holder, nn.Module):
        state = holder.__dict__
        for kind in ("_modules", "_parameters", "_buffers"):
            found = state[kind].get(name)
            if found is not None:
                return found
    return getattr(holder, name)


@functools.cache
def own_names() -> frozenset[str]:
    """Return the names of a GraphModule's own attributes: a module or tensor registered under one is not found as an attribute."""
    return frozenset((*dir(fx.GraphModule), *vars(fx.GraphModule(nn.Module(), fx.Graph()))))


@functools.cache
def _is_plain(path: str) -> bool:
    """Return whether `self.` and the path is an expression that reads what is registered there."""
    first, *others = path.split(".")
    return not (
        first in own_names()
        or any(hasattr(nn.Module, part) for part in others)
        or any(keyword.iskeyword(part) or not part.replace("_", "a").isalnum() for part in (first, *others))
    )


class Code(CodeGen):
    """PyTorch's generator of code, with two things it does not always get right.

    Paths that are not plain expressions are looked up where modules and tensors are registered, and named tuples that are returned
    have their classes among the globals.
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[type, str] = {}

    def generate_output(self, output_args: Any, **_: Any) -> str:
        return f"return {self._written(output_args)}"

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), *((name, found) for found, name in self._classes.items())]

    def _written(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self._written, value)) + "]"
        if not isinstance(value, tuple):
            return repr(value)
        items = "(" + "".join(f"{self._written(item)}, " for item in value) + ")"
        if not hasattr(value, "_fields"):
            return items
        return self._classes.setdefault(type(value), f"{type(value).__name__}__{len(self._classes)}") + items

    def _gen_python_code(self, nodes: Any, root_module: str, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, root_module, *args, **kwargs)
        for node in nodes:
            if node.op in ("call_module", "get_attr") and not _is_plain(str(node.target)):
                expression = fx.graph._format_target(root_module, str(node.target))
                written = f"    {node!r} = {expression}".replace("\n", "\n    ")  # PyTorch indents lines
                if f"\n{written}" not in code.src:
                    raise AssertionError(f"%{node.name} is not in the generated code as {written.strip()}")
                code.src = code.src.replace(f"\n{written}", f"\n    {node!r} = {_REGISTERED}({root_module}, {str(node.target)!r})", 1)
                code.globals[_REGISTERED] = registered
        return code

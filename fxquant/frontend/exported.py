"""`torch.export`'s programs as models: their ATen operators in PyTorch's spelling, so that they are traced as any module is."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen

from fxquant.frontend.aten import CHECKS, python_form
from fxquant.frontend.source import is_library
from fxquant.frontend.values import active, is_tracing
from fxquant.graph import model_meta

_READ = "fxquant.exported"  # in meta of a module that `module_of` made
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*([^\n]*)')


def module_of(program: torch.export.ExportedProgram) -> nn.Module:
    """A module with the program's parameters under their names, that computes what the program does and checks nothing.

    While it is traced, operators are told the lines and the modules that the exported model had them in.
    """
    module: Any = program.module()
    graph: fx.Graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.name.partition("::")[2] in CHECKS:
                graph.erase_node(node)
                continue
            with graph.inserting_before(node):
                graph.call_function(_at, (_path(node), _line(node)))
            node.target = python_form(node.target)
    module.recompile()
    if hasattr(module, "_guards_fn"):
        del module._guards_fn
    module.meta[_READ] = True
    return module  # type: ignore[no-any-return]


def is_unpacked(module: nn.Module) -> bool:
    """Whether a module is what `ExportedProgram.module()` or `torch.export.unflatten` returned, and not what `module_of` returned."""
    if isinstance(module, torch.export.UnflattenedModule):
        return True
    if not isinstance(module, fx.GraphModule) or model_meta(module).get(_READ) or not isinstance(module.graph._codegen, _PyTreeCodeGen):
        return False
    return any(node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes)


def _at(path: str, line: str) -> None:
    """Tells a trace in progress where the operators that follow were written."""
    if is_tracing():
        handler = active()
        handler.path, handler.line = path, line


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return re.sub(r"^L\['self'\]\.?", "", path)


def _line(node: fx.Node) -> str:
    """The innermost line that is the user's, as errors and `explain` tell it."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not is_library(frame[0])] or frames
    if not own:
        return ""
    file, number, function, text = own[-1]
    return f"{file.rpartition('/')[2]}:{number} in {function}:  {text.strip()}"

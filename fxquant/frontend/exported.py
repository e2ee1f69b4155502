"""`torch.export` programs as models: ATen operators in PyTorch's call forms, so that they are traced like any module."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen

from fxquant.frontend.aten import CHECKS, python_form
from fxquant.frontend.source import is_library
from fxquant.frontend.values import active, is_tracing
from fxquant.ir.graph import model_meta

_READ = "fxquant.exported"  # in meta of a module that `module_of` made
LOST_GRADIENTS = "lost_gradients"  # in `meta` of a model: sentences about gradients that TRAIN cannot have
_LOST = (
    "an exported program holds no hooks, no torch.inference_mode and no custom backward: "
    "TRAIN uses the gradients of its operators; pass the nn.Module to keep those of your code"
)
_FUNCTION = "_functorch/autograd_function.py"  # in the stack of what torch.export found in a custom function's forward
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*([^\n]*)')


def module_of(program: torch.export.ExportedProgram) -> nn.Module:
    """Return a module with the program's parameters under their names, which computes what the program does and checks nothing.

    While it is traced, operators get the source lines and the modules that they had in the exported model.
    """
    module: Any = program.module()
    lost = _in_python(module)
    if any(parameter.requires_grad for parameter in module.parameters()):
        module.meta[LOST_GRADIENTS] = [_LOST, *lost]
    if hasattr(module, "_guards_fn"):
        del module._guards_fn
    module.meta[_READ] = True
    return module  # type: ignore[no-any-return]


def _in_python(module: Any) -> list[str]:
    """Spell the operators of a graph, and of those that it calls, as PyTorch's functions; returns what of their gradients is lost."""
    lost: list[str] = []
    graph: fx.Graph = module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            inner: Any = module.get_submodule(str(node.args[1].target))
            lost += _custom_functions(inner) + _in_python(inner)
            node.target = _in_gradient_mode
        elif node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.name.partition("::")[2] in CHECKS:
                graph.erase_node(node)
                continue
            with graph.inserting_before(node):
                graph.call_function(_at, (_path(node), _line(node)))
            node.target = python_form(node.target)
    module.recompile()
    return lost


def _in_gradient_mode(enabled: bool, function: Any, *args: Any) -> Any:
    """Return a part of a program that was exported in this gradient mode."""
    with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
        return function(*args)


def _custom_functions(module: Any) -> list[str]:
    """Return a note if the program has the forward of a custom `torch.autograd.Function` and has lost its backward; else an empty list."""
    for node in module.graph.nodes:
        if _FUNCTION in (node.meta.get("stack_trace") or ""):
            where = _line(node, own=True)
            return [f"a custom autograd function{f' ({where})' if where else ''} passes no gradient: its backward is not in the program"]
    return []


def lost_gradients(module: nn.Module) -> list[str]:
    """Return notes on the gradients that a program, which is this module now, has lost."""
    meta = vars(module).get("meta")  # a user's module may have a child of that name
    return list(meta.get(LOST_GRADIENTS, ())) if isinstance(meta, dict) else []


def is_unpacked(module: nn.Module) -> bool:
    """Return whether a module was returned by `ExportedProgram.module()` or `torch.export.unflatten`, and not by `module_of`."""
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


def _line(node: fx.Node, own: bool = False) -> str:
    """Return the innermost line that is the user's, as errors and `explain` tell it; a library's where there is none, unless `own`."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own_frames = [frame for frame in frames if not is_library(frame[0])] or ([] if own else frames)
    if not own_frames:
        return ""
    file, number, function, text = own_frames[-1]
    return f"{file.rpartition('/')[2]}:{number} in {function}:  {text.strip()}"

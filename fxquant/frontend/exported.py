"""`torch.export` programs as models: ATen operators in PyTorch's call forms, so that they are traced like any module."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen

from fxquant.frontend.aten import CHECKS, python_form
from fxquant.frontend.source import is_library
from fxquant.frontend.values import active, is_tracing
from fxquant.ir.graph import model_meta
from fxquant.support import logger

_READ = "fxquant.exported"  # in meta of a module that `module_of` made
LOST_GRADIENTS = "lost_gradients"  # in `meta` of a model: sentences about gradients that TRAIN cannot have
_LOST = (
    "an exported program holds no hooks, no torch.inference_mode and no custom backward: "
    "TRAIN uses the gradients of its operators; pass the nn.Module to keep those of your code"
)
_TRAINS = frozenset(("train", "training", "use_input_stats"))  # the arguments of ATen operators that are true in train mode
_FUNCTION = "_functorch/autograd_function.py"  # in the stack of what torch.export found in a custom function's forward
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*([^\n]*)')


def module_of(program: torch.export.ExportedProgram) -> nn.Module:
    """Return a module with the program's parameters under their names, which computes what the program does and checks nothing.

    While it is traced, operators get the source lines and the modules that they had in the exported model. Batch norms and dropouts that
    were exported in train mode follow the mode of the module: in eval mode they use running statistics, and drop nothing.
    """
    module: Any = program.module()
    for name in ("train", "eval"):  # an exported module refuses both
        vars(module).pop(name, None)
    lost = _follow_mode(module) + _in_python(module)
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


def _follow_mode(program: Any) -> list[str]:
    """Make operators that were exported in train mode read the mode of their module, and remove counters of batches; return what is lost.

    Norms without running statistics stay as they are. Logs a warning if dropouts are all that was exported in train mode.
    """
    followed = set()
    inside = []
    for graph in [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]:
        for node in graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            arguments = [argument.name for argument in node.target._schema.arguments]
            given = dict(zip(arguments, node.args, strict=False))
            names = _read_mode(node, given)
            followed |= names
            inside += [node.name] if names and (given.get("dropout_p") or given.get("dropout")) else []
            if node.target is torch.ops.aten.add_.Tensor and not node.users and "num_batches_tracked" in str(node.args[0]):
                graph.erase_node(node)  # a batch norm that is a function does not read its counter
    if followed and followed <= {"train", "dropout_p"}:
        logger.warning(
            "dropouts of the program were exported in train mode: in eval mode, and as integers, they drop nothing; to drop there as well"
            " (Monte Carlo dropout), pass the nn.Module"
        )
    return [f"dropout inside of attention and of recurrent layers is off in TRAIN: {', '.join(inside)}"] if inside else []


def _read_mode(node: fx.Node, given: dict[str, Any]) -> set[str]:
    """Replace the arguments of an operator that are true in train mode alone, and a share to drop, by the mode; return their names."""
    if given.get("running_mean", 0) is None:
        return set()
    replaced = {name for name, value in given.items() if (value is True and name in _TRAINS) or (value and name == "dropout_p")}
    if replaced:
        with node.graph.inserting_before(node):
            mode = node.graph.create_node("get_attr", "training")
            drop = node.graph.call_function(operator.mul, (given["dropout_p"], mode)) if "dropout_p" in replaced else None
        values = {name: mode if given[name] is True else drop for name in replaced}
        node.args = tuple({**given, **values}.values())
    return replaced


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

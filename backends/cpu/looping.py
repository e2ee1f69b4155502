"""Loops of prepared models at once: where nothing observes or trains, the integer program of a loop takes the place of its steps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backends.cpu import chains
from fxquant.ir import loops
from fxquant.ir.graph import fact, is_parameter, parameter_value, resolve
from fxquant.ir.integer import zero_point
from fxquant.kernels.admission import prove
from fxquant.kernels.kernel import Bound, Disagrees, Match, NotApplicable, Site
from fxquant.kernels.patterns import forms_of, repeated
from fxquant.prepared.operators import QuantizedOperator, take_integers
from fxquant.primitives import loop
from fxquant.quantization.spec import State
from fxquant.support import disagreed

SHORTEST = 16  # steps; the program of fewer takes as long to build as they take
_Program = tuple[Bound, Match]  # what runs, and where it is in the graph of the loop alone
_BUILT: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, _Program | None]]] = weakref.WeakKeyDictionary()


def at_once(model: Any, name: str, frame: loops.Frame, values: dict[str, Any]) -> None:
    """Run the loop that a node begins, where it computes integers and nothing looks at its steps; leave it as it is elsewhere."""
    if torch.is_grad_enabled() or frame.count < SHORTEST or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return
    if not all(type(value) is Tensor and value.device.type == "cpu" and value.numel() for value in values.values()):
        return
    start = next(node for node in model.graph.find_nodes(op="call_function", target=loops.begin) if node.name == name)
    nodes = loops.body(start)
    operators = {node.name: resolve(model, str(node.target)) for node in nodes if node.op == "call_module"}
    if not all(isinstance(each, QuantizedOperator) and _validates(each) for each in operators.values()):
        return
    reads = loops.reads(start)
    sources = {each.name: resolve(model, str(each.target)) for each in reads if each.name in values}
    held = [each for module in (*operators.values(), *sources.values()) for each in (*module.parameters(), *module.buffers())]
    held += [each for node in reads if is_parameter(node) and isinstance(each := parameter_value(model, node), Tensor)]
    if any(each.is_inference() for each in held):
        return
    key = tuple((each.data_ptr(), each._version) for each in held)
    programs = _BUILT.setdefault(model, {})
    if name not in programs or programs[name][0] != key:
        programs[name] = key, _built(model, start)
    program = programs[name][1]
    if program is not None:
        _run(program, frame, {each: (value, sources[each].output) for each, value in values.items()})


def _validates(operator: QuantizedOperator) -> bool:
    """Return whether an operator computes integers now, without statistics that move and without hooks."""
    hooked = operator._forward_hooks or operator._forward_pre_hooks
    return (operator.state is State.VALIDATE or (operator.state is State.TRAIN and not operator.training)) and not hooked


def _built(model: fx.GraphModule, start: fx.Node) -> _Program | None:
    """Return the program of a loop, proved on three steps; None where there is none."""
    alone = loops.ALONE[0](model, start)
    root = alone.graph.find_nodes(op="call_function", target=loop.stack)[0]
    match = repeated(root)
    if not isinstance(match, Match):
        return None
    sizes: dict[fx.Node, tuple[int, ...]] = {}
    along = {node.args[0]: node.args[2] for node in alone.graph.nodes if node.target is loop.item}
    for node in (*match.reads, root):
        sizes[node] = tuple(3 if dim == along.get(node, 0 if node is root else None) else size if isinstance(size, int) else 2
                            for dim, size in enumerate(fact(node).shape))  # fmt: skip
    site = Site(alone, match, sizes, forms_of(alone))
    try:
        built = chains.program.build(site)
        prove(site, chains.program, built)
    except NotApplicable:
        return None
    except Disagrees as error:
        disagreed(model, "the program of a loop", [f"%{start.name}"], str(error), "its steps run one by one")
        return None
    return built.bind(), match


def _run(program: _Program, frame: loops.Frame, values: dict[str, tuple[Tensor, Any]]) -> None:
    """Run a program, and leave in the frame what each step carried, as the lowering of prepared operators holds it."""
    bound, match = program
    inputs = []
    for node in match.reads:
        value, quantizer = values[node.name]
        inputs.append((take_integers(value, quantizer).value + zero_point(node)).to(fact(node).dtype).contiguous())
    outputs = []
    for stack in (match.root, *match.results):
        arguments: Any = stack.args
        rows = values[arguments[0].name][0].shape
        outputs.append(torch.empty(frame.count, *rows, dtype=fact(stack).dtype, device="cpu"))
    bound(inputs, outputs if match.results else outputs[0])
    for stack, output in zip((match.root, *match.results), outputs, strict=True):
        steps = (output[1:].to(torch.float32) - zero_point(stack)).unbind(0)
        frame.carried[stack.args[2]] = list(steps)  # type: ignore[index]
    frame.step = frame.count


loops.AT_ONCE.append(at_once)

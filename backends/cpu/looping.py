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
from fxquant.prepared import through_time as through_time  # which runs loops with gradients by what is offered here
from fxquant.prepared.operators import QuantizedOperator, followed_by, take_integers
from fxquant.primitives import loop
from fxquant.primitives.proof import Shapes
from fxquant.quantization.spec import State
from fxquant.support import disagreed

SHORTEST = 16  # steps; the program of fewer takes as long to build as they take
SHORTEST_TRAINED = 4  # with gradients, whose steps take longer
_Program = tuple[Bound, Match]  # what runs, and where it is in the graph of the loop alone
_SHAPES: weakref.WeakKeyDictionary[Any, Shapes] = weakref.WeakKeyDictionary()
_BUILT: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, _Program | None]]] = weakref.WeakKeyDictionary()


def at_once(model: Any, start: fx.Node, frame: loops.Frame, values: dict[str, Any]) -> None:
    """Run the loop that a node begins, where it computes integers and nothing looks at its steps; leave it as it is elsewhere."""
    shortest = SHORTEST_TRAINED if frame.again else SHORTEST
    if torch.is_grad_enabled() or frame.count < shortest or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return
    if not all(type(value) is Tensor and value.device.type == "cpu" and value.numel() for value in values.values()):
        return
    reads, nodes = loops.reads(start), [node for node in loops.body(start) if node.target is not loops.end]
    if not all(node.op == "call_module" or is_parameter(node) for node in (*reads, *nodes)):  # floats, as around a dynamic layer
        return
    operators = {node.name: resolve(model, str(node.target)) for node in nodes if node.op == "call_module"}
    if not all(isinstance(each, QuantizedOperator) and _validates(each, frame) for each in operators.values()):
        return
    sources = {each.name: resolve(model, str(each.target)) for each in reads if each.name in values}
    if not all(isinstance(each, QuantizedOperator) and not each.plain for each in sources.values()):
        return
    modules = [module for each in (*operators.values(), *sources.values()) for module in each.modules()]
    held = [each for module in modules for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
    held += [each for node in reads if is_parameter(node) and isinstance(each := parameter_value(model, node), Tensor)]
    if any(each.is_inference() for each in held):
        return
    key = (frame.again, *((each.data_ptr(), each._version) for each in held))
    programs = _BUILT.setdefault(model, {})
    if start.name not in programs or programs[start.name][0] != key:
        programs[start.name] = key, _built(model, start, proves=not frame.again)
    program = programs[start.name][1]
    if program is not None:
        _run(program, frame, {each: (value, sources[each].output) for each, value in values.items()})


def _validates(operator: QuantizedOperator, frame: loops.Frame) -> bool:
    """Return whether an operator computes integers now, without noise, hooks, and scales that follow this run of a loop."""
    hooked = operator._forward_hooks or operator._forward_pre_hooks
    noisy = operator.is_training and operator.noise[0] is not None
    follows = not frame.again and any(each.moves for each in followed_by(operator))
    return operator.state in (State.VALIDATE, State.TRAIN) and not (hooked or noisy or follows)


def _built(model: fx.GraphModule, start: fx.Node, *, proves: bool) -> _Program | None:
    """Return the program of a loop, proved on three steps if `proves`; None where there is none."""
    alone = loops.ALONE[0](model, start, _SHAPES.setdefault(model, Shapes()))
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
        if proves:
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
    frame.advance(frame.count - frame.step)


loops.AT_ONCE.append(at_once)

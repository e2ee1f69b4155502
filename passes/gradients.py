"""Gradient rules of the model's forward apply while the prepared model trains, and change no bit of its results.

%a = call_module a(%x)                      %a = conv2d(%x, …)      detached: it is computed without gradients
%detach = call_method detach(%a)       →    %b = conv2d(%a, …)
%b = call_module b(%detach)

A node is detached where all its readers are, so that nothing separates operators that are fused. Where one reader has gradients
and another has none, an identity remains for the latter. Custom backwards are identities, too, until operators observe.
"""

import math
from typing import Any

import torch
from torch import fx

from fxquant.ir import graph as facts
from fxquant.ir.functional import stopped
from fxquant.ir.graph import TensorFact
from fxquant.numerics.rounding import GradientRule
from fxquant.ops import calls, operator_of
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.movement.shape import identity
from fxquant.passes.rewriting import substitute
from fxquant.pipeline import Context
from fxquant.prepared.stage import quantized_operator

STOP = ""  # in place of the path of a rule: the gradient is stopped
OPERANDS = "only a custom backward reads it, while training"
_STOPS = ("detach", torch.detach, stopped)


def mark(gm: fx.GraphModule, context: Context) -> int:
    """Mark every node that is computed without gradients; a stop remains only where its readers differ."""
    nodes = list(gm.graph.nodes)
    rules = {node: rule for node in nodes if (rule := _rule(gm, node)) is not None}
    stops = [node for node in nodes if node.op in ("call_method", "call_function") and node.target in _STOPS]
    if not rules and not stops:
        return 0
    constant = _constants(gm)
    stops = [node for node in stops if node not in constant]
    for node in reversed(nodes):
        # A custom backward may read a node for its value, and send the gradient elsewhere.
        read = [user for user in node.users if user not in rules or len(user.args) < 2 or user.args[0] is not node or node in user.args[1:]]
        if node in stops or (node.users and node.op != "output" and node not in constant and all(map(facts.is_detached, read))):
            facts.detach(node)
    for node in nodes:
        if node.op != "output" and node not in rules and _reads_detached_alone(gm, node):
            facts.detach(node)
    for node in stops:
        _remove_stop(gm, node, context)
    for node in rules:
        if node in constant:
            _mark_parameters(node)
        else:
            _replace_rule(gm, node, context)
    return len(stops) + len(rules)


def _rule(gm: fx.GraphModule, node: fx.Node) -> GradientRule | None:
    module = facts.resolve(gm, str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, GradientRule) else None


def _constants(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes computed from parameters, buffers and constants alone; they stay as the user wrote them, stops included."""
    constants: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (node.op.startswith("call_") and node.all_input_nodes and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


def _mark_parameters(node: fx.Node) -> None:
    if node.op != "get_attr":
        facts.mark_parameter(node)
        for operand in node.all_input_nodes:
            _mark_parameters(operand)


def _reads_detached_alone(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether all float operands are detached or constants, and one at least is detached, so that the node can be, too."""
    detached = False
    for operand in node.all_input_nodes:
        tensor = facts.fact(operand)
        if facts.is_detached(operand):
            detached = True
        elif operand.op == "get_attr" and not isinstance(facts.resolve(gm, str(operand.target)), torch.nn.Parameter):
            continue
        elif not isinstance(tensor, TensorFact | int | float) or (isinstance(tensor, TensorFact) and tensor.dtype.is_floating_point):
            return False
    return detached and not (node.op == "call_module" and any(True for _ in facts.resolve(gm, str(node.target)).parameters()))


def _remove_stop(gm: fx.GraphModule, node: fx.Node, context: Context) -> None:
    """Let readers of a stop read its operand, where the operand or the reader is detached itself."""
    operand = node.all_input_nodes[0]
    for user in list(node.users):
        if facts.is_detached(operand) or facts.is_detached(user):
            user.replace_input_with(node, operand)
    _move_to_output(node, operand, STOP)
    if not node.users:
        gm.graph.erase_node(node)
        context.say(f"%{node.name} is removed: %{operand.name} is computed without gradients")
    elif isinstance(facts.fact(node), TensorFact):
        node.op, node.target, node.args, node.kwargs = "call_function", identity, (operand,), {}
        facts.change_gradient(node, STOP)


def _move_to_output(node: fx.Node, operand: fx.Node, change: str) -> None:
    """Return the operand of a node from the model, where only the output reads the node; the gradient changes after the integer part."""
    if not node.users or any(user.op != "output" for user in node.users):
        return
    output = next(iter(node.users))
    for position in [position for position, place in enumerate(facts.nodes_in(output.args)) if place is node]:
        facts.change_gradient(output, change, position)
    output.replace_input_with(node, operand)


def _replace_rule(gm: fx.GraphModule, node: fx.Node, context: Context) -> None:
    """Replace a custom backward by an identity; further operands of the latter are read by a node for training alone."""
    operand, *others = node.args
    assert isinstance(operand, fx.Node)
    if facts.is_detached(node):
        substitute(node, operand)
        context.say(f"%{node.name} is removed: none of its readers has a gradient")
        return
    path = str(node.target)
    if others:
        with gm.graph.inserting_before(node):
            reader = facts.inherit(gm.graph.create_node("call_module", path, tuple(others)), node, "gradients.mark")
        facts.set_fact(reader, None)
        facts.refuse(reader, OPERANDS)
        facts.mark_training(reader)
    _move_to_output(node, operand, path)
    if not node.users:
        gm.graph.erase_node(node)
        return
    node.op, node.target, node.args, node.kwargs = "call_function", identity, (operand,), {}
    facts.change_gradient(node, path)


def move(gm: fx.GraphModule, context: Context) -> int:
    """Move every custom backward between an operator and a clamp that is fused into it after the clamp."""
    changes = 0
    for node in list(gm.graph.nodes):
        if not facts.gradient_changes(node) or node.op == "output":
            continue
        operand = node.args[0]
        while isinstance(operand, fx.Node) and len(operand.users) == 1 and len(node.users) == 1:
            reader = next(iter(node.users))
            source = operator_of(operand)
            if not calls(reader, clamp) or source is None or "clamp" not in source.absorbs:
                break
            if not all(limit is None or (isinstance(limit, int | float) and not math.isnan(limit)) for limit in reader.args[1:]):
                break
            reader.replace_input_with(node, operand)
            reader.replace_all_uses_with(node)
            node.args = (reader,)
            reader.append(node)
            context.say(f"the gradient of %{operand.name} changes after %{reader.name}")
            operand = reader
            changes += 1
    return changes


def attach(gm: fx.GraphModule, context: Context) -> int:
    """Insert calls of the gradient rules and stops into the prepared graph, on the dequantized tensors between its operators."""
    readers = {str(node.target): node for node in gm.graph.nodes if _rule(gm, node) is not None and not facts.is_parameter(node)}
    changes = 0
    for node in list(gm.graph.nodes):
        applied = facts.gradient_changes(node)
        if node.op == "output":
            changes += _attach_outputs(gm, node, readers)
        elif applied:
            if node.op == "call_module":
                parent, _, name = str(node.target).rpartition(".")
                del facts.resolve(gm, parent)._modules[name]
            _call(node, node.args[0], applied[0], readers)
            changes += 1
        elif facts.is_detached(node) and quantized_operator(gm, node) is None:
            changes += _stop_after(gm, node)
    for reader in readers.values():
        gm.graph.erase_node(reader)
    if changes:
        _sort(gm.graph)
    return changes + len(readers)


def _call(node: fx.Node, operand: Any, path: str, readers: dict[str, fx.Node]) -> None:
    others = readers[path].args if path in readers else ()
    node.op, node.target = ("call_function", torch.detach) if path == STOP else ("call_module", path)
    node.args, node.kwargs = (operand, *others), {}


def _attach_outputs(gm: fx.GraphModule, output: fx.Node, readers: dict[str, fx.Node]) -> int:
    changes = facts.gradient_changes(output)
    if not changes:
        return 0
    places: list[fx.Node] = []
    for position, place in enumerate(facts.nodes_in(output.args)):
        if position not in changes:
            places.append(place)
            continue
        with gm.graph.inserting_before(output):
            called = facts.inherit(gm.graph.call_function(torch.detach, (place,)), place, "gradients.attach")
        facts.set_fact(called, facts.fact(place))
        _call(called, place, changes[position], readers)
        places.append(called)
    following = iter(places)
    output.args = fx.map_arg(output.args, lambda _: next(following))
    return len(changes)


def _stop_after(gm: fx.GraphModule, node: fx.Node) -> int:
    """Stop the gradient after a float operator, where a reader has one."""
    value = facts.fact(node)
    live = [user for user in node.users if not facts.is_detached(user)]
    stops = value.dtype.is_floating_point if isinstance(value, TensorFact) else value is None or isinstance(value, tuple | list | dict)
    if not live or not stops:
        return 0
    with gm.graph.inserting_after(node):
        inserted = gm.graph.call_function(torch.detach if isinstance(value, TensorFact) else stopped, (node,))
    facts.inherit(inserted, node, "gradients.attach")
    facts.set_fact(inserted, value)
    for user in live:
        user.replace_input_with(node, inserted)
    return 1


def _sort(graph: fx.Graph) -> None:
    """Sort the nodes so that each follows its operands, and otherwise keep their order."""
    placed: set[fx.Node] = set()
    for node in list(graph.nodes):
        waiting = [node]
        while waiting:
            open_ = [operand for operand in waiting[-1].all_input_nodes if operand not in placed]
            if open_:
                waiting.append(open_[0])
                continue
            ready = waiting.pop()
            placed.add(ready)
            if ready is not node:
                node.prepend(ready)

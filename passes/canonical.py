"""One call form per operator, which every later pass may assume.

%y = call_module conv1(%x)      →   %conv1_weight = [conv1.weight]
                                    %y = conv2d(%x, %conv1_weight, stride=…)
%y = call_method relu(%x)       →   %y = clamp(%x, min=0, max=None)
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn

from fxquant.ir.functional import dequant_stub, mark_stub, outside, quant_stub
from fxquant.ir.graph import (
    BatchDim,
    TensorFact,
    absorb,
    attach,
    fact,
    gradient_changes,
    inherit,
    is_parameter,
    mark_parameter,
    nodes_in,
    noise,
    pass_on,
    refuse,
    resolve,
    set_fact,
    spell,
    state_demand,
)
from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS, Fixed, Instead, Operator, Own, Parameter, Plain, operands_of, operator_of
from fxquant.ops.core.casting import MADE, filled, is_broadcast, is_joined, made_anew, sizes_of
from fxquant.ops.core.composite import QUANTIZE, Builder
from fxquant.ops.core.places import is_arange
from fxquant.ops.core.promotion import fold_sizes, give_batch, of_an_index, promoted
from fxquant.ops.elementwise.activation import OF_MODULE, dropout
from fxquant.ops.elementwise.table import SHIFTED, with_offset
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import is_cast, is_power
from fxquant.passes.rewriting import bypass, eliminate_dead, substitute
from fxquant.pipeline import Context

PURE = ("math", "_operator", "builtins")  # modules whose functions do nothing but return a number


def rewrite(gm: fx.GraphModule, context: Context) -> int:
    """Rewrite every node that an operator of the table recognises as a call of the operator's function, arguments in order.

    Nodes computed from parameters alone (`self.weight * self.gain`, `.t()`) are marked, and are parameters from here on.
    Nodes that return their operand unchanged (nn.Identity, `contiguous()`, `+ 0`, `.view` to the same shape) are removed.
    """
    attributes: dict[str, fx.Node] = {str(node.target): node for node in gm.graph.nodes if node.op == "get_attr"}
    modules = dict(gm.named_modules(remove_duplicate=False))
    changes = _remove_identities(gm, modules)
    excluded = outside(gm)
    for node in list(gm.graph.nodes):
        changes += _hold(gm, node, modules, attributes)
        if _computes_parameter(node):
            mark_parameter(node)
            continue
        if node in excluded:
            refuse(node, excluded[node])
            continue
        if node.target in (quant_stub, dequant_stub):
            _replace_stub(node, context)
            changes += 1
            continue
        if isinstance(fact(node), int | float | BatchDim) or _of_sizes(node):  # sizes, and what is computed of them
            continue
        fold_sizes(node)
        recognised = _with_batch(node, modules, context)
        if recognised is None:
            continue
        operator, arguments, written = recognised
        spell(node, *written)
        because = of_an_index(node, operator, arguments)
        meant = because or promoted(node, operator, arguments, Builder(node.name, node, (), "canonical.rewrite"))
        if isinstance(meant, tuple):
            operator = OPERATORS[meant[0]]
            arguments = _bind(operator, (), meant[1])
        arguments = meant if isinstance(meant, str) else arguments
        if not isinstance(arguments, str):
            arguments = (None if meant is not None else _of_other_numbers(node, operator)) or operator.normalize(node, arguments)
        arguments = _without_elements(node, arguments) or arguments
        if isinstance(arguments, str):
            refuse(node, arguments)
            context.say(f"%{node.name} stays as it is: {arguments}")
            continue
        target = str(node.target)
        values = {name: _attribute(gm, node, target, value, attributes) for name, value in arguments.items()}
        node.op, node.target = "call_function", operator.function
        if hasattr(nn.Module, node.name):  # as `x.to(…)` is called: its operator is a submodule of the prepared model
            node._rename(f"{node.name}_1")
        node.args, node.kwargs = tuple(values.values()), {}
        changes += 1
        if _computes_parameter(node):  # a layer that is applied to a constant
            mark_parameter(node)
            continue
        _pass_by(node, context)
        _shift(node, context)
    eliminate_dead(gm.graph.nodes, _is_unused)
    return changes


def _remove_identities(gm: fx.GraphModule, modules: dict[str, nn.Module]) -> int:
    """Remove calls of nn.Identity on containers; their readers read the container directly."""
    nodes = gm.graph.find_nodes(op="call_module")
    calls = [node for node in nodes if type(modules[str(node.target)]) is nn.Identity and isinstance(fact(node), tuple | list | dict)]
    for node in calls:
        substitute(node, node.args[0] if node.args else node.kwargs["input"])
    return len(calls)


def _hold(gm: fx.GraphModule, node: fx.Node, modules: dict[str, nn.Module], attributes: dict[str, fx.Node]) -> int:
    """Replace a tensor that every run recreates with equal values by a constant, where an activation is added to it, and the like."""
    value = made_anew(node)
    if value is None or _computes_parameter(node):  # made like a parameter, it is one
        return 0
    joined, added = [], []
    for reader in list(node.users):
        recognised = _recognise(reader, modules)
        operator, arguments = (None, {}) if recognised is None else recognised[:2]
        if isinstance(arguments, str):
            operator, arguments = None, {}
        if is_joined(node, value, reader, operator, arguments):
            joined.append(reader)
        elif is_broadcast(node, reader, operator):
            added.append(reader)
    if not added and not joined:
        return 0
    path = f"{MADE}.{node.name}"
    attach(gm, path, value)
    with gm.graph.inserting_before(node):
        attributes[path] = inherit(gm.graph.create_node("get_attr", path, name=f"{node.name}_made"), node, "canonical.rewrite")
    set_fact(attributes[path], TensorFact(tuple(value.shape), value.dtype))
    for reader in added:
        reader.replace_input_with(node, attributes[path])
    if joined:
        batched = not all(isinstance(size, int) for size in fact(node).shape)
        repeated = _repeated_for_the_batch(gm, node, attributes[path]) if batched else attributes[path]
        for reader in joined:
            reader.replace_input_with(node, repeated)
    return len(added) + len(joined)


def _repeated_for_the_batch(gm: fx.GraphModule, node: fx.Node, constant: fx.Node) -> fx.Node:
    """Return the constant, expanded to the sizes of the result of `node`."""
    node_fact, sizes = fact(node), sizes_of(node)
    assert isinstance(node_fact, TensorFact)
    with gm.graph.inserting_before(node):
        if sizes is None:
            like = filled(node).all_input_nodes[0]
            sizes = []
            for dim, size in enumerate(node_fact.shape):
                if isinstance(size, int):
                    sizes.append(size)
                    continue
                computed = inherit(gm.graph.call_method("size", (like, dim)), node, "canonical.rewrite")
                set_fact(computed, size)
                sizes.append(computed)
        repeated = inherit(gm.graph.call_function(expand, (constant, sizes)), node, "canonical.rewrite")
    set_fact(repeated, node_fact)
    return repeated


def _of_other_numbers(node: fx.Node, operator: Operator) -> str | None:
    """Return why the operator's function cannot replace the call that the user wrote, which gives other numbers; None if it can."""
    node_fact = fact(node)
    if node.target is operator.function or not isinstance(node_fact, TensorFact):
        return None
    read = {operand: of.dtype for operand in node.all_input_nodes if isinstance(of := fact(operand), TensorFact)}
    if isinstance(operator.demand, Plain):
        same_dtype = node_fact.dtype == getattr(torch, operator.demand.dtype)
    else:
        same_dtype = node_fact.dtype == torch.float32 or not isinstance(operator.demand, Own | Fixed)
        if operator.expand is not None and not same_dtype:  # the indices of a sort, int64 computed from float tensors
            same_dtype = node_fact.dtype == torch.int64 and set(read.values()) == {torch.float32}
    if same_dtype:
        return None
    other = next((operand for operand, dtype in read.items() if dtype != torch.float32 and not is_parameter(operand)), None)
    what, dtype = ("result", node_fact.dtype) if other is None else (f"operand %{other.name}", read[other])
    remedy = "; convert it to float32" if other is not None and dtype.is_floating_point else ""
    return f"its {what} is {str(dtype).removeprefix('torch.')}, and only float32 tensors are quantized{remedy}"


def _without_elements(node: fx.Node, arguments: dict[str, Any] | str) -> str | None:
    """Return a reason to stay in float if a tensor has no elements: it has no range, sum or largest element."""
    read = [node, *nodes_in(arguments if isinstance(arguments, dict) else {})]
    empty = next((value for value in read if isinstance(of := fact(value), TensorFact) and 0 in of.shape), None)
    return None if empty is None else f"%{empty.name} has no elements"


def _replace_stub(node: fx.Node, context: Context) -> None:
    """Rewrite a QuantStub as a quantize, whose scale the rules determine later, and remove a DeQuantStub."""
    operand, *scale = node.args
    assert isinstance(operand, fx.Node)
    operand_fact = fact(operand)
    if node.target is quant_stub and isinstance(operand_fact, TensorFact) and operand_fact.dtype == torch.float32:
        node.target, node.args = QUANTIZE.function, (operand,)
        mark_stub(node)
        if scale:
            state_demand(node, Fixed(float(scale[0]), "int8"))  # type: ignore[arg-type]
        return
    context.say(f"%{node.name} marks where the integer part begins or ends")
    bypass(node)


def _of_sizes(node: fx.Node) -> bool:
    """Return whether a node computes a number that is not a multiple of the batch size, such as 1 / x.shape[0]."""
    read = [fact(operand) for operand in node.all_input_nodes]
    numbers = bool(read) and all(each is None or isinstance(each, int | float | BatchDim) for each in read)
    return fact(node) is None and numbers and not any(map(is_parameter, node.all_input_nodes))


def _computes_parameter(node: fx.Node) -> bool:
    """Return whether a node is computed from parameters alone, without random numbers; it is then not rewritten."""
    if node.op == "call_module":
        return is_parameter(node)  # a custom function of a weight
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes or not all(map(is_parameter, node.all_input_nodes)):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    packet = getattr(torch.ops.aten, re.sub(r"(?<=dropout)\dd$", "", name), None)  # aten has no operator dropout2d
    return packet is None or not any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())


def _pass_by(node: fx.Node, context: Context) -> None:
    """Bypass a node that returns an operator's result unchanged, so that fusions find the operator itself."""
    operator = operator_of(node)
    assert operator is not None
    arguments = operator.arguments(node)
    operands = operands_of(node)
    if len(operands) != 1 or operator_of(operands[0]) is None or not isinstance(fact(node), TensorFact) or gradient_changes(node):
        return
    if fact(operands[0]) == fact(node) and operator.refuses(node, arguments) is None and operator.idle(arguments):
        pass_on(operands[0], node)
        node.replace_all_uses_with(operands[0])
        context.say(f"%{node.name} passes on %{operands[0].name} unchanged, and is removed")


def _shift(node: fx.Node, context: Context) -> None:
    """Fuse the addition of a number into the unary function that reads it, so that a number below a step of the sum is not lost."""
    operator = operator_of(node)
    addition = node.args[0] if node.args else None
    if operator is None or not isinstance(addition, fx.Node) or operator.refuses(node, operator.arguments(node)) is not None:
        return
    arguments = with_offset(operator, operator.arguments(node), addition)
    if arguments is not None:
        node.target, node.args = SHIFTED.function, tuple(arguments.values())
        absorb(node, addition)
        context.say(f"%{addition.name} is part of the table %{node.name}")


def _is_unused(node: fx.Node) -> bool:
    """Return whether an unread node is removed: only a replaced call form read it, such as sizes of a reshape, or a weight's transpose."""
    node_fact, called, operands = fact(node), node.op in ("call_method", "call_function"), node.all_input_nodes
    number = not isinstance(node_fact, TensorFact)
    if node_fact is None:  # as Python's quotient of sizes, which is not an integer
        pure = getattr(node.target, "__module__", None) in PURE and bool(operands)
        number = pure and not any(isinstance(fact(each), TensorFact | list | tuple | dict) for each in operands)
    replaced = operator_of(node) is not None or is_cast(node) or is_power(node) or made_anew(node) is not None or is_arange(node)
    return replaced or (called and (number or (isinstance(node_fact, TensorFact) and 0 in node_fact.shape)))


def _with_batch(
    node: fx.Node, modules: dict[str, nn.Module], context: Context
) -> tuple[Operator, dict[str, Any] | str, tuple[Any, ...]] | None:
    """Return the result of `_recognise`, after adding a missing batch dimension to the operand; a dropout for a module that draws noise."""
    if node.op == "call_module" and noise(node) is not None:
        return OPERATORS[dropout], {"input": node.args[0], "p": 0.5, "kind": OF_MODULE}, (type(modules[str(node.target)]),)
    if give_batch(node, modules):
        context.say(f"%{node.name} reads a sample without a batch: it is called on a batch of one")
    return _recognise(node, modules)


def _recognise(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[Operator, dict[str, Any] | str, tuple[Any, ...]] | None:
    """Return the operator that a node calls, its canonical arguments (or a reason against it), and the user's call form, for rules."""
    args, kwargs = node.args, node.kwargs
    if node.op == "call_module":
        module = modules[str(node.target)]
        if type(module) not in MODULES:
            return None
        operator, extract = MODULES[type(module)]
        arguments = extract(module)
        if isinstance(arguments, str):
            return operator, arguments, (type(module),)
        if isinstance(arguments, Instead):
            operator, arguments = OPERATORS[arguments.function], arguments.arguments
        return operator, _bind_module(operator, args, kwargs, arguments), (type(module),)
    if node.op == "call_function" and node.target in FUNCTIONS:
        operator, adapt = FUNCTIONS[node.target]
    elif node.op == "call_method" and node.target in METHODS:
        operator, adapt = METHODS[str(node.target)]
    else:
        return None
    if adapt is None:
        return operator, _bind(operator, args, kwargs), (node.target,)
    try:
        adapted = adapt(*args, **kwargs)
    except TypeError:
        form = f"{len(args)} arguments by position" if len(args) != 1 else "one argument by position"
        form += f" and {', '.join(kwargs)} by name" if kwargs else ""
        return operator, f"{operator.name} has no integer form with {form}", (node.target,)
    except (IndexError, ZeroDivisionError):  # PyTorch takes dimension 0 and -1 of a tensor without dimensions
        operand_fact = fact(args[0]) if args and isinstance(args[0], fx.Node) else None
        if not isinstance(operand_fact, TensorFact) or operand_fact.shape:
            raise
        return operator, "its operand has no dimensions", (node.target,)
    if isinstance(adapted, Instead):
        operator, adapted = OPERATORS[adapted.function], adapted.arguments
    return operator, adapted if isinstance(adapted, str) else _bind(operator, (), adapted), (node.target,)


def _bind_module(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any] | str:
    """Return the arguments of a module's call and the module's `settings`, without the keywords in `Operator.read_off`."""
    keywords = {name: value for name, value in kwargs.items() if name not in operator.read_off}
    twice = [place for place, name in enumerate(operator.parameter_names[: len(args)]) if name in settings]
    if twice and not operator.read_off:
        return "its arguments have an integer form only if they are passed by name"
    return _bind(operator, args[: twice[0]] if twice else args, {**settings, **keywords})


def _bind(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return operator.bind(args, kwargs)
    except TypeError as error:
        return f"no integer form is known for its arguments: {error}"


def _attribute(gm: fx.GraphModule, node: fx.Node, target: str, value: Any, attributes: dict[str, fx.Node]) -> Any:
    """Replace a `Parameter` of a module, also in a list, by the get_attr node that reads it; return other values unchanged.

    One node per parameter: it stands before its first use, and so before every other.
    """
    if isinstance(value, list) and any(isinstance(item, Parameter) for item in value):
        return [_attribute(gm, node, target, item, attributes) for item in value]
    if not isinstance(value, Parameter):
        return value
    path = f"{target}.{value.name}" if value.name else target
    if path not in attributes:
        with gm.graph.inserting_before(node):
            name = path.replace(".", "_") + ("" if value.name else "_module")
            attributes[path] = inherit(gm.graph.create_node("get_attr", path, name=name), node, "canonical.rewrite")
        parameter = resolve(gm, path)
        if isinstance(parameter, torch.Tensor):
            set_fact(attributes[path], TensorFact(tuple(parameter.shape), parameter.dtype))
    elif node < attributes[path]:
        node.prepend(attributes[path])
    return attributes[path]

"""One call form per operator, which every later pass may assume.

%y = call_module conv1(%x)      →   %conv1_weight = [conv1.weight]
                                    %y = conv2d(%x, %conv1_weight, stride=…)
%y = call_method relu(%x)       →   %y = clamp(%x, min=0, max=None)
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from fxquant import ops
from fxquant.ir import graph as facts
from fxquant.ir.functional import dequant_stub, mark_stub, outside, quant_stub
from fxquant.ir.graph import BatchDim, TensorFact
from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS, Fixed, Instead, Operator, Own, Parameter, Plain, Trait
from fxquant.ops.core.casting import MADE, is_broadcast, made_of_sizes, to_integer, to_real, truncated  # fmt: skip
from fxquant.ops.core.composite import QUANTIZE, Builder
from fxquant.ops.core.places import is_arange
from fxquant.ops.elementwise.activation import OF_MODULE, dropout
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.table import SHIFTED, with_offset
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.ops.movement.repeating import cat, expand, stack
from fxquant.ops.movement.shape import identity, is_cast, is_power, reshape
from fxquant.passes.rewriting import bypass, eliminate_dead, substitute
from fxquant.pipeline import Context
from fxquant.primitives.selection import RELATIONS
from fxquant.primitives.whole import DTYPES

PURE = ("math", "_operator", "builtins")  # modules whose functions do nothing but return a number


def rewrite(gm: fx.GraphModule, context: Context) -> int:
    """Rewrite every node that an operator of the table recognises as a call of the operator's function, arguments in order.

    Nodes computed from parameters alone (`self.weight * self.gain`, `.t()`) are marked, and are parameters from here on.
    Nodes that return their operand unchanged (nn.Identity, `contiguous()`, `+ 0`, `.view` to the same shape) are removed.
    """
    attributes: dict[str, fx.Node] = {str(node.target): node for node in gm.graph.nodes if node.op == "get_attr"}
    modules = dict(gm.named_modules(remove_duplicate=False))
    changes, excluded = _remove_identities(gm, modules), outside(gm)
    constants = _Made(gm, modules, attributes)
    for node in list(gm.graph.nodes):
        changes += constants.hold(node)
        if _computes_parameter(node):
            facts.mark_parameter(node)
            continue
        if node in excluded:
            facts.refuse(node, excluded[node])
            continue
        if node.target in (quant_stub, dequant_stub):
            _replace_stub(node, context)
            changes += 1
            continue
        if isinstance(facts.fact(node), int | float | BatchDim) or _of_sizes(node):  # sizes, and what is computed of them
            continue
        fold_sizes(node)
        recognised = _recognise(node, modules)
        if recognised is None:
            continue
        operator, arguments, written = recognised
        facts.spell(node, *written)
        meant = of_an_index(node, operator, arguments) or promoted(
            node, operator, arguments, Builder(node.name, node, (), "canonical.rewrite")
        )
        if isinstance(meant, tuple):
            operator = OPERATORS[meant[0]]
            arguments = _bind(operator, (), meant[1])
        arguments = meant if isinstance(meant, str) else arguments
        if not isinstance(arguments, str):
            because = None if meant is not None else _of_other_numbers(node, operator)
            operator, arguments = (operator, because) if because else _normalized(node, operator, arguments)
        arguments = _without_elements(node, arguments) or arguments
        if isinstance(arguments, str):
            facts.refuse(node, arguments)
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
            changes += constants.repeat(node)
            continue
        _pass_by(node, context)
        _shift(node, context)
    eliminate_dead(gm.graph.nodes, lambda node: node in constants.values or node.op == "get_attr" or _is_unused(node))
    return changes


def _normalized(node: fx.Node, operator: Operator, arguments: dict[str, Any]) -> tuple[Operator, dict[str, Any] | str]:
    """Return the operator with its arguments in their simplest form, or the operator that means the same in a simpler form."""
    simplest = operator.normalize(node, arguments)
    return _normalized(node, OPERATORS[simplest.function], simplest.arguments) if isinstance(simplest, Instead) else (operator, simplest)


def _remove_identities(gm: fx.GraphModule, modules: dict[str, nn.Module]) -> int:
    """Remove calls of nn.Identity on containers; their readers read the container directly."""
    nodes = gm.graph.find_nodes(op="call_module")
    calls = [node for node in nodes if type(modules[str(node.target)]) is nn.Identity and isinstance(facts.fact(node), tuple | list | dict)]
    for node in calls:
        substitute(node, node.args[0] if node.args else node.kwargs["input"])
    return len(calls)


class _Made:
    """The tensors that a model computes at every run with equal values, held as constants where an activation is computed with one."""

    def __init__(self, gm: fx.GraphModule, modules: dict[str, nn.Module], attributes: dict[str, fx.Node]) -> None:
        self.gm, self.modules, self.attributes = gm, modules, attributes
        self.values = made_of_sizes(gm)
        self.rows: dict[fx.Node, Any] = {}  # layers of constants, which are computed for one sample, and their facts for the batch

    def hold(self, node: fx.Node) -> int:
        """Replace a made tensor by a constant in what reads it and is computed of an activation; return the number of readers."""
        value = self.values.get(node)
        if value is None or _computes_parameter(node):  # made like a parameter, it is one
            return 0
        readers = self._readers(node)
        if not any(readers):
            return 0
        path = f"{MADE}.{node.name}"
        facts.attach(self.gm, path, value)
        with self.gm.graph.inserting_before(node):
            constant = facts.inherit(self.gm.graph.create_node("get_attr", path, name=f"{node.name}_made"), node, "canonical.rewrite")
        self.attributes[path] = constant
        facts.set_fact(constant, TensorFact(tuple(value.shape), value.dtype))
        return self._give(node, constant, facts.fact(node), readers)

    def repeat(self, node: fx.Node) -> int:
        """Mark a node as a parameter; what reads a layer of constants, which is computed for one sample, gets the batch's result."""
        facts.mark_parameter(node)
        if node not in self.rows:
            return 0
        return self._give(node, node, self.rows[node], self._readers(node))

    def _readers(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return what reads a made tensor: where a batch of 1 is enough, where it needs the batch's size, and layers of constants alone."""
        added, joined, layers = list[fx.Node](), list[fx.Node](), list[fx.Node]()
        for reader in list(node.users):
            if reader in self.values or reader.op == "output" or not isinstance(facts.fact(reader), TensorFact):
                continue
            recognised = _recognise(reader, self.modules)
            operator = None if recognised is None or isinstance(recognised[1], str) else recognised[0]
            alone = [operand for operand in reader.all_input_nodes if not facts.is_parameter(operand)] == [node]
            varying = [[dim for dim, size in enumerate(facts.shape_of(each)) if isinstance(size, BatchDim)] for each in (node, reader)]
            if operator is not None and Trait.SUMS in operator.traits and alone and varying == [[0], [0]]:
                layers.append(reader)
            else:
                (added if is_broadcast(node, reader, operator) else joined).append(reader)
        return added, joined, layers

    def _give(self, node: fx.Node, constant: fx.Node, node_fact: Any, readers: tuple[list[fx.Node], ...]) -> int:
        added, joined, layers = readers
        for reader in layers:
            self.rows[reader] = facts.fact(reader)
            facts.set_fact(reader, replace(self.rows[reader], shape=(1, *self.rows[reader].shape[1:])))
        repeated = constant
        if joined and any(isinstance(size, BatchDim) for size in node_fact.shape):
            sizes = [self._size(size, node) for size in node_fact.shape]
            with self.gm.graph.inserting_before(node):
                repeated = facts.inherit(self.gm.graph.call_function(expand, (constant, sizes)), node, "canonical.rewrite")
            facts.set_fact(repeated, node_fact)
            if constant is node:
                node.append(repeated)
        for reader, operand in [*((each, constant) for each in (*added, *layers)), *((each, repeated) for each in joined)]:
            reader.replace_input_with(node, operand)
        return len(added) + len(joined) + len(layers)

    def _size(self, size: facts.Size, node: fx.Node) -> int | fx.Node:
        """Return a size that a tensor has before `node`, by preference one that no constant replaces."""
        if isinstance(size, int):
            return size
        before = sorted(itertools.takewhile(lambda each: each is not node, self.gm.graph.nodes), key=self.values.__contains__)
        shapes = {each: getattr(facts.fact(each), "shape", ()) for each in before}
        read = next(each for each, shape in shapes.items() if size in (facts.fact(each), *shape))
        return read if facts.fact(read) == size else facts.size_node(read, shapes[read].index(size), node)


def _of_other_numbers(node: fx.Node, operator: Operator) -> str | None:
    """Return why the operator's function cannot replace the call that the user wrote, which gives other numbers; None if it can."""
    node_fact = facts.fact(node)
    if node.target is operator.function or not isinstance(node_fact, TensorFact):
        return None
    read = {operand: of.dtype for operand in node.all_input_nodes if isinstance(of := facts.fact(operand), TensorFact)}
    if isinstance(operator.demand, Plain):
        same_dtype = node_fact.dtype == getattr(torch, operator.demand.dtype)
    else:
        same_dtype = node_fact.dtype == torch.float32 or not isinstance(operator.demand, Own | Fixed)
        if operator.expand is not None and not same_dtype:  # the indices of a sort, int64 computed from float tensors
            same_dtype = node_fact.dtype == torch.int64 and set(read.values()) == {torch.float32}
    if same_dtype:
        return None
    other = next((operand for operand, dtype in read.items() if dtype != torch.float32 and not facts.is_parameter(operand)), None)
    what, dtype = ("result", node_fact.dtype) if other is None else (f"operand %{other.name}", read[other])
    remedy = "; convert it to float32" if other is not None and dtype.is_floating_point else ""
    return f"its {what} is {str(dtype).removeprefix('torch.')}, and only float32 tensors are quantized{remedy}"


def _without_elements(node: fx.Node, arguments: dict[str, Any] | str) -> str | None:
    """Return a reason to stay in float if a tensor has no elements: it has no range, sum or largest element."""
    read = [node, *facts.nodes_in(arguments if isinstance(arguments, dict) else {})]
    empty = next((value for value in read if isinstance(of := facts.fact(value), TensorFact) and 0 in of.shape), None)
    return None if empty is None else f"%{empty.name} has no elements"


def _replace_stub(node: fx.Node, context: Context) -> None:
    """Rewrite a QuantStub as a quantize, whose scale the rules determine later, and remove a DeQuantStub."""
    operand, *scale = node.args
    assert isinstance(operand, fx.Node)
    operand_fact = facts.fact(operand)
    if node.target is quant_stub and isinstance(operand_fact, TensorFact) and operand_fact.dtype == torch.float32:
        node.target, node.args = QUANTIZE.function, (operand,)
        mark_stub(node)
        if scale:
            facts.state_demand(node, Fixed(float(scale[0]), "int8"))  # type: ignore[arg-type]
        return
    context.say(f"%{node.name} marks where the integer part begins or ends")
    bypass(node)


def _of_sizes(node: fx.Node) -> bool:
    """Return whether a node computes a number that is not a multiple of the batch size, such as 1 / x.shape[0]."""
    read = [facts.fact(operand) for operand in node.all_input_nodes]
    numbers = bool(read) and all(each is None or isinstance(each, int | float | BatchDim) for each in read)
    return facts.fact(node) is None and numbers and not any(map(facts.is_parameter, node.all_input_nodes))


def _computes_parameter(node: fx.Node) -> bool:
    """Return whether a node is computed from parameters alone, without random numbers; it is then not rewritten."""
    if node.op == "call_module":
        return facts.is_parameter(node)  # a custom function of a weight
    read = node.all_input_nodes
    if node.op not in ("call_function", "call_method") or not read or not all(map(facts.is_parameter, read)):
        return False
    return not facts.is_random(node)


def _pass_by(node: fx.Node, context: Context) -> None:
    """Bypass a node that returns an operator's result unchanged, so that fusions find the operator itself."""
    operator = ops.operator_of(node)
    assert operator is not None
    arguments = operator.arguments(node)
    operands = ops.operands_of(node)
    if len(operands) != 1 or ops.operator_of(operands[0]) is None:
        return
    if not isinstance(facts.fact(node), TensorFact) or facts.gradient_changes(node):
        return
    if facts.fact(operands[0]) == facts.fact(node) and operator.refuses(node, arguments) is None and operator.idle(arguments):
        facts.pass_on(operands[0], node)
        node.replace_all_uses_with(operands[0])
        context.say(f"%{node.name} passes on %{operands[0].name} unchanged, and is removed")


def _shift(node: fx.Node, context: Context) -> None:
    """Fuse the addition of a number into the unary function that reads it, so that a number below a step of the sum is not lost."""
    operator = ops.operator_of(node)
    addition = node.args[0] if node.args else None
    if operator is None or not isinstance(addition, fx.Node) or operator.refuses(node, operator.arguments(node)) is not None:
        return
    arguments = with_offset(operator, operator.arguments(node), addition)
    if arguments is not None:
        node.target, node.args = SHIFTED.function, tuple(arguments.values())
        facts.absorb(node, addition)
        context.say(f"%{addition.name} is part of the table %{node.name}")


def _is_unused(node: fx.Node) -> bool:
    """Return whether an unread node is removed: only a replaced call form read it, such as sizes of a reshape, or a weight's transpose."""
    node_fact, called, operands = facts.fact(node), node.op in ("call_method", "call_function"), node.all_input_nodes
    number = not isinstance(node_fact, TensorFact)
    if node_fact is None:  # as Python's quotient of sizes, which is not an integer
        pure = getattr(node.target, "__module__", None) in PURE and bool(operands)
        number = pure and not any(isinstance(facts.fact(each), TensorFact | list | tuple | dict) for each in operands)
    replaced = ops.operator_of(node) is not None or is_cast(node) or is_power(node) or is_arange(node)
    return replaced or (called and (number or (isinstance(node_fact, TensorFact) and 0 in node_fact.shape)))


def _recognise(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[Operator, dict[str, Any] | str, tuple[Any, ...]] | None:
    """Return the operator that a node calls, its canonical arguments (or a reason against it), and the user's call form, for rules."""
    args, kwargs = node.args, node.kwargs
    if node.op == "call_module":
        recognised = _recognise_module(node, modules[str(node.target)])
        return None if recognised is None else (*recognised, (type(modules[str(node.target)]),))
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
        operand_fact = facts.fact(args[0]) if args and isinstance(args[0], fx.Node) else None
        if not isinstance(operand_fact, TensorFact) or operand_fact.shape:
            raise
        return operator, "its operand has no dimensions", (node.target,)
    if isinstance(adapted, Instead):
        operator, adapted = OPERATORS[adapted.function], adapted.arguments
    return operator, adapted if isinstance(adapted, str) else _bind(operator, (), adapted), (node.target,)


def _recognise_module(node: fx.Node, module: nn.Module) -> tuple[Operator, dict[str, Any] | str] | None:
    if facts.noise(node) is not None:  # a module of the user's that draws noise is a dropout
        return OPERATORS[dropout], {"input": node.args[0], "p": 0.5, "kind": OF_MODULE}
    if type(module) not in MODULES:
        return None
    operator, extract = MODULES[type(module)]
    if isinstance(module, _InstanceNorm) and len(facts.shape_of(node.all_input_nodes[0])) == module._get_no_batch_dim():  # type: ignore[no-untyped-call]
        return operator, "its input has no batch dimension"
    arguments = extract(module)
    if isinstance(arguments, Instead):
        operator, arguments = OPERATORS[arguments.function], arguments.arguments
    if isinstance(arguments, str):
        return operator, arguments
    keywords = {name: value for name, value in node.kwargs.items() if name not in operator.read_off}
    twice = [place for place, name in enumerate(operator.parameter_names[: len(node.args)]) if name in arguments]
    if twice and not operator.read_off:
        return operator, "its arguments have an integer form only if they are passed by name"
    return operator, _bind(operator, node.args[: twice[0]] if twice else node.args, {**arguments, **keywords})


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
            attributes[path] = facts.inherit(gm.graph.create_node("get_attr", path, name=name), node, "canonical.rewrite")
        parameter = facts.resolve(gm, path)
        if isinstance(parameter, torch.Tensor):
            facts.set_fact(attributes[path], TensorFact(tuple(parameter.shape), parameter.dtype))
    elif node < attributes[path]:
        node.prepend(attributes[path])
    return attributes[path]


# ---- Promotion of operands that an operator does not take: integers and booleans to float ------------------------------
#
# A call that reads integers or booleans is promoted as by PyTorch:
#
# tokens + 1, places // 2, mask & other      int64 arithmetic, without a scale: `fxquant.ops.elementwise.whole`
# scores * places, bytes / 255               integers converted to float and quantized: `to_real`
# logical_and(scores, mask)                  whether a number is not 0, then on booleans
Call = tuple[Callable[..., Any], dict[str, Any]]  # an operator's function, and its arguments by name
NEVER = 2**62  # stands for a number that no integer is equal to


def promoted(node: fx.Node, operator: Operator, arguments: dict[str, Any] | str, build: Builder) -> Call | str | None:
    """Return the call with promoted operands, which `build` converts; None if no promotion is needed, or a reason against it."""
    result = facts.fact(node)
    if not isinstance(result, TensorFact) or isinstance(arguments, str):
        return None
    read = [value for value in facts.nodes_in(arguments) if not facts.is_parameter(value) and isinstance(facts.fact(value), TensorFact)]
    if Trait.COMPARES_WITH_ZERO in operator.traits and result.dtype == torch.bool:
        numbers = [arguments[name] for name in operator.reads if not isinstance(arguments[name], fx.Node)]
        if not numbers and all(facts.fact(value).dtype == torch.bool for value in read):
            return None
        return operator.function, {name: truth(value, build) if name in operator.reads else value for name, value in arguments.items()}
    if operator.function is truncated:
        return _narrow(node, operator.function, arguments, build)
    if not read or all(facts.fact(value).dtype.is_floating_point or facts.fact(value).dtype.is_complex for value in read):
        return None
    if result.dtype == torch.float32:
        return _of_real_numbers(operator, arguments, build)
    if any(facts.fact(value).dtype.is_floating_point for value in read):
        return _of_real_numbers(operator, arguments, build) if operator.name in RELATIONS else None
    if operator.function in (cat, stack):
        return _joined(node, operator, arguments, build)
    if result.dtype == torch.bool and operator.name not in RELATIONS:
        return _of_bits(operator, arguments, build)
    if operator.moves:
        return _moved(node, operator, arguments, build)
    return _of_whole_numbers(node, operator, arguments, build)


OF_AN_INDEX = "it computes with an index as a number, which a grid would round to another place"
_EACH = {Trait.ELEMENTWISE, Trait.POINTWISE, Trait.DIVIDES, Trait.EXTREMUM}
_PASSING = {to_real, to_integer, cat, stack, *WHOLE.values()}  # they return an index, or compute one exactly


def of_an_index(node: fx.Node, operator: Operator, arguments: dict[str, Any] | str) -> str | None:
    """Return why an operator on elements stays in float: one of its operands is an index, or is computed from one."""
    result = facts.fact(node)
    if isinstance(arguments, str) or not isinstance(result, TensorFact) or operator.carries or operator.function in _PASSING:
        return None
    each = result.dtype == torch.float32 and not operator.traits.isdisjoint(_EACH)
    return OF_AN_INDEX if (each or operator.function is truncated) and any(map(_is_index, _read(operator, arguments))) else None


def _is_index(value: fx.Node) -> bool:
    """Return whether a node holds indices of elements, such as argmax returns, or integers that are computed from such indices."""
    value_fact, maker = facts.fact(value), value
    if facts.refusal(value) == OF_AN_INDEX:
        return True
    if ops.operator_of(value) is None and value.args and isinstance(value.args[0], fx.Node):
        maker = value.args[0]  # of elements and their places
    record = ops.operator_of(maker)
    if facts.is_parameter(value) or not isinstance(value_fact, TensorFact) or record is None or record.function is truncated:
        return False
    read = _read(record, record.arguments(maker))
    if value_fact.dtype in DTYPES and any(isinstance(of := facts.fact(each), TensorFact) and of.dtype.is_floating_point for each in read):
        return True
    return (record.moves or bool(record.carries) or record.function in _PASSING) and any(map(_is_index, read))


def _read(operator: Operator, arguments: dict[str, Any]) -> list[fx.Node]:
    return facts.nodes_in([arguments.get(name) for name in operator.operands or operator.reads])


def truth(value: Any, build: Builder) -> Any:
    """Return whether the numbers of a tensor are not 0."""
    if not isinstance(value, fx.Node):
        return build.constant(torch.tensor(bool(value), device="cpu", dtype=torch.bool))
    if facts.fact(value).dtype == torch.bool:
        return value
    if facts.is_parameter(value) or facts.fact(value).dtype.is_floating_point:
        return build.host(torch.ne, value, 0)
    return build.host(WHOLE["ne"], wide(value, build), 0)


def _of_bits(operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    """Return the logical call for arithmetic on booleans alone, or None."""
    values = [truth(arguments[name], build) for name in ("input", "other") if isinstance(arguments.get(name), fx.Node)]
    if operator.function is where and isinstance(arguments["condition"], fx.Node):
        condition, numbers = arguments["condition"], [arguments["input"], arguments["other"]]
        if len(values) == 1 and numbers[1] in (0.0, False):  # a product
            return torch.logical_and, {"input": condition, "other": values[0]}
        if len(values) == 2:
            left = build.host(torch.logical_and, condition, values[0])
            right = build.host(torch.logical_and, build.host(torch.logical_not, condition), values[1])
            return torch.logical_or, {"input": left, "other": right}
        return None
    function = {Trait.CONJUNCTION: torch.logical_and, Trait.DISJUNCTION: torch.logical_or}
    for trait in operator.traits & set(function) if len(values) == 2 else ():
        return function[trait], {"input": values[0], "other": values[1]}
    return None


def real(value: Any, build: Builder) -> Any:
    """Return booleans or integers as float values; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(real(item, build) for item in value)
    value_fact = facts.fact(value) if isinstance(value, fx.Node) and not facts.is_parameter(value) else None
    if not isinstance(value_fact, TensorFact) or value_fact.dtype.is_floating_point or value_fact.dtype.is_complex:
        return value
    if value_fact.dtype == torch.bool:
        return build.host(where, value, 1.0, 0.0)
    return build.host(to_real, wide(value, build))


def _of_real_numbers(operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    if operator.function is to_real:
        return None if facts.fact(arguments["input"]).dtype == torch.int64 else (to_real, {"input": wide(arguments["input"], build)})
    if operator.moves or not operator.operands:
        return None
    converted = {name: real(value, build) if name in operator.operands else value for name, value in arguments.items()}
    return None if converted == arguments else (operator.function, converted)


def wide(value: Any, build: Builder) -> Any:
    """Return booleans or integers as int64; where a narrower tensor was only moved as int64, return it before its cast back."""
    value_fact = facts.fact(value) if isinstance(value, fx.Node) else None
    if not isinstance(value_fact, TensorFact) or facts.is_parameter(value) or value_fact.dtype == torch.int64:
        return value  # also a size, which is a number
    record = ops.operator_of(value)
    if record is not None and record.function is to_integer and _is_narrow_of_the_same(value):
        return value.args[0]
    return build.host(to_integer, value, torch.int64)


def _is_narrow_of_the_same(node: fx.Node) -> bool:
    """Return whether a node casts integers back to the narrow dtype that they had before they were moved."""
    source, dtype = node.args[0], facts.fact(node).dtype
    while isinstance(source, fx.Node) and (record := ops.operator_of(source)) is not None:
        if record.function is to_integer:
            before = source.args[0]
            return isinstance(before, fx.Node) and facts.fact(before).dtype == dtype
        if not record.moves or not isinstance(source.args[0], fx.Node):
            return False
        source = source.args[0]
    return False


def _narrow(node: fx.Node, function: Callable[..., Any], arguments: dict[str, Any], build: Builder) -> Call:
    """Return the call, followed by a cast to the dtype of the node's result."""
    node_fact = facts.fact(node)
    if not isinstance(node_fact, TensorFact) or node_fact.dtype not in DTYPES or node_fact.dtype == torch.int64:
        return function, arguments
    bound = OPERATORS[function].bind((), arguments)
    return to_integer, {"input": build.host(function, *bound.values()), "dtype": node_fact.dtype}


def _moved(node: fx.Node, operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    """Rewrite a movement of int8 to int32 integers: widen the operands to int64, move, cast back; None if it is not one or cannot be."""
    if facts.fact(node).dtype not in DTYPES or facts.fact(node).dtype == torch.int64:
        return None
    widened = {
        name: [wide(item, build) for item in value] if isinstance(value, list | tuple) and name in operator.operands else wide(value, build)
        if name in operator.operands else value
        for name, value in arguments.items()
    }  # fmt: skip
    bound = operator.normalize(node, widened)
    return None if isinstance(bound, str) else _narrow(node, operator.function, bound, build)


def _joined(node: fx.Node, operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | None:
    """Rewrite a concatenation or stack of integers (widened to int64) or booleans."""
    node_fact, dim = facts.fact(node), arguments["dim"]
    tensors = [value if node_fact.dtype == torch.bool else wide(value, build) for value in arguments["tensors"]]
    if operator.function is stack:
        dim %= len(node_fact.shape)
        shapes = [build.sizes(value) for value in tensors]
        tensors = [build.host(reshape, value, [*sizes[:dim], 1, *sizes[dim:]]) for value, sizes in zip(tensors, shapes, strict=True)]
    return _narrow(node, WHOLE["cat"], {"tensors": tensors, "dim": dim}, build)


def _of_whole_numbers(node: fx.Node, operator: Operator, arguments: dict[str, Any], build: Builder) -> Call | str | None:
    if operator.name in RELATIONS:
        return _compared(operator.name, arguments, build)
    if operator.function is where:
        widened = {each: wide(value, build) if each != "condition" else value for each, value in arguments.items()}
        if any(isinstance(value, float) and not value.is_integer() for value in widened.values()):
            return None
        widened = {each: int(value) if isinstance(value, float) else value for each, value in widened.items()}
        return _narrow(node, WHOLE["where"], widened, build)
    if operator.function is to_integer:
        dtype = arguments["dtype"]
        return to_integer, {"input": arguments["input"] if dtype == torch.int64 else wide(arguments["input"], build), "dtype": dtype}
    if not isinstance(facts.fact(node), TensorFact) or facts.fact(node).dtype not in DTYPES:
        return None
    if Trait.LEAVES_INTEGERS in operator.traits:
        return _narrow(node, identity, {"input": wide(arguments["input"], build)}, build)
    if operator.integers is None:
        return None
    operand = facts.fact(arguments["input"]) if isinstance(arguments.get("input"), fx.Node) else None
    call = operator.integers({each: wide(value, build) for each, value in arguments.items()}, operand)
    return call if isinstance(call, str | None) else _narrow(node, *call, build)


def _compared(relation: str, arguments: dict[str, Any], build: Builder) -> Call:
    """Rewrite a comparison for int64 operands: a number that is not an integer is rounded so that the result is unchanged."""
    operands: dict[str, Any] = {}
    for name, value in arguments.items():
        rounding = RELATIONS[relation if name == "other" else RELATIONS[relation].swapped].rounding
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, float) and math.isfinite(value):
            whole_number = math.floor(value) if rounding == "floor" else math.ceil(value)
            value = whole_number if rounding is not None or value.is_integer() else NEVER
        operands[name] = wide(value, build)
    return WHOLE[relation], operands


# ---- Sizes and bounds that a model computes from its constants as tensors of one integer: they are replaced by that integer ----
SIZED = frozenset((
    "pad", "_pad", "constant_pad_nd", "narrow", "view", "reshape", "expand", "repeat", "unflatten", "split",
    "new_zeros", "new_ones", "new_full",
))  # fmt: skip


def fold_sizes(node: fx.Node) -> None:
    """Replace slice bounds and sizes that are computed from constants alone by numbers, in the arguments of a raw node."""
    if node.op not in ("call_function", "call_method"):
        return
    if not any(map(facts.is_parameter, node.all_input_nodes)):
        return
    arguments: Any = facts.own((node.args[1:], node.kwargs), lambda bounds: fx.map_arg(bounds, _number), slice)
    if facts.target_name(node) in SIZED:
        arguments = fx.map_arg(arguments, _number)
    node.args, node.kwargs = (*node.args[:1], *arguments[0]), dict(arguments[1])


def _number(value: fx.Node) -> Any:
    """Return the number that a node holds, where it is one integer that follows from constants; otherwise the node."""
    value_fact, model = facts.fact(value), value.graph.owning_module
    if not facts.is_parameter(value) or model is None or not isinstance(value_fact, TensorFact) or value_fact.shape:
        return value
    if value_fact.dtype.is_floating_point or value_fact.dtype.is_complex or value_fact.dtype == torch.bool:
        return value
    return int(facts.parameter_value(model, value))

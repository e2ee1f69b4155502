"""Call hooks on the user's modules in a prepared model, which runs operators in their place: hooks read the modules' tensors.

A call of a module is recorded in the trace by the names of the tensors that it reads and returns. After the passes, some of these
are inside of fused operators. A hook that reads such a tensor cannot fire, and its registration raises an error.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError
from fxquant.ir import loops
from fxquant.ir.carried import calling_line
from fxquant.ir.graph import computed, fact, is_parameter, made_by, module_path, noise, origins, passed_on, resolve
from fxquant.ir.integer import Reference
from fxquant.ir.model import CALLS, CARRIED, HOOKS
from fxquant.prepared.channels import tensor_exponents
from fxquant.prepared.operators import QuantizedOperator
from fxquant.quantization.spec import prefixes
from fxquant.support import logger

_BOUNDARIES = ("boundary.insert", "boundary.requantize", "requantize.insert")  # the last one in files of earlier versions
NOWHERE = ""  # the name of a tensor that a prepared model does not compute


@dataclass(frozen=True)
class Call:
    """One call of a module.

    path             the module's path
    entry            its index in the order in which calls began; calls are recorded in the order in which they ended
    args, kwargs, result   its nested arguments and result, with a `Reference` for each tensor: to a node of the trace, and after
                     `attach_hooks` to a node of the prepared graph, or to NOWHERE
    """

    path: str
    entry: int
    args: Any
    kwargs: Any
    result: Any

    @property
    def read(self) -> tuple[Any, Any]:
        """The nests of its arguments."""
        return self.args, self.kwargs


class Registry(OrderedDict[int, Any]):
    """The hooks of a module: a registration that can never fire raises ConfigurationError.

    what     the kind of hook, for the error text
    because  the reason why it cannot fire; "" if it can
    remedy   the remedy, for the error text
    caution  a warning, logged at registration, about tensors that the hook does not get; "" if it gets all
    """

    used = False  # whether anything was ever registered, in this process: until then no model looks for hooks

    def __init__(self, what: str = "", because: str = "", remedy: str = "", caution: str = "") -> None:
        super().__init__()
        self.what, self.because, self.remedy, self.caution = what, because, remedy, caution

    def __setitem__(self, key: int, hook: Any) -> None:
        if getattr(self, "because", ""):
            raise ConfigurationError(f"{self.what} would never fire", because=self.because, remedy=self.remedy)
        if getattr(self, "caution", ""):
            logger.warning("%s: %s", self.what, self.caution)
        Registry.used = True
        super().__setitem__(key, hook)


@dataclass(frozen=True)
class Uncallable:
    """The forward of a module whose computation is a part of the graph."""

    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        because = "in a prepared model it holds parameters; what it computes is part of one graph, which is quantized as a whole"
        remedy = "call the prepared model, and read this tensor in a forward hook; or prepare a module whose forward returns it"
        raise ConfigurationError(f"{self.path} cannot be called directly", at=calling_line(), because=because, remedy=remedy)


# ---- from the names of the trace to those of the prepared graph ------------------------------------------------------
def attach_hooks(prepared: fx.GraphModule, traced: fx.Graph) -> None:
    """Make hooks on the modules of a prepared model fire; `traced` is the graph that it was made from."""
    calls: Iterable[Call] = itertools.starmap(Call, prepared.meta.get(CALLS, ()))
    values = _values(prepared.graph, traced)
    resolved = [_resolved(call, values) for call in calls]
    prepared.meta[CALLS] = tuple((call.path, call.entry, call.args, call.kwargs, call.result) for call in resolved)
    restore_hooks(prepared)


def restore_hooks(prepared: fx.GraphModule) -> None:
    """Make hooks fire as `attach_hooks` does, in a copied or loaded model, whose `meta` records calls by the names of its nodes."""
    others = _others(prepared)
    own = {path: module for path, module in prepared.named_modules() if path and not _is_below(path, others)}
    calls = [call for call in itertools.starmap(Call, prepared.meta.get(CALLS, ())) if call.path in own]
    near, drawing = _next_computed(calls), {str(noise(node)) for node in prepared.graph.nodes}
    mine: dict[str, list[Call]] = {}
    for call in calls:
        mine.setdefault(call.path, []).append(call)
    for path, module in own.items():
        if not isinstance(module, torch.jit.ScriptModule):
            registries = _registries(path, mine.get(path, []), near.get(path, ""), CALLS in prepared.meta)
            module.__dict__.update(registries if _is_below(path, drawing) else {"forward": Uncallable(path), **registries})
    prepared.__dict__[HOOKS] = Hooks(tuple(calls))


def are_calls(value: Any, graph: fx.Graph | None) -> bool:
    """Return whether a value in `meta` of a loaded model is a valid list of calls; with `graph`, its names must be nodes of the graph."""
    names = None if graph is None else {node.name for node in graph.nodes} | {NOWHERE}
    try:
        calls = [Call(*entry) for entry in value]
    except TypeError:
        return False
    sound = all(type(call.path) is str and type(call.entry) is int for call in calls)
    return sound and all(names is None or names.issuperset(_names((call.read, call.result))) for call in calls)


def _next_computed(calls: list[Call]) -> dict[str, str]:
    """Return, by path of module, the path of the next module to end whose output is a tensor of the prepared graph; "" if none."""
    following, near = dict[str, str](), ""
    for call in reversed(calls):
        following[call.path] = near
        names = _names(call.result)
        near = call.path if names and NOWHERE not in names else near
    return following


def _is_below(path: str, others: set[str]) -> bool:
    """Return whether a module, or one that holds it, is among others."""
    return not others.isdisjoint(prefixes(path))


def _others(prepared: fx.GraphModule) -> set[str]:
    """Return the paths of modules whose hooks PyTorch calls: modules that the graph calls in float, and the holders of operators."""
    paths = {str(node.target) for node in prepared.graph.find_nodes(op="call_module")}
    paths |= set(prepared.meta[CARRIED].modules()) if CARRIED in prepared.meta else set()
    for module in prepared.children():
        steps = getattr(module, "steps", None)  # a training branch
        paths |= {str(node.target) for node in steps.find_nodes(op="call_module")} if isinstance(steps, fx.Graph) else set()
    return {path.rpartition(".")[0] if isinstance(resolve(prepared, path), QuantizedOperator) else path for path in paths}


def _values(graph: fx.Graph, traced: fx.Graph) -> dict[str, fx.Node]:
    """Map names of the trace's nodes to the prepared graph's nodes with their values; inner nodes of fused operators are absent.

    A prepared node has the value of the last node that was fused into it, or that of its operand if that was traced later (a dropout that
    a relu was moved before). If several prepared nodes have one value, the last is returned.
    """
    order = {node.name: index for index, node in enumerate(traced.nodes)}
    facts = {node.name: fact(node) for node in traced.nodes}
    source_names: dict[fx.Node, str] = {}
    by_name: dict[str, fx.Node] = {}
    for node in graph.nodes:
        names = [name for name in origins(node) if name in order]
        if not names or node.op in ("get_attr", "output"):
            continue
        names += [source_names[operand] for operand in node.all_input_nodes if operand in source_names]
        source_names[node] = max(names, key=order.__getitem__)
        if fact(node) == facts[source_names[node]]:
            by_name[source_names[node]] = node
        else:
            by_name.pop(source_names[node], None)
    same = dict(pair for node in graph.nodes for pair in passed_on(node))
    for gone in same:
        name = gone
        while name in same:
            name = same[name]
        if name in by_name:
            by_name[gone] = by_name[name]
    return by_name


def _resolved(call: Call, values: Mapping[str, fx.Node]) -> Call:
    def named(reference: Reference, inside: str | None) -> Reference:
        node = values.get(reference.node)
        return Reference(NOWHERE if node is None else (node if inside is None else _as_read(node, inside)).name)

    args, kwargs = _mapped(call.read, lambda reference: named(reference, call.path))
    return Call(call.path, call.entry, args, kwargs, _mapped(call.result, lambda reference: named(reference, None)))


def _as_read(node: fx.Node, path: str) -> fx.Node:
    """Return the node, or the node that brings its value to the grid on which a module reads it."""

    def is_inside(user: fx.Node) -> bool:
        return f"{module_path(user)}.".startswith(f"{path}.") and made_by(user) not in _BOUNDARIES

    if any(map(is_inside, node.users)):
        return node
    between = [user for user in node.users if made_by(user) in _BOUNDARIES and any(map(is_inside, user.users))]
    return between[0] if between and fact(between[0]) == fact(node) else node


def _mapped(nest: Any, function: Any) -> Any:
    return pytree.tree_map_only(Reference, function, nest)


def _names(nest: Any) -> list[str]:
    return [leaf.node for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Reference)]


def _registries(path: str, calls: list[Call], near: str, recorded: bool) -> dict[str, Registry]:
    """Return the hook registries of a module, by attribute; `near` is a module that can be hooked, `recorded` is False without records."""
    reads = NOWHERE in [name for call in calls for name in _names(call.read)]
    missing = [[name == NOWHERE for name in _names(call.result)] for call in calls]
    returns = any(each and all(each) for each in missing)
    remedy = f"hook a module whose output is computed, such as {near}" if near else "hook the float model"
    inside = "is inside of a fused operator of the integer graph"
    unknown = "" if recorded else "the file that it was loaded from does not say what calls of modules read and return"
    backward = "a forward hook can call output.register_hook(function), which is given the gradient of the output"
    absent = f"a tensor of its {'input' if reads else 'output'} {inside}, or nothing reads it, so the hook receives None instead"
    caution, lost = absent * (reads or any(map(any, missing))), unknown or f"its output {inside}" * returns
    registries = {
        "_forward_hooks": Registry(f"a forward hook on {path}", lost, remedy, caution),
        "_forward_pre_hooks": Registry(f"a forward pre-hook on {path}", unknown or f"its input {inside}" * reads, remedy),
    }
    because = "operators run in place of modules, so no gradient passes through the module itself"
    for name, kind in (("_backward_hooks", "backward hook"), ("_backward_pre_hooks", "backward pre-hook")):
        registries[name] = Registry(f"a {kind} on {path}", because, backward)
    return registries


class Hooks:
    """Runs a prepared model whose modules have hooks, node by node: the same numbers, with the hooks called in between."""

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls = calls

    def active(self, model: nn.Module) -> bool:
        """Return whether any module has a hook that will fire."""
        return Registry.used and any(True for _ in self._hooked(model))

    def _hooked(self, model: nn.Module) -> Iterator[tuple[Call, nn.Module]]:
        for call in self.calls:
            module = resolve(model, call.path)
            if module._forward_hooks or module._forward_pre_hooks:
                yield call, module

    def run(self, model: fx.GraphModule, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the model with the hooks of its modules called, and return its result."""
        return _Run(model, list(self._hooked(model))).run(inputs, named)


class _Run:
    def __init__(self, model: fx.GraphModule, hooked: list[tuple[Call, nn.Module]]) -> None:
        self.model, self.hooked = model, hooked
        self.exponents = tensor_exponents(model)
        self.values: dict[str, Any] = {}

    def run(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        position = {node.name: index for index, node in enumerate(self.model.graph.nodes)}

        def ready(nest: Any) -> int:
            return max((position[name] for name in _names(nest) if name), default=0)

        ends = [(ready(call.result), call, module) for call, module in self.hooked if module._forward_hooks]
        starts = [(ready(call.read), call, module) for call, module in self.hooked if module._forward_pre_hooks]
        starts.sort(key=lambda start: start[1].entry)
        rest = iter(inputs)
        for node in loops.running(self.model.graph.nodes, self._value):
            index = position[node.name]
            if node.op == "output":
                return fx.map_arg(node.args[0], self._value)
            if node.op == "placeholder":
                self.values[node.name] = named[str(node.target)] if node.target in named else next(rest, *node.args)
            elif node.op != "get_attr":
                self.values[node.name] = computed(self.model, node, self._value)
            if node.target is loops.begin:
                reads = [each for each in loops.reads(node) if not is_parameter(each)]
                loops.at_once(self.model, node.name, self.values[node.name], {each.name: self._value(each) for each in reads})
            for when, call, module in ends:
                if when == index:
                    self._end(call, module)
            for when, call, module in starts:
                if when == index:
                    self._start(call, module)
        raise AssertionError("a graph has an output")

    def _value(self, node: fx.Node) -> Any:
        """Return the value of a node; a parameter is read at this moment."""
        return resolve(self.model, str(node.target)) if node.op == "get_attr" else self.values[node.name]

    def _shown(self, nest: Any) -> Any:
        """Return a nest with the float model's tensors, without the factors of equalized channels; None for absent tensors."""

        def shown(reference: Reference) -> Any:
            value, exponents = self.values.get(reference.node), self.exponents.get(reference.node)
            return value * _factors(-exponents, value) if exponents is not None and isinstance(value, Tensor) else value

        return _mapped(nest, shown)

    def _start(self, call: Call, module: nn.Module) -> None:
        args, kwargs = self._shown(call.read)
        for key, hook in list(module._forward_pre_hooks.items()):
            returned = hook(module, args, kwargs) if key in module._forward_pre_hooks_with_kwargs else hook(module, args)
            if returned is not None:
                _refuse_other(f"a forward pre-hook on {call.path} returned something", "its input is read by other operators as well")

    def _end(self, call: Call, module: nn.Module) -> None:
        args, kwargs = self._shown(call.read)
        result = self._shown(call.result)
        for key, hook in list(module._forward_hooks.items()):
            with_kwargs = key in module._forward_hooks_with_kwargs
            returned = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
            if returned is not None:
                if not isinstance(call.result, Reference) or not isinstance(returned, Tensor):
                    _refuse_other(f"a forward hook on {call.path} returned something", "only an output that is one tensor can be replaced")
                result, name = returned, call.result.node
                exponents = self.exponents.get(name)
                self.values[name] = returned if exponents is None else returned * _factors(exponents, returned)


def _factors(exponents: Tensor, like: Tensor) -> Tensor:
    return torch.exp2(exponents.to(like.dtype)).unsqueeze(0).to(like.device)


def _refuse_other(what: str, because: str) -> None:
    remedy = "return None; to change a layer, change the float model"
    raise ConfigurationError(what, because=f"operators run in place of modules, and {because}", remedy=remedy)

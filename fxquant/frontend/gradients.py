"""Gradients in forward: regions without gradients, and custom functions with a backward of their own.

with torch.no_grad(): y = self.a(x)        %a = call_module a(%x)
return self.b(y)                           %detach = call_method detach(%a)
                                           %b = call_module b(%detach)
"""

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fxquant.frontend.values import ATOMS, BatchNumber, TracedTensor, Value, active, is_tracing, is_tracked, refuse
from fxquant.ir import graph
from fxquant.ir.functional import stopped
from fxquant.ir.graph import TensorFact
from fxquant.numerics.rounding import GradientRule, Slot
from fxquant.support import reached

_COPIES = frozenset(("clone", "view_as", "contiguous", "alias", "detach"))


class Gradients:
    """The findings of one trace about gradients.

    rules     the modules that change gradients, by their paths in the graph
    modes     source lines, and whether they have gradients in train mode, where this differs from eval mode
    lines     source lines, and whether they were computed with gradients; after the trace, none where forward switches nothing
    switched  whether forward has switched gradients on or off
    """

    def __init__(self, names: set[str]) -> None:
        self.rules: dict[str, GradientRule] = {}
        self.modes: Mapping[str, bool] = {}
        self.lines: dict[str, bool] = {}
        self.switched, self._taken = False, names
        self._without: set[fx.Node] = set()
        self._asked: set[fx.Node] = set()  # nodes on which forward called `requires_grad_`

    def describe(self, node: fx.Node) -> None:
        """Note in which gradient mode a new node is computed."""
        if node.op.startswith("call_"):
            line, enabled = graph.source(node), torch.is_grad_enabled()
            self.lines[line] = enabled
            if not self.modes.get(line, enabled):
                self._without.add(node)

    def ask(self, node: fx.Node, requires_grad: bool) -> None:
        """Note that forward sets `requires_grad` of a tensor."""
        (self._asked.add if requires_grad else self._asked.discard)(node)

    def required(self, handler: Any, node: fx.Node) -> bool:
        """Return whether a tensor has a gradient while the float model trains: it depends on a parameter, in a region with gradients."""

        def stops(each: fx.Node) -> bool:
            each_fact = graph.fact(each)
            real = not isinstance(each_fact, TensorFact) or each_fact.dtype.is_floating_point
            return each in self._without or is_stop(each) or not real

        def trains(each: fx.Node) -> bool:
            return each.op in ("call_module", "get_attr") and str(each.target) not in self.rules and handler.is_trained(each)

        before = reached([node], lambda each: () if stops(each) else each.all_input_nodes)
        return any(each in self._asked or (not stops(each) and trains(each)) for each in before)

    def add(self, rule: GradientRule, name: str) -> str:
        """Store a gradient rule in `rules` under a free path, and return the path, at which the graph calls it."""
        base = "gradient_" + "".join(letter if letter.isalnum() else "_" for letter in name)
        path, number = base, 0
        while path in self.rules or path in self._taken:
            number += 1
            path = f"{base}_{number}"
        self.rules[path] = rule
        return path

    def finish(self, recorded: fx.Graph) -> None:
        """Write the ends of regions without gradients into the graph."""
        self.lines = self.lines if self.switched else {}
        for node in list(recorded.nodes):
            if node in self._without and not is_stop(node):
                self._end(recorded, node)

    def _end(self, recorded: fx.Graph, node: fx.Node) -> None:
        """Insert a detach between a node of a region without gradients and its readers outside of the region."""
        node_fact = graph.fact(node)
        if isinstance(node_fact, TensorFact) and not node_fact.dtype.is_floating_point and not node_fact.dtype.is_complex:
            return
        if node_fact is not None and not isinstance(node_fact, TensorFact | tuple | list | dict):
            return
        outside = [user for user in node.users if user not in self._without and not is_stop(user)]
        # A custom backward may read the node for its value alone, and pass no gradient to it.
        outside = [each for each in outside if str(each.target) not in self.rules or len(each.args) < 2 or node in each.args[1:]]
        if not outside or all(graph.reads_shape_only(user) for user in outside):
            return
        with recorded.inserting_after(node):
            written: tuple[str, Any] = ("call_method", "detach") if isinstance(node_fact, TensorFact) else ("call_function", stopped)
            inserted = recorded.create_node(*written, (node,))
        graph.describe(inserted, node_fact, graph.source(node), graph.module_path(node))
        graph.attach_qconfigs(inserted, graph.attached_qconfigs(node))
        for user in outside:
            user.replace_input_with(node, inserted)


def is_stop(node: fx.Node) -> bool:
    """Return whether a node passes its operand on without gradients, as the user wrote it."""
    return node.target in ("detach", torch.detach, stopped) and node.op in ("call_method", "call_function")


_NOT_KEPT = {
    "register_post_accumulate_grad_hook": "it waits for the gradient of a leaf, and a traced tensor is not a leaf",
    "retain_grad": "a traced tensor keeps no gradient; parameters and inputs of the prepared model do",
}


def about_gradients(handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a tensor function that only concerns gradients to the trace; return NotImplemented for any other function."""
    name = getattr(func, "__name__", "")
    if name == "register_hook":
        because = "a graph has no place for it, and the gradients of TRAIN would be other ones than the float model's"
        remedy = "write the function and its backward as a torch.autograd.Function, or register it in a forward hook of the prepared model"
        refuse("forward registers a hook on the gradient of a tensor", because=because, remedy=remedy)
    if name in _NOT_KEPT and getattr(torch.Tensor, name, None) is func:
        handler.warn(f"{name} does nothing in the prepared model: {_NOT_KEPT[name]}")
        return None
    return NotImplemented


def overwritten(handler: Any, result: TracedTensor, before: fx.Node) -> TracedTensor:
    """Return a tensor that was changed in place while no gradient is recorded: it keeps the gradient that it had."""
    if not result.is_floating_point() or result.node is before or not handler.gradients.required(handler, before):
        return result
    with torch.enable_grad():
        return ruled(handler, GradientRule(Unchanged, (Slot(0),), None), "kept", (result.node, before), result.value)


class Unchanged(torch.autograd.Function):
    """The identity, for which the gradient of a tensor before a change in place stands."""

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor) -> torch.Tensor:
        return before.view_as(before)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def ruled(handler: Any, rule: GradientRule, name: str, nodes: tuple[fx.Node, ...], value: Value) -> TracedTensor:
    """Insert a call of a gradient rule on `nodes`, and return its result, which has the value of its first operand."""
    node = handler.graph.create_node("call_module", handler.gradients.add(rule, name), nodes)
    handler.describe(node, value)
    return TracedTensor(node, value)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `apply` that a `torch.autograd.Function` inherits."""
    usual = super(_SingleLevelFunction, cls).apply
    handler = active() if is_tracing() else None
    if handler is None or handler.paused or not is_tracked(args, handler.known):
        return usual(*args, **kwargs)
    if cls is torch.utils.checkpoint.CheckpointFunction:  # as in PyTorch, it has gradients only if one of its tensors requires them
        function, _, *operands = args
        required = torch.is_grad_enabled() and any(arg.requires_grad for arg in operands if isinstance(arg, TracedTensor))
        with torch.set_grad_enabled(required):
            return function(*operands)
    if cls.__module__.startswith("torch.") or not torch.is_grad_enabled():
        return usual(*args, **kwargs)
    return _recorded(handler, cls, usual, args)


def _without_recomputing(function: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Replace the context of a non-reentrant `torch.utils.checkpoint` while tracing: a graph saves and recomputes no activations."""
    if is_tracing():
        yield
    else:
        yield from _USUAL_CHECKPOINT(function, *_, **__)


_USUAL_CHECKPOINT = torch.utils.checkpoint._checkpoint_without_reentrant_generator
STAND_INS: tuple[tuple[Any, str, Any], ...] = (
    (_SingleLevelFunction, "apply", classmethod(_apply)),
    (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _without_recomputing),
)


def _recorded(handler: Any, cls: Any, usual: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Trace the function's forward, without gradients, and give each of its results the function's own backward."""
    operands: list[Any] = []
    slots: dict[int, Slot] = {}

    def slot(arg: Any) -> Any:
        if isinstance(arg, BatchNumber | torch.Tensor):
            if id(arg) not in slots:
                slots[id(arg)] = Slot(len(operands))
                operands.append(arg)
            return slots[id(arg)]
        if type(arg) not in ATOMS and isinstance(arg, nn.Module | FunctionType | MethodType):
            because = "its backward would reach parameters of another copy of the model"
            remedy = "pass tensors and numbers to apply, or call the module in place of the function"
            refuse(f"the custom function {cls.__qualname__} is given a {type(arg).__name__}", because=because, remedy=remedy)
        return arg

    arguments = tuple(tree_map(slot, arg) for arg in args)
    nodes = handler.nodes_of(operands)
    returned = usual(*args)
    leaves, form = tree_flatten(returned)
    single = isinstance(returned, torch.Tensor)
    alone = nodes[0] if len(nodes) == 1 and _reads_no_values(handler, cls, arguments, operands) else None
    rerouted = [
        _rerouted(handler, cls, leaf, GradientRule(cls, arguments, None if single else index), nodes, alone)
        if isinstance(leaf, TracedTensor) and leaf.is_floating_point()
        else leaf
        for index, leaf in enumerate(leaves)
    ]
    # An operand that the function returns, changed in place, stands for the new tensor everywhere.
    changed = {id(each) for each in operands}
    pairs = zip(leaves, rerouted, strict=True)
    return tree_unflatten([handler.memory.advance(leaf, result) if id(leaf) in changed else result for leaf, result in pairs], form)


def _reads_no_values(handler: Any, cls: Any, arguments: tuple[Any, ...], operands: list[Any]) -> bool:
    """Return whether the function saves no tensor, so that its backward is a function of the gradient alone."""
    if not isinstance(operands[0], TracedTensor):
        return False
    try:
        with handler.pausing(), handler.evaluator.mode, torch.enable_grad():
            fake = torch.empty_like(operands[0].value.abstract.tensors[0]).requires_grad_().clone()
            outputs = cls.apply(*(tree_map(lambda arg: fake if isinstance(arg, Slot) else arg, arg) for arg in arguments))
            results = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.grad_fn is not None]
        contexts: list[Any] = [each.grad_fn for each in results]
        return bool(contexts) and not any(
            context.saved_tensors or any(isinstance(value, torch.Tensor) for value in tree_leaves(vars(context))) for context in contexts
        )
    except Exception:  # it computes what fake tensors cannot; then it is given the values
        return False


def _rerouted(
    handler: Any, cls: Any, result: TracedTensor, rule: GradientRule, nodes: tuple[fx.Node, ...], alone: fx.Node | None
) -> TracedTensor:
    """Return the result of a custom function, whose gradient goes where the function's backward sends it.

    `alone` is its only operand, where the backward is a function of the gradient alone.
    """
    handler.memory.refresh(result)
    of = result.node
    while of is not alone and alone is not None and graph.target_name(of) in _COPIES and graph.fact(of) == graph.fact(alone):
        of = of.all_input_nodes[0]
    return ruled(handler, rule, cls.__name__, (of,) if of is alone else (result.node, *nodes), result.value)

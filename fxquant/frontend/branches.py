"""Code that forward runs only in train mode: auxiliary heads, and outputs that a loss needs.

The model is traced a second time in train mode. The part that both traces share is one graph, which is quantized. The rest is a separate
module, called on tensors of that graph. It runs only while the prepared model is in train mode, and the integer model does not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxquant.errors import TraceError
from fxquant.frontend.checks import same_tensor
from fxquant.frontend.environment import undisturbed
from fxquant.frontend.handler import Handler
from fxquant.frontend.inputs import ExampleInputs
from fxquant.frontend.opaque import Holder, Method
from fxquant.frontend.outputs import nest_of, rebuilt
from fxquant.frontend.state import MovedState, with_gradient
from fxquant.ir import graph
from fxquant.ir.integer import Reference
from fxquant.ir.interpreter import Interpreter
from fxquant.ir.model import free_name
from fxquant.numerics.gradient import GradientRule
from fxquant.support import logger

NAME = "training_branch"
BECAUSE = "it is computed while training only"
_DROPS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"))


class TrainingBranch(Holder):
    """The part of a model that computes its result in train mode from tensors of its graph; it calls modules without owning them.

    forward stores the result in `result`, from which `ReturnInTraining` takes it.
    """

    def __init__(self, root: nn.Module, steps: fx.Graph, form: Any) -> None:
        super().__init__(root)
        self.steps, self.form, self.result = steps, form, None

    def forward(self, *inputs: Any) -> None:
        self.result = rebuilt(self.form, Interpreter(self.held[0], self.steps).run(*inputs)) if self.training else None

    def train(self, mode: bool = True) -> TrainingBranch:
        """Set the mode, as any module does; methods that are kept as Python, which only the branch calls, follow it."""
        super().train(mode)
        for module in self.held[0].modules():
            if isinstance(module, Method):
                module.train(mode)
        return self


class ReturnInTraining:
    """A forward hook: in train mode, what the training branch has computed; else what the graph has."""

    def __call__(self, module: Any, args: Any, result: Any) -> Any:
        branch = next(child for child in module.children() if isinstance(child, TrainingBranch))
        found, branch.result = branch.result, None
        return found if module.training else result


def lost_parameters(traced: fx.GraphModule, inputs: ExampleInputs, state: MovedState) -> list[str]:
    """Return the names and lines of the parameters that train in the float model, and have no gradient in the graph."""
    own = dict(traced.named_parameters(remove_duplicate=False))
    asked = {name: line for name, line in state.trained.items() if name in own}
    if not asked or any(tensor.is_inference() for tensor in (*own.values(), *traced.buffers())):  # these cannot train
        return []
    with torch.inference_mode(False), torch.enable_grad(), undisturbed():
        result = traced(**{name: tensor.clone() for name, tensor in inputs.tensors().items()})
    reached = set(map(id, with_gradient(nest_of(result))))
    beside = {path for module in traced.children() if isinstance(module, TrainingBranch) for path in reads(module.steps)}
    return [
        name + f" ({line})" * bool(line)
        for name, line in asked.items()
        if id(own[name]) not in reached and not any(name == path or name.startswith(f"{path}.") for path in beside)
    ]


def reads(steps: fx.Graph) -> set[str]:
    """Return the paths of the modules and tensors that a graph reads."""
    return {str(node.target) for node in steps.nodes if node.op in ("call_module", "get_attr")}


class Branch:
    """The part of a trace in train mode that the trace in eval mode does not have.

    steps    a graph of it, which returns what forward returned
    inputs   the nodes of the first trace that it reads, in the order of its placeholders
    form     that of what forward returned
    snapshot, methods  of methods that are kept as Python and that it calls, as in a `Handler`
    rules    what it calls that changes gradients, by path

    Raises TraceError if a layer of the first trace is called on something else in the second.
    """

    def __init__(self, first: Handler, second: Handler) -> None:
        constants = _matched(first, second)
        self.snapshot, self.methods, self.rules = second.snapshot, second.methods, dict[str, GradientRule]()
        for path, rule in second.gradients.rules.items():
            if path not in first.gradients.rules or not rule.same(first.gradients.rules[path]):
                constants[path] = f"training_{path}"
                self.rules[constants[path]] = rule
        known: dict[Any, fx.Node] = {}
        for node in first.graph.nodes:
            known.setdefault(_key(node, lambda operand: operand.name, {}), node)
        common: dict[fx.Node, fx.Node] = {}  # nodes of the second trace that are ones of the first
        own: list[fx.Node] = []
        for node in second.graph.nodes:
            found = known.get(_key(node, lambda o: common[o].name if o in common else f"own {o.name}", constants))
            if found is not None and node.op != "output":
                common[node] = found
            else:
                own.append(node)
        _check(first, own, set(common.values()))
        read = dict.fromkeys(operand for node in own for operand in node.all_input_nodes if operand in common)
        self.form, self.steps = second.form, fx.Graph()
        self.inputs = [common[node] for node in read if node.op != "get_attr"]
        made = {node: self.steps.placeholder(f"common_{index}") for index, node in enumerate(n for n in read if n.op != "get_attr")}
        for node in [*(n for n in read if n.op == "get_attr"), *own]:
            copied = made[node] = self.steps.node_copy(node, made.__getitem__)
            copied.meta = {}
            if node.op in ("get_attr", "call_module"):
                copied.target = constants.get(str(node.target), node.target)
        self.differs = len(own) > 1 or [common.get(node) for node in own[0].all_input_nodes] != _returned(first.graph)

    def attach(self, module: fx.GraphModule, root: nn.Module) -> None:
        """Call the branch at the end of the module's graph; `root` holds what it calls."""
        name = free_name(module, NAME)
        module._modules[name] = TrainingBranch(root, self.steps, self.form).eval()
        output = next(iter(module.graph.find_nodes(op="output")))
        with module.graph.inserting_before(output):
            node = module.graph.create_node("call_module", name, tuple(self.inputs))
        graph.describe(node, None, "", "")
        graph.refuse(node, BECAUSE)
        graph.mark_training(node)


def _matched(first: Handler, second: Handler) -> dict[str, str]:
    """Return the names of the second trace's constants: those of equal ones of the first, or free names, under which they are added."""
    found: dict[str, str] = {}
    for name, constant in second.constants.items():
        same = next((known for known, other in first.constants.items() if same_tensor(constant, other)), None)
        if same is None:
            same = f"_training{name}"
            first.constants[same] = constant
        found[name] = same
    return found


def _key(node: fx.Node, name: Callable[[fx.Node], str], constants: dict[str, str]) -> Any:
    """Return a key that is equal for two nodes that call the same on the same operands."""

    def named(operand: fx.Node) -> Any:
        return Reference(name(operand))

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), named)
    target = constants.get(str(node.target), node.target) if node.op in ("get_attr", "call_module") else node.target
    if graph.target_name(node) in _DROPS:  # whose training= says what the mode is
        args, kwargs = args[:2], {key: value for key, value in kwargs.items() if key != "training"}
    if graph.target_name(node) == "scaled_dot_product_attention":
        args, kwargs = (*args[:4], *args[5:]), {key: value for key, value in kwargs.items() if key != "dropout_p"}
    return node.op, target if isinstance(target, str) else id(target), repr(args), repr(kwargs)


def _returned(recorded: fx.Graph) -> list[fx.Node]:
    found: list[fx.Node] = next(iter(recorded.find_nodes(op="output"))).all_input_nodes
    return found


def _layer(node: fx.Node) -> set[Any]:
    """Return the module that a node calls, or the parameters and tensors that it reads."""
    if node.op == "call_module":
        return {node.target}
    return {operand.target for operand in node.all_input_nodes if operand.op == "get_attr"} if node.op != "output" else set()


def _check(first: Handler, own: list[fx.Node], common: set[fx.Node]) -> None:
    again = {target: node for node in own for target in _layer(node)}
    for node in first.graph.nodes:
        elsewhere = [again[target] for target in _layer(node) if target in again]
        if node not in common and elsewhere:
            raise TraceError(
                "forward computes the same layers in another way in train mode",
                node=node,
                because=f"%{node.name} reads another tensor there, so training would not fit the integer model",
                remedy="let self.training (a stochastic depth, a custom batch norm) change only what the loss reads, or "
                "prepare the model without training_branch=True",
            )
    shared = {graph.module_path(node) or node.name for node in again.values() if any(_layer(node) & _layer(other) for other in common)}
    if shared:
        logger.warning("layers that are called once more while training, in float there: %s", ", ".join(sorted(shared)))

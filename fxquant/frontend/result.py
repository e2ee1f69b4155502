"""Build the traced GraphModule: its module tree, its graph, the graph of the train-mode branch, and the entries of its `meta`."""

import difflib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxquant.errors import ConfigurationError, TraceError
from fxquant.frontend.entry import STAGE
from fxquant.frontend.environment import Snapshot, undisturbed
from fxquant.frontend.handler import Handler
from fxquant.frontend.inputs import FIXED, CallSignature, ExampleInputs, InputCheck, call_signature, input_check, set_signature
from fxquant.frontend.opaque import Holder, Method
from fxquant.frontend.state import MovedState, Place, overrides_train, own_parameters, with_gradient
from fxquant.frontend.tracer import ReturnForm, nest_of, rebuilt, return_form, same_tensor, set_form
from fxquant.ir import graph
from fxquant.ir.carried import SETTINGS, Carried
from fxquant.ir.graph import Interpreter, TensorFact, attach, model_meta, own_names, shape_of, sizes_of_input, varies_beyond_batch
from fxquant.ir.integer import Reference, notes
from fxquant.ir.model import CALLS, CARRIED, FROZEN_BY_TRAIN, FROZEN_NORMS, KEPT_IN_EVAL, Model, free_name, replace_graph
from fxquant.numerics.rounding import GradientRule
from fxquant.support import logger

# ---- code that forward runs only in train mode: auxiliary heads, and outputs that a loss needs -----------------------
#
# The model is traced a second time in train mode. The part that both traces share is one graph, which is quantized. The rest is a separate
# module, called on tensors of that graph. It runs only while the prepared model is in train mode, and the integer model does not have it.
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

    def train(self, mode: bool = True) -> "TrainingBranch":
        """Set train or eval mode, also of the methods kept as Python, which only the training branch calls."""
        super().train(mode)
        for module in self.held[0].modules():
            if isinstance(module, Method):
                module.train(mode)
        return self


class ReturnInTraining:
    """A forward hook that returns the result of the training branch in train mode, and that of the graph in eval mode."""

    def __call__(self, module: Any, args: Any, result: Any) -> Any:
        branch = next(child for child in module.children() if isinstance(child, TrainingBranch))
        train_result, branch.result = branch.result, None
        return train_result if module.training else result


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
    """The part of the trace in train mode that the trace in eval mode does not have.

    steps    its graph, which returns the result of forward
    inputs   the nodes of the first trace that it reads, in the order of its placeholders
    form     the nested structure of forward's result
    snapshot, methods  the shells, and the Python methods that it calls, as in a `Handler`
    rules    the gradient rules that it calls, by path

    Raises TraceError if a layer of the first trace is called on another operand in the second.
    """

    def __init__(self, first: Handler, second: Handler) -> None:
        constants: dict[str, str] = {}  # to names in the first trace: of an equal constant, or a free name, under which each is added
        for name, constant in second.constants.items():
            equal = (first_name for first_name, other in first.constants.items() if same_tensor(constant, other))
            constants[name] = next(equal, f"_training{name}")
            first.constants.setdefault(constants[name], constant)
        self.snapshot, self.methods, self.rules = second.snapshot, second.methods, dict[str, GradientRule]()
        for path, rule in second.gradients.rules.items():
            if path not in first.gradients.rules or not rule.same(first.gradients.rules[path]):
                constants[path] = f"training_{path}"
                self.rules[constants[path]] = rule
        by_key: dict[Any, fx.Node] = {}
        for node in first.graph.nodes:
            by_key.setdefault(_key(node, lambda operand: operand.name, {}), node)
        common: dict[fx.Node, fx.Node] = {}  # nodes of the second trace that are ones of the first
        own: list[fx.Node] = []
        for node in second.graph.nodes:
            same = by_key.get(_key(node, lambda o: common[o].name if o in common else f"own {o.name}", constants))
            if same is not None and node.op != "output":
                common[node] = same
            else:
                own.append(node)
        _check(first, own, set(common.values()))
        read = dict.fromkeys(operand for node in own for operand in node.all_input_nodes if operand in common)
        self.form, self.steps = second.form, fx.Graph()
        self.inputs = [common[node] for node in read if node.op != "get_attr"]
        copies = {node: self.steps.placeholder(f"common_{index}") for index, node in enumerate(n for n in read if n.op != "get_attr")}
        for node in [*(n for n in read if n.op == "get_attr"), *own]:
            copied = copies[node] = self.steps.node_copy(node, copies.__getitem__)
            copied.meta = {}
            if node.op in ("get_attr", "call_module"):
                copied.target = constants.get(str(node.target), node.target)
        self.differs = len(own) > 1 or [common.get(node) for node in own[0].all_input_nodes] != first.graph.output_node().all_input_nodes

    def attach(self, module: fx.GraphModule, root: nn.Module) -> None:
        """Call the branch at the end of the module's graph; `root` holds the modules and tensors that it uses."""
        name = free_name(module, NAME)
        module._modules[name] = TrainingBranch(root, self.steps, self.form).eval()
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            node = module.graph.create_node("call_module", name, tuple(self.inputs))
        graph.describe(node, None, "", "")
        graph.refuse(node, BECAUSE)
        graph.mark_training(node)


def _key(node: fx.Node, name: Callable[[fx.Node], str], constants: dict[str, str]) -> Any:
    """Return a key that is equal for two nodes that call the same on the same operands."""
    args, kwargs = graph.own((node.args, node.kwargs), lambda operand: Reference(name(operand)))
    target = constants.get(str(node.target), node.target) if node.op in ("get_attr", "call_module") else node.target
    if graph.target_name(node) in _DROPS:  # whose training= says what the mode is
        args, kwargs = args[:2], {key: value for key, value in kwargs.items() if key != "training"}
    if graph.target_name(node) == "scaled_dot_product_attention":
        args, kwargs = (*args[:4], *args[5:]), {key: value for key, value in kwargs.items() if key != "dropout_p"}
    return node.op, target if isinstance(target, str) else id(target), repr(args), repr(kwargs)


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
                "prepare the model without the option training_branch=True",
            )
    shared = {graph.module_path(node) or node.name for node in again.values() if any(_layer(node) & _layer(other) for other in common)}
    if shared:
        logger.warning("layers that are called once more while training, in float there: %s", ", ".join(sorted(shared)))


def build(
    model: nn.Module, recording: Handler, signature: list[list[Any]], preserve: Sequence[str], branch: Branch | None
) -> fx.GraphModule:
    """Return a GraphModule with the model's own parameter names, and parameters shared with the model; `preserve` as `trace` means it.

    `branch` holds the operations that forward runs only in train mode.
    """
    carried = Carried.of(model, _preservable(model, preserve))
    snapshot = Snapshot(model, own_buffers=True)
    called = {node.target for node in recording.graph.nodes if node.op == "call_module"}
    beside: set[Any] = reads(branch.steps) if branch is not None else set()
    called |= beside & set(dict(model.named_modules()))
    module = Model(nn.Module(), fx.Graph(), type(model).__name__)
    tree = _PlainTree(snapshot, called | set(carried.modules()))
    shell = tree.build(snapshot.root)
    for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        module.__dict__[kind].update(shell.__dict__[kind])

    def attach_called(to: nn.Module, of: Snapshot, methods: Mapping[str, tuple[nn.Module, Any]], rules: Mapping[str, nn.Module]) -> None:
        for path, (owner, function) in methods.items():
            attach(to, path, Method(tree.build(snapshot.root.get_submodule(of.paths.get(id(owner), "")), whole=True), function))
        for path, rule in rules.items():
            attach(to, path, rule)

    attach_called(module, recording.snapshot, recording.methods, recording.gradients.rules)
    for name, constant in recording.constants.items():
        attach(module, name, constant)
        module._non_persistent_buffers_set.add(name)
    module.eval()
    replace_graph(module, recording.graph)
    if branch is not None:
        shell.__dict__["_buffers"].update(module._buffers)
        attach_called(shell, branch.snapshot, branch.methods, branch.rules)
        branch.attach(module, shell)
    module.recompile()
    module.meta[STAGE] = "traced"
    module.meta[CALLS] = tuple(recording.calls)
    module.meta[SETTINGS] = recording.settings
    in_eval, frozen, note = own_train_mode(model)
    module.meta.update({key: names for key, names in ((KEPT_IN_EVAL, in_eval), (FROZEN_BY_TRAIN, frozen)) if names})
    module.meta[_ASSUMPTIONS] = [*recording.notes, *note, *_noted(module, model, called, beside)]
    module.meta[CARRIED] = carried
    carried.dress(module)
    set_signature(module, signature)
    set_form(module, recording.form)
    attach_call_hooks(module)
    return module


def attach_call_hooks(module: fx.GraphModule) -> None:
    """Register hooks with which a graph takes the float model's arguments, checks them, and returns the float model's structure.

    Calling this again replaces the hooks; copies of the model keep them.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, CallSignature | InputCheck | ReturnForm | ReturnInTraining)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    signature, form = call_signature(module), return_form(module)
    if signature is not None:
        module.register_forward_pre_hook(signature, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(input_check(module), with_kwargs=True)
    if form is not None:
        module.register_forward_hook(form)
    if any(isinstance(child, TrainingBranch) for child in module.children()):
        module.register_forward_hook(ReturnInTraining())


def _preservable(model: nn.Module, preserve: Sequence[str]) -> Sequence[str]:
    """Return the names unchanged. Raises ConfigurationError for a name that the model lacks, or that is an attribute of GraphModule."""
    for name in preserve:
        *parents, last = name.split(".")
        try:
            holder = model.get_submodule(".".join(parents))
            getattr(holder, last)
        except AttributeError as error:
            there = [one for one in dir(holder) if one not in dir(nn.Module)] if "holder" in locals() else []
            near = difflib.get_close_matches(last, there, n=1)
            raise ConfigurationError(
                f"preserve={name!r} names nothing",
                because=f"of the model: {error}",
                remedy=f"did you mean {'.'.join([*parents, *near])!r}?"
                if near
                else "pass names of attributes, methods or modules of the model",
            ) from None
        if not parents and last in own_names():
            because = "a GraphModule already has an attribute of that name"
            remedy = "give yours another name"
            raise ConfigurationError(f"preserve={name!r} cannot be kept", because=because, remedy=remedy)
    return preserve


class _PlainTree:
    """Builds the module tree of a graph: modules that the graph calls, and their children, stay; others become plain `nn.Module`s."""

    def __init__(self, snapshot: Snapshot, called: set[Any]) -> None:
        self._called = {identity for identity, path in snapshot.paths.items() if path in called}
        self._built: dict[tuple[int, bool], nn.Module] = {}

    def build(self, module: nn.Module, whole: bool = False) -> nn.Module:
        """Return the counterpart of a shell; `whole` says that it is inside of a module that the graph calls."""
        called = id(module) in self._called
        whole = whole or called
        built = self._built.get((id(module), whole))
        if built is not None or isinstance(module, torch.jit.ScriptModule):
            return built or module
        kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Module)  # of an empty module: a container stays one
        plain: nn.Module = object.__new__(type(module)) if whole else next(kind for kind in kinds if isinstance(module, kind))()
        self._built[id(module), whole] = plain
        if whole:
            plain.__dict__.update(module.__dict__)
            plain.__dict__.pop("qconfig", None)  # the nodes know it
        if called:
            # Hooks have been traced, and in-place modules as if they were not.
            plain.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
            if plain.__dict__.get("inplace") is True:
                plain.__dict__["inplace"] = False
        for kind in ("training", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            plain.__dict__[kind] = module.__dict__[kind]
        plain.__dict__["_modules"] = {name: None if child is None else self.build(child, whole) for name, child in module._modules.items()}
        return plain


def _inputs_noted(module: fx.GraphModule) -> list[str]:
    facts = {node.target: graph.fact(node) for node in module.graph.find_nodes(op="placeholder")}
    return [
        f"input {name} is {fact}: {'sizes that are numbers are' if varies_beyond_batch(fact) else 'every size but B is'} fixed"
        for name, fact in facts.items()
        if isinstance(fact, TensorFact)
    ]


def _noted(module: fx.GraphModule, model: nn.Module, called: set[Any], beside: set[Any]) -> list[str]:
    """Return notes on inputs, on layers that alone are in train mode, as for Monte Carlo dropout, and on parameters without readers."""
    training = [path for path, layer in model.named_modules() if layer.training and path in called and not model.training]
    used = beside | {node.target for node in module.graph.nodes if node.op == "get_attr"}
    inside = tuple(f"{owner}." for owner in beside | {node.target for node in module.graph.nodes if node.op == "call_module"})
    names = [name for name, _ in module.named_parameters() if name not in used and not name.startswith(inside)]
    return [
        *_inputs_noted(module),
        *(f"{path} is in train mode, and the model is not: it was traced in eval mode" for path in training),
        *(f"parameter {name} is not used by the graph" for name in names),
    ]


_ASSUMPTIONS = "fxquant.assumptions"
_MOVED = "fxquant.moved_by_forward"
_RANDOM = "fxquant.random_by_forward"
_UNTRAINED = "fxquant.untrained_here"


def assumptions(module: fx.GraphModule) -> list[str]:
    """Return sentences about the values that were fixed while tracing."""
    return model_meta(module).get(_ASSUMPTIONS, [])  # type: ignore[no-any-return]


def moved_by_forward(module: fx.GraphModule) -> dict[str, str]:
    """Return the names of tensors that forward changes in train mode but the graph does not, each with the user's source line or "".

    Tensors of modules that the graph calls in float do change, and are absent.
    """
    called = [str(node.target) for node in module.graph.find_nodes(op="call_module")]
    called += [path.rpartition(".")[0] for path in called if isinstance(graph.resolve(module, path), Method)]
    moved: dict[str, str] = model_meta(module).get(_MOVED, {})
    return {name: line for name, line in moved.items() if not any(name.startswith(f"{path}.") for path in called)}


def random_by_forward(module: fx.GraphModule) -> list[Place]:
    """Return the places where forward draws random numbers in train mode alone: the path of the module, and the line of the user's code."""
    return [(path, line) for path, _, line in (place.partition("\t") for place in model_meta(module).get(_RANDOM, ()))]


def untrained_here(module: fx.GraphModule) -> list[str]:
    """Return texts on parameters that have a gradient only in the float model: the name and the line of the user's code that reads it."""
    return model_meta(module).get(_UNTRAINED, [])  # type: ignore[no-any-return]


def note_fixed(fixed: fx.GraphModule, traced: fx.GraphModule, why: str) -> None:
    """Note on a graph made of a traced one at the example's sizes why sizes do not vary that are open in the traced one."""
    pairs = zip(fixed.graph.find_nodes(op="placeholder"), traced.graph.find_nodes(op="placeholder"), strict=True)
    sizes = {}
    for node, before in pairs:
        for dim, (name, *_) in sizes_of_input(before).items():
            notes(node)[f"{FIXED}{dim}"] = why
            sizes[name] = f"{name} of the inputs is fixed to {shape_of(node)[dim]}: {why}"
    others = [text for text in assumptions(fixed) if text not in _inputs_noted(traced)]
    fixed.meta[_ASSUMPTIONS] = [*sizes.values(), *others, *_inputs_noted(fixed)]
    attach_call_hooks(fixed)


def note_state(module: fx.GraphModule, state: MovedState, recording: Handler, untrained: list[str]) -> None:
    """Store in a traced model's `meta` the tensors that forward changes and the calls that are random in train mode, and `untrained`."""
    module.meta[_ASSUMPTIONS] = [*assumptions(module), *state.notes()]
    named = (*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False))
    used = {*recording.read, *(name for name, _ in named)}
    moved = {name: line for name, line in state.moved.items() if name in used}
    random = ["\t".join(place) for place in state.draws if place not in recording.draws]
    for key, value in ((_MOVED, moved), (FROZEN_NORMS, state.frozen_norms), (_RANDOM, random), (_UNTRAINED, untrained)):
        if value:
            module.meta[key] = value


# ---- the effects of a model's own `train` besides train mode, kept by name -------------------------------------------
SHOWN = 8  # names in a sentence


def own_train_mode(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of modules that the user's `train` keeps in eval mode, the names of parameters that it freezes, and a note on both.

    They are found on shells; the model is not changed.
    """
    own = [type(module).__name__ for module in model.modules() if overrides_train(module)]
    if not own:
        return [], [], []
    shells = Snapshot(model, own_buffers=True)
    copies = own_parameters(shells.modules)
    asked = {name: copies[id(parameter)] for name, parameter in model.named_parameters() if parameter.requires_grad}
    method = " and ".join(f"{name}.train" for name in dict.fromkeys(own))
    try:
        shells.root.train(True)
        frozen = [name for name, copy in asked.items() if not copy.requires_grad]
    except Exception as error:  # whatever the user's code raises
        return [], [], [f"{method} raised {type(error).__name__}: {error}; its effect in train mode is left out"]
    in_eval = [path for path, module in shells.root.named_modules() if not module.training]
    clauses = [*([f"keeps {_listed(in_eval)} in eval mode"] if in_eval else []), *([f"freezes {_listed(frozen)}"] if frozen else [])]
    return in_eval, frozen, [f"{method} {' and '.join(clauses)}, and so does train() of this model"] if clauses else []


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

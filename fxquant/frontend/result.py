"""The traced GraphModule: its module tree, and what is written on it."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxquant.errors import ConfigurationError
from fxquant.frontend.branches import Branch, ReturnInTraining, TrainingBranch, reads
from fxquant.frontend.entry import STAGE
from fxquant.frontend.handler import Handler
from fxquant.frontend.inputs import InputCheck, input_check
from fxquant.frontend.opaque import Method
from fxquant.frontend.outputs import ReturnForm, return_form, set_form
from fxquant.frontend.signature import CallSignature, call_signature, set_signature
from fxquant.frontend.snapshot import Snapshot
from fxquant.frontend.state import MovedState, Place, overrides_train, own_parameters
from fxquant.ir import graph
from fxquant.ir.carried import SETTINGS, Carried
from fxquant.ir.codegen import own_names
from fxquant.ir.graph import TensorFact, attach, model_meta
from fxquant.ir.model import CALLS, CARRIED, FROZEN_BY_TRAIN, FROZEN_NORMS, KEPT_IN_EVAL, Model, replace_graph


def build(
    model: nn.Module, recording: Handler, signature: list[list[Any]], preserve: Sequence[str], branch: Branch | None
) -> fx.GraphModule:
    """Return a GraphModule with the model's own parameter names, and parameters shared with the model; `preserve` as `trace` means it.

    `branch` is what forward computes in train mode only.
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
    kept, frozen, note = own_train_mode(model)
    module.meta.update({key: names for key, names in ((KEPT_IN_EVAL, kept), (FROZEN_BY_TRAIN, frozen)) if names})
    module.meta[_ASSUMPTIONS] = [*recording.notes, *note, *_fixed_sizes(module), *_turned_to_eval(model, called), *_unused(module, beside)]
    module.meta[CARRIED] = carried
    carried.dress(module)
    set_signature(module, signature)
    set_form(module, recording.form)
    attach_call_hooks(module)
    return module


def attach_call_hooks(module: fx.GraphModule) -> None:
    """Let a graph be called like the float model, check its inputs, and return what that does, in train mode by a training branch.

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
    """Return the names as they are. Raises ConfigurationError for one that the model does not have, or that a GraphModule means itself."""
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
            raise ConfigurationError(
                f"preserve={name!r} cannot be kept",
                because="a GraphModule already has an attribute of that name",
                remedy="give yours another name",
            )
    return preserve


class _PlainTree:
    """Builds the tree of a graph: what is called (or is inside of what is called) stays, anything else becomes a plain `nn.Module`."""

    def __init__(self, snapshot: Snapshot, called: set[Any]) -> None:
        self._called = {identity for identity, path in snapshot.paths.items() if path in called}
        self._built: dict[tuple[int, bool], nn.Module] = {}

    def build(self, module: nn.Module, whole: bool = False) -> nn.Module:
        """Return the counterpart of a shell; `whole` says that it is inside of what is called."""
        called = id(module) in self._called
        whole = whole or called
        known = self._built.get((id(module), whole))
        if known is not None or isinstance(module, torch.jit.ScriptModule):
            return known or module
        plain: nn.Module = object.__new__(type(module)) if whole else _container(module)
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


def _container(module: nn.Module) -> nn.Module:
    """Return an empty module that is indexed and iterated over as this one."""
    kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return next((kind() for kind in kinds if isinstance(module, kind)), nn.Module())


def _fixed_sizes(module: fx.GraphModule) -> list[str]:
    inputs = [(node.target, graph.fact(node)) for node in module.graph.find_nodes(op="placeholder")]
    return [f"input {name} is {fact}: every size but B is fixed" for name, fact in inputs if isinstance(fact, TensorFact)]


def _turned_to_eval(model: nn.Module, called: set[Any]) -> list[str]:
    """Layers that alone are in train mode, as for Monte Carlo dropout: the graph has them as in eval mode."""
    if model.training:
        return []
    found = [path for path, module in model.named_modules() if module.training and path in called]
    return [f"{path} is in train mode, and the model is not: it was traced in eval mode" for path in found]


def _unused(module: fx.GraphModule, beside: set[Any]) -> list[str]:
    used = beside | {node.target for node in module.graph.nodes if node.op == "get_attr"}
    owners = beside | {node.target for node in module.graph.nodes if node.op == "call_module"}
    names = []
    for name, _ in module.named_parameters():
        parts = name.split(".")
        if name not in used and not any(".".join(parts[:end]) in owners for end in range(1, len(parts))):
            names.append(f"parameter {name} is not used by the graph")
    return names


# ---- what is noted on a traced model ---------------------------------------------------------------------------------

_ASSUMPTIONS = "fxquant.assumptions"
_MOVED = "fxquant.moved_by_forward"
_RANDOM = "fxquant.random_by_forward"
_UNTRAINED = "fxquant.untrained_here"


def assumptions(module: fx.GraphModule) -> list[str]:
    """Return what was fixed while tracing, one sentence each."""
    found: list[str] = model_meta(module).get(_ASSUMPTIONS, [])
    return found


def moved_by_forward(module: fx.GraphModule) -> dict[str, str]:
    """Return the tensors that forward moves in train mode, and the graph never, each with the line of the user's code or "".

    Those of modules that the graph calls as they are, in float, do move.
    """
    called = [str(node.target) for node in module.graph.find_nodes(op="call_module")]
    called += [path.rpartition(".")[0] for path in called if isinstance(graph.resolve(module, path), Method)]
    found: dict[str, str] = model_meta(module).get(_MOVED, {})
    return {name: line for name, line in found.items() if not any(name.startswith(f"{path}.") for path in called)}


def random_by_forward(module: fx.GraphModule) -> list[Place]:
    """Return the places where forward draws random numbers in train mode alone: the path of the module, and the line of the user's code."""
    return [(path, line) for path, _, line in (place.partition("\t") for place in model_meta(module).get(_RANDOM, ()))]


def untrained_here(module: fx.GraphModule) -> list[str]:
    """Return parameters that train in the float model alone, each with the first line of the user's code that reads it."""
    found: list[str] = model_meta(module).get(_UNTRAINED, [])
    return found


def note_state(module: fx.GraphModule, state: MovedState, recording: Handler, untrained: list[str]) -> None:
    """Write on a traced model what forward changes in train mode, where that mode alone is random, and what only the float model trains."""
    module.meta[_ASSUMPTIONS] = [*assumptions(module), *state.notes()]
    named = (*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False))
    held = {*recording.read, *(name for name, _ in named)}
    moved = {name: line for name, line in state.moved.items() if name in held}
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
    kept = [path for path, module in shells.root.named_modules() if not module.training]
    said = [*([f"keeps {_listed(kept)} in eval mode"] if kept else []), *([f"freezes {_listed(frozen)}"] if frozen else [])]
    return kept, frozen, [f"{method} {' and '.join(said)}, and so does train() of this model"] if said else []


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

"""The traced GraphModule: its module tree, what is written on it, and the check of its inputs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import fx, nn

from fxquant import graph as facts
from fxquant.errors import ConfigurationError
from fxquant.graph import BatchDim, TensorFact
from fxquant.trace.snapshot import Snapshot
from fxquant.trace.tracer import Recording

_STAGE = "fxquant.stage"
_ASSUMPTIONS = "fxquant.assumptions"
_TRANSIENT = "fxquant.transient_buffers"


def is_traced(module: object) -> bool:
    """Whether a module is a GraphModule that `trace` made and no pass has changed the stage of."""
    return isinstance(module, fx.GraphModule) and module.meta.get(_STAGE) == "traced"


def assumptions(module: fx.GraphModule) -> list[str]:
    """What was fixed while tracing, one sentence each."""
    found: list[str] = module.meta.get(_ASSUMPTIONS, [])
    return found


def build(model: nn.Module, recording: Recording) -> fx.GraphModule:
    """A GraphModule with the model's own parameter names, and parameters shared with the model."""
    snapshot = Snapshot(model, own_buffers=True)
    called = {node.target for node in recording.graph.nodes if node.op == "call_module"}
    module = fx.GraphModule(nn.Module(), fx.Graph(), type(model).__name__)
    shell = _PlainTree(snapshot, called).build(snapshot.root)
    for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        module.__dict__[kind].update(shell.__dict__[kind])
    for name, constant in recording.constants.items():
        module.register_buffer(name, constant, persistent=False)
    module.eval()
    facts.replace_graph(module, recording.graph)
    module.recompile()
    module.meta[_STAGE] = "traced"
    module.meta[_ASSUMPTIONS] = [*recording.notes, *_fixed_sizes(module), *_unused(module)]
    module.meta[_TRANSIENT] = sorted(module._non_persistent_buffers_set)
    attach_input_check(module)
    return module


class _PlainTree:
    """Builds the tree of a graph: what is called (or is inside of what is called) stays, anything else becomes a plain `nn.Module`."""

    def __init__(self, snapshot: Snapshot, called: set[Any]) -> None:
        self._called = {identity for identity, path in snapshot.paths.items() if path in called}
        self._built: dict[tuple[int, bool], nn.Module] = {}

    def build(self, module: nn.Module, whole: bool = False) -> nn.Module:
        """The counterpart of a shell; `whole` says that it is inside of what is called."""
        called = id(module) in self._called
        whole = whole or called
        known = self._built.get((id(module), whole))
        if known is not None or isinstance(module, torch.jit.ScriptModule):
            return known or module
        plain: nn.Module = object.__new__(type(module)) if whole else nn.Module()
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


def _fixed_sizes(module: fx.GraphModule) -> list[str]:
    sizes = []
    for node in module.graph.find_nodes(op="placeholder"):
        fact = facts.fact(node)
        if isinstance(fact, TensorFact):
            sizes.append(f"input {node.target} is {fact}: every size but B is fixed")
    return sizes


def _unused(module: fx.GraphModule) -> list[str]:
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    owners = {node.target for node in module.graph.nodes if node.op == "call_module"}
    names = []
    for name, _ in module.named_parameters():
        parts = name.split(".")
        if name not in used and not any(".".join(parts[:end]) in owners for end in range(1, len(parts))):
            names.append(f"parameter {name} is not used by the graph")
    return names


# ---- the check of the inputs ---------------------------------------------------------------------------------------


def attach_input_check(module: fx.GraphModule) -> None:
    """Let the module check its inputs against the facts of its placeholders before it computes anything.

    The check survives `copy.deepcopy`; calling this again replaces it.
    """
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _check_inputs:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    module.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    if _restore not in module._deepcopy_hooks:
        module._deepcopy_hooks.append(_restore)


def _restore(copy: fx.GraphModule) -> None:
    # deepcopy of a GraphModule forgets its hooks, and which of its own buffers are not to be saved.
    copy._non_persistent_buffers_set.update(set(copy.meta.get(_TRANSIENT, ())) & set(copy._buffers))
    attach_input_check(copy)


def _check_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    batch: tuple[str, int] | None = None
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        fact = facts.fact(node)
        name = str(node.target)
        given = args[index] if index < len(args) else kwargs.get(name)
        if not isinstance(fact, TensorFact) or given is None:
            continue
        _check_kind(name, given, fact)
        for dim, (size, wanted) in enumerate(zip(given.shape, fact.shape, strict=True)):
            if not isinstance(wanted, BatchDim):
                if size != wanted:
                    _refuse_input(name, f"dimension {dim} has size {size}", f"the model was traced with {fact}, and only B can vary")
            elif batch is None:
                batch = (name, size)
            elif batch[1] != size:
                _refuse_input(name, f"its batch is {size}", f"input {batch[0]} has a batch of {batch[1]}, and all inputs share one")


def _check_kind(name: str, given: Any, fact: TensorFact) -> None:
    if not isinstance(given, torch.Tensor):
        _refuse_input(name, f"it is a {type(given).__name__}", f"the model was traced with a tensor, {fact}")
    if given.dim() != len(fact.shape):
        _refuse_input(name, f"it has {given.dim()} dimensions", f"the model was traced with {fact}")
    if given.dtype != fact.dtype:
        _refuse_input(name, f"its type is {given.dtype}", f"the model was traced with {fact}")


def _refuse_input(name: str, what: str, because: str) -> None:
    raise ConfigurationError(
        f"input {name} does not fit the graph: {what}",
        because=because,
        remedy="pass an input of that form, or trace the model again with an example of the new one",
    )

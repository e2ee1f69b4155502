"""The GraphModule that every model here is, its passes under activation checkpointing, and the process that it is compiled in.

It keeps its facts when it is copied or pickled, and its dtype.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.carried import SETTINGS, refuse_changes
from fxquant.ir.graph import BATCH_SIZES, Code, TensorFact, fact, is_deployed, own, own_names
from fxquant.ir.integer import Reference
from fxquant.support import logger

CARRIED = "fxquant.ir.carried"  # in `meta` of a model: what else the float model held
KEPT_IN_EVAL = "fxquant.kept_in_eval"  # in `meta`: paths of modules that the model's own `train` keeps in eval mode
FROZEN_NORMS = "fxquant.frozen_norms"  # in `meta`: names of running means that batch norms read in train mode, and never move
FROZEN_BY_TRAIN = "fxquant.frozen_by_train"  # in `meta`: names of parameters that it freezes
CALLS = "fxquant.calls"  # in `meta`: what the calls of modules read and returned, in the order in which they ended: `hooks.Call`
HOOKS = "_fxquant_hooks"  # what runs a prepared model while its modules have hooks
SAMPLES = "_fxquant_samples"  # samples that a prepared model keeps for a calibration that continues; no file has them
OPERATORS = "quantized"  # the module of a prepared model that holds its operators
RUNNER = "_fxquant_runner"  # what runs an integer model, if that is not its generated code


class Model(fx.GraphModule):
    """A GraphModule whose copies keep everything: unused parameters, hooks, and `meta`.

    The user's modules and parameters may have any names, also those of a GraphModule's own attributes ("graph", "meta", "code").
    Its numbers are integers in float32 tensors and scales that are float32, so it moves between devices but not to another
    float dtype. An integer model is always in eval mode, and without gradients.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in own_names() and not isinstance(value, torch.Tensor | torch.nn.Module):
            object.__setattr__(self, name, value)  # nn.Module would take it for the user's
        else:
            meta = self.__dict__.get("meta", {})
            if meta.get("stage") == "PREPARED" and SETTINGS in meta:
                refuse_changes(self, meta[SETTINGS], name, value)
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return the module, parameter or buffer of that name, or else the float model's carried attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            carried = self.__dict__.get("meta", {}).get(CARRIED)
            if carried is None or (name.startswith("__") and name.endswith("__")):
                raise
            try:
                return carried.find(self, name)
            except AttributeError as error:
                if str(error) != name:
                    raise  # raised by the user's own property
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def recompile(self) -> PythonCode:
        self._graph.set_codegen(Code())
        code = super().recompile()
        if is_deployed(self):  # every GraphModule has its own class, which holds its code
            type(self).forward = torch.no_grad()(_run_by(type(self).forward))
        elif self.__dict__.get("meta", {}).get("stage") == "PREPARED":
            type(self).forward = _with_hooks(type(self).forward)
        runner = self.__dict__.get(RUNNER)
        if runner is not None:
            runner.reset()
        return code

    @staticmethod
    def of(root: torch.nn.Module, graph: fx.Graph) -> Model:
        """Return a model with the parameters, buffers and submodules of `root`, which are shared, and this graph.

        It is not compiled yet: call `recompile` before running it.
        """
        model = Model(torch.nn.Module(), fx.Graph())
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            model.__dict__[name] = root.__dict__[name].copy()
        model.meta = dict(root.meta) if isinstance(root, fx.GraphModule) else {}
        model.training = root.training
        replace_graph(model, graph)
        return model

    def train(self, mode: bool = True) -> Model:
        """Set train or eval mode. An integer model stays in eval mode.

        Modules that the float model's own `train` keeps in eval mode, and parameters that it freezes, are so here.
        """
        mode = mode and not is_deployed(self)
        super().train(mode)
        meta = self.__dict__.get("meta", {})
        in_eval, frozen = (set(meta.get(key, ())) if mode else set() for key in (KEPT_IN_EVAL, FROZEN_BY_TRAIN))
        for path, module in self.named_modules() if in_eval else ():
            module.training = path not in in_eval
        for name, parameter in self.named_parameters() if frozen else ():
            parameter.requires_grad_(parameter.requires_grad and name not in frozen)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Model:
        """Move to another device; a change of the float dtype is refused before anything is changed."""
        dtype = fn(torch.empty(0, dtype=torch.float32, device="cpu")).dtype
        if dtype != torch.float32:
            because = "its integers and scales are exact in float32, and would be rounded"
            remedy = "leave it in float32; torch.autocast around a call lets its float operators compute in another type"
            raise ConfigurationError(f"the model cannot be converted to {dtype}", because=because, remedy=remedy)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)  # .float() leaves what is float64

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state_dict, without constants that only older versions save, and without scales that belong to another grid.

        Names that all begin with `module.`, as those of DataParallel and DistributedDataParallel do, lose this prefix.
        """
        if state_dict and not hasattr(self, "module") and all(key.startswith(f"{prefix}module.") for key in state_dict):
            for key in list(state_dict):
                state_dict[prefix + key.removeprefix(f"{prefix}module.")] = state_dict.pop(key)
        for name in self._non_persistent_buffers_set:
            state_dict.pop(prefix + name, None)
        others = _of_other_grids(self, state_dict, prefix)
        if others:
            own = self.state_dict(prefix=prefix)
            for key in [key for key in state_dict if key.startswith(others)]:
                # Factors of channels are a part of the function that the other weights compute.
                if ".factors." not in key or key not in own or own[key].shape != state_dict[key].shape:
                    del state_dict[key]
            names = ", ".join("%" + other.removeprefix(f"{prefix}{OPERATORS}.").removesuffix(".") for other in others[:8])
            logger.warning(
                "%d operators have other channels, or grids of another kind, in the state_dict: load it with strict=False, and calibrate;"
                " their scales are not taken: %s",
                len(others),
                names + ", …" * (len(others) > 8),
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __prepare_scriptable__(self) -> Any:
        """Return the module that `torch.jit.script` compiles for an integer model: a call of the program that `torch.jit.trace` records."""
        if self.__dict__.get("meta", {}).get("stage") == "PREPARED":
            raise no_program_of_prepared("torch.jit.script")
        inputs = self.graph.find_nodes(op="placeholder")
        facts = [value for value in map(fact, inputs) if isinstance(value, TensorFact)]
        if not is_deployed(self) or len(facts) < len(inputs):
            because = "it checks its inputs in Python"
            remedy = "use torch.jit.trace or torch.export.export; fxq.export.export_pt2 also compares the bits"
            raise ExportError("torch.jit.script cannot make a program of this model", because=because, remedy=remedy)
        zeros = tuple(torch.zeros(value.at(BATCH_SIZES[0]), dtype=value.dtype, device="cpu") for value in facts)
        traced: Any = torch.jit.trace(self, zeros, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        program, graph = nn.ModuleDict({"program": traced}), fx.Graph()
        graph.output(graph.call_module("program", tuple(graph.placeholder(node.name) for node in inputs)))
        return fx.GraphModule(program, graph)

    def __copy__(self) -> Model:
        # The copy that GraphModule makes, and DataParallel runs, would have neither hooks nor unused parameters.
        copied = Model.of(self, copy.deepcopy(self.graph))
        for name, value in self.__dict__.items():
            if name not in _OF_EVERY_COPY:
                copied.__dict__[name] = copy.copy(value) if isinstance(value, dict | set) or name == RUNNER else value
        copied.recompile()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        copied = Model(torch.nn.Module(), fx.Graph(), type(self).__name__)
        memo[id(self)] = copied
        state = copy.deepcopy({name: value for name, value in self.__dict__.items() if name != "_graph"}, memo)
        copied.__dict__.update(state)
        replace_graph(copied, copy.deepcopy(self.graph))
        copied.recompile()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # A GraphModule would be traced again from its code, and forget every fact.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_graph", SAMPLES)}
        return _unpickle, (state, [_entry(node) for node in self.graph.nodes])


def _of_other_grids(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> tuple[str, ...]:
    """Return the state_dict prefixes of operators whose tensors in `state_dict` have other shapes, or that differ in having zero points."""
    operators = model._modules.get(OPERATORS)
    groups = []
    for name, operator in operators._modules.items() if operators is not None else ():
        group = f"{prefix}{OPERATORS}.{name}."
        own = {} if operator is None else operator.state_dict(prefix=group)
        loaded = {key: value for key, value in state_dict.items() if key.startswith(group)}
        zero_points = [any(key.endswith(".zero_point") for key in keys) for keys in (own, loaded)]
        differs = [key for key in own.keys() & loaded.keys() if torch.is_tensor(own[key]) and own[key].shape != loaded[key].shape]
        if loaded and (differs or zero_points[0] != zero_points[1]):
            groups.append(group)
    return tuple(groups)


def no_program_of_prepared(by: str) -> ExportError:
    """Return the error for a function of PyTorch that is to make a program of a prepared model."""
    because = "it observes, trains and proves its integers in Python"
    remedy = "export what fxq.convert(prepared) returns: by torch.jit, fxq.export.export_pt2 or fxq.export_onnx"
    return ExportError(f"{by} cannot make a program of a prepared model", because=because, remedy=remedy)


def look_at_constants(model: Any) -> None:
    """Make the runner of an integer model read all constants again, so that its results equal an exported file's."""
    runner = getattr(model, "__dict__", {}).get(RUNNER)
    if runner is not None:
        runner.follow(model)


def _refuse_proxies(inputs: tuple[Any, ...]) -> None:
    """Raise ExportError if torch.fx traces the model: it computes with proxies of tensors."""
    if any(isinstance(value, fx.Proxy) for value in inputs):
        because = "it computes with the values of its inputs, in Python"
        remedy = "trace the float model; fxq.compare compares a model with it, and fxq.inspect.record reads tensors"
        raise ExportError("torch.fx cannot trace a prepared or an integer model", because=because, remedy=remedy)


def _run_by(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that the model's runner computes, where it has one; `reference` is the one that runs the graph as it is."""

    @functools.wraps(reference)
    def forward(self: Model, *inputs: Any, **named: Any) -> Any:
        _refuse_proxies(inputs)
        runner = self.__dict__.get(RUNNER)
        return reference(self, *inputs, **named) if runner is None or named else runner(self, reference, inputs)

    return forward


def _with_hooks(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that calls hooks of modules, and can be computed again inside of backward; `reference` runs the graph."""

    @functools.wraps(reference)
    def forward(self: Model, *inputs: Any, **named: Any) -> Any:
        _refuse_proxies(inputs)
        hooks = None if torch.compiler.is_compiling() else self.__dict__.get(HOOKS)
        if hooks is None:
            return reference(self, *inputs, **named)
        refuse_changes(self, self.meta.get(SETTINGS, {}))

        def call() -> Any:
            return hooks.run(self, inputs, named) if hooks.active(self) else reference(self, *inputs, **named)

        return run_pass(self, call, (inputs, named))

    return forward


_OF_EVERY_COPY = ("_graph", "_code", "meta", "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _unpickle(state: dict[str, Any], entries: list[tuple[Any, ...]]) -> Model:
    model = Model(torch.nn.Module(), fx.Graph())
    model.__dict__.update(state)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, meta in entries:
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda value: nodes[value.node] if isinstance(value, Reference) else _found(value)
        )
        nodes[name] = graph.create_node(op, _found(target), args, kwargs, name)
        nodes[name].meta.update((key, own(value, _found, _Function)) for key, value in meta.items())
    replace_graph(model, graph)
    model.recompile()
    return model


def _entry(node: fx.Node) -> tuple[Any, ...]:
    # One by one: pickling a node would recurse through all that it reads.
    args, kwargs = own(own((node.args, node.kwargs), lambda operand: Reference(operand.name)), _by_name, FunctionType)
    meta = {key: own(value, _by_name, FunctionType) for key, value in node.meta.items()}
    return node.op, node.name, _by_name(node.target), args, kwargs, meta


@dataclass(frozen=True)
class _Function:
    """A pickled reference, by module and name, to a function with a local qualified name, such as some of `torch.nn.functional`."""

    module: str
    name: str


def _by_name(value: Any) -> Any:
    """Return a `_Function` for a module's function with a local qualified name; any other value unchanged."""
    if not isinstance(value, FunctionType) or "<locals>" not in value.__qualname__:
        return value
    function: Any = getattr(sys.modules.get(value.__module__), value.__name__, None)
    return _Function(value.__module__, value.__name__) if function is value else value


def _found(value: Any) -> Any:
    return getattr(import_module(value.module), value.name) if isinstance(value, _Function) else value


def free_name(gm: torch.nn.Module, name: str) -> str:
    """Return the name with underscores appended until no module, parameter or buffer and no attribute of GraphModule has it."""
    while name in own_names() or any(name in registry for registry in (gm._modules, gm._parameters, gm._buffers)):
        name += "_"
    return name


def replace_graph(gm: fx.GraphModule, graph: fx.Graph) -> None:
    """Give the module another graph without compiling it; assigning `gm.graph` would compile at once."""
    gm._graph = graph
    graph.owning_module = gm


def dress_carried(model: fx.GraphModule) -> None:
    """Give a model the preserved attributes of submodules."""
    if CARRIED in model.meta:
        model.meta[CARRIED].dress(model)


# ---- passes of a prepared model under activation checkpointing -------------------------------------------------------
#
# A pass in state TRAIN moves scales and running statistics. A pass inside of backward that repeats it must start from the same buffers,
# and must move nothing. Gradients are then those without checkpointing, and statistics move once a step.
PASSES = "_fxquant_passes"  # what a model remembers of its passes
PASSES_KEPT = 32  # passes that are remembered; of more micro-batches before one backward pass, the first could not be computed again
_STILL = (".observer.", ".others.", ".learned.")  # buffers that calibration moves, and a start that is taken once


def run_pass(model: nn.Module, call: Callable[[], Any], inputs: Any) -> Any:
    """Run a prepared model and return its result; a pass inside of backward starts from the buffers of the pass that it repeats.

    Raises ConfigurationError for a pass inside of backward that repeats none, and moves something; and for a transform of torch.func
    that is not possible.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed(model, call)
    if not model.training:
        return call()
    if torch._C._current_graph_task_id() != -1:
        return _again(model, call, inputs)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or not torch.is_grad_enabled():  # may be computed again
        passes = model.__dict__.setdefault(PASSES, Passes())
        started = {(path, name): value.clone() for path, name, value in _moving(model)}
        storages = [StorageWeakRef(each.untyped_storage()) for each in _tensors(inputs)]  # type: ignore[no-untyped-call]
        passes.taken.append(Taken(_key(inputs), storages, started))
    return call()


class Taken(NamedTuple):
    """One pass: its key, the storages of its inputs, and the buffers that it started from by the path of the module and the name."""

    key: Any
    storages: list[StorageWeakRef]
    buffers: dict[tuple[str, str], Tensor]


class Passes:
    """The buffers that each of the last passes started from, with the key of the pass. A copy of a model has had no passes."""

    def __init__(self) -> None:
        self.taken: deque[Taken] = deque(maxlen=PASSES_KEPT)

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, ()


def _again(model: nn.Module, call: Callable[[], Any], inputs: Any) -> Any:
    key, passes = _key(inputs), model.__dict__.get(PASSES, Passes())
    # Where an input of a pass has been freed, another tensor may have its address.
    same = (each for each in reversed(passes.taken) if each.key == key and not any(storage.expired() for storage in each.storages))
    started = next((each.buffers for each in same), None)
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for path, name, value in list(_moving(model)):
            registry = model.get_submodule(path)._buffers
            before.append((registry, name, value))
            registry[name] = (value if started is None else started[path, name]).clone()
        result = call()
        if started is None and any(not torch.equal(registry[name], value) for registry, name, value in before if not value.isnan().any()):
            raise ConfigurationError(
                "the prepared model is called inside of backward, on inputs that it was not called on before",
                because="recomputation starts from the scales and statistics of the first pass, which are not known;"
                f" those of the last {PASSES_KEPT} passes under activation checkpointing are",
                remedy="checkpoint only the call of the prepared model, on tensors that do not change until backward,"
                " or call fxq.freeze(prepared) first",
            )
        return result
    finally:
        for registry, name, value in before:
            registry[name] = value


def _transformed(model: nn.Module, call: Callable[[], Any]) -> Any:
    """Run the pass under a transform of torch.func, which lets no tensor outside of it move, and no number be read from one inside."""
    with torch._C._DisableFuncTorch():
        before = [(value, value.clone()) for value in model.buffers()] if model.training else []
    try:
        return call()
    except RuntimeError as error:
        with torch._C._DisableFuncTorch(), torch.no_grad():
            for value, saved in before:
                value.copy_(saved)
        raise ConfigurationError(
            "torch.func cannot transform this pass of the prepared model",
            because="in train mode, scales and statistics change in place, and numbers are read from batched or differentiated tensors; "
            f"PyTorch says: {str(error).splitlines()[0]}",
            remedy="call fxq.freeze(prepared), and the model once, before the transform; take vmap over inputs, not over parameters",
        ) from error


def _moving(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Return the buffers that training may move: of each the path of its module, its name, and the tensor."""
    return [
        (path, name, value)
        for path, module in model.named_modules()
        if not any(part in f".{path}." for part in _STILL)
        for name, value in module._buffers.items()
        if value is not None
    ]


def _key(inputs: Any) -> Any:
    return tuple((each.data_ptr(), tuple(each.shape), None if each.is_inference() else each._version) for each in _tensors(inputs))


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


# ---- what holds while something is compiled or run -------------------------------------------------------------------
@contextmanager
def collection_paused() -> Iterator[None]:
    """Inside, garbage collection is off: compiling creates almost no garbage, and scanning its objects takes half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:  # of several compilations at once the first has found it on
            gc.enable()


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia")


@contextmanager
def autocast_off() -> Iterator[None]:
    """Inside, autocast is off for every device in this thread, so that compilation does not depend on the caller's autocast."""
    with ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def default_device_cpu() -> Iterator[None]:
    """Inside, PyTorch makes tensors on the CPU where no device is named: its own exporters and loaders name none."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside, a float computation has the same bits, whatever autocast and whatever number of threads is set outside.

    Kernels of convolutions and matrix products choose the order of their sums by the number of threads, so it is one thread.
    """
    threads = torch.get_num_threads()
    with autocast_off():
        try:
            torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)

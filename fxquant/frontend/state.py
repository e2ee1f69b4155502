"""The effects of one call of forward in train mode that a graph of eval mode does not have.

They are changes of state, of buffers, tensors and numbers that a graph reads and never changes, and random numbers that are drawn.
"""

import contextlib
import inspect
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxquant.frontend.environment import EXPORTED_AT, OwnRandomNumbers, Snapshot, frames, undisturbed, user_source
from fxquant.frontend.inputs import ExampleInputs
from fxquant.frontend.values import ATOMS
from fxquant.support import reached
from fxquant.support.files import memory_start

_FORWARDS = {kind.forward.__code__ for kind in (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm, nn.modules.instancenorm._InstanceNorm)}
_WEIGHTS_FIRST = inspect.Signature([
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for name in ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
])  # fmt: skip
_BATCH_NORMS: dict[Any, inspect.Signature] = {
    **{function: inspect.signature(function) for function in (F.batch_norm, F.instance_norm)},
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), _WEIGHTS_FIRST),
}


Place = tuple[str, str]


@dataclass
class MovedState:
    """The state that one call of forward in train mode changes, and its random draws."""

    # Names of buffers and of other tensors, with the line of the user's code that changes each, "" where it is none.
    moved: dict[str, str] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)  # names of attributes that hold another number afterwards
    # Names of running means that functions of batch norm read with training=False in train mode, too.
    frozen_norms: list[str] = field(default_factory=list)
    # The places where random numbers are drawn: the path of the innermost module, and the line of the user's code.
    draws: list[Place] = field(default_factory=list)
    noise: frozenset[str] = frozenset()  # paths of the user's modules that draw, and return a tensor of the shape of their only argument
    dropped: dict[Place, float] = field(default_factory=dict)  # the places of calls of attention that drop elements, with the probability
    # Names of the parameters that have a gradient, with the first line of the user's code that reads each.
    trained: dict[str, str] = field(default_factory=dict)
    failed: str = ""  # why forward could not be called; empty where it was

    def notes(self) -> list[str]:
        """Return sentences for `explain` on changed attributes and a failed call; changed tensors are reported elsewhere."""
        sentences = [f"attribute {name} is changed by forward in train mode: here it keeps its value of the trace" for name in self.numbers]
        unknown = f"whether forward moves buffers or draws random numbers in train mode is not known: {self.failed}"
        return [*sentences, unknown] if self.failed else sentences


NOTHING_MOVED = MovedState()


def state_moved_by_forward(model: nn.Module, inputs: ExampleInputs) -> MovedState:
    """Call forward once in train mode, on copies of the model's state, and return the tensors that it changed and its random calls.

    PyTorch's batch norms and dropouts stay in eval mode: a prepared model implements their train mode.
    """
    with torch.inference_mode(False):
        snapshot = Snapshot(model, own_buffers=True)
        own = own_parameters(snapshot.modules)
        shells = [shell for shell in snapshot.modules if not isinstance(shell, torch.jit.ScriptModule)]
        if any(map(overrides_train, shells)):
            with contextlib.suppress(Exception):  # whatever the user's code raises; `own_train_mode` says so
                snapshot.root.train(True)
        parameters = {id(own[key]): name for key, name in snapshot.tensors.items() if key in own}
        watch, numbers = _Watch(snapshot, parameters), Draws(snapshot, _call.__code__)
        for shell in shells:
            # Batch and instance norms whose forward is PyTorch's.
            norm = isinstance(shell, nn.modules.batchnorm._NormBase) and type(shell).forward.__module__.startswith("torch.nn.modules.")
            shell.__dict__["training"] = not norm and not isinstance(shell, nn.modules.dropout._DropoutNd)
            shell.__dict__["_buffers"] = _Registry(shell._buffers, watch)
            shell.__dict__["_forward_hooks"] = OrderedDict({**shell._forward_hooks, -1: numbers.returned})
        before = {path: dict(_fingerprints(module)) for path, module in snapshot.root.named_modules()}
        args, kwargs = inputs.arguments({name: tensor.clone() for name, tensor in inputs.tensors().items()})
        try:
            with torch.enable_grad(), numbers.of_python(), undisturbed(numbers=numbers), watch:
                result = _call(snapshot.root, args, kwargs)
        except Exception as error:  # whatever the user's code raises: in train mode many models want labels
            return MovedState(failed=f"called on the example inputs it raises {type(error).__name__}: {error}".splitlines()[0])
    trained = set(map(id, with_gradient(result)))
    moved = MovedState(
        {name: line for name, line in watch.moved().items() if not _counts_batches(snapshot.root, name)},
        frozen_norms=[] if isinstance(model, fx.GraphModule) else sorted(watch.frozen - watch.live),
        draws=list(numbers.places),
        noise=frozenset(numbers.fits),
        dropped=watch.dropped,
        trained={name: watch.read.get(name, "") for key, name in parameters.items() if key in trained},
    )
    for path, module in snapshot.root.named_modules():
        _compare(path, before.get(path, {}), dict(_fingerprints(module)), moved)
    return moved


def own_parameters(shells: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Replace the parameters of shells by copies; return the copies by `id` of the model's parameters."""
    copies: dict[int, nn.Parameter] = {}
    for shell in shells:
        for name, parameter in () if isinstance(shell, torch.jit.ScriptModule) else shell._parameters.items():
            if parameter is not None:
                copy = copies.setdefault(id(parameter), nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                shell._parameters[name] = copy
    return copies


def overrides_train(module: nn.Module) -> bool:
    """Return whether a module's class, or the module itself, has a `train` of the user's."""
    method = vars(module).get("train", type(module).train)
    return method is not nn.Module.train and not str(getattr(method, "__module__", "")).startswith("torch.")


def with_gradient(result: Any) -> list[Tensor]:
    """Return the leaf tensors, such as parameters, that get gradients in a backward pass from the tensors of a nested result."""
    functions: list[Any] = [value.grad_fn for value in tree_leaves(result) if isinstance(value, Tensor)]
    every = reached(functions, lambda function: () if function is None else (following for following, _ in function.next_functions))
    return [function.variable for function in every if hasattr(function, "variable")]


def _call(root: nn.Module, args: Any, kwargs: Any) -> Any:
    return root(*args, **kwargs)


def _counts_batches(root: nn.Module, name: str) -> bool:
    """Return whether a buffer is the counter of a batch norm whose statistics do not depend on it, as they have a momentum."""
    path, _, counter = name.rpartition(".")
    return counter == "num_batches_tracked" and getattr(root.get_submodule(path), "momentum", None) is not None


class _Registry(dict[str, Any]):
    """The buffers of a module, which tell when one is replaced."""

    def __init__(self, buffers: dict[str, Any], watch: "_Watch") -> None:
        super().__init__(buffers)
        self._watch = watch

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not self.get(name):
            self._watch.changed(self.get(name))
        super().__setitem__(name, value)


class _Watch(TorchFunctionMode):
    """Observes which tensors of a model functions change, and how batch norms are called.

    frozen   names of running means that were read with training=False
    live     names of running means that were read with training=True: a prepared model updates them as well
    dropped  the places of attention calls with dropout, with the probability
    read     names of parameters, with the first line that reads each
    """

    def __init__(self, snapshot: Snapshot, parameters: dict[int, str]) -> None:
        super().__init__()
        buffers = {id(tensor): tensor for shell in snapshot.modules for tensor in shell.buffers(recurse=False)}
        named = {**snapshot.attributes, **{key: name for key, name in snapshot.tensors.items() if key in buffers}, **parameters}
        self._paths, self.dropped, self.read, self._parameters = snapshot.paths, dict[Place, float](), dict[str, str](), parameters
        shell_parameters = [tensor for shell in snapshot.modules for tensor in shell.parameters(recurse=False)]
        self._kept = [*shell_parameters, *buffers.values(), *snapshot._copies.values()]  # so that identities stay taken
        self._tensors = {id(tensor): tensor for tensor in self._kept if isinstance(tensor, Tensor) and id(tensor) in named}
        self._names = named
        self._versions = {key: tensor._version for key, tensor in self._tensors.items()}
        self._before = {key: tensor.clone() for key, tensor in self._tensors.items()}
        self._lines, self._followed, self._data_lines = dict[int, str](), set[int](), dict[int, str]()
        self._storages = {memory_start(tensor): key for key, tensor in self._tensors.items() if tensor.numel()}
        self.frozen: set[str] = set()
        self.live: set[str] = set()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _BATCH_NORMS and not any(frame.f_code in _FORWARDS for frame in itertools.islice(frames(), 10)):  # of the user's own
            arguments = _BATCH_NORMS[func].bind(*args, **(kwargs or {})).arguments
            mean, variance = arguments.get("running_mean"), arguments.get("running_var")
            training = bool(arguments.get("use_input_stats", arguments.get("training", func is F.instance_norm)))
            if id(mean) in self._names:
                (self.live if training else self.frozen).add(self._names[id(mean)])
                self._followed |= {id(mean), id(variance)} if training else set()
        if func is F.scaled_dot_product_attention:
            share = (kwargs or {}).get("dropout_p", args[4] if len(args) > 4 else 0.0)
            self.dropped |= {place(self._paths, _call.__code__): float(share)} if share else {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                key = id(value) if id(value) in self._tensors else id(value._base)
                if key in self._parameters and self._parameters[key] not in self.read:
                    self.read[self._parameters[key]] = user_source(_call.__code__)
                elif func.__name__.endswith("_") and type(value) is Tensor and memory_start(value) in self._storages:  # by .data
                    self._data_lines[self._storages[memory_start(value)]] = user_source(_call.__code__)
                if key in self._tensors and self._tensors[key]._version != self._versions[key]:
                    self._versions[key] = self._tensors[key]._version
                    self.changed(self._tensors[key])
        return result

    def changed(self, tensor: Any) -> None:
        """Note the line that changes or replaces a tensor."""
        if id(tensor) in self._names and id(tensor) not in self._followed:
            self._lines.setdefault(id(tensor), user_source(_call.__code__))

    def moved(self) -> dict[str, str]:
        """Return the names of tensors that were changed or replaced, with the line."""
        changed = set(self._lines) | {key for key, before in self._before.items() if not torch.equal(before, self._tensors[key])}
        lines = {**self._data_lines, **self._lines}
        return {self._names[key]: lines.get(key, "") for key in self._names if key in changed - self._followed}


class Draws(OwnRandomNumbers):  # type: ignore[no-untyped-call]
    """Notes where random numbers are drawn.

    places  the path of the innermost module, and the line of the user's code, of each draw
    fits    paths of the user's modules that draw, and whose result has always had the shape of their only argument
    """

    def __init__(self, snapshot: Snapshot, root: CodeType) -> None:
        super().__init__()
        self._paths, self._root = snapshot.paths, root
        self.places: dict[Place, None] = {}
        self._fitting: dict[str, bool] = {}

    def noticed(self) -> None:
        self.places[place(self._paths, self._root)] = None

    @contextlib.contextmanager
    def of_python(self) -> Iterator[None]:
        """Note draws from Python's and NumPy's generators, which afterwards are as they were before."""
        generators: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
            (random.getstate, random.setstate), (np.random.get_state, np.random.set_state),
        )  # fmt: skip
        states = [(get, set_, get()) for get, set_ in generators]
        try:
            yield
        finally:
            for get, set_, before in states:
                if repr(get()) != repr(before):
                    self.places["", "forward draws from Python's random or numpy.random"] = None
                    set_(before)

    def returned(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Record, as a forward hook, whether a module's result always has the shape of its only argument."""
        fits = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(result, Tensor) and result.shape == args[0].shape
        path = self._paths[id(module)]
        self._fitting[path] = fits and self._fitting.get(path, True)

    @property
    def fits(self) -> list[str]:
        return [path for path, _ in self.places if path and self._fitting.get(path, False)]


def place(paths: Mapping[int, str], root: CodeType) -> Place:
    """Return the path of the module that is being called, and the line of the user's code that is being executed."""
    line = user_source(root)
    if line.startswith("<eval_with_key>"):  # generated code, as of an exported program
        return EXPORTED_AT.get(("", line))
    for frame in frames():
        if frame.f_code is root:
            break
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return path, line
    return "", line


def _fingerprints(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors that are plain attributes, also inside of lists and dicts."""
    for name, value in vars(module).items():
        if name[0] == "_" or name == "training":
            continue
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if all(type(item) in ATOMS or isinstance(item, Tensor) for item in items):
            yield name, list(items)


def _compare(path: str, before: dict[str, list[Any]], after: dict[str, list[Any]], moved: MovedState) -> None:
    """Add the attributes that hold something else afterwards."""
    for name, items in after.items():
        old_items, where = before.get(name), f"{path}.{name}".lstrip(".")
        if old_items is None or (len(old_items) == len(items) and all(map(_unchanged, old_items, items))) or where in moved.moved:
            continue
        if any(isinstance(item, Tensor) for item in old_items):
            moved.moved[where] = ""
        else:
            moved.numbers.append(where)


def _unchanged(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other or one != one)

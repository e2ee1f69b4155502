"""Prepare Python and the model for a trace: functions and methods are replaced until it ends, and it runs on a copy of the module tree.

`int`, `len` and the functions of `math` would silently turn a number that depends on the batch into a plain one.
Every thread sees the replacements, but they act only in a thread that traces.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxquant.frontend.gradients import STAND_INS
from fxquant.frontend.values import ATOMS, BatchNumber, TracedTensor, active, is_tracing, refuse
from fxquant.ir.carried import PLAIN, line_of
from fxquant.ir.model import autocast_off

# ---- The line of the user's code that is being executed, found quickly -----------------------------------------------
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


def frames() -> Iterator[FrameType]:
    """Yield the frames that are being executed, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_source(root: CodeType) -> str:
    """Return the innermost frame outside of torch and fxquant: "model.py:41 in forward:  y = self.act(y)".

    The search ends at a frame of `root`. Without user code inside it, the result is an empty string.
    """
    for frame in frames():
        if frame.f_code is root:
            break
        if not is_library(frame.f_code.co_filename):
            return line_of(frame.f_code, frame.f_lineno)
    return ""


def calls_from(folder: str) -> bool:
    """Return whether a function of a file in this folder, "torch/distributions/", is being executed."""
    return any(folder in frame.f_code.co_filename.replace(os.sep, "/") for frame in frames())


def raised_in(error: BaseException, folder: str) -> bool:
    """Return whether a function of a file in this folder was being executed when an error was raised."""
    return any(folder in entry.f_code.co_filename.replace(os.sep, "/") for entry, _ in traceback.walk_tb(error.__traceback__))


@functools.cache
def is_library(filename: str) -> bool:
    """Return whether a file belongs to torch, to fxquant or to Python's import machinery."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen")


@functools.cache
def source_of_error(error: BaseException, root: CodeType) -> str | None:
    """Return the user's line that was executing inside `root` when an error was raised."""
    text, inside = None, False
    for frame, line in traceback.walk_tb(error.__traceback__):
        if inside and not is_library(frame.f_code.co_filename):
            text = line_of(frame.f_code, line)
        inside = inside or frame.f_code is root
    return text


EXPORTED_AT: ContextVar[tuple[str, str]] = ContextVar("EXPORTED_AT")  # the module and the line of what an exported program computes now


def exported_at(path: str, line: str) -> None:
    """Tell where the operators that follow were written: a trace in progress, and whoever looks at this call."""
    EXPORTED_AT.set((path, line))
    if is_tracing():
        handler = active()
        handler.path, handler.line, handler.qconfig = path, line, handler.attached(path) + handler.attached("") * bool(path)


_MATH = (
    math.sqrt, math.log, math.log2, math.log10, math.log1p, math.exp, math.floor, math.ceil, math.trunc, math.pow, math.fabs, math.gcd,
    math.isqrt, math.sin, math.cos, math.atan,
)  # fmt: skip


class _AnswersLike(type):
    """The metaclass of a stand-in for a built-in class: `isinstance` and `issubclass` check against the class `stands_for`."""

    stands_for: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stands_for)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stands_for)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)


class _Number(_AnswersLike):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], BatchNumber) and is_tracing():
            return args[0] if isinstance(args[0], cls.stands_for) else active().arithmetic(cls.stands_for, args)
        return cls.stands_for(*args, **kwargs)


class _Range(_AnswersLike):
    def __call__(cls, *args: Any) -> Any:
        if any(isinstance(arg, BatchNumber) for arg in args):
            because = "a graph has a fixed number of operations, and range() was given a number that depends on the batch size"
            remedy = "write the loop with whole tensors, or fix the batch size by options=fxq.Options(dynamic_shapes={})"
            refuse("a loop runs over the batch", because=because, remedy=remedy)
        return builtins.range(*args)


def _math_stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any) -> Any:
        if is_tracing() and any(isinstance(arg, BatchNumber) for arg in args):
            return active().arithmetic(function, args)
        return function(*args)

    return stand_in


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for min or max: Python's own would compare sizes, and the order of two sizes can vary."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        numbers = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        sizes = is_tracing() and any(isinstance(each, BatchNumber) for each in numbers)
        if sizes and not kwargs and all(isinstance(each, int | float) for each in numbers):
            return active().arithmetic(function, tuple(numbers))
        return function(*args, **kwargs)

    return stand_in


_MATH_STAND_INS = {function: _math_stand_in(function) for function in _MATH}
_MATH_MODULE = ModuleType("math")  # what `math` is for the modules of a model that is traced
_MATH_MODULE.__dict__.update(math.__dict__)
_MATH_MODULE.__dict__.update((function.__name__, stand_in) for function, stand_in in _MATH_STAND_INS.items())
_BUILTIN_STAND_INS: dict[str, Any] = {
    "int": type("_Int", (_Number,), {})("_IntStandIn", (builtins.int,), {"stands_for": builtins.int}),
    "float": type("_Float", (_Number,), {})("_FloatStandIn", (builtins.float,), {"stands_for": builtins.float}),
    "range": _Range("_RangeStandIn", (), {"stands_for": builtins.range}),
    "min": _extreme(min),
    "max": _extreme(max),
    "len": lambda sized: sized.size(0) if isinstance(sized, TracedTensor) and is_tracing() else builtins.len(sized),
}


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    usual = _replacements.before(nn.Module, "__call__")
    return active().call_module(usual, module, args, kwargs) if is_tracing() else usual(module, *args, **kwargs)


def _attribute_of_module(module: nn.Module, name: str) -> Any:
    """Stands in for `nn.Module.__getattribute__`, which is that of every object."""
    value = object.__getattribute__(module, name)
    if type(value) in PLAIN and name in module.__dict__ and is_tracing():
        active().attribute_read(module, name, value)
    return value


def _call_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the call of a scripted function: a trace runs the Python that it was scripted from, where PyTorch has kept it.

    TorchScript's interpreter reads sizes of a batch as numbers, and takes no result that is its operand, as a slice of everything is.
    """
    python = getattr(function, "_torchdynamo_inline", None)
    if is_tracing() and python is not None and not active().paused:
        return python(*args, **kwargs)
    return _replacements.before(torch.jit.ScriptFunction, "__call__")(function, *args, **kwargs)


_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _keeps_to_itself(record: logging.LogRecord) -> Any:
    """Drop records of PyTorch's fake tensor log while this thread traces: the trace converts the errors logged there to a TraceError."""
    return False if is_tracing() else logging.Logger.filter(_FAKE_LOG, record)


# ---- replacing, for as long as anyone traces -------------------------------------------------------------------------
_ABSENT = object()


@dataclass
class _Replacement:
    """The value of a name before it was replaced (`_ABSENT` if there was none), and how many traces need the replacement."""

    before: Any = _ABSENT
    users: int = 0


class _Replacements:
    """Attributes of Python modules and classes that have a stand-in while at least one trace, in any thread, needs it.

    All threads see them, so every stand-in behaves like the original in a thread that does not trace.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, str], _Replacement] = {}

    def before(self, holder: Any, name: str) -> Any:
        """Return the value of an attribute when it was last replaced; a running call may ask after the value was restored."""
        return self._entries[id(holder), name].before

    @contextlib.contextmanager
    def installed(self, entries: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
        """Inside, `name` of each `holder` is its `stand_in`; the original value is restored when the last trace ends."""
        with contextlib.ExitStack() as undo:
            for holder, name, stand_in in entries:
                undo.callback(self._release, holder, name, stand_in)
                self._acquire(holder, name, stand_in)
            yield

    def _acquire(self, holder: Any, name: str, stand_in: Any) -> None:
        with self._lock:
            entry = self._entries.setdefault((id(holder), name), _Replacement())
            entry.users += 1
            present = holder.__dict__.get(name, _ABSENT)
            if present is not stand_in:
                entry.before = present
                setattr(holder, name, stand_in)

    def _release(self, holder: Any, name: str, stand_in: Any) -> None:
        with self._lock:
            entry = self._entries[id(holder), name]
            entry.users -= 1
            # If it is no longer the stand-in, somebody else has replaced it meanwhile, and will put back what they found.
            if entry.users or holder.__dict__.get(name, _ABSENT) is not stand_in:
                return
            if entry.before is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, entry.before)


_replacements = _Replacements()


@contextlib.contextmanager
def prepared_environment(model: nn.Module, numbers: OwnRandomNumbers) -> Iterator[None]:
    """Inside, this thread calls modules through the `call_module` of its trace, and Python functions keep batch numbers symbolic.

    `numbers` records whether random numbers were drawn. Other threads may trace or run models at the same time, unaffected.
    """
    entries: list[tuple[Any, str, Any]] = [
        (nn.Module, "__call__", _call_module),
        (nn.Module, "__getattribute__", _attribute_of_module),
        (torch.jit.ScriptFunction, "__call__", _call_scripted),
        (_FAKE_LOG, "filter", _keeps_to_itself),
    ]
    entries += STAND_INS
    entries += [entry for module in _python_modules(model) for entry in _stand_ins(module)]
    with undisturbed(numbers=numbers), _replacements.installed(entries):
        yield


def _stand_ins(module: ModuleType) -> Iterator[tuple[ModuleType, str, Any]]:
    names = module.__dict__
    for name, stand_in in _BUILTIN_STAND_INS.items():
        if names.get(name, stand_in) is stand_in:
            yield module, name, stand_in
    for name, value in list(names.items()):
        if value is math or value is _MATH_MODULE:
            yield module, name, _MATH_MODULE
        elif type(value) is BuiltinFunctionType and value in _MATH_STAND_INS:
            yield module, name, _MATH_STAND_INS[value]
        elif type(value) is FunctionType and value in _MATH_STAND_INS.values():  # another thread traces at this moment
            yield module, name, value


@contextlib.contextmanager
def undisturbed(numbers: OwnRandomNumbers | None = None) -> Iterator[None]:
    """Inside, this thread has its own random numbers, no autocast, and attention layers run their Python code, not the fast path.

    The random numbers, or the caller's `numbers`, are the same every time. Other threads are unaffected, and afterwards all generators
    have their state from before.
    """
    with autocast_off(), _OtherPaths(), numbers or OwnRandomNumbers():
        yield


_RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


class _OtherPaths(TorchFunctionMode):
    """Where a mode is active, attention layers do not take the path that computes something else than their Python.

    Recurrent layers compute two steps of a tensor without values: PyTorch computes each one in turn, which shows no other shape.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _RECURRENT or kwargs or len(args) != 9 or not isinstance(args[0], FakeTensor) or args[0].dim() != 3:
            return func(*args, **(kwargs or {}))
        input, axis = args[0], int(args[8])  # batch_first
        output, *states = func(input.narrow(axis, 0, min(2, input.shape[axis])), *args[1:])
        sizes = [*input.shape[:2], output.shape[2]]
        swapped = axis == 1 and output.stride(0) <= output.stride(1)
        whole = output.new_empty(sizes[1], sizes[0], sizes[2]).transpose(0, 1) if swapped else output.new_empty(sizes)
        return (whole, *states)


class OwnRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draw random numbers from streams of this mode's own; a generator is lent to an operator for one call at a time."""

    _lock = threading.RLock()  # a trace inside of a trace draws through both

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states: dict[Any, torch.Tensor] = {}
        self.drawn = False  # whether any operator has drawn, of tensors without values too

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and PyTorch's guard against that takes longer than most operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        switches = _switches(func)
        if switches is None or not all(args[at] if at < len(args) else kwargs.get(name, usual) for at, name, usual in switches):
            return func(*args, **kwargs)
        self.drawn = True
        self.noticed()
        generator = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
        device = torch.device(kwargs.get("device") or next((arg.device for arg in args if isinstance(arg, torch.Tensor)), "cpu"))
        if device.type == "meta":
            return func(*args, **kwargs)
        with self._lock, self._lent(generator or _generator_of(device)):
            return func(*args, **kwargs)

    def noticed(self) -> None:
        """Called when an operator draws."""

    @contextlib.contextmanager
    def _lent(self, generator: torch.Generator) -> Iterator[None]:
        before = generator.get_state()
        mine = self._states.get(generator)
        generator.set_state(torch.Generator(generator.device).manual_seed(0).get_state() if mine is None else mine)
        try:
            yield
        finally:
            self._states[generator] = generator.get_state()
            generator.set_state(before)


@functools.cache
def _switches(func: Any) -> tuple[tuple[int, str, Any], ...] | None:
    """Return place, name and default of the arguments without which an operator draws no random numbers; None if it never draws."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return None
    named = enumerate(func._schema.arguments)
    return tuple((at, each.name, each.default_value) for at, each in named if each.name in ("training", "train", "dropout_p"))


def _generator_of(device: torch.device) -> torch.Generator:
    """Return the generator a device's numbers are drawn from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators: Sequence[torch.Generator] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def _python_modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the model's classes, and the modules from which these import functions and classes."""
    classes = {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    direct = {kind.__module__ for kind in classes}
    used = set(direct)
    for name in direct:
        module = sys.modules.get(name)
        if module is not None and not _is_foreign(module):
            used |= {value.__module__ for value in list(module.__dict__.values()) if isinstance(value, (FunctionType, type))}
    modules = [sys.modules[name] for name in sorted(filter(None, used)) if name in sys.modules]
    return [module for module in modules if not _is_foreign(module)]


def _is_foreign(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ != "__main__"
    return is_library(file) or (file.startswith(_STANDARD_LIBRARY) and "-packages" not in file)


_STANDARD_LIBRARY = contextlib.__file__.removesuffix("contextlib.py")


# ---- shallow copies of a module tree: the trace runs on one, and the graph is built on another -----------------------
#
# A shell shares its parameters with the module it was made from, is in eval mode, and owns everything that forward may
# change: its attributes, its lists and dicts, and the plain tensors in them. Attributes that forward sets are set on the shell.
_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")  # a trace has no backward, and a graph does not call the modules
_CONTAINERS = (dict, list, tuple, set, collections.OrderedDict, collections.defaultdict)


class Snapshot:
    """A shell of every module of a model, in eval mode; where `training`, the user's own modules are in train mode."""

    def __init__(self, model: nn.Module, own_buffers: bool = False, training: bool = False) -> None:
        self.paths: dict[int, str] = {}  # the first dotted path of every shell, by identity
        self.tensors: dict[int, str] = {}  # the first dotted name of every parameter and buffer, by identity
        self.attributes: dict[int, str] = {}  # the dotted name of every other tensor, by identity
        self._own_buffers, self._training = own_buffers, training
        self._shells: dict[int, nn.Module] = {}
        self._originals: list[tuple[nn.Module, nn.Module, str]] = []  # keeps the originals alive, so that ids stay taken
        self._copies: dict[int, Any] = {}
        self.root = self._tree(model, "")  # the shell of the model itself
        for original, shell, path in self._originals:
            state = shell.__dict__
            state["training"] = self._training and not type(original).__module__.startswith("torch.nn.modules.")
            for name, value in original.__dict__.items():
                if name in state or name == "_compiled_call_impl":  # which `module.compile()` leaves
                    continue
                empty = name in _BACKWARD_HOOKS or (name in _HOOKS and not value)
                state[name] = type(value)() if empty else self._attribute(value, name, path)
        self.names = {*self.tensors.values(), *model._modules}  # the names taken by parameters, buffers and the model's children

    def shell(self, module: nn.Module) -> nn.Module:
        """Return the shell that stands for a module of the model; any other module itself."""
        return self._shells.get(id(module), module)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """Return the shell of every module that tracing met, registered in the model or not."""
        return self._shells.values()

    def _tree(self, module: nn.Module, path: str) -> nn.Module:
        previous = self._shells.get(id(module))
        if previous is not None:
            return previous
        if isinstance(module, torch.jit.ScriptModule):
            self._shells[id(module)] = module
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self.tensors.setdefault(id(tensor), f"{path}.{name}" if path else name)
            return module
        shell: nn.Module = object.__new__(type(module))
        self._shells[id(module)] = shell
        self.paths[id(shell)] = path
        self._originals.append((module, shell, path))
        prefix = path + "." if path else ""
        state = shell.__dict__
        state["_modules"] = {name: None if child is None else self._tree(child, prefix + name) for name, child in module._modules.items()}
        state["_parameters"] = dict(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.tensors.setdefault(id(parameter), prefix + name)
        state["_buffers"] = {name: self._buffer(buffer, prefix + name) for name, buffer in module._buffers.items()}
        return shell

    def _buffer(self, buffer: torch.Tensor | None, name: str) -> torch.Tensor | None:
        if buffer is None:
            return None
        own: torch.Tensor = self._copies.setdefault(id(buffer), buffer.detach().clone()) if self._own_buffers else buffer
        self.tensors.setdefault(id(own), name)
        return own

    def _attribute(self, value: Any, name: str, path: str) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, f"{path}.{name}" if path else name)
        if isinstance(value, nn.Module):
            return self._shells.get(id(value)) or self._hidden(value)
        if kind in _CONTAINERS:
            return self._container(value, name, path)
        if kind is MethodType and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.shell(value.__self__))
        if kind is functools.partial:
            keywords = {key: self._attribute(item, name, path) for key, item in value.keywords.items()}
            return functools.partial(self._attribute(value.func, name, path), *self._container(value.args, name, path), **keywords)
        return value

    def _tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if id(tensor) in self.tensors:
            return tensor
        if id(tensor) in self._copies:
            return self._copies[id(tensor)]  # type: ignore[no-any-return]
        copy = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        self._copies[id(tensor)] = copy
        self.attributes[id(copy)] = where
        return copy

    def _hidden(self, module: nn.Module) -> nn.Module:
        """Return the shell of a module that is reachable, but is not registered as a child."""
        first = len(self._originals)
        shell = self._tree(module, "")
        for original, copy, _ in self._originals[first:]:
            del self.paths[id(copy)]
            for tensor in (*copy._parameters.values(), *copy._buffers.values()):
                if tensor is not None and self.tensors.pop(id(tensor), None) is not None:
                    self.attributes[id(tensor)] = type(original).__name__
        return shell

    def _container(self, value: Any, name: str, path: str) -> Any:
        copy = self._copies.get(id(value))
        if copy is not None:
            return copy
        if isinstance(value, dict):
            copy = self._copies[id(value)] = value.copy()
            if _is_cache(name, value):
                copy.clear()
            for key, item in copy.items():
                copy[key] = self._attribute(item, name, path)
        elif isinstance(value, list):
            copy = self._copies[id(value)] = []
            copy.extend(self._attribute(item, name, path) for item in value)
        elif isinstance(value, tuple):
            items = [self._attribute(item, name, path) for item in value]
            copy = value if all(old is new for old, new in zip(value, items, strict=True)) else tuple(items)
        else:
            copy = value.copy()
        return copy


def with_backward_hooks(model: nn.Module) -> list[str]:
    """Return the paths of the modules that have backward hooks."""
    return [path for path, module in model.named_modules() if any(module.__dict__.get(hooks) for hooks in _BACKWARD_HOOKS)]


def _is_cache(name: str, value: dict[Any, Any]) -> bool:
    """Return whether a dict holds tensors that forward computed from parameters: left in place, it would hide them from the trace."""
    tensors = [item for item in value.values() if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)]
    return bool(tensors) and ("cache" in name.lower() or any(tensor.grad_fn is not None for tensor in tensors))

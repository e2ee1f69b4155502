"""The stand-ins that a traced model sees for its tensors and for numbers that depend on a size that varies.

A traced tensor is a `torch.Tensor`, so that every library accepts it. It is also an `fx.Proxy`, so that libraries which ask whether they
are being traced get the right answer. It holds the node that computes it and its `Value`, its facts at the three points that stand for all
sizes (`ir.graph`). A batch number is an `int` or `float` that knows its values there and its node.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx

from fxquant.errors import TraceError
from fxquant.ir import functional
from fxquant.ir.graph import BatchDim, TensorFact


class Value:
    """A tensor at the three points: fake tensors, or real ones where its content is known while tracing.

    Values of fake tensors are interned, so two of them describe the same shapes exactly if they are the same object.
    """

    __slots__ = ("abstract", "device", "dtype", "fact", "real", "shapes", "strides", "tensors")

    def __init__(self, tensors: tuple[torch.Tensor, ...], abstract: Value | None = None) -> None:
        self.tensors, first = tensors, tensors[0]
        self.shapes = tuple(tensor.shape for tensor in tensors)
        self.strides, self.dtype, self.device = first.stride(), first.dtype, first.device
        self.real = abstract is not None
        self.abstract = abstract or self
        self.fact: TensorFact = abstract.fact if abstract else TensorFact.between(*tensors)


@dataclass(frozen=True)
class Number:
    """A number that differs between the points."""

    values: tuple[int | float, ...]


@dataclass(frozen=True)
class View:
    """One step from a tensor to a view of it."""

    spelled: tuple[str, tuple[Any, ...], dict[str, Any]]  # the method's name and its other arguments, as `functional.write` takes them
    again: Callable[[TracedTensor], Any]  # records the same operation on another tensor and returns its result
    item: int | None = None  # which item of a sequence of views it is; None if there is one view


@dataclass(frozen=True)
class Change:
    """An in-place operation: the changed place, the views that lead to it from the whole memory, and its new value."""

    place: object
    way: tuple[View, ...] | None
    result: TracedTensor
    stopped: bool = False  # whether it is invisible to autograd: it changed a detached tensor, or ran without gradients


@dataclass(slots=True, eq=False)
class Aliases:
    """Tensors that share one memory: an in-place operation on one tensor makes the others stale."""

    whole: TracedTensor  # the memory as a whole, after the first `applied` in-place operations
    applied: int = 0
    changes: list[Change] = field(default_factory=list)  # all in-place operations, in order; their number is the version of the memory

    @property
    def version(self) -> int:
        return len(self.changes)


class _Traces(threading.local):
    """The handlers of the traces in progress in this thread, innermost last; each thread has its own list."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []


_traces = _Traces()


@contextlib.contextmanager
def tracing(handler: Any) -> Iterator[None]:
    """Inside, this thread's operations on tensors of the model are recorded by `handler`."""
    _traces.handlers.append(handler)
    try:
        yield
    finally:
        _traces.handlers.pop()


def active() -> Any:
    """Return the handler of the trace in progress in this thread. Raises TraceError if there is none."""
    if not _traces.handlers:
        because = "the model's forward handed it to another thread, or kept it after the trace: it has a shape but no content"
        remedy = "compute in the thread that calls forward, and keep no tensor outside of the model"
        raise TraceError("a tensor of a trace is used where nothing is traced", because=because, remedy=remedy)
    return _traces.handlers[-1]


def is_tracing() -> bool:
    """Return whether a trace is in progress in this thread."""
    return bool(_traces.handlers)


class TracedTensor(torch.Tensor, fx.Proxy):  # type: ignore[misc]
    """A tensor of the model while it is traced."""

    node: fx.Node
    value: Value
    aliases: Aliases | None  # the tensors that share its memory; None until there is a view
    version: int  # the version of that memory this tensor stands for
    place: object  # equal objects mean the same elements of that memory
    way: tuple[View, ...] | None  # the views that lead there from the whole memory; None if one of them cannot be taken again
    stopped: bool  # whether it is a detached tensor, or a view of one

    @staticmethod
    def __new__(cls, node: fx.Node, value: Value) -> TracedTensor:
        tensor: TracedTensor = torch.Tensor._make_wrapper_subclass(
            cls, value.shapes[0], strides=value.strides, dtype=value.dtype, device=value.device
        )
        tensor.node, tensor.value, tensor.aliases, tensor.stopped = node, value, None, False
        return tensor

    def __init__(self, node: fx.Node, value: Value) -> None:
        """Nothing: `fx.Proxy.__init__` must not run."""

    def __getattr__(self, name: str) -> NoReturn:
        # fx.Proxy would invent an attribute.
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return active().call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return active().call(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor(%{self.node.name}, {self.value.fact})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        return self.value.shapes[0][0]

    def __iter__(self) -> Iterator[Any]:
        return iter(active().rows(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:  # type: ignore[override]
        return self.clone()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(active().sizes(self))

    def size(self, dim: int | None = None) -> Any:
        sizes = active().sizes(self)
        return torch.Size(sizes) if dim is None else sizes[dim]

    def dim(self) -> int:
        return len(self.value.shapes[0])

    ndim = property(dim)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.value.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.value.device

    def requires_grad_(self, requires_grad: bool = True) -> TracedTensor:
        active().gradients.ask(self.node, requires_grad)
        return self


# Python's operators on two numbers, on two tensors besides, and on one.
Functions = tuple[Callable[..., Any], ...]
ARITHMETIC: Functions = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow)
COMPARISONS: Functions = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
ON_TENSORS: Functions = (*ARITHMETIC, operator.matmul, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
UNARY: Functions = (operator.neg, operator.pos, operator.invert, operator.abs)


def python_name(function: Callable[..., Any]) -> str:
    """Return the name of one of Python's operators in its method: "and" of `__and__`."""
    return function.__name__.strip("_")


def _recorded(function: Callable[..., Any], how: str, reflected: bool = False) -> Callable[..., Any]:
    """Return a Python operator as a method of traced tensors or batch numbers; it calls the handler's method named `how` to record it."""

    def apply(self: Any, *others: Any) -> Any:
        if isinstance(self, BatchNumber) and not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        return getattr(active(), how)(function, (*others, self) if reflected else (self, *others))

    return apply


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: active().memory.advance(self, active().operator(function, (self, other)))


for _function in (*ON_TENSORS, *COMPARISONS, *UNARY):
    setattr(TracedTensor, f"__{python_name(_function)}__", _recorded(_function, "operator"))
for _function in ON_TENSORS:
    setattr(TracedTensor, f"__r{python_name(_function)}__", _recorded(_function, "operator", reflected=True))
    setattr(TracedTensor, f"__i{python_name(_function)}__", _in_place(_function))


# ---- numbers that depend on the batch size -------------------------------------------------------------------------
class BatchNumber:
    """The base class of `BatchInt` and `BatchFloat`: numbers that depend on a size that varies, whose arithmetic is recorded."""

    values: tuple[Any, ...]  # the number at the three points of the trace, and at two other batch sizes
    node: fx.Node

    def __new__(cls, values: tuple[Any, ...], node: fx.Node) -> Any:
        number = super().__new__(cls, values[0])  # type: ignore[call-arg]
        number.values, number.node = values, node
        return number

    # A cache keyed by a batch number must always miss: entries of other traces, or of eager calls, would be wrong here.
    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return bool(active().decide(operator.truth, (self,)))

    def __reduce__(self) -> Any:
        return (type(self.values[0]), (self.values[0],))

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchNumber:
        return self

    def __round__(self, digits: int | None = None) -> Any:
        return active().arithmetic(builtins.round, (self,) if digits is None else (self, digits))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any, modulus: None = None) -> Any:
        return active().arithmetic(operator.pow, (self, other))


class BatchInt(BatchNumber, int):  # type: ignore[misc]
    """An integer that depends on a size that varies."""

    __hash__ = BatchNumber.__hash__


class BatchFloat(BatchNumber, float):  # type: ignore[misc]
    """A float that depends on a size that varies."""

    __hash__ = BatchNumber.__hash__


for _function in ARITHMETIC:
    if _function is not operator.pow:  # it has a third argument
        setattr(BatchNumber, f"__{python_name(_function)}__", _recorded(_function, "arithmetic"))
    setattr(BatchNumber, f"__r{python_name(_function)}__", _recorded(_function, "arithmetic", reflected=True))
for _name, _function in (
    *(("neg", operator.neg), ("pos", operator.pos), ("abs", operator.abs)),
    *(("trunc", builtins.int), ("floor", math.floor), ("ceil", math.ceil)),
):
    setattr(BatchNumber, f"__{_name}__", _recorded(_function, "arithmetic"))
for _function in COMPARISONS:
    setattr(BatchNumber, f"__{python_name(_function)}__", _recorded(_function, "decide"))


def numeric_fact(values: Sequence[Any]) -> int | float | BatchDim | None:
    """Return the fact of a number that has `values` at the points: the number where they agree, a `BatchDim` of integers, else None."""
    if all(value == values[0] for value in values):
        return values[0]  # type: ignore[no-any-return]
    return BatchDim.between(*values) if all(isinstance(value, int) for value in values) else None


def varying(values: Sequence[Any]) -> str:
    """Return what a number or shape with these values at the points depends on, in words."""
    return "the batch size" if values[0] != values[1] else "a size that varies"


def refuse(what: str, because: str, remedy: str, at: Any = None) -> NoReturn:
    """Raise a `TraceError` at the line of the model that is being executed, or at `at`, a line that `source` returned."""
    handler = active() if is_tracing() else None
    at = at or (handler.source() if handler else None)
    raise TraceError(what, because=because, remedy=remedy, at=at, module=handler.path if handler else None)


# ---- results whose facts are not known before the graph runs ---------------------------------------------------------
UNKNOWN = object()  # the template of such a result


class Unknown:
    """The result of an opaque function whose type or sizes are known only when the graph runs."""

    def __init__(self, node: fx.Node) -> None:
        object.__setattr__(self, "node", node)

    def __getitem__(self, index: Any) -> Any:
        return active().unknown_item(self, index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_unknown(f"given to {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse_unknown(f"asked for its .{name}")


def _refuse_unknown(what: str) -> NoReturn:
    because = "its sizes depend on content, or it is not a tensor, so nothing is known of it before the graph runs"
    remedy = "do that inside the function, or in another function under fxq.wrap, or describe its result by fxq.wrap(…, fake=…)"
    refuse(f"the result of a function that is kept as Python is {what}", because=because, remedy=remedy)


_REFUSED: Functions = (
    *(*ARITHMETIC, operator.matmul, operator.and_, operator.or_, operator.xor, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.neg, operator.abs, operator.invert, operator.index, operator.setitem),
)
for _name in (
    *("bool", "len", "iter", "int", "float", "contains", "call", "radd", "rsub", "rmul", "rtruediv"),
    *map(python_name, _REFUSED),
):
    setattr(Unknown, f"__{_name}__", lambda *_, name=_name: _refuse_unknown(f"used by Python ({name})"))


# ---- The arguments of one call: as graph arguments, and as a key under which its result is cached --------------------
# ---- In-place operations: a graph changes nothing in place, so the Python object refers to another node from then on ----
Record = Callable[[str, Any, Callable[..., Any], Any, Any], Any]  # records an operation: op, target, function, args, kwargs -> its result


# (tensor after a change without gradients, its node before) -> the tensor with its gradient from before the change
Overwritten = Callable[[TracedTensor, fx.Node], TracedTensor]


class Memory:
    """The changes that in-place operations have made during one trace.

    `record`, `note` and `overwritten` are those of the trace. `tensors` are the names of the model's parameters and buffers, by identity.
    `recorded` maps identities to the values that are recorded for an argument; each change here adds to it.
    """

    def __init__(
        self, record: Record, note: Callable[[str], None], tensors: Mapping[int, str], recorded: dict[int, Any], overwritten: Overwritten
    ) -> None:
        self._record, self._note, self._tensors, self._recorded = record, note, tensors, recorded
        self._overwritten = overwritten
        self._rebound: dict[int, TracedTensor] = {}  # plain tensors that were changed with a traced value, by identity

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor that a plain one stands for since it was changed in place; otherwise the tensor itself."""
        return self._rebound.get(id(tensor), tensor)

    def advance(self, target: torch.Tensor, result: Any, moved: bool = False) -> torch.Tensor:
        """Let a tensor that is changed in place stand for `result` from now on.

        `moved` says that its memory is not changed: as after `x.t_()`, it is only seen in another way.
        """
        if not isinstance(target, TracedTensor):
            return self._rebind(target, result)
        result = self._as(target.dtype, result)
        if not torch.is_grad_enabled() and not moved:
            result = self._overwritten(result, target.node)
        target.node, target.value = result.node, result.value
        aliases = target.aliases
        if aliases is not None and moved:
            target.place, target.way, target.version = result.place, result.way, result.version
        elif aliases is not None:
            stopped = target.stopped or not torch.is_grad_enabled()
            aliases.changes.append(Change(target.place, target.way, TracedTensor(result.node, result.value), stopped))
            target.version = aliases.version
        return target

    def holds(self, target: torch.Tensor, index: Any, value: Any) -> bool:
        """Return whether `target[index] = value` changes nothing, since `value` is that view, changed in place (`x[i] += 1`)."""
        target = self.current(target)
        if not isinstance(target, TracedTensor) or not isinstance(value, TracedTensor) or target.aliases is None:
            return False
        if value.aliases is not target.aliases or value.version != value.aliases.version or not value.way or target.way is None:
            return False
        *before, last = value.way
        same = len(before) == len(target.way) and all(mine is theirs for mine, theirs in zip(before, target.way, strict=True))
        return same and last.spelled[0] == "__getitem__" and last.spelled[1][0] is index

    def _rebind(self, target: torch.Tensor, result: Any) -> torch.Tensor:
        previous = self._rebound.get(id(target))
        if previous is not None:
            self.advance(previous, result)
            return target
        name = self._tensors.get(id(target))
        if name is not None:
            self._note(f"{name} is changed in place by forward: the change is not kept between calls")
        elif target._is_view() or torch._C._storage_Use_Count(target.untyped_storage()._cdata) > 2:  # the storage asked for here is one
            _refuse_shared()
        self._rebound[id(target)] = self._as(target.dtype, result)
        self._recorded[id(target)] = target
        return target

    def _as(self, dtype: torch.dtype, result: TracedTensor) -> TracedTensor:
        if result.dtype == dtype:
            return result
        return self._record("call_method", "to", torch.Tensor.to, (result, dtype), {})  # type: ignore[no-any-return]

    def refresh(self, tensor: TracedTensor) -> None:
        """Let a tensor whose memory was changed through another one stand for the changed value."""
        aliases = tensor.aliases
        if aliases is None or tensor.version == aliases.version:
            return
        missed, tensor.version = aliases.changes[tensor.version :], aliases.version
        before = tensor.node
        if missed[-1].place is tensor.place:
            present = missed[-1].result
        elif all(_apart(change.way, tensor.way) for change in missed):
            return
        else:
            present = self._seen(aliases, tensor.way)
        if any(change.stopped for change in missed) and not tensor.stopped:
            present = self._overwritten(present, before)
        tensor.node, tensor.value = present.node, present.value

    def _seen(self, aliases: Aliases, way: tuple[View, ...] | None) -> TracedTensor:
        """Return a view of the memory as it is now."""
        if way is None or any(change.way is None for change in aliases.changes[aliases.applied :]):
            _refuse_shared()
        for change in aliases.changes[aliases.applied :]:
            aliases.whole = self._written(aliases.whole, change)
            aliases.applied += 1
        view: Any = TracedTensor(aliases.whole.node, aliases.whole.value)
        for step in way:
            view = step.again(view) if step.item is None else step.again(view)[step.item]
        return view  # type: ignore[no-any-return]

    def _written(self, whole: TracedTensor, change: Change) -> TracedTensor:
        """Return the whole memory once a place of it holds something else."""
        steps: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for step in change.way or ():
            steps.append(step.spelled)
            if step.item is not None:
                steps.append(("__getitem__", (step.item,), {}))
        if not steps:
            return change.result
        function: Any = functional.write
        args: tuple[Any, ...] = (whole, change.result, tuple(steps))
        if [name for name, *_ in steps] == ["__getitem__"]:
            function, args = functional.setitem, (whole, steps[0][1][0], change.result)
        return self._record("call_function", function, function, args, {})  # type: ignore[no-any-return]


def share_memory(base: TracedTensor, result: Any, same_place: bool, step: View | None) -> None:
    """Record in `result` (a tensor, or several) that it is a view of `base`, made by `step`, which is None if the operation is unknown."""
    if base.aliases is None:
        base.aliases, base.place, base.version = Aliases(TracedTensor(base.node, base.value)), object(), 0
        base.way = ()
    several = isinstance(result, (tuple, list))
    for index, view in enumerate(result if several else (result,)):
        if isinstance(view, TracedTensor):
            view.aliases, view.version, view.stopped = base.aliases, base.aliases.version, view.stopped or base.stopped
            view.place = base.place if same_place and not several else object()
            if view.place is base.place:
                view.way = base.way
            elif base.way is None or step is None:
                view.way = None
            else:
                view.way = (*base.way, replace(step, item=index) if several else step)


def view_step(record: Record, op: str, target: Any, function: Any, args: Any, kwargs: Any) -> View | None:
    """Return the `View` by which a recorded operation's result is a view of its first argument; None if it is not a known view."""
    name = target if op == "call_method" else getattr(target, "__name__", "")
    name = {"getitem": "__getitem__"}.get(name, name)
    if op == "call_module" or name not in functional.VIEWS or not args or not isinstance(args[0], TracedTensor):
        return None
    rest = tuple(args[1:])
    return View((name, rest, dict(kwargs)), lambda tensor: record(op, target, function, (tensor, *rest), kwargs))


def _apart(one: tuple[View, ...] | None, other: tuple[View, ...] | None) -> bool:
    """Return whether two views certainly have no element in common: different items of one sequence of views, such as a chunk's."""
    if one is None or other is None:
        return False
    for mine, theirs in zip(one, other, strict=False):
        if mine.again is not theirs.again:
            return False
        if mine.item != theirs.item:
            return mine.spelled[0] in functional.PARTITIONS
    return False


def _refuse_shared() -> NoReturn:
    because = "a graph computes new tensors and changes none, so views do not follow an in-place operation"
    remedy = "replace the in-place operation by its out-of-place form (x = x + y), or clone() the tensor first"
    refuse("a tensor is read after its memory was changed through a view", because=because, remedy=remedy)


ATOMS = frozenset((
    int, float, bool, str, complex, bytes, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip


class Arguments:
    """Converts the arguments of one call to `function`.

    `memory` holds the in-place changes of the trace; `attribute` returns the node and the value of a tensor that is not traced.

    key      everything that the shapes and dtypes of the result depend on, as a cache key
    fake     whether a tensor's content is unknown while tracing
    known    whether a tensor's content is known while tracing
    traced   the traced tensors among the arguments, in order
    unknown  whether an argument is an `Unknown`, without shape and dtype
    """

    __slots__ = ("attribute", "fake", "key", "known", "memory", "substitutes", "traced", "unknown")

    def __init__(self, function: Any, memory: Memory, attribute: Callable[[torch.Tensor], tuple[fx.Node, Value]]) -> None:
        self.memory, self.attribute = memory, attribute
        self.key: list[Any] = [function]
        self.fake = self.known = self.unknown = False
        self.traced: list[TracedTensor] = []
        self.substitutes: dict[int, Value] = {}

    def convert(self, arg: Any) -> Any:
        """Return the argument as it is in the graph (tensors as nodes), and append a description of it to the cache key `self.key`."""
        kind = type(arg)
        if kind is TracedTensor:
            return self._traced(arg)
        if kind in ATOMS:
            self.key.append(kind)
            self.key.append(arg)
            return arg
        if isinstance(arg, torch.Tensor):
            return self._plain(arg)
        if isinstance(arg, BatchNumber):
            self.key.append(Number(arg.values))
            return arg.node
        if isinstance(arg, (tuple, list)):
            self.key.append((kind, len(arg)))
            items = [self.convert(item) for item in arg]
            return items if isinstance(arg, list) else tuple(items)
        if isinstance(arg, dict):
            self.key.append((kind, tuple(arg)))
            return {name: self.convert(item) for name, item in arg.items()}
        if isinstance(arg, slice):
            self.key.append(slice)
            return slice(self.convert(arg.start), self.convert(arg.stop), self.convert(arg.step))
        return self._other(arg)

    def _traced(self, tensor: TracedTensor) -> Any:
        self.memory.refresh(tensor)
        self._see(tensor.value)
        self.traced.append(tensor)
        return tensor.node

    def _see(self, value: Value) -> None:
        self.known, self.fake = self.known or value.real, self.fake or not value.real
        self.key.append(value.abstract)

    def _plain(self, tensor: torch.Tensor) -> Any:
        current = self.memory.current(tensor)
        if isinstance(current, TracedTensor):
            node = self._traced(current)
            self.substitutes[id(tensor)] = current.value
            return node
        node, value = self.attribute(tensor)
        self._see(value)
        self.substitutes[id(tensor)] = value
        return node

    def _other(self, arg: Any) -> Any:
        if isinstance(arg, Unknown):
            self.fake = self.unknown = True
            self.key.append(arg.node)
            return arg.node
        if isinstance(arg, (bool, int, float, str)):  # numpy scalars, str and int enums
            plain = next(base for base in (bool, int, float, str) if isinstance(arg, base))(arg)
            self.key.append(plain)
            return plain
        if isinstance(arg, type(torch.FloatTensor)):  # x.type(torch.FloatTensor): the name means the same
            return self.convert(f"{arg.__module__}.{arg.__name__}")
        if isinstance(arg, range):
            return self.convert(list(arg))
        if hasattr(arg, "item") and getattr(arg, "shape", None) == ():
            return self.convert(arg.item())
        because = "graphs hold tensors, numbers, strings, None, dtypes, devices, and tuples, lists, dicts and slices of them"
        remedy = "pass such values to modules at construction, not to operators in forward"
        refuse(f"an argument of type {type(arg).__name__} cannot be part of a graph", because=because, remedy=remedy)


def is_tracked(args: Iterable[Any], recorded: dict[int, Any]) -> bool:
    """Return whether a traced tensor, a batch number, or a tensor in `recorded` (by identity) is among the arguments."""
    for arg in args:
        kind = type(arg)
        if kind is TracedTensor or kind is BatchInt or kind is BatchFloat or kind is Unknown:
            return True
        if kind in ATOMS:
            continue
        if isinstance(arg, torch.Tensor):
            if id(arg) in recorded:
                return True
        elif isinstance(arg, (tuple, list)):
            if is_tracked(arg, recorded):
                return True
        elif isinstance(arg, dict):
            if is_tracked(arg.values(), recorded):
                return True
        elif isinstance(arg, slice) and is_tracked((arg.start, arg.stop, arg.step), recorded):
            return True
    return False

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from fxquant.errors import TraceError
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

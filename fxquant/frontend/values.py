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
from torch import Tensor, fx

from fxquant.errors import TraceError
from fxquant.ir import graph
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


# ---- Elements selected by a mask: their number is unknown while tracing, so only elementwise functions may read them -
#
#     x[x < 0] *= 0.1   →   x = where(x < 0, x * 0.1, x)
#
# The functions are computed on all elements; the assignment back to the selected positions becomes a `where`.


# Defined for all numbers, and hardly larger than these: computed everywhere, they neither make NaN nor widen a scale.
_ELEMENTWISE = frozenset((
    "add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "neg", "negative", "abs", "absolute", "sign", "square",
    "relu", "relu6", "leaky_relu", "clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "tanh", "sigmoid", "sin", "cos",
    "atan", "erf", "round", "floor", "ceil", "trunc", "silu", "gelu", "softsign", "clone", "detach", "contiguous", "float",
))  # fmt: skip
_PURE = frozenset(
    ("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert", "isnan", "isfinite", "isinf", "logical_not", "abs", "clone", "getitem")
)


class Selected:
    """The result of `input[mask]`, for a mask of the input's shape.

    whole  a tensor of that shape that holds the elements where the mask is true, and anything elsewhere
    mask   where they are
    """

    def __init__(self, whole: Tensor, mask: TracedTensor, at: Any = None) -> None:
        self._whole, self._mask, self._at = whole, mask, at or active().source()

    def refuse_as_output(self) -> NoReturn:
        """Raise the error of a model that returns it, at the line that selects."""
        _refuse(self._at)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _everywhere(func, getattr(func, "__name__", ""), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.removesuffix("_") not in _ELEMENTWISE:
            _refuse()
        return lambda *args, **kwargs: _everywhere(getattr(torch.Tensor, name.removesuffix("_")), name, (self, *args), kwargs)

    def __pow__(self, exponent: Any) -> Selected:
        if not isinstance(exponent, int) or exponent < 1:
            _refuse()
        return self._with(self._whole**exponent)

    def __ipow__(self, exponent: Any) -> Selected:
        return _into(self, self**exponent)

    def _with(self, whole: Tensor) -> Selected:
        return Selected(whole, self._mask, self._at)


def _binary(function: Callable[..., Any]) -> None:
    """Define a Python operator, its reflected form and its in-place form."""
    name = function.__name__
    setattr(Selected, f"__{name}__", lambda self, other: _everywhere(function, name, (self, other), {}))
    setattr(Selected, f"__r{name}__", lambda self, other: _everywhere(function, name, (other, self), {}))
    setattr(Selected, f"__i{name}__", lambda self, other: _everywhere(function, f"{name}_", (self, other), {}))


for _operator in (operator.add, operator.sub, operator.mul):
    _binary(_operator)
for _name, _written in (("__truediv__", "true_divide"), ("__itruediv__", "true_divide_")):
    setattr(Selected, _name, lambda self, other, written=_written: _everywhere(operator.truediv, written, (self, other), {}))
for _name, _function in (("__neg__", operator.neg), ("__abs__", operator.abs)):
    setattr(Selected, _name, lambda self, function=_function: _everywhere(function, function.__name__, (self,), {}))
_NOT_SELECTED: Functions = (operator.index, operator.getitem, operator.setitem, *COMPARISONS)
for _name in ("bool", "len", "iter", "float", "int", *map(python_name, _NOT_SELECTED)):
    setattr(Selected, f"__{_name}__", lambda *_: _refuse())


def _refuse(at: Any = None) -> NoReturn:
    because = "getitem needs numbers that are known only when the graph runs"
    remedy = "use torch.where or a mask instead of a branch or an index, or move the decision out of forward"
    refuse("the model's Python depends on the content of a tensor", at=at, because=because, remedy=remedy)


def _everywhere(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Selected:
    """Apply an elementwise function to selected elements and numbers. In place it changes the elements, never the tensor they are from."""
    of = [each for each in (*args, *kwargs.values()) if isinstance(each, Selected)]
    others = [each for each in (*args, *kwargs.values()) if not isinstance(each, Selected)]
    written = name.removesuffix("_")
    divided = "div" in name and (not isinstance(args[0], Selected) or len(of) > 1 or "rounding_mode" in kwargs)
    plain = all(each is None or (isinstance(each, int | float) and math.isfinite(each)) for each in others)
    together = all(_same(each._mask.node, of[0]._mask.node) for each in of)
    if written not in _ELEMENTWISE or divided or not plain or not together:
        _refuse()
    if name.endswith("_") and hasattr(torch.Tensor, written) and function is getattr(torch.Tensor, name, None):
        function = getattr(torch.Tensor, written)
    wholes = [each._whole if isinstance(each, Selected) else each for each in args]
    result = of[0]._with(function(*wholes, **{key: each._whole if isinstance(each, Selected) else each for key, each in kwargs.items()}))
    return _into(of[0], result) if name.endswith("_") else result


def _into(target: Selected, result: Selected) -> Selected:
    target._whole = result._whole
    return target


def _same(one: Any, other: Any) -> bool:
    """Return whether two nodes have one value: they are one, or the same comparison of the same."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and bool(one == other)
    if one is other:
        return True
    alike = one.op == other.op != "placeholder" and one.target == other.target and one.kwargs == other.kwargs
    pure = alike and graph.target_name(one) in _PURE and len(one.args) == len(other.args)
    return pure and all(map(_same, one.args, other.args))


def _as_it_is(tensor: TracedTensor) -> TracedTensor:
    """Return the present value of a tensor, which later changes do not affect."""
    tensor.shape  # noqa: B018  # brings it up to date with what was written through views
    return TracedTensor(tensor.node, tensor.value)


def _is_list_of_truth_values(place: Any) -> bool:
    return type(place) is list and bool(place) and all(type(item) is bool for item in place)


def select(input: Any, index: Any) -> Any:
    """Return `input[index]`, where the index is a mask of its shape, or holds lists of booleans; NotImplemented otherwise."""
    places = index if isinstance(index, tuple) else (index,)
    if any(map(_is_list_of_truth_values, places)):
        return input[tuple(torch.tensor(place, device="cpu") if _is_list_of_truth_values(place) else place for place in places)]
    if not isinstance(input, TracedTensor) or not isinstance(index, TracedTensor) or index.dtype != torch.bool or index.value.real:
        return NotImplemented
    if not input.is_floating_point() or input.value.shapes != index.value.shapes:
        return NotImplemented
    return Selected(_as_it_is(input), _as_it_is(index))


def assign(input: Any, index: Any, value: Any) -> Any:
    """Record `input[index] = value` as a `where` if `value` was selected with the same mask; return NotImplemented for other values."""
    if not isinstance(value, Selected):
        return NotImplemented
    if not isinstance(index, TracedTensor) or not _same(_as_it_is(index).node, value._mask.node):
        _refuse()
    if input.dtype != value._whole.dtype or input.shape != value._whole.shape:
        _refuse()
    input.copy_(torch.where(index, value._whole, input))
    return None

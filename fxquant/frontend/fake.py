"""Evaluate operators at the points that stand for all sizes: on tensors without data, or on constants, once for equal arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from fxquant.errors import FxQuantError
from fxquant.frontend.environment import calls_from
from fxquant.frontend.values import UNKNOWN, Arguments, BatchNumber, Number, TracedTensor, Value, refuse, varying
from fxquant.ir.graph import POINTS, own


@dataclass(slots=True, eq=False)
class Outcome:
    """The result of an operator."""

    template: Any  # a `Value`, a `Number`, a `Sequenced` of these, or a plain Python value
    alias: int | None  # the index of the traced argument that the first tensor result shares memory with, or None
    same_place: bool  # whether it has the same elements in the same order as that argument
    recorded: bool = field(init=False)  # whether a part of it has to be computed by a node
    from_content: bool = False  # whether it depends on the content of arguments, not only on their shapes

    def __post_init__(self) -> None:
        self.recorded = _has_values(self.template)


class Sequenced:
    """A container of results: its type, its keys and its items."""

    __slots__ = ("items", "keys", "kind")

    def __init__(self, kind: type, items: list[Any], keys: list[Any] | None = None) -> None:
        self.kind, self.items, self.keys = kind, items, keys

    def rebuild(self, items: Sequence[Any]) -> Any:
        """Return the same kind of sequence with other items."""
        if self.keys is not None:
            return dict(zip(self.keys, items, strict=True))
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)


class Evaluator:
    """Runs operators on fake tensors at the three points of sizes (`ir.graph`), for one trace or for several of the same model.

    points  for each point, the first point of the same sizes: (0, 0, 0) where none varies, (0, 1, 1) where only the batch does
    """

    def __init__(self) -> None:
        self.points: tuple[int, ...] = (0, 0, 0)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.cache: dict[tuple[Any, ...], Outcome] = {}
        self._interned: dict[tuple[Any, ...], Value] = {}
        self._fakes: dict[tuple[Any, ...], torch.Tensor] = {}  # equal ones are one object
        self._results: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # at one point: the result, and where it lies in memory

    def intern(self, *seen: torch.Tensor) -> Value:
        """Return a fake `Value` of tensors like the given ones (shape, stride, dtype, device); equal arguments give the same object.

        One tensor stands for all points.
        """
        tensors = seen if len(seen) > 1 else (seen[0],) * len(POINTS)
        first = tensors[0]
        key = (first.dtype, first.device, *((tensor.shape, tensor.stride()) for tensor in tensors))
        value = self._interned.get(key)
        if value is None:
            value = self._interned[key] = Value(tuple(map(self._fake, tensors)))
        return value

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        fake = self._fakes.get(key)
        if fake is None:
            with self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            self._fakes[key] = fake
        return fake

    def known(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor whose content is known while tracing."""
        return Value((tensor,) * len(POINTS), self.intern(tensor))

    def run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, content: Content | int | None, substitutes: dict[int, Value],
        key: tuple[Any, ...] | None = None,
    ) -> Outcome:  # fmt: skip
        """Run a function at every point, on fake tensors or, with `content`, on filled tensors; return the merged outcome.

        With a `key`, which describes function and arguments, a result at a point is that of an earlier run on equal arguments.

        `content` is None if the content of the arguments must not be read; else a function that replaces tensors of unknown content, or a
        sample that fills them: 0, 1, or the seed of random numbers. `substitutes` are the values of plain tensors, by identity.
        """
        sides = {point: _Side(point, content, substitutes) for point in dict.fromkeys(self.points)}
        results: dict[int, tuple[Any, ...]] = {}
        for point, side in sides.items():
            here = None if key is None else tuple(_part_at(part, point) for part in key)
            if here in self._results:
                results[point] = self._results[here]
                continue
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                side_args, side_kwargs = side.arguments(args), side.arguments(kwargs)
                with self.mode if side.content is None else contextlib.nullcontext():
                    result = function(*side_args, **side_kwargs)
            results[point] = (result, *_alias(result, side.traced))
            if here is not None:
                self._results[here] = results[point]
        return Outcome(self._merge(*(results[point][0] for point in self.points)), *results[0][1:])

    def ran_at_first(self, key: tuple[Any, ...] | None) -> bool:
        """Return whether the function of a key has run at the first point."""
        return key is not None and tuple(_part_at(part, 0) for part in key) in self._results

    def run_on_content(self, function: Callable[..., Any], args: Any, kwargs: Any, substitutes: dict[int, Value]) -> Outcome | None:
        """Return the outcome, as `run` does, of a function whose result shapes depend on content that is known while tracing.

        Return None if they depend on unknown content as well.
        """
        zeros, ones = (self.run(function, args, kwargs, sample, substitutes) for sample in (0, 1))
        zeros.template, ones.template = _without_content(zeros.template), _without_content(ones.template)
        zeros.from_content = True
        return zeros if isinstance(zeros.template, Value) and zeros.template is ones.template else None

    def run_on_zeros(self, function: Callable[..., Any], args: Any, kwargs: Any, substitutes: dict[int, Value]) -> Outcome | None:
        """Run a function on zeros where its form for fake tensors raises an error; None if it fails on them as well."""
        try:
            outcome = self.run(function, args, kwargs, 0, substitutes)
        except Exception:  # the error of the fake tensors is the one that tells
            return None
        outcome.template = _without_content(outcome.template)
        return outcome if isinstance(outcome.template, Value) else None

    def _merge(self, *seen: Any) -> Any:
        first = seen[0]
        if isinstance(first, torch.Tensor):
            kinds = [(each.dim(), each.dtype) for each in seen]
            if len(set(kinds)) > 1:
                because = f"an operator returned tensors of different dimensions or types at different sizes: {', '.join(map(str, kinds))}"
                remedy = f"avoid squeeze() without a dimension, and conditions on {varying(kinds)}"
                refuse(f"the rank or type of a tensor depends on {varying(kinds)}", because=because, remedy=remedy)
            abstract = self.intern(*seen)
            return abstract if isinstance(first, FakeTensor) else Value(seen, abstract)
        if isinstance(first, (tuple, list)):
            counts = [len(each) for each in seen]
            if len(set(counts)) > 1:
                because = f"an operator returned {min(counts)} results at one size and {max(counts)} at another"
                remedy = "keep the dimension inside the tensors; do not split along it"
                refuse(f"the number of results depends on {varying(counts)}", because=because, remedy=remedy)
            return Sequenced(type(first), [self._merge(*items) for items in zip(*seen, strict=True)])
        if isinstance(first, dict):
            return Sequenced(type(first), [self._merge(*(each[key] for each in seen)) for key in first], list(first))
        if isinstance(first, bool):
            if any(each is not first for each in seen):
                refuse_condition(seen)
        elif isinstance(first, (int, float)) and any(each != first and not (each != each and first != first) for each in seen):
            return Number(seen)
        return first


def _part_at(part: Any, point: int) -> Any:
    """Return a part of the key of a call as it is at one point; tensors of one Evaluator are equal if they are one object."""
    return (id(part.tensors[point]),) if isinstance(part, Value) else part.values[point] if isinstance(part, Number) else part


# ---- the arguments at one batch size, and where a result lies in memory ----------------------------------------------
Content = Callable[[torch.Tensor], torch.Tensor]  # what stands for a fake tensor of unknown content


def _filling(sample: int) -> Content:
    """Return a function that makes tensors of one number, 0 or 1, or of numbers drawn from another seed."""
    generator = torch.Generator().manual_seed(sample)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if sample in (0, 1):
            return torch.full(tensor.shape, sample, dtype=tensor.dtype, device=tensor.device)
        drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
        return (drawn if tensor.dtype.is_floating_point or tensor.dtype.is_complex else drawn.round()).to(tensor.device, tensor.dtype)

    return fill


class _Side:
    """The arguments of a call at one point."""

    __slots__ = ("content", "point", "substitutes", "traced")

    def __init__(self, point: int, content: Content | int | None, substitutes: dict[int, Value]) -> None:
        self.point, self.substitutes = point, substitutes
        # Fills tensors of unknown content: a function, or a sample number; None: content must not be read.
        self.content = _filling(content) if isinstance(content, int) else content
        self.traced: list[torch.Tensor] = []  # the tensors that replace traced ones, in order

    def arguments(self, arg: Any) -> Any:
        """Return an argument, possibly nested, with real or fake tensors in place of traced ones."""
        return own(arg, self._leaf, (torch.Tensor, BatchNumber))

    def _leaf(self, arg: Any) -> Any:
        if isinstance(arg, TracedTensor):
            self.traced.append(self._tensor(arg.value))
            return self.traced[-1]
        if isinstance(arg, BatchNumber):
            return arg.values[self.point]
        value = self.substitutes.get(id(arg))
        return arg if value is None else self._tensor(value)

    def _tensor(self, value: Value) -> torch.Tensor:
        tensor = (value if self.content is not None else value.abstract).tensors[self.point]
        return tensor if self.content is None or value.real else self.content(tensor)


def _without_content(template: Any) -> Any:
    return template.abstract if isinstance(template, Value) else template


def _alias(result: Any, traced: list[torch.Tensor]) -> tuple[int | None, bool]:
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None, False
    memory = result.untyped_storage()._cdata
    for index, tensor in enumerate(traced):
        if tensor.untyped_storage()._cdata == memory:
            return index, _place(tensor) == _place(result)
    return None, False


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _has_values(template: Any) -> bool:
    if isinstance(template, Sequenced):
        return any(_has_values(item) for item in template.items)
    return isinstance(template, (Value, Number)) or template is UNKNOWN


# ---- one operation, from the cache where it has been evaluated -------------------------------------------------------
READS_CONTENT = frozenset((
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "numpy", "__array__", "is_nonzero",
    "__contains__",
))  # fmt: skip


def evaluate(evaluator: Evaluator, name: str, function: Callable[..., Any], args: Any, kwargs: Any, arguments: Arguments) -> Outcome:
    """Return the outcome of an operation. Raises TraceError if it depends on data, and the errors of the function."""
    key: Any = tuple(arguments.key) if arguments.fake else None
    try:
        outcome = evaluator.cache.get(key)
    except TypeError:  # something unhashable among the arguments
        key = outcome = None
    if outcome is None:
        outcome = _run(evaluator, name, function, args, kwargs, arguments, key)
        if key is not None and not outcome.from_content:
            evaluator.cache[key] = outcome
    return outcome


def _run(evaluator: Evaluator, name: str, function: Callable[..., Any], args: Any, kwargs: Any, arguments: Arguments, key: Any) -> Outcome:
    fake = arguments.fake
    if fake and name in READS_CONTENT:
        refuse_data(name)
    result = known_result(function, args, kwargs) if fake else None
    if result is not None:
        return Outcome(result, None, same_place=False)
    try:
        return evaluator.run(function, args, kwargs, None if fake else lambda tensor: tensor, arguments.substitutes, key)
    except FxQuantError:
        raise
    except Exception as error:
        depends = any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutput"))  # on the content of a fake tensor
        again = evaluator.run_on_content if depends else evaluator.run_on_zeros
        possible = arguments.known if depends else fake and not evaluator.ran_at_first(key)  # else sizes are what it refuses
        outcome = again(function, args, kwargs, arguments.substitutes) if possible else None
        if outcome is None and not depends:
            raise
        return outcome or refuse_data(name)


# ---- the result of a batch norm, which PyTorch computes by about fifteen operators on tensors without values ---------
_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


def known_result(function: Callable[..., Any], args: Any, kwargs: Any) -> Value | None:
    """Return the result of a batch norm's forward, a new tensor like its input; None where anything is unusual, and for other functions."""
    module = getattr(function, "__self__", None)
    if kwargs or len(args) != 1 or not isinstance(args[0], TracedTensor) or not isinstance(module, _BatchNorm):
        return None
    abstract = args[0].value.abstract
    return abstract if all(_is_normalized_by(module, side) for side in abstract.tensors) else None


def _is_normalized_by(module: _BatchNorm, input: torch.Tensor) -> bool:
    """Return whether a batch norm's running statistics fit the input's channels, and all tensors are float32 and contiguous."""
    if input.dtype != torch.float32 or input.stride() != _strides(tuple(input.shape)):
        return False
    tensors = [tensor for tensor in (*module._parameters.values(), module.running_mean, module.running_var) if tensor is not None]
    like = (module.num_features,), torch.float32, input.device
    plain = all((tuple(tensor.shape), tensor.dtype, tensor.device) == like for tensor in tensors)
    complete = module.running_mean is not None and module.running_var is not None and not module.training
    return plain and complete and input.dim() in _DIMENSIONS.get(type(module), ()) and input.shape[1] == module.num_features


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", dtype=torch.float32).stride()


def refuse_data(name: str) -> NoReturn:
    """Raise the error for a function that asks a tensor for its content."""
    if calls_from("torch/distributions/"):
        because = f"{name} needs numbers that are known only when the graph runs"
        remedy = "pass validate_args=False to it, or call torch.distributions.Distribution.set_default_validate_args(False)"
        refuse("a distribution checks its arguments by their content", because=because, remedy=remedy)
    overloads = getattr(torch.ops.aten, name, None)
    sized = overloads is not None and any(torch.Tag.dynamic_output_shape in getattr(overloads, o).tags for o in overloads.overloads())
    refuse(
        "the model's Python depends on the content of a tensor",
        because="`if`, `while`, `and`, `or`, `not` and `assert` need the value of a tensor, which exists only when the graph runs"
        if name == "__bool__"
        else f"{name} needs numbers that are known only when the graph runs",
        remedy="return what it reads from forward, and call it on the outputs of the model; torch.topk returns a fixed number of items"
        if sized
        else "use torch.where or a mask instead of a branch or an index, or move the decision out of forward",
    )


def refuse_condition(values: Sequence[bool]) -> NoReturn:
    """Raise TraceError for a condition that has these values, of which two differ, at the points."""
    because = "a condition is true at some sizes and false at others, and a graph has no branches"
    remedy = f"make the condition independent of {varying(values)}, or fix sizes with options=fxq.Options(dynamic_shapes={{}})"
    refuse(f"control flow depends on {varying(values)}", because=because, remedy=remedy)

"""Evaluation of operators at two batch sizes, with everything repeated answered from a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxquant.trace.values import BatchNumber, Number, TracedTensor, Value, refuse


class Outcome:
    """What an operator returns.

    template   a `Value`, a `Number`, a `Sequenced` of such, or a plain Python value
    alias      which of the traced arguments the first tensor result shares its memory with, or None
    same_place whether it is also the same elements in the same order
    recorded   whether anything in it can only be computed by a node
    """

    __slots__ = ("alias", "recorded", "same_place", "template")

    def __init__(self, template: Any, alias: int | None, same_place: bool) -> None:
        self.template, self.alias, self.same_place = template, alias, same_place
        self.recorded = _has_values(template)


class Sequenced:
    """Several results: what the sequence or dict was, and what it held."""

    __slots__ = ("items", "keys", "kind")

    def __init__(self, kind: type, items: list[Any], keys: list[Any] | None = None) -> None:
        self.kind, self.items, self.keys = kind, items, keys

    def rebuild(self, items: Sequence[Any]) -> Any:
        """The same kind of sequence with other items."""
        if self.keys is not None:
            return dict(zip(self.keys, items, strict=True))
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)


class Evaluator:
    """Runs operators on fake tensors at two batch sizes.

    `static` says that both batch sizes are the same, so that one run is enough.
    """

    def __init__(self, static: bool) -> None:
        self.static = static
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.cache: dict[tuple[Any, ...], Outcome] = {}
        self._interned: dict[tuple[Any, ...], Value] = {}

    def intern(self, a: torch.Tensor, b: torch.Tensor) -> Value:
        """The one fake `Value` of these shapes, strides, dtypes and devices."""
        key = (a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride())
        value = self._interned.get(key)
        if value is None:
            value = self._interned[key] = Value(self._fake(a), self._fake(b))
        return value

    def known(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor whose content is known while tracing."""
        return Value(tensor, tensor, self.intern(tensor, tensor))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, fake: bool, substitutes: dict[int, Value]) -> Outcome:
        """What `function` returns at both batch sizes.

        `fake` says that the content of the arguments is not to be looked at; `substitutes` are the values of plain
        tensors, by identity.
        """
        a, traced = self._run_side(function, args, kwargs, "a", fake, substitutes)
        b = a if self.static else self._run_side(function, args, kwargs, "b", fake, substitutes)[0]
        return Outcome(self._merge(a, b), *_alias(a, traced))

    def _run_side(
        self, function: Callable[..., Any], args: Any, kwargs: Any, side: str, fake: bool, substitutes: dict[int, Value]
    ) -> tuple[Any, list[torch.Tensor]]:
        traced: list[torch.Tensor] = []
        args = at_side(args, side, fake, substitutes, traced)
        kwargs = at_side(kwargs, side, fake, substitutes, traced)
        with torch._C.DisableTorchFunction():
            if fake:
                with self.mode:
                    result = function(*args, **kwargs)
            else:
                result = function(*args, **kwargs)
            return result, traced

    def _merge(self, a: Any, b: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self._merge_tensors(a, b)
        if isinstance(a, (tuple, list)):
            if len(a) != len(b):
                refuse(
                    "the number of results depends on the batch size",
                    because=f"an operator returned {len(a)} results at one batch size and {len(b)} at another",
                    remedy="keep the batch dimension inside the tensors; do not split along it",
                )
            return Sequenced(type(a), [self._merge(x, y) for x, y in zip(a, b, strict=True)])
        if isinstance(a, dict):
            return Sequenced(type(a), [self._merge(a[key], b[key]) for key in a], list(a))
        if isinstance(a, bool):
            if a is not b:
                refuse_batch_condition(a, b)
        elif isinstance(a, (int, float)) and a != b and not (a != a and b != b):
            return Number(a, b)
        return a

    def _merge_tensors(self, a: torch.Tensor, b: torch.Tensor) -> Value:
        if a.dim() != b.dim() or a.dtype != b.dtype:
            refuse(
                "the rank or type of a tensor depends on the batch size",
                because=f"an operator returned {a.dim()} dimensions of {a.dtype} at one batch size and {b.dim()} of {b.dtype} at another",
                remedy="avoid squeeze() without a dimension, and conditions on the batch size",
            )
        abstract = self.intern(a, b)
        return abstract if isinstance(a, FakeTensor) else Value(a, b, abstract)


def refuse_batch_condition(a: bool, b: bool) -> None:
    """Raise the error of a branch that would go both ways."""
    refuse(
        "control flow depends on the batch size",
        because=f"a condition is {a} at one batch size and {b} at another; a graph has no branches",
        remedy="make the condition independent of the batch, or trace with dynamic_shapes={} to fix the batch size",
    )


def is_data_dependent(error: BaseException) -> bool:
    """Whether a fake tensor was asked for its content."""
    name = type(error).__name__
    return "DataDependent" in name or "DynamicOutput" in name


def at_side(arg: Any, side: str, fake: bool, substitutes: dict[int, Value], traced: list[torch.Tensor]) -> Any:
    """The arguments as they are at one batch size; the tensors that stand for traced ones are collected in `traced`."""
    if isinstance(arg, TracedTensor):
        tensor: torch.Tensor = getattr(arg.value.abstract if fake else arg.value, side)
        traced.append(tensor)
        return tensor
    if isinstance(arg, torch.Tensor):
        value = substitutes.get(id(arg))
        return arg if value is None else getattr(value.abstract if fake else value, side)
    if isinstance(arg, BatchNumber):
        return getattr(arg, side)
    if isinstance(arg, (tuple, list)):
        items = [at_side(item, side, fake, substitutes, traced) for item in arg]
        if hasattr(arg, "_fields"):
            return type(arg)(*items)
        return items if isinstance(arg, list) else tuple(items)
    if isinstance(arg, dict):
        return {key: at_side(item, side, fake, substitutes, traced) for key, item in arg.items()}
    if isinstance(arg, slice):
        return slice(*(at_side(item, side, fake, substitutes, traced) for item in (arg.start, arg.stop, arg.step)))
    return arg


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
    return isinstance(template, (Value, Number))

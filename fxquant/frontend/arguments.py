"""The arguments of one call: as graph arguments, and as a key under which its result is cached."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx

from fxquant.frontend.values import Aliases, BatchFloat, BatchInt, BatchNumber, Change, TracedTensor, Unknown, Value, View, refuse
from fxquant.ir import functional

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
            self.key.append(arg.values)
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
            self.key.append(id(arg))
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

"""Support for every package: the log, registries of implementations, checks of arguments, atomic files, locks, progress bars and seeds."""

import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

import torch

logger = logging.getLogger("fxquant")


@contextmanager
def log_levels(levels: Mapping[str, int]) -> Iterator[None]:
    """Set the levels of loggers, by their names, within the context."""
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {each: each.level for each in loggers}
    try:
        for each, level in loggers.items():
            each.setLevel(level)
        yield
    finally:
        for each, level in before.items():
            each.setLevel(level)


_SECONDS: ContextVar[Counter[str] | None] = ContextVar("seconds", default=None)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Measure the seconds of a `with` block, less the seconds of timed blocks inside it; the outermost block logs the seconds of each."""
    start, around, inside = time.perf_counter(), _SECONDS.get(), Counter[str]()
    token = _SECONDS.set(inside)
    try:
        yield
    finally:
        _SECONDS.reset(token)
    whole = time.perf_counter() - start
    if around is not None:
        around.update(inside + Counter({step: whole - sum(inside.values())}))
        return
    logger.info("%s took %.1f s: %s", step, whole, ", ".join(f"{name} {seconds:.1f} s" for name, seconds in inside.items()))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, PyTorch's global CPU generator starts from `seed`; afterwards it has its former state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


Item = TypeVar("Item", bound=Hashable)


def reached(start: Iterable[Item], following: Callable[[Item], Iterable[Item]]) -> Iterator[Item]:
    """Yield the items of `start`, and all that follow from them, directly or through others: each once, the nearest first."""
    visited = dict.fromkeys(start)
    waiting = deque(visited)
    while waiting:
        yield (item := waiting.popleft())
        new = dict.fromkeys(each for each in following(item) if each not in visited)
        visited.update(new)
        waiting.extend(new)


# ---- Registries of implementations that backends offer in place of PyTorch's, and of forms by key --------------------
#
# An implementation that is compared with its reference at run time, and computes other bits, is not used. `disagreed` records where:
# with a warning for each place and an entry of `fxq.report`. In the test suite every entry is an error.
Implementation = TypeVar("Implementation")
Form = TypeVar("Form")


class Offers(Generic[Implementation]):
    """The implementations of one protocol, in the order in which they were offered; `takes` of each says which tensors it is for."""

    def __init__(self) -> None:
        self.known: list[Implementation] = []

    def add(self, implementation: Implementation) -> None:
        """Add an implementation, which is tried after the earlier ones."""
        self.known.append(implementation)

    def first(self, *values: Any) -> Implementation | None:
        """Return the first implementation that takes these values; None where none does."""
        for each in self.known:
            if each.takes(*values):  # type: ignore[attr-defined]
                return each
        return None


def declaring(forms: dict[Any, Form]) -> Callable[..., Callable[[Form], Form]]:
    """Return a decorator that enters a function into this table, under every key that it is called with."""

    def form(*keys: Any) -> Callable[[Form], Form]:
        def declare(function: Form) -> Form:
            forms.update(dict.fromkeys(keys, function))
            return function

        return declare

    return form


class Disagreement(NamedTuple):
    """An implementation that computed other bits than its reference at a place, and is not used there."""

    implementation: str
    place: str
    because: str


RECORDED: list[tuple[weakref.ref[Any] | None, Disagreement]] = []  # each with its model; None for what concerns every model


def disagreed(model: Any, implementation: str, places: Sequence[str], because: str, instead: str) -> None:
    """Record that an implementation computed other bits than its reference; log a warning for places that are not recorded yet.

    `model` is the model with these places, or None for a proof that concerns all models. `instead` names the replacement, for the log.
    """
    recorded = {(each.implementation, each.place) for each in disagreements(model)}
    new = [place for place in places if (implementation, place) not in recorded]
    if not new:
        return
    RECORDED.extend((None if model is None else weakref.ref(model), Disagreement(implementation, place, because)) for place in new)
    logger.warning(
        "%s is not used for %s, because %s; %s, and results stay exact. Please report this with the processor and the versions of"
        " fxquant, PyTorch and onnxruntime",
        implementation,
        ", ".join(new),
        because,
        instead,
    )


def disagreements(model: Any) -> list[Disagreement]:
    """Return the recorded disagreements of a model, and the disagreements that concern every model."""
    return [each for owner, each in RECORDED if owner is None or (model is not None and owner() is model)]

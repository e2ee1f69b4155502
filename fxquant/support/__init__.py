"""Support for every package: the log, checks of arguments, atomic files, locks across forks, progress bars and seeds."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

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
        torch.manual_seed(seed)
        yield

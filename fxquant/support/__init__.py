"""Support for every package: the log, checks of arguments, atomic files, locks across forks, progress bars and seeds."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, PyTorch's global CPU generator starts from `seed`; afterwards it has its former state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield

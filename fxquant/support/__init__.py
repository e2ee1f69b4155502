"""Support for every package: the log, checks of arguments, atomic files, locks across forks, progress bars, registries and seeds."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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

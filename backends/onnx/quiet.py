"""Call PyTorch's exporter without its remarks, one thread at a time."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from fxquant.backends.onnx.translations import built_once
from fxquant.support.forks import free_in_child


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporter's remarks about its internals from the user; its errors stay visible.

    One thread exports at a time, because the settings changed here and by the exporter are visible to all threads. It may do so
    again within: the exporter imports modules of the user's, which may export when they are imported.
    """
    with _exporting, built_once():
        yield from _levels_raised()


_exporting = threading.RLock()
free_in_child(sys.modules[__name__], "_exporting", threading.RLock)
_OF_THE_EXPORTER = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.export", "torch._export", "torch._logging")


def _levels_raised() -> Iterator[None]:
    levels = {"torch.onnx": logging.ERROR, "onnxscript": logging.CRITICAL, **dict.fromkeys(_OF_THE_EXPORTER, logging.CRITICAL)}
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        # The exporter prints whole graphs of what it cannot export.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)

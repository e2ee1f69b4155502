"""Progress bars for anything that may take over two seconds, and a context that defers Ctrl-C."""

import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")
MOMENT = 1.0  # seconds before a bar appears that was not asked for
BETWEEN_LINES = 10.0  # seconds, where standard error is not a terminal
_displays: list[Progress] = []  # the one in use: what begins inside another's work is a line below it


def progress(items: Iterable[Item], total: int | None, description: str, show: bool | None = None) -> Iterator[Item]:
    """Yield the items, with a progress bar on standard error while they pass (None: after a moment, or lines if it is not a terminal)."""
    with _task(description, total, show) as display:
        if display is None:
            begun = told = time.monotonic()
            of_all = "" if total is None else f" of {total}"
            for number, item in enumerate(items, 1):
                yield item
                if show is None and time.monotonic() - told >= BETWEEN_LINES:
                    told = time.monotonic()
                    print(f"{description}: {number}{of_all} after {told - begun:.0f} s", file=sys.stderr, flush=True)
            return
        bar, task = display
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def working(description: str, show: bool | None = None) -> Iterator[None]:
    """Show a moving bar on standard error while work of unknown length runs; as a decorator, while a function runs."""
    with _task(description, None, show):
        yield


@contextmanager
def _task(description: str, total: int | None, show: bool | None) -> Iterator[tuple[Progress, TaskID] | None]:
    """Yield the display and its new line; None where nothing is shown."""
    if not shown(show) or threading.current_thread() is not threading.main_thread():
        yield None
        return
    if _displays:
        task = _displays[-1].add_task(description, total=total)
        try:
            yield _displays[-1], task
        finally:
            _displays[-1].remove_task(task)
        return
    with _displayed(0.0 if show else MOMENT) as display:
        yield display, display.add_task(description, total=total)


@contextmanager
def _displayed(delay: float) -> Iterator[Progress]:
    display = bar()

    def start() -> None:
        try:
            display.start()
        except LiveError:  # the caller has a display of rich's own
            display.disable = True

    timer = threading.Timer(delay, start)
    timer.daemon = True
    _displays.append(display)
    try:
        timer.start() if delay else start()
        yield display
    finally:
        _displays.remove(display)
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if display.live.is_started:
            display.stop()


def shown(show: bool | None) -> bool:
    """Return whether to show progress: as asked, or, for None, if standard error is a terminal."""
    return sys.stderr.isatty() if show is None else show


def bar() -> Progress:
    """Return a progress bar on standard error that vanishes when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Delay a Ctrl-C that comes inside to the end of the context, so that sums which belong together are of the same batches."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise KeyboardInterrupt

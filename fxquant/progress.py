"""Progress on anything that may take over two seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int | None, description: str, show: bool | None = None) -> Iterator[Item]:
    """The items, with a progress bar on standard error while they pass (None: if it is a terminal)."""
    if not shown(show):
        yield from items
        return
    with bar() as display:
        task = display.add_task(description, total=total)
        for item in items:
            yield item
            display.advance(task)


def shown(show: bool | None) -> bool:
    """Whether to show progress: as asked, or, for None, if standard error is a terminal."""
    return sys.stderr.isatty() if show is None else show


def bar() -> Progress:
    """A progress bar on standard error that vanishes when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)

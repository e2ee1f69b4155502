"""Locks that are free in a forked child: it has one thread, and locks held by other threads of its parent would never be released."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_OWNERS: weakref.WeakKeyDictionary[Any, list[Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def in_child(owner: Any, function: Callable[[Any], None]) -> None:
    """Call the function with the owner, while that lives, in every process forked from this one, before anything else there.

    The owner is not kept alive; the function must not refer to it.
    """
    _OWNERS.setdefault(owner, []).append(function)


def free_in_child(owner: Any, name: str, make: Callable[[], Any], interrupted: Callable[[Any], None] | None = None) -> None:
    """In a forked child, replace the owner's lock of that name by a new one where another thread of the parent held it.

    `interrupted` is then called with the owner, whose state that thread may have left between two changes.
    """

    def free(owner: Any) -> None:
        lock = getattr(owner, name)
        if lock.acquire(blocking=False):
            lock.release()
            return
        setattr(owner, name, make())
        if interrupted is not None:
            interrupted(owner)

    in_child(owner, free)


def _in_child() -> None:
    for owner, functions in list(_OWNERS.items()):
        for function in functions:
            function(owner)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)

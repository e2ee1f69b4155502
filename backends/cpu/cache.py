"""Compiled libraries in the user's cache. A library is loaded only if this user wrote it and it is complete; else it is compiled again.

A file holds a SHA-256 checksum followed by the library. It is read once, and the bytes that were compared with the checksum are loaded
from memory, so that no one can exchange them in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("fxquant")

CHECKSUM = hashlib.sha256().digest_size
_loads = itertools.count()


def cached(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the library that is cached under a name; if none can be trusted, call `make` and cache what it returns.

    If the user has no private folder, nothing is cached, and a line of the log says so.
    """
    try:
        file = folder() / name
    except OSError as error:
        _say_once(f"compiled kernels are not kept, and every process compiles its own: {error}")
        return make()
    try:
        return read(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("a compiled library is not used, and compiled again: %s", error)
    content = make()
    try:
        write(file, content)
    except OSError as error:
        logger.warning("a compiled library is not kept: %s", error)
    return content


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def folder() -> Path:
    """Return the cache folder, which exists and which no one else can write to. Raises OSError if there is none."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        above = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError("this user has no home directory; the variable XDG_CACHE_HOME can name a folder") from error
    found = above / "fxquant"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(found.stat(), found)
    return found


def read(file: Path) -> bytes:
    """Return the library that a file holds. Raises OSError for a link, a damaged file, and one that others own or can write to."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(file, flags), "rb") as stream:
        known = os.fstat(stream.fileno())
        if not stat.S_ISREG(known.st_mode):
            raise OSError(f"{file} is not a file")
        _require_own(known, file)
        held = stream.read()
    checksum, content = held[:CHECKSUM], held[CHECKSUM:]
    if not content or hashlib.sha256(content).digest() != checksum:
        raise OSError(f"{file} is damaged")
    return content


def write(file: Path, content: bytes) -> None:
    """Write a library with its checksum atomically, in place of an existing file."""
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with open(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(content).digest() + content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def load(name: str, content: bytes) -> ctypes.CDLL:
    """Load a library from these bytes. Raises OSError if they are not one, or nothing may be run from memory or temporary folders."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create(name), "wb") as stream:
            stream.write(content)
            stream.flush()
            # The loader distinguishes libraries by path, and descriptor numbers are reused: every path is made unique.
            path = f"/proc/self/fd/{'./' * next(_loads)}{stream.fileno()}"
            with contextlib.suppress(OSError):
                return ctypes.CDLL(path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # for this user alone
        file = Path(directory) / name
        file.write_bytes(content)
        return ctypes.CDLL(str(file))


def _require_own(known: os.stat_result, path: Path) -> None:
    if hasattr(os, "geteuid") and known.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to another user")
    if known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others can write to {path}")

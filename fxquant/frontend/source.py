"""The line of the user's code that is being executed, found quickly."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))

_foreign: dict[CodeType, bool] = {}
_texts: dict[tuple[CodeType, int], str] = {}


def frames() -> Iterator[FrameType]:
    """Yield the frames that are being executed, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_source(root: CodeType) -> str:
    """Return the innermost frame outside of torch and fxquant: "model.py:41 in forward:  y = self.act(y)".

    The search ends at a frame of `root`. Without user code inside it, the result is an empty string.
    """
    for frame in frames():
        code = frame.f_code
        if code is root:
            break
        foreign = _foreign.get(code)
        if foreign is None:
            foreign = _foreign[code] = is_library(code.co_filename)
        if not foreign:
            return _text(code, frame.f_lineno)
    return ""


def calls_from(folder: str) -> bool:
    """Return whether a function of a file in this folder, "torch/distributions/", is being executed."""
    return any(folder in frame.f_code.co_filename.replace(os.sep, "/") for frame in frames())


def raised_in(error: BaseException, folder: str) -> bool:
    """Return whether a function of a file in this folder was being executed when an error was raised."""
    return any(folder in entry.f_code.co_filename.replace(os.sep, "/") for entry, _ in traceback.walk_tb(error.__traceback__))


def is_library(filename: str) -> bool:
    """Return whether a file belongs to torch, to fxquant or to Python's import machinery."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen")


def _text(code: CodeType, line: int) -> str:
    text = _texts.get((code, line))
    if text is None:
        statement = linecache.getline(code.co_filename, line).strip()
        text = f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
        text = _texts[code, line] = f"{text}:  {statement}" if statement else text
    return text


def source_of_error(error: BaseException, root: CodeType) -> str | None:
    """Return the user's line that was executing inside `root` when an error was raised."""
    text, inside = None, False
    for frame, line in traceback.walk_tb(error.__traceback__):
        if inside and not is_library(frame.f_code.co_filename):
            text = _text(frame.f_code, line)
        inside = inside or frame.f_code is root
    return text

"""The line of the user's code that is being executed, found quickly."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import CodeType, FrameType

import torch

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))

_foreign: dict[CodeType, bool] = {}
_texts: dict[tuple[CodeType, int], str] = {}


def user_source(root: CodeType) -> str:
    """Return the innermost frame outside of torch and fxquant: "model.py:41 in forward:  y = self.act(y)".

    The search ends at a frame of `root`. Without user code inside it, the result is an empty string.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is root:
            return ""
        foreign = _foreign.get(code)
        if foreign is None:
            foreign = _foreign[code] = is_library(code.co_filename)
        if not foreign:
            return _text(code, frame.f_lineno)
        frame = frame.f_back
    return ""


def calls_from(folder: str) -> bool:
    """Return whether a function of a file in this folder, "torch/distributions/", is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if folder in frame.f_code.co_filename.replace(os.sep, "/"):
            return True
        frame = frame.f_back
    return False


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
    entry, text = error.__traceback__, None
    inside = False
    while entry is not None:
        code = entry.tb_frame.f_code
        if inside and not is_library(code.co_filename):
            text = _text(code, entry.tb_lineno)
        inside = inside or code is root
        entry = entry.tb_next
    return text

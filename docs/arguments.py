"""Docstrings on the site: a table of names, each with two spaces and words behind it, becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"(\w[\w.*, ]*?) {2,}(\S.*)")


class Arguments(griffe.Extension):
    """Rewrites the docstring of every class, function and module that is read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe with each of them."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The text with its tables as lists; what is indented under a row belongs to it."""
    lines, inside, code = list[str](), False, False
    for line in text.splitlines():
        code ^= line.lstrip().startswith("```")
        row = None if code or line.startswith(" ") else ROW.fullmatch(line)
        if row is not None:
            if not inside and lines and lines[-1]:
                lines.append("")
            lines.append(f"- `{row[1]}`: {row[2]}")
            inside = True
        elif inside and line.startswith(" ") and line.strip():
            lines[-1] += " " + line.strip()
        else:
            if inside and line.strip():
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)

"""Docstrings on the site: a table of names, each with two spaces and words behind it, becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"(\w[\w.*, ]*?) {2,}(\S.*)")
INNER = re.compile(r' +("[^"]+"|[\w./]+) {2,}(\S.*)')  # a row of an indented table: values of an argument, files of a folder


class Arguments(griffe.Extension):
    """Rewrites the docstring of every class, function and module that is read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe with each of them."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Return the text with its tables as lists: a row indented under another row becomes an item of a list inside it."""
    lines, code = list[str](), False
    inside: int | None = None  # None outside of lists, -1 in a row, and in an indented table the column of its names
    for line in text.splitlines():
        code ^= line.lstrip().startswith("```")
        row = None if code or line.startswith(" ") else ROW.fullmatch(line)
        inner = None if code else INNER.fullmatch(line)
        words, column = line.strip(), len(line) - len(line.lstrip())
        if (row is not None or inner is not None) and lines and lines[-1] and not lines[-1].lstrip().startswith("- "):
            lines.append("")
        if row is not None:
            lines.append(f"- `{row[1]}`: {row[2]}")
            inside = -1
        elif inner is not None:
            nested = inside is not None and (inside == -1 or lines[-1].startswith("    "))
            lines.append(f"{'    ' * nested}- `{inner[1]}`: {inner[2]}")
            inside = column
        elif inside is not None and words and column:
            if column == inside:  # after a list in a row: the row goes on
                lines += ["", "    " + words]
                inside = -1
            else:
                lines[-1] += " " + words
        else:
            if inside is not None and words:
                lines.append("")
            inside = None
            lines.append(line)
    return "\n".join(lines)

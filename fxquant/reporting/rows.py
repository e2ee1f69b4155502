"""Findings as rows: they iterate, print as a table, and are shown as one in a notebook."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = TypeVar("Row", bound=NamedTuple)


@dataclass(frozen=True)
class Rows(Sequence[Row], Generic[Row]):
    """Findings, a named tuple each, in the order of the graph."""

    title: str  # the heading of the table
    items: tuple[Row, ...]  # the rows
    none: str = "none"  # the text if there are none

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __rich__(self) -> Table:
        heads = [name.replace("_", " ") for name in self.items[0]._fields] if self.items else []
        table = Table(*heads, title=self.title, title_justify="left")
        for item in self.items:
            table.add_row(*(escape(cell(value)) for value in item))
        return table

    def __str__(self) -> str:
        return as_text(self.__rich__()) if self.items else f"{self.title}: {self.none}"

    def _repr_html_(self) -> str:
        return as_html(self.__rich__()) if self.items else f"<p>{escape(str(self))}</p>"


def cell(value: Any) -> str:
    """Return a value as the text of a table's cell."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(cell, value)) if isinstance(value, list | tuple) else str(value)


def as_text(shown: Any) -> str:
    """Something of rich's as plain lines."""
    console = Console(file=io.StringIO(), width=160)
    console.print(shown)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def as_html(shown: Any) -> str:
    """Render an object as HTML, for a notebook."""
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")

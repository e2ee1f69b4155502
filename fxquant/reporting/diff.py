"""The difference of two graphs, or of two files, as text."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fxquant.errors import ConfigurationError
from fxquant.reporting.inspection import Contents, difference, of_model, read
from fxquant.support.arguments import checked


@dataclass(frozen=True)
class GraphDifference:
    """The difference of two graphs: text, scales, zero points and tensors; prints as lines, with - for the first and + for the second.

    text  the lines; "" where they are equal
    """

    text: str

    @property
    def equal(self) -> bool:
        """Whether both hold the same."""
        return not self.text

    def __str__(self) -> str:
        return self.text or "equal: the same graph, scales and tensors"

    def _repr_html_(self) -> str:
        colours = {"+": "#dafbe1", "-": "#ffebe9", "@": "#ddf4ff"}
        lines = [f"<span style='background:{colours.get(line[:1], 'none')}'>{html.escape(line)}</span>" for line in str(self).splitlines()]
        return "<pre style='line-height:1.3'>" + "\n".join(lines) + "</pre>"


@checked()
def diff(a: Any, b: Any) -> GraphDifference:
    """Compare two graphs at any stage, or two files that `save` wrote, or two that `export_onnx` wrote.

    Raises ConfigurationError for other arguments, and for a graph and an ONNX file. Raises ExportError for a file that cannot be read.
    """
    return GraphDifference(difference(_contents(a, "a"), _contents(b, "b")))


def _contents(value: Any, name: str) -> Contents:
    if isinstance(value, fx.GraphModule):
        return of_model(Path(name), value)
    if isinstance(value, str | os.PathLike):
        return read(value)
    raise ConfigurationError(
        f"{name} is a {type(value).__name__}, which has no graph",
        because="graphs are traced, prepared and integer models, and files of them",
        remedy="pass the result of fxq.trace, fxq.prepare or fxq.convert, or a path",
    )

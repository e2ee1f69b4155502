"""Findings as rows: they iterate, print as a table, and are shown as one in a notebook; the figures of a tuning method are such rows."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = TypeVar("Row")
Found = TypeVar("Found", bound=NamedTuple)


@dataclass(frozen=True)
class Rows(Sequence[Found], Generic[Found]):
    """Findings, a named tuple each, in the order of the graph."""

    title: str  # the heading of the table
    items: tuple[Found, ...]  # the rows
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


# ---- the figures of a tuning method for every layer
class LayerTable(Generic[Row]):
    """A row for each layer: iterates over the rows, and prints as the table that a subclass builds in `__rich__`."""

    layers: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return as_text(self)


@dataclass(frozen=True)
class TunedLayer:
    """The outcome for one layer, or one block of layers.

    name     the last node with a weight; the block's result is compared after its last nodes and their fused clamps
    layers   the nodes with weights
    before   the mean squared error of its result against the float model's, on held-out samples
    after    the same after tuning
    kept     whether the model keeps the tuned parameters: if the error fell, and the outputs of the model gained 0.2 dB
    signal   the mean square of the float model's result
    """

    name: str
    layers: tuple[str, ...]
    before: float
    after: float
    kept: bool
    signal: float

    @staticmethod
    def of(document: dict[str, Any]) -> "TunedLayer":
        """Return the outcome that a checkpoint holds as a JSON object."""
        return TunedLayer(**{**document, "layers": tuple(document["layers"])})

    @property
    def gain(self) -> float:
        """The reduction of the mean squared error by tuning, in dB."""
        return _decibels(self.before, self.after)


@dataclass(frozen=True)
class TuningResult(LayerTable[TunedLayer]):
    """The tuned layers in the order they run; iterates over them, and prints as a table.

    method   the function that tuned
    layers   a row each
    skipped  layers that the method cannot tune, each with the reason
    losses   the loss of each step, where one loss is minimized over the whole model, as by `distill`
    """

    method: str
    layers: tuple[TunedLayer, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def kept(self) -> tuple[TunedLayer, ...]:
        """The layers whose tuned parameters the model keeps."""
        return tuple(layer for layer in self.layers if layer.kept)

    @property
    def summary(self) -> str:
        """One line."""
        return f"{self.method}: {len(self.kept)} of {len(self.layers)} tuned"

    def __rich__(self) -> Table:
        table = Table(title=self.summary, title_justify="left")
        for name in ("layer", "weights", "before", "after", "gain", ""):
            table.add_column(name, justify="left" if name in ("layer", "weights", "") else "right")
        for layer in self.layers:
            before, after = (f"{_decibels(layer.signal, noise):.2f} dB" for noise in (layer.before, layer.after))
            outcome = "kept" if layer.kept else "unchanged"
            table.add_row(layer.name, ", ".join(layer.layers), before, after, f"{layer.gain:+.2f} dB", outcome)
        for name, because in self.skipped:
            table.add_row(name, "", "", "", "", because)
        return table


def _decibels(signal: float, noise: float) -> float:
    if noise <= 0:
        return 0.0 if signal <= 0 else math.inf
    return -math.inf if signal <= 0 else 10 * math.log10(signal / noise)

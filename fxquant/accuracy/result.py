"""The result of a tuning method: its figures for every layer, which print as a table."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

Row = TypeVar("Row")


class LayerTable(Generic[Row]):
    """A row for each layer: iterates over the rows, and prints as the table that a subclass builds in `__rich__`."""

    layers: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __rich__(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the table without colours, as wide as it needs to be."""
        written = io.StringIO()
        Console(file=written, width=160, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


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
    def of(document: dict[str, Any]) -> TunedLayer:
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
    memory   bytes of values that were kept for the samples at the same time, at most
    losses   the loss of each step, where one loss is minimized over the whole model, as by `distill`
    """

    method: str
    layers: tuple[TunedLayer, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    memory: int = 0
    losses: tuple[float, ...] = ()

    @property
    def kept(self) -> tuple[TunedLayer, ...]:
        """The layers whose tuned parameters the model keeps."""
        return tuple(layer for layer in self.layers if layer.kept)

    @property
    def summary(self) -> str:
        """One line."""
        return f"{self.method}: {len(self.kept)} of {len(self.layers)} tuned, {self.memory / 2**20:.1f} MiB of values kept at most"

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

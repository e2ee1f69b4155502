"""A graph as a picture."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from torch import fx

from fxquant.analysis.layers import Layer
from fxquant.errors import ConfigurationError
from fxquant.reporting.advice import grid_text
from fxquant.reporting.layout import Drawing, drawing, needs
from fxquant.support.arguments import FILE, checked, instance
from fxquant.support.files import write_file
from fxquant.support.progress import working

FORMATS = (".svg", ".png", ".pdf")
LARGEST = 400  # inches: beyond this a page is smaller than its letters
WIDTH, HEIGHT = 3.0, 0.8  # inches for each column and row

# Colours of Okabe and Ito, which colour-blind readers can distinguish; the frame and the text show the same without colour.
LOOK = {
    "int4": ("#CC79A7", "-"),
    "int8": ("#9AD1F5", "-"),
    "uint8": ("#9AD1F5", "-"),
    "int16": ("#7FD6B4", "-"),
    "int32": ("#F0E442", "-"),
    "float": ("#F4B183", "--"),
    "": ("#EEEEEE", ":"),
}


@checked(model=instance("a traced, prepared or integer model", fx.GraphModule), path=FILE)
@working("drawing")
def draw(model: fx.GraphModule, path: str | os.PathLike[str]) -> Path:
    """Write the operators of a graph at any stage as a picture, from top to bottom: SVG, PNG or PDF by the name's ending; returns the path.

    A box says name, operator, dtype and scale, and shape; colours are dtypes, what is computed in float has a dashed frame, inputs and
    the output a dotted one. Needs matplotlib, of the extra "report". Raises ConfigurationError without it, and for another ending.
    """
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        raise ConfigurationError(
            f"{file} is not a known picture format", because=f"its name ends in none of {', '.join(FORMATS)}", remedy="name it so"
        )
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise needs("matplotlib", error) from error
    shown = drawing(model)
    columns = [x for x, _ in shown.places.values()]
    rows = [y for _, y in shown.places.values()]
    left = min(columns) - 0.7
    right = max(max(columns) + 0.7, *(x + 0.2 for edge in shown.graph.edges for x, _ in shown.path(*edge)), left)
    size = (WIDTH * (right - left), HEIGHT * (max(rows) - min(rows) + 1.2))
    shrink = min(1.0, LARGEST / max(size))
    figure = Figure(figsize=(size[0] * shrink, size[1] * shrink), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(left, right), ylim=(min(rows) - 0.6, max(rows) + 0.6))
    axes.axis("off")
    _edges(axes, shown)
    for name, (x, y) in shown.places.items():
        layer = shown.layers.get(name)
        colour, line = LOOK.get(
            "" if layer is None else layer.dtype if layer.integer else "int8" if layer.dynamic else "float", LOOK["int8"]
        )
        axes.text(
            x, y, label(name, layer), ha="center", va="center", fontsize=8 * shrink, linespacing=1.3,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#333333", "linestyle": line, "linewidth": 0.8},
        )  # fmt: skip
    ending, picture = file.suffix.lower(), io.BytesIO()
    with rc_context({"svg.hashsalt": "fxquant"}):  # equal graphs give equal bytes
        figure.savefig(picture, format=ending[1:], metadata={"Date": None} if ending == ".svg" else None)
    return write_file(file, picture.getvalue())


def label(name: str, layer: Layer | None) -> str:
    """Return the text of a box."""
    if layer is None:
        return name
    shape = ",".join(map(str, layer.shape))
    kind = grid_text(layer.grid) if layer.grid is not None else layer.dtype
    return f"{name}: {layer.operator}\n{kind}  [{shape}]"


def _edges(axes: Any, shown: Drawing) -> None:
    for one, other in shown.graph.edges:
        points = shown.path(one, other)
        axes.plot([x for x, _ in points], [y for _, y in points], color="#777777", linewidth=0.8, zorder=0, solid_joinstyle="round")

"""Draw a graph as a picture."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from fxquant.analysis.layers import Layer
from fxquant.reporting.advice import grid_text
from fxquant.reporting.layout import Drawing, drawing
from fxquant.reporting.pictures import PICTURE, Svg, figure_class, rendered, short, write_picture
from fxquant.support.arguments import POSITIVE, checked, instance
from fxquant.support.progress import working

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


@checked(
    model=instance("a traced, prepared or integer model", fx.GraphModule),
    path=PICTURE,
    depth=POSITIVE.or_none("every operator is a box of its own"),
)
@working("drawing")
def draw(model: fx.GraphModule, path: str | os.PathLike[str] | None = None, *, depth: int | None = None) -> Path | Svg:
    """Draw the operators of a graph at any stage, from top to bottom, as SVG, PNG or PDF by the ending of `path`; return the path.

    Without a path, the result is the text of the SVG, which a notebook shows. A box says name, operator, dtype and scale, and shape.
    Colours are dtypes. A dashed frame marks what is computed in float, with the device where it runs; inputs and the output are dotted.

    depth  the operators of a module at this depth of the model that run one after another are one box ("layer1.0" is at 2): a large
           graph becomes readable by it. The box says how many operators of which dtypes it holds

    Needs matplotlib, of the extra "report". Raises ConfigurationError without it, and for another ending.
    """
    Figure = figure_class()
    shown = drawing(model, depth=depth)
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
        run = shown.folded.get(name) or tuple(filter(None, [shown.layers.get(name)]))
        colour, line = LOOK.get(_look(run), LOOK["int8"])
        axes.text(
            x, y, label(name, run), ha="center", va="center", fontsize=8 * shrink, linespacing=1.3, parse_math=False,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#333333", "linestyle": line, "linewidth": 0.8},
        )  # fmt: skip
    return Svg(rendered(figure, ".svg").decode()) if path is None else write_picture(figure, path)


def _look(run: Sequence[Layer]) -> str:
    """Return the key of a box's look: float if any of its operators is, otherwise the dtype of its result."""
    if any(_is_float(layer) for layer in run):
        return "float"
    return run[-1].dtype if run else ""


def _is_float(layer: Layer) -> bool:
    return not layer.integer and not layer.dynamic


def label(name: str, run: Sequence[Layer]) -> str:
    """Return the text of a box: of an operator, of the operators of a module, or of an input or the output, which have none."""
    if not run:
        return name
    last = run[-1]
    shape = ",".join(map(str, last.shape))
    kind = grid_text(last.grid) if last.grid is not None else last.dtype
    where = f" on {last.device}" if _is_float(last) and (last.reason or last.boundary) else ""
    if len(run) == 1:
        return f"{short(name)}: {last.operator}\n{kind} [{shape}]{where}"
    dtypes = Counter(layer.dtype for layer in run if not layer.boundary)
    held = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    return f"{short(name)}: {held}\n{kind} [{shape}]{where}"


def _edges(axes: Any, shown: Drawing) -> None:
    for one, other in shown.graph.edges:
        points = shown.path(one, other)
        axes.plot([x for x, _ in points], [y for _, y in points], color="#777777", linewidth=0.8, zorder=0, solid_joinstyle="round")

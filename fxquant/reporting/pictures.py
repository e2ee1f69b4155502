"""Write figures of matplotlib, which this module alone imports."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from fxquant.reporting.layout import needs
from fxquant.support.arguments import FILE, such
from fxquant.support.files import write_file

FORMATS = (".svg", ".png", ".pdf")
PICTURE = such(
    f"the path of a picture, which ends in {', '.join(FORMATS)}", FILE.take, lambda path: os.path.splitext(path)[1].lower() in FORMATS
).or_none("nothing is written")
LONGEST = 30  # letters of a name in a picture


def figure_class() -> Any:
    """Return matplotlib's class of figures. Raises ConfigurationError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise needs("matplotlib", error) from error
    return Figure


def write_picture(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure in the format of the path's ending; return the path. Equal figures give equal bytes.

    Raises ExportError where it cannot be written.
    """
    from matplotlib import rc_context

    ending, picture = Path(path).suffix.lower(), io.BytesIO()
    with rc_context({"svg.hashsalt": "fxquant", "svg.fonttype": "none"}):  # names in an SVG can be searched
        figure.savefig(picture, format=ending[1:], metadata={"Date": None} if ending == ".svg" else None)
    return write_file(path, picture.getvalue())


def short(name: str) -> str:
    """Return a name with its middle left out where it is long: the ends of similar names differ."""
    half = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}"

"""A model as one HTML file that needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from torch import fx

from fxquant.analysis.check import findings
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import stage_of
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, first_batches
from fxquant.reporting.comparing import Comparison, compare
from fxquant.reporting.contents import contents
from fxquant.reporting.layout import needs
from fxquant.support.arguments import FILE, FLAG, TEXT, checked, instance
from fxquant.support.files import check_place, write_file
from fxquant.support.progress import working


@checked(
    model=instance("a traced, prepared or integer model", fx.GraphModule),
    path=FILE,
    prepared=instance("a prepared model", fx.GraphModule).or_none("only `model` is shown"),
    comparison=instance("what fxq.compare returned", Comparison).or_none("the model is compared with the reference"),
    title=TEXT,
    advice=FLAG,
)
@working("writing the report")
def report(
    model: fx.GraphModule,
    path: str | os.PathLike[str],
    batches: Any = None,
    *,
    reference: Any = None,
    prepared: fx.GraphModule | None = None,
    comparison: Comparison | None = None,
    title: str = "fxquant report",
    advice: bool = True,
    num_batches: int | None = None,
    options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> Path:
    """Write what is known of a model as one HTML file, which opens without network; returns its path.

    It has a summary, how near the forms are to each other, advice, the graph with zoom and search, coloured by error, dtype or device,
    a table of layers that sorts and filters, of each tensor the histogram with the range of its grid and the channels, of each weight its
    channels, what is left in float and why, limits that are broken, and what the passes did.

    reference   the form that `model` is compared with on the batches: the float model
    prepared    the prepared model beside an integer one: held against the target's limits, and compared with `model`
    comparison  what `compare` found already; then no batches are needed

    Needs plotly, of the extra "report". Raises ConfigurationError without it, and for a reference without batches or batches without
    a form to compare with, and what `compare` raises.
    """
    if reference is not None and batches is None and comparison is None:
        raise ConfigurationError("a reference needs batches", because="both models are run on them", remedy="pass batches, or leave it out")
    if batches is not None and reference is None and prepared is None:
        raise ConfigurationError(
            "batches mean nothing here",
            because="no other form of the model is given that it could be compared with",
            remedy="pass reference=, the float model, or leave batches out",
        )
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise needs("plotly", error) from error
    check_place(path)
    if batches is not None:
        batches = as_batches(batches)
        batches = list(first_batches(batches, num_batches)) if isinstance(batches, Iterator) else batches  # both comparisons take them
    reading: dict[str, Any] = {"num_batches": num_batches, "options": options, "show_progress": show_progress}
    if comparison is None and reference is not None:
        comparison = compare(reference, model, batches, advice=advice, prepared=prepared, **reading)
    forms = {} if comparison is None else {f"{comparison.labels[1]} against {comparison.labels[0]}": comparison}
    if prepared is not None and batches is not None:
        forms["integer against prepared"] = compare(prepared, model, batches, advice=False, states=("validate", None), **reading)
    checked_model = prepared if prepared is not None else model if stage_of(model) == "PREPARED" else None
    limits = (
        [] if checked_model is None else [each for each in findings(checked_model, checked_model.meta["target"]) if each.kind == "limit"]
    )
    text = json.dumps(contents(model, comparison, forms, limits, title), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    page = resources.files("fxquant.reporting").joinpath("page.html").read_text(encoding="utf-8")
    head, rest = page.split("__DATA__")
    middle, tail = rest.split("__PLOTLY__")
    return write_file(path, head + text.replace("<", "\\u003c") + middle + get_plotlyjs() + tail)

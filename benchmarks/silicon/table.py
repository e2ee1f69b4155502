"""The results as a table, in the terminal and as a page."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.silicon.operators import Result

COLUMNS: dict[str, Callable[[Result], str]] = {
    "row": lambda result: result.row,
    "march": lambda result: result.march,
    "activations": lambda result: result.dtype,
    "scales": lambda result: result.scales,
    "runs on": lambda result: result.place,
    "differing": lambda result: f"{result.differing} of {result.elements}" if result.place in ("BPU", "processor") else "–",
    "steps": lambda result: f"{result.steps:.0f}" if result.place in ("BPU", "processor") else "–",
    "": lambda result: result.note[:160].replace("|", "/"),
}


def summary(results: Sequence[Result]) -> str:
    """How many rows are equal, differ, or do not run on the BPU."""
    compared = [result for result in results if result.place == "BPU"]
    differing = [result for result in compared if result.differing]
    return (
        f"{len(compared) - len(differing)} of {len(compared)} rows on the BPU are equal in all "
        f"{sum(result.elements for result in compared)} elements but {sum(result.differing for result in differing)}; "
        f"{len(results) - len(compared)} rows do not run there"
    )


def show(results: Sequence[Result]) -> None:
    """The table in the terminal."""
    table = Table(*COLUMNS)
    for result in results:
        table.add_row(*(cell(result) for cell in COLUMNS.values()))
    console = Console(width=200)
    console.print(table)
    console.print(summary(results), markup=False)


def markdown(results: Sequence[Result]) -> str:
    """The table as a page."""
    lines = [
        summary(results) + ".",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cell(result) for cell in COLUMNS.values()) + " |" for result in results),
    ]
    return "\n".join(lines) + "\n"

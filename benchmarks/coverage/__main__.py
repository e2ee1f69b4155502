"""Try each capability that the documents describe, which works, works in part, or is absent: `python -m benchmarks.coverage`.

Every row runs something small, mostly on one network of three layers. Where that raises, the row "fails", and the exit status is 1.
`--page` writes docs/COVERAGE.md; `--only WORD` tries the rows that have it in their chapter or words.
"""

import argparse
import contextlib
import importlib
import io
import logging
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.coverage.record import ABSENT, FAILS, PART, ROWS, WORKS, Here, Row, State
from fxquant.support.progress import progress

CHAPTERS = ("start", "settings", "training", "depth")
PAGE = Path(__file__).parents[2] / "docs" / "COVERAGE.md"
HEAD = """# Coverage

What the public documents of Horizon's plugin and of PyTorch's quantization describe, in a few words of ours, and what of it is here.
Each row is tried by a small run: `python -m benchmarks.coverage` prints this table, and `--page` writes this page.
"""


def main() -> int:
    """Try the rows, print them, and write the page if that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description="what works of what the documents describe")
    parser.add_argument("--only", default="", help="the rows that have this in their chapter or words")
    parser.add_argument("--page", action="store_true", help="write docs/COVERAGE.md")
    parser.add_argument("--quiet", action="store_true", help="no table; what is not whole alone")
    arguments = parser.parse_args()
    for name in CHAPTERS:
        importlib.import_module(f"benchmarks.coverage.{name}")
    chosen = [row for row in ROWS if arguments.only.lower() in f"{row.chapter} {row.words}".lower()]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    states: list[State] = []
    with tempfile.TemporaryDirectory() as folder:
        here = Here(Path(folder))
        for row in progress(chosen, len(chosen), "trying"):
            torch.manual_seed(0)
            with contextlib.redirect_stdout(io.StringIO()):
                states.append(row.tried(here)[0])
    table = Table("chapter", "capability", "state", "")
    for row, state in zip(chosen, states, strict=True):
        if not arguments.quiet or state.state != WORKS:
            table.add_row(row.chapter, row.words, state.state, state.because)
    Console().print(table)
    counts = Counter(state.state for state in states)
    print(f"{len(states)} capabilities: " + ", ".join(f"{name} {counts[name]}" for name in (WORKS, PART, ABSENT, FAILS)))
    if arguments.page:
        PAGE.write_text(page(chosen, states), encoding="utf-8")
    return int(counts[FAILS] > 0)


def page(rows: list[Row], results: list[State]) -> str:
    """The page: a table for each chapter, and one of their counts."""
    chapters = list(dict.fromkeys(row.chapter for row in rows))
    states = {name: [state for row, state in zip(rows, results, strict=True) if row.chapter == name] for name in chapters}
    lines = [HEAD, f"| chapter | {' | '.join((WORKS, PART, ABSENT))} |", "|---|---|---|---|"]
    for name in (*chapters, None):
        mine = results if name is None else states[name]
        counts = Counter(state.state for state in mine)
        lines.append(f"| {name or '**all**'} | {' | '.join(str(counts[one]) for one in (WORKS, PART, ABSENT))} |")
    for name in chapters:
        lines += ["", f"## {name}", "", "| capability | state | what is missing |", "|---|---|---|"]
        lines += [
            f"| {row.words} | {state.state} | {state.because.replace('|', '/')} |"
            for row, state in zip(rows, results, strict=True)
            if row.chapter == name
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""The page of operators says what is true: its rows are those of the table, and a sample of its cells is measured again."""

from __future__ import annotations

import random

import pytest

from benchmarks.operators import page
from benchmarks.operators.__main__ import PAGE
from benchmarks.operators.measure import NONE, has, measure
from benchmarks.operators.rows import FAMILIES
from benchmarks.operators.spelling import Spelling
from fxquant.ops import OPERATORS

SAMPLE = 6
COLUMNS = 8  # of a table of operators


def rows() -> list[list[str]]:
    """The cells of every row of every table of the page."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0")[2:-2].split(" | ")] for line in lines]


def written() -> dict[tuple[str, str], list[str]]:
    """The rows of the tables of operators, by operator and first spelling."""
    return {(row[0], row[1].strip("`")): row for row in rows() if len(row) == COLUMNS and row[1].startswith("`")}


def test_every_operator_that_is_tried_has_its_row() -> None:
    assert set(written()) == {(row.operator, row.texts[0]) for family in FAMILIES.values() for row in family}


def test_every_limit_has_its_row_and_every_row_of_a_record_is_true() -> None:
    """A record that is newer than the page has no row until the page is written again."""
    found = [tuple(row) for row in rows()]
    names = {record.name for record in OPERATORS.values()}
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index("## Operator records") : text.index("## Limits")].splitlines()
    written = [tuple(cell.strip() for cell in line[2:-2].split(" | ")) for line in lines if line.startswith("| ")][1:]
    known = {tuple(cell.strip() for cell in row) for row in page.record_rows()}
    assert {row[0] for row in page.record_rows()} == names
    assert set(written) <= known
    assert len(written) > len(names) / 2
    assert {tuple(cell.strip() for cell in row) for row in page.limit_rows()} <= {row[:5] for row in found}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("index", range(SAMPLE))
def test_a_cell_is_what_is_measured(index: int) -> None:
    """One row of each sixth of the table, on one target."""
    every = [(family, row) for family, entries in FAMILIES.items() for row in entries if not row.random]
    family, row = random.Random(index).choice(every[index::SAMPLE])
    target = page.TARGETS[index % len(page.TARGETS)]
    spelling = Spelling(family, row, row.texts[0])
    dtypes = [dtype for dtype in page.DTYPES if dtype == page.DTYPES[0] or has(target, dtype)]
    known = {(spelling.name, target, dtype): measure(spelling, target, dtype, NONE) for dtype in dtypes}
    assert written()[row.operator, row.texts[0]][3 + page.TARGETS.index(target)] == page.cell(spelling, target, known)

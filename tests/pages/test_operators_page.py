"""The page of operators says what is true: its rows are those of the table, and a sample of its cells is measured again."""

from __future__ import annotations

import random

import pytest

from benchmarks.operators import page
from benchmarks.operators.__main__ import PAGE
from benchmarks.operators.measure import CRASH, FLOAT, INTEGER, NONE, REFUSED, WRONG, Result, has, measure
from benchmarks.operators.rows import FAMILIES
from benchmarks.operators.spelling import Spelling, spelled
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


def test_a_page_is_written_of_nothing_that_is_wrong() -> None:
    entry = next(iter(spelled(FAMILIES)))
    for kind in (CRASH, WRONG):
        with pytest.raises(ValueError, match="crash or are wrong"):
            page.text([Result(entry.name, "bayes-e", "int8", kind)])


def test_each_kind_of_result_is_told_apart() -> None:
    """A spelling that is integer, one that stays in float with its reason, and one that is refused."""
    known = {entry.text: entry for entry in spelled(FAMILIES)}
    kinds = {"torch.add(x, y)": INTEGER, "torch.fft.fft(x).abs()": FLOAT, "torch.masked_select(x, x > 0)": REFUSED}
    for text, kind in kinds.items():
        result = measure(known[text], "bayes-e", "int8", NONE)
        assert result.kind == kind
        assert bool(result.reasons) == (kind != INTEGER)
        assert kind != INTEGER or result.sqnr > 30


def test_what_is_wrong_is_found() -> None:
    """A float model whose result is another than that of its graph: it changes from call to call."""
    entry = next(entry for entry in spelled(FAMILIES) if entry.row.operator == "random" and "bernoulli" in entry.text)
    deterministic = Spelling(entry.family, type(entry.row)(entry.row.operator, entry.row.texts, entry.row.over), entry.text)
    assert measure(deterministic, "bayes-e", "int8", NONE).kind == WRONG


def test_the_totals_are_those_of_the_rows() -> None:
    """Both pages that state them, and the cells that they are the sums of."""
    cells = [tuple(map(int, row[-1].split(" of "))) for row in written().values()]
    integer, tried = (sum(cell[side] for cell in cells) for side in (0, 1))
    share = f"{100 * integer / tried:.0f} %"
    assert f"{integer} of {tried} ({share}) of all" in " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"and {share} of all" in (PAGE.parent / "measurements.md").read_text(encoding="utf-8")

"""The list of capabilities: rows that fail are reported, and the page has every row."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.coverage.__main__ import CHAPTERS, PAGE, page
from benchmarks.coverage.record import ABSENT, FAILS, PART, ROWS, WORKS, Here, Row, absent, part, sure


@pytest.fixture(scope="module", autouse=True)
def _chapters() -> None:
    for name in CHAPTERS:
        importlib.import_module(f"benchmarks.coverage.{name}")


def test_a_row_says_what_came_of_its_run(tmp_path: Path) -> None:
    here = Here(tmp_path)
    tried = {
        words: Row("chapter", words, run).tried(here)[0]
        for words, run in {
            WORKS: lambda h: sure(h.x.shape[0] == 8),
            PART: lambda h: part("not all of it"),
            ABSENT: lambda h: absent("nothing of it"),
            FAILS: lambda h: sure(h.x.shape[0] == 9, "another size"),
        }.items()
    }
    assert all(words == state.state for words, state in tried.items())
    assert tried[FAILS].because == "AssertionError: another size"
    text = page([Row("chapter", words, lambda h: None) for words in tried], list(tried.values()))
    assert "| chapter | 1 | 1 | 1 |" in text
    assert "| part | part | not all of it |" in text


@pytest.mark.parametrize("words", ["a traced model", "a file of settings", "a batch size written", "attributes, methods"])
def test_some_rows_hold(words: str, tmp_path: Path) -> None:
    (row,) = [row for row in ROWS if row.words.startswith(words)]
    state, _ = row.tried(Here(tmp_path))
    assert state.state == WORKS, state.because


def test_the_page_has_every_row_and_none_that_fails() -> None:
    lines = [
        line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and line.count(" | ") == 2
    ]
    shown = [cells[0].removeprefix("| ") for cells in lines if cells[1] in (WORKS, PART, ABSENT)]
    assert shown == [row.words for row in ROWS]

"""The check of words reads pages: private phrases and long sentences are found in prose, and not in code or tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = " ".join(["word"] * 36) + "."


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words_of_the_docs", ROOT / "docs" / "words.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("# A page\n\nIt is told that\nnothing is wrong.", 3),
        ("First.\n\n- one\n- two whole numbers", 4),
        (f"# A page\n\nShort. {LONG}", 3),
        ("```python\nx = 1\n```\n\nThe way back.", 5),
    ],
)
def test_what_is_wrong_is_found_at_its_line(words: ModuleType, page: str, line: int) -> None:
    assert [place for place, _ in words.of_page(page)] == [line]


@pytest.mark.parametrize(
    "page",
    [
        "```text\nthe way back\n```\n",
        "| whole numbers | real numbers |\n|---|---|\n| it is told | x |\n",
        "Call `the way back`, of [a page](whole-numbers.md).\n",
        f"{LONG[:100]}. {LONG[:100]}.\n",
    ],
)
def test_code_and_tables_are_left_out(words: ModuleType, page: str) -> None:
    assert list(words.of_page(page)) == []


def test_all_pages_are_among_those_that_are_checked(words: ModuleType) -> None:
    checked = {path.relative_to(ROOT).as_posix() for path in words.files([]) if path.suffix == ".md"}
    assert {"README.md", "CHANGELOG.md", "docs/guide/quantize.md", "docs/OPERATORS.md", "backends/bpu/ARITHMETIC.md"} <= checked

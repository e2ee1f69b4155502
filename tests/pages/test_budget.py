"""The size of the library is compared with its budget: a tree that is larger, or clearly smaller, is named."""

from __future__ import annotations

import pytest

from docs.budget import complaints, measured

pytestmark = pytest.mark.quick

SMALL = "x = 1\n" * 10
WIDE = "def wide(a, b, c, d, e, /, f, g, *, h, i): ...\n"


def test_sizes_are_counted() -> None:
    files = {"passes/one.py": SMALL, "fxquant/two.py": SMALL, "fxquant/ops/__init__.py": SMALL, "backends/wide.py": WIDE * 80}
    assert measured(files) == {"lines": 110, "files": 4, "small": 1, "wide": 80}
    assert measured({"fxquant/primitives/wide.py": WIDE * 80})["wide"] == 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (700, []),
        (801, ["fxquant/long.py has 801 lines; 800 are allowed", "lines: 801, and the budget is 700: let what is new replace something"]),
        (300, ["lines: 300, and the budget is 700: lower it in docs/budget.py"]),
    ],
)
def test_a_tree_beyond_its_budget_or_far_below_it_is_named(lines: int, said: list[str]) -> None:
    budget = {"lines": 700, "files": 1, "small": 0, "wide": 0}
    assert complaints({"fxquant/long.py": "x = 1\n" * lines}, budget) == said

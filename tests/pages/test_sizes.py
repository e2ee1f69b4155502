"""How large a file and a function may be, so that each can be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.test_layers import parsed

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
ROOMS = ("fxquant", "passes", "backends")

FILE_LINES = 800  # a file is a unit of thought, and not cut where a line count says so
FUNCTION_LINES = 60  # behind the docstring
PARAMETERS = 8  # more are a value object that nobody has named
LONG_SIGNATURES = 25  # public functions, whose options are keywords, and operators with the arguments of PyTorch's functions
# A primitive's parameters are the arguments of its calls in saved files; the functions of `compat` have the signatures of other toolkits.
GIVEN_SIGNATURES = ("fxquant/primitives/", "fxquant/compat/")


Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    """The text of every file of the library, by its path."""
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))}


def functions(files: dict[str, str]) -> Iterator[tuple[str, Function]]:
    """Every function and method, after the path of its file and its name."""
    for path, text in files.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, Function):
                yield f"{path}: {node.name}", node


def too_long_files(files: dict[str, str]) -> list[str]:
    """The files of more lines than are allowed."""
    lengths = {path: len(text.splitlines()) for path, text in files.items()}
    return [f"{path} has {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES]


def too_long_functions(files: dict[str, str]) -> list[str]:
    """The functions of more lines than are allowed."""
    found = []
    for name, node in functions(files):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        lines = (node.end_lineno or 0) - node.body[documented].lineno + 1
        if lines > FUNCTION_LINES:
            found.append(f"{name} has {lines} lines")
    return found


def long_signatures(files: dict[str, str]) -> list[str]:
    """The functions of more parameters than are allowed, where these are not given."""
    found = []
    for name, node in functions(files):
        count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        if count > PARAMETERS and not name.startswith(GIVEN_SIGNATURES):
            found.append(f"{name} has {count} parameters")
    return found


def test_a_file_is_short_enough() -> None:
    assert too_long_files(sources()) == [], "split it by what it says"


def test_a_function_is_short_enough() -> None:
    assert too_long_functions(sources()) == [], "split it by what it does"


def test_few_functions_have_many_parameters() -> None:
    found = long_signatures(sources())
    assert len(found) <= LONG_SIGNATURES, "pass options that belong together as one value:\n" + "\n".join(found)


def test_what_is_too_large_is_named() -> None:
    assert too_long_files({"passes/long.py": "x = 1\n" * 801}) == ["passes/long.py has 801 lines"]
    body = '    """Long."""\n' + "    x = 1\n" * 61
    assert too_long_functions({"passes/long.py": f"def long():\n{body}"}) == ["passes/long.py: long has 61 lines"]
    assert too_long_functions({"passes/short.py": "def short():\n" + "    x = 1\n" * 60}) == []
    wide = "def wide(a, b, c, d, e, /, f, g, *, h, i): ..."
    assert long_signatures({"backends/wide.py": wide}) == ["backends/wide.py: wide has 9 parameters"]
    assert long_signatures({"fxquant/primitives/wide.py": wide}) == []

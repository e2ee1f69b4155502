"""Compare the size of the library with its budget: the numbers below, which only fall. Run by `make lint`.

lines       lines of Python of fxquant, passes and backends
files       files of Python there
small       modules of fewer than SMALLEST lines, besides passes and `__init__`: a file is a unit of thought
tests       lines of Python of tests
benchmarks  lines of Python of benchmarks
wide        functions with more than PARAMETERS parameters: public ones, whose options are keywords, and functions with PyTorch's arguments

A number that the tree has come below is lowered here in the same change, so that what was gained stays.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

BUDGET = {"lines": 70_500, "files": 289, "small": 15, "wide": 15, "tests": 42_120, "benchmarks": 14_900}
# how far the tree may be below its budget before that is lowered
SLACK = {"lines": 200, "files": 3, "small": 3, "wide": 3, "tests": 500, "benchmarks": 200}
SMALLEST, LARGEST = 80, 800  # lines of a file of the library
PARAMETERS = 8
# A primitive's parameters are the arguments of its calls in saved files; functions of `compat` have the signatures of other toolkits.
FOREIGN_SIGNATURES = ("fxquant/primitives/", "fxquant/compat/")

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fxquant", "passes", "backends")
APART = ("tests", "benchmarks")  # whose lines are counted by themselves


def sources() -> dict[str, str]:
    """Return the text of every Python file of the library, the tests and the benchmarks, by its path."""
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for package in (*PACKAGES, *APART)
        for file in sorted((ROOT / package).rglob("*.py"))
    }


def wide_functions(files: dict[str, str]) -> list[str]:
    """Return the functions of more than PARAMETERS parameters, each after the path of its file."""
    wide = []
    for path, text in files.items():
        if path.startswith(FOREIGN_SIGNATURES):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                if len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) > PARAMETERS:
                    wide.append(f"{path}: {node.name}")
    return wide


def measured(files: dict[str, str]) -> dict[str, int]:
    """Return what the budget limits, of these files."""
    apart = {name: sum(len(text.splitlines()) for path, text in files.items() if path.startswith(f"{name}/")) for name in APART}
    files = {path: text for path, text in files.items() if not path.startswith(APART)}
    lengths = {path: len(text.splitlines()) for path, text in files.items()}
    small = [
        path for path, lines in lengths.items() if lines < SMALLEST and not path.startswith("passes/") and Path(path).name != "__init__.py"
    ]
    return {"lines": sum(lengths.values()), "files": len(files), "small": len(small), "wide": len(wide_functions(files)), **apart}


def complaints(files: dict[str, str], budget: dict[str, int]) -> list[str]:
    """Return a sentence for each number that differs from the budget, and for each file that is too long."""
    sentences = [
        f"{path} has {lines} lines; {LARGEST} are allowed"
        for path, text in files.items()
        if (lines := len(text.splitlines())) > LARGEST and not path.startswith(APART)
    ]
    for name, size in measured(files).items():
        if size > budget[name]:
            sentences.append(f"{name}: {size}, and the budget is {budget[name]}: let what is new replace something")
        elif size < budget[name] - SLACK[name]:
            sentences.append(f"{name}: {size}, and the budget is {budget[name]}: lower it in docs/budget.py")
    return sentences


if __name__ == "__main__":
    problems = complaints(sources(), BUDGET)
    print("\n".join(problems), end="\n" * bool(problems))
    sys.exit(bool(problems))

"""What an operator or a primitive is stands on its record: no other package lists their names, or asks for one."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from fxquant.ops import BY_NAME
from fxquant.primitives import PRIMITIVES
from tests.pages.test_layers import ROOT, library, parsed

pytestmark = pytest.mark.quick

# Modules that hold records, or names of theirs as data; `frontend` meets PyTorch's functions and methods before there are operators.
APART = (
    *(f"fxquant.ops.{family}" for family in ["attention", "elementwise", "indexing", "layers", "pooling", "recurrent", "sampling"]),
    *(f"fxquant.ops.core.{module}" for module in ["casting", "places", "promotion", "unbatched", "weighted"]),
    *("fxquant.primitives", "fxquant.backends.bpu", "fxquant.compat", "fxquant.nn", "fxquant.frontend"),
)
# Words that are names of something else, too, by where they stand and the first of them.
WORDS = {
    ("fxquant", "AccumulatorOverflow"),  # what `fxq` offers
    ("fxquant.ops.core.floating", "div"),  # methods of tensors
    ("fxquant.ops.core.floating", "softmax"),
    ("fxquant.primitives.arithmetic", "requantize_fixed"),  # an arithmetic's own primitives
    ("fxquant.primitives.arithmetic", "requantize_real"),
    ("fxquant.backends.c.elementwise_forms", "eq"),  # the relations of `compare`
    ("fxquant.backends.cpu.native", "convolution"),  # functions in C
    ("fxquant.backends.onnx.direct", "view"),  # methods of tensors
    ("fxquant.ir.functional", "__getitem__"),
}


def listed(module: str, source: str, values: dict[str, Any]) -> Iterator[str]:
    """Literal collections of two or more names of operators or primitives, and comparisons of a name with one, with their lines.

    `values` are the module's globals, by which an expression is known to be a primitive.
    """
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict):
            entries = [entry for entry in (node.keys if isinstance(node, ast.Dict) else node.elts) if entry is not None]
            names = [entry.value for entry in entries if isinstance(entry, ast.Constant) and isinstance(entry.value, str)]
            primitives = [ast.unparse(entry) for entry in entries if _primitive(entry, values)]
            for found in (primitives, names):
                known = [name for name in found if name in BY_NAME or found is primitives]
                if len(known) > 1 and (module, found[0].rpartition(".")[2]) not in WORDS:
                    yield f"{module}:{node.lineno} lists {', '.join(known)}"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = [side.value for side in sides if isinstance(side, ast.Constant) and side.value in BY_NAME]
            if asked and any(_is_name(side) for side in sides):
                yield f"{module}:{node.lineno} compares a name with {asked[0]!r}"


def _primitive(entry: ast.expr, values: dict[str, Any]) -> bool:
    parts = ast.unparse(entry).split(".")
    if not isinstance(entry, ast.Attribute | ast.Name) or not all(part.isidentifier() for part in parts):
        return False
    found = values.get(parts[0])
    for part in parts[1:]:
        found = getattr(found, part, None)
    return callable(found) and found in PRIMITIVES


def _is_name(side: ast.expr) -> bool:
    """Whether it is `….name`, or what a function called `….name` returns."""
    side = side.func if isinstance(side, ast.Call) else side
    return (isinstance(side, ast.Attribute) and side.attr == "name") or (isinstance(side, ast.Name) and side.id.endswith("_name"))


def test_no_package_lists_names_of_operators_or_primitives() -> None:
    found: list[str] = []
    for module, source in library().items():
        if not any(module == package or module.startswith(f"{package}.") for package in APART):
            found += listed(module, source, vars(importlib.import_module(module)))
    assert found == []
    assert len(WORDS) <= 10


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("MOVES = (\n    'reshape', 'permute')", ["m:1 lists reshape, permute"]),
        ("\nrules = {'add': 1, 'other': 2, 'sub': 3}", ["m:2 lists add, sub"]),
        ("for f in [accumulate.linear, linear_wide, len]: pass", ["m:1 lists accumulate.linear, linear_wide"]),
        ("if operator.name == 'clamp': pass", ["m:1 compares a name with 'clamp'"]),
        ("if 'softmax' != _name(node): pass", ["m:1 compares a name with 'softmax'"]),
        ("if approximate == 'tanh' or kind == 'add' or operator.name == mine: pass", []),
        ("names = ('reshape', 'x', accumulate.linear)", []),
    ],
)
def test_a_planted_list_is_found(source: str, expected: list[str]) -> None:
    from fxquant.primitives import accumulate

    assert list(listed("m", source, {"accumulate": accumulate, "linear_wide": accumulate.linear_wide, "len": len})) == expected


def test_packages_that_are_apart_exist() -> None:
    assert all(any(module.startswith(package) for module in library()) for package in APART)
    assert (ROOT / "fxquant").is_dir()

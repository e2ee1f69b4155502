"""Facts about operators and primitives are fields of their records: no module lists operators by name or compares a name."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from fxquant.ops import BY_NAME
from fxquant.primitives import PRIMITIVES
from tests.pages.test_layers import below, library, parsed

pytestmark = pytest.mark.quick

APART = "fxquant.compat"  # tables of other libraries' names
# Words of another vocabulary, which are names of operators or primitives, too: a module, and the first word of a collection in it.
WORDS = {
    # methods of tensors and functions of PyTorch, in graphs that are not canonical yet
    ("fxquant.frontend.values", "add"),
    ("fxquant.frontend.values", "lt"),
    ("fxquant.frontend.written_out", "batch_norm"),
    ("fxquant.frontend.written_out", "div"),
    ("fxquant.frontend.written_out", "narrow"),
    ("fxquant.ops.core.casting", "add"),
    ("fxquant.ops.core.floating", "div"),
    ("fxquant.ops.core.floating", "softmax"),
    ("fxquant.ops.core.places", "view"),
    ("fxquant.ops.core.promotion", "pad"),
    ("fxquant.backends.onnx.direct", "view"),
    ("fxquant.ir.functional", "__getitem__"),
    # words for an argument of PyTorch: `rounding_mode`, `mode`, `reduce`, and the kinds of recurrent layers
    ("fxquant.ops.elementwise.division", "floor"),
    ("fxquant.ops.indexing.bags", "sum"),
    ("fxquant.ops.indexing.scatter", "sum"),
    ("fxquant.ops.recurrent.recurrence", "lstm"),
    ("fxquant.ops.sampling.resize", "linear"),
    # words for an argument of a primitive, where it is declared, and in C: `relation`, `operation`
    ("fxquant.primitives.comparison", "eq"),
    ("fxquant.primitives.whole", "add"),
    ("fxquant.backends.c.forms", "eq"),
    # keywords of a layer's function for what is fused into it
    ("fxquant.ops.core.weighted", "batch_norm"),
    # an arithmetic's own primitives
    ("fxquant.primitives.arithmetic", "requantize_fixed"),
    ("fxquant.primitives.arithmetic", "requantize_real"),
}


def listed(module: str, source: str, values: dict[str, Any], used: set[tuple[str, str]]) -> Iterator[str]:
    """Literal collections of two or more names of operators or primitives, and comparisons of a name with one, with their lines.

    `values` are the module's globals, by which an expression is known to be a primitive; the entries of `WORDS` that are met go to `used`.
    """
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict):
            entries = [entry for entry in (node.keys if isinstance(node, ast.Dict) else node.elts) if entry is not None]
            names = [entry.value for entry in entries if isinstance(entry, ast.Constant) and isinstance(entry.value, str)]
            primitives = [ast.unparse(entry) for entry in entries if _primitive(entry, values)]
            for found in (primitives, names):
                known = [name for name in found if name in BY_NAME or found is primitives]
                place = (module, found[0].rpartition(".")[2]) if found else (module, "")
                if len(known) > 1 and place in WORDS:
                    used.add(place)
                elif len(known) > 1:
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
    found, used = list[str](), set[tuple[str, str]]()
    for module, source in library().items():
        if not below(module, APART):
            found += listed(module, source, vars(importlib.import_module(module)), used)
    assert found == []
    assert used == WORDS
    assert len(WORDS) <= 24


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

    assert list(listed("m", source, {"accumulate": accumulate, "linear_wide": accumulate.linear_wide, "len": len}, set())) == expected

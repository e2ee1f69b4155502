"""Names in the code: no module lists operators by name or compares a name, and modules that docstrings name exist."""

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fxquant.ops import BY_NAME
from fxquant.primitives import PRIMITIVES
from tests.pages.test_layers import PACKAGES, below, library, parsed

pytestmark = pytest.mark.quick

APART = "fxquant.compat"  # tables of other libraries' names
# Words of another vocabulary, which are names of operators or primitives, too: a module, and the first word of a collection in it.
WORDS = {
    # methods of tensors and functions of PyTorch, in graphs that are not canonical yet
    ("fxquant.frontend.written_out", "batch_norm"),
    ("fxquant.frontend.written_out", "div"),
    ("fxquant.passes.floating", "div"),
    ("fxquant.passes.floating", "softmax"),
    ("fxquant.ops.core.places", "view"),
    ("fxquant.passes.canonical", "pad"),
    ("fxquant.ir.functional", "__getitem__"),
    # words for an argument of PyTorch: `rounding_mode`, `mode`, `reduce`, and the kinds of recurrent layers
    ("fxquant.ops.elementwise.arithmetic", "floor"),
    ("fxquant.ops.indexing.index", "sum"),
    ("fxquant.ops.indexing.scatter", "sum"),
    ("fxquant.ops.recurrent.recurrence", "lstm"),
    ("fxquant.ops.sampling.resize", "linear"),
    # words for an argument of a primitive, where it is declared, and in C: `relation`, `operation`
    ("fxquant.primitives.selection", "eq"),
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
            for listing in (primitives, names):
                matches = [name for name in listing if name in BY_NAME or listing is primitives]
                place = (module, listing[0].rpartition(".")[2]) if listing else (module, "")
                if len(matches) > 1 and place in WORDS:
                    used.add(place)
                elif len(matches) > 1:
                    yield f"{module}:{node.lineno} lists {', '.join(matches)}"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = [side.value for side in sides if isinstance(side, ast.Constant) and side.value in BY_NAME]
            if asked and any(_is_name(side) for side in sides):
                yield f"{module}:{node.lineno} compares a name with {asked[0]!r}"


def _primitive(entry: ast.expr, values: dict[str, Any]) -> bool:
    parts = ast.unparse(entry).split(".")
    if not isinstance(entry, ast.Attribute | ast.Name) or not all(part.isidentifier() for part in parts):
        return False
    result = values.get(parts[0])
    for part in parts[1:]:
        result = getattr(result, part, None)
    return callable(result) and result in PRIMITIVES


def _is_name(side: ast.expr) -> bool:
    """Whether it is `….name`, or what a function called `….name` returns."""
    side = side.func if isinstance(side, ast.Call) else side
    return (isinstance(side, ast.Attribute) and side.attr == "name") or (isinstance(side, ast.Name) and side.id.endswith("_name"))


def test_no_package_lists_names_of_operators_or_primitives() -> None:
    result, used = list[str](), set[tuple[str, str]]()
    for module, source in library().items():
        if not below(module, APART):
            result += listed(module, source, vars(importlib.import_module(module)), used)
    assert result == []
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


OBJECTS = ("nn", "prepared", "training")  # PyTorch's `nn`, and a model or an operator of that name
DOTTED = re.compile(r"`((?:fxquant\.)?[a-z_]\w*(?:\.\w+)+)(?:\(\))?`")


def names_of(source: str) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    names = set()
    for node in parsed(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        names |= {
            alias.asname or alias.name for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom) for alias in each.names
        }
    return names


def unknown(modules: Mapping[str, str], text: str) -> Iterator[str]:
    """Yield the names in backquotes that begin with a package of the library, and name neither a module nor an attribute of one."""
    for dotted in DOTTED.findall(text):
        parts = dotted.removeprefix("fxquant.").split(".")
        if parts[0] not in PACKAGES or parts[0] in OBJECTS:
            continue
        prefixes = [".".join(["fxquant", *parts[:count]]) for count in range(len(parts), 0, -1)]
        module = next((prefix for prefix in prefixes if prefix in modules), None)
        rest = parts[len(module.split(".")) - 1 :] if module else parts
        if module is None or (rest and rest[0] not in names_of(modules[module])):
            yield dotted


def test_every_module_that_a_docstring_names_exists() -> None:
    modules = library()
    # Docstrings of `compat` name modules of other toolkits.
    own = {name: source for name, source in modules.items() if not name.startswith("fxquant.compat")}
    gone = {f"{name}: {dotted}" for name, source in own.items() for dotted in unknown(modules, source)}
    assert gone == set()


def test_a_name_of_a_module_that_is_gone_is_found() -> None:
    modules = {"fxquant.ops": "", "fxquant.ops.core": "", "fxquant.ops.core.record": "class Operator: ..."}
    text = "`ops.core.record` `ops.core.record.Operator` `ops.core.record.Gone` `fxquant.ops.gone` `torch.gone` `ops.core.gone.name`"
    assert list(unknown(modules, text)) == ["ops.core.record.Gone", "fxquant.ops.gone", "ops.core.gone.name"]

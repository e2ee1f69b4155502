"""Names of modules in docstrings and comments, `package.module` or `package.module.name`, are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.pages.test_layers import PACKAGES, library, parsed

pytestmark = pytest.mark.quick

WORDS = ("nn", "prepared", "training")  # PyTorch's `nn`, and a model or an operator of that name
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
    """Yield the names in backquotes that begin with a package of the library, and are no module, nor a name in one."""
    for dotted in DOTTED.findall(text):
        parts = dotted.removeprefix("fxquant.").split(".")
        if parts[0] not in PACKAGES or parts[0] in WORDS:
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

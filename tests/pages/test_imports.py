"""What is imported when: a module of fxquant's, and a library, once something is used that needs it."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fxquant as fxq

pytestmark = pytest.mark.quick

HEAVY = ("onnx", "onnxruntime", "onnxscript", "networkx", "rich", "scipy", "matplotlib", "plotly", "sklearn", "safetensors", "PIL")
STEPS = {
    "import fxquant as fxq": (*HEAVY, "fxquant.api", "fxquant.ops", "fxquant.backends", "fxquant.tuning", "fxquant.reporting"),
    "fxq.prepare": ("onnx", "onnxruntime", "onnxscript", "scipy", "matplotlib", "plotly", "sklearn", "PIL", "fxquant.backends.onnx.export"),
    "fxq.QConfigMapping, fxq.State, fxq.Target": ("onnx", "onnxruntime", "fxquant.search.tune"),
}


def test_importing_fxquant_imports_nothing_that_is_not_used_yet() -> None:
    lines = [f"{step}; print(json.dumps(sorted(sys.modules)))" for step in STEPS]
    code = "; ".join(["import sys, json, torch", *lines])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    loaded = [set(json.loads(line)) for line in ran.stdout.splitlines()]
    for (step, names), there in zip(STEPS.items(), loaded, strict=True):
        assert not there.intersection(names), step
    assert "fxquant.api" in loaded[1]


def test_every_public_name_is_where_the_type_checker_is_told() -> None:
    source = ast.parse(Path(str(fxq.__file__)).read_text(encoding="utf-8"))
    (typed,) = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    known = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name: module for name, module in known.items() if module != "fxquant"} == fxq._WHERE  # type: ignore[attr-defined]
    assert {*known, "__version__"} == set(fxq.__all__)
    assert len(fxq.__all__) <= 45
    for name, module in known.items():
        holder = importlib.import_module(str(module))
        assert getattr(fxq, name) is getattr(holder, name)
    assert set(fxq.__all__) <= set(dir(fxq))


def test_modules_are_attributes_and_other_names_are_none() -> None:
    assert fxq.backends.get("bayes-e").name == "bayes-e"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        fxq.quantise  # type: ignore[attr-defined]  # noqa: B018

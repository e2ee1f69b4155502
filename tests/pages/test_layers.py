"""Who may import whom, held by `ast`, imports inside functions included; and what is imported when."""

import ast
import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx
import pytest

import fxquant as fxq
from tests.shared.programs import run_python

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]

# The packages, from the bottom up: a module imports from its own package and from those before it. `fxquant.errors` and its like are
# packages of one file; "fxquant" is the table of contents that users import.
PACKAGES = (
    "errors",  # what is raised
    "version",
    "support",  # arguments, files, locks, progress
    "options",
    "numerics",  # scales, grids, multipliers
    "ir",  # graphs and their facts
    "primitives",  # what integers are computed by
    "training",  # fused kernels of training steps
    "quantization",  # qconfigs, observers, quantizers
    "lowering",  # operators to primitives
    "ops",  # the operator table
    "kernels",  # kernels that stand for several primitives
    "frontend",  # the tracer
    "target",
    "prepared",  # the modules of a prepared model
    "analysis",  # what can be said of a model
    "remedies",  # operators within the limits of a target
    "pipeline",
    "passes",
    "accuracy",  # scales, weights and biases of one model
    "serialization",
    "backends",
    "reporting",
    "api",
    "nn",
    "search",  # methods that prepare models
    "quantizing",  # all in one call
    "conformance",
    "",
    "compat",
    "cli",
)
# Beyond the order: imports that a package, or a part of it, does not have.
APART = {
    "passes": ("serialization", "kernels", "frontend"),  # a pass knows graphs, operators and facts
    "backends": ("passes", "accuracy", "remedies", "pipeline", "serialization"),  # nor does a target know how a graph came about
    "backends.aten": ("backends.bpu", "backends.c", "backends.cpu", "backends.horizon", "backends.onnx"),
    "backends.bpu": ("backends.aten", "backends.c", "backends.cpu", "backends.horizon", "backends.onnx"),
    "backends.c": ("backends.aten", "backends.bpu", "backends.cpu", "backends.horizon", "backends.onnx"),
    "backends.cpu": ("backends.aten", "backends.bpu", "backends.c", "backends.horizon", "backends.onnx"),
    "backends.horizon": ("backends.aten", "backends.bpu", "backends.c", "backends.cpu"),
    "backends.onnx": ("backends.aten", "backends.bpu", "backends.c", "backends.cpu", "backends.horizon"),
    "cli": ("passes", "backends", "ops", "ir", "compat"),  # the command line is a user of the public functions
}
PUBLIC = ("board", "export", "extend", "inspect", "observers", "results", "tuning")  # modules that only gather names of packages
SINGLE = {"passes"}  # packages whose modules import none of their own but what SHARED names: they are run by the table of contents
SHARED = {"fxquant.passes.floating", "fxquant.passes.rewriting"}

ONNX_WRITERS = {
    "export", "fast_kernels", "float_export", "horizon", "loops", "metadata", "runtime", "writer",
}  # fmt: skip
# Packages from outside that only these modules may import, if any.
CONFINED: dict[str, set[str]] = {
    "scipy": {"fxquant.search.bit_widths"},
    "matplotlib": set(),
    "plotly": {"fxquant.reporting.page", "fxquant.reporting.estimate"},
    "onnx": {"fxquant.conformance.kit", "fxquant.frontend.onnx_files"} | {f"fxquant.backends.onnx.{name}" for name in ONNX_WRITERS},
    "onnxruntime": {"fxquant.backends.onnx.runtime"},
    "onnxscript": {"fxquant.backends.onnx.float_export"},
    "sklearn": set(),
    "torch.ao": {"fxquant.compat.torch_ao"},  # PyTorch's own objects by name, where this PyTorch has them
    "torch.quantization": set(),
}
# PyTorch is removing its quantized tensors: plain int8, uint8 and int32 are used.
BANNED_ATTRIBUTES = {
    "torch.ao", "torch.quantization", "torch.ops.quantized",
    "torch.quint8", "torch.qint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4",
    "torch.quantize_per_tensor", "torch.quantize_per_channel",
}  # fmt: skip


@functools.cache
def library() -> Mapping[str, str]:
    """The source of every module, by the name it is imported as; a package's __init__ goes by the package's name."""
    sources = {}
    for top, package in (("fxquant", "fxquant"), ("passes", "fxquant.passes"), ("backends", "fxquant.backends")):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            sources[".".join([package, *(part for part in parts if part != "__init__")])] = file.read_text(encoding="utf-8")
    return sources


def below(name: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or stands below it."""
    return name == prefix or name.startswith(prefix + ".")


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement, wherever it stands."""
    return [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Every module that is imported, as precisely as can be known."""
    for node in imports(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full in modules or full in CONFINED else module


@functools.cache
def attributes(source: str) -> set[str]:
    """Every dotted expression, as "torch.ops.quantized"."""
    texts = {ast.unparse(node) for node in ast.walk(parsed(source)) if isinstance(node, ast.Attribute)}
    return {text for text in texts if text.replace(".", "").isidentifier()}


def package_of(name: str) -> str:
    """Return the package of a module: what follows "fxquant." up to the next dot, "" for the package itself and its public modules."""
    return name.split(".")[1] if "." in name and name.removeprefix("fxquant.") not in PUBLIC else ""


def refused(name: str, target: str) -> bool:
    """Return whether a module must not import another one of ours."""
    package, other = package_of(name), package_of(target)
    if package not in PACKAGES or other not in PACKAGES or PACKAGES.index(other) > PACKAGES.index(package):
        return True
    inside = name.removeprefix("fxquant.")
    if any(below(inside, part) and below(target.removeprefix("fxquant."), never) for part, others in APART.items() for never in others):
        return True
    return package == other and package in SINGLE and name != f"fxquant.{package}" and target not in SHARED


def violations(modules: Mapping[str, str]) -> list[str]:
    """Return everything that the order of the packages and the tables do not allow."""
    arrows = []
    for name, source in modules.items():
        if package_of(name) not in PACKAGES:
            arrows.append(f"{name} is in no package")
            continue
        for target in sorted(set(imported(source, modules))):
            if target.startswith("."):
                arrows.append(f"{name} imports {target}: imports are absolute")
            elif below(target, "fxquant") and refused(name, target):
                arrows.append(f"{name} imports {target}")
            arrows.extend(f"{name} imports {target}" for c, allowed in CONFINED.items() if below(target, c) and name not in allowed)
        arrows.extend(f"{name} uses {text}" for text in sorted(attributes(source) & BANNED_ATTRIBUTES))
    return arrows


def circles(modules: Mapping[str, str]) -> list[list[str]]:
    """The sets of modules that import each other, in a circle; imports inside functions and for the type checker alone count."""
    graph = networkx.DiGraph()
    for name, source in modules.items():
        for target in imported(source, modules):
            if target in modules and target != name:
                graph.add_edge(name, target)
    return [sorted(result) for result in networkx.strongly_connected_components(graph) if len(result) > 1]


def test_imports_form_no_circle_and_keep_their_direction() -> None:
    assert circles(library()) == []
    assert violations(library()) == []


@pytest.mark.parametrize("line", ["import fxquant.frontend.handler", "def f():\n    from fxquant.frontend.handler import Handler"])
def test_a_planted_circle_is_found(line: str) -> None:
    modules = library()
    planted = {**modules, "fxquant.frontend.values": modules["fxquant.frontend.values"] + line}
    (circle,) = circles(planted)
    assert {"fxquant.frontend.handler", "fxquant.frontend.values"} <= set(circle)


def test_every_row_is_about_a_module_that_exists() -> None:
    modules = library()
    packages = {package_of(name) for name in modules}
    assert set(PACKAGES) == packages
    parts = {part for row, others in APART.items() for part in (row, *others)}
    assert [part for part in parts if f"fxquant.{part}" not in modules] == []
    assert [name for name in (*SHARED, *(name for names in CONFINED.values() for name in names)) if name not in modules] == []


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("fxquant.errors", "import fxquant.ir.graph", "imports fxquant.ir.graph"),
        ("fxquant.ops.pooling.pool", "def f():\n    from fxquant.backends import bpu", "imports fxquant.backends.bpu"),
        ("fxquant.primitives.pool", "import onnx", "imports onnx"),
        ("fxquant.passes.scales", "from fxquant.passes.specs import annotate", "imports fxquant.passes.specs"),
        ("fxquant.passes.scales", "from . import specs", "imports .: imports are absolute"),
        ("fxquant.passes.scales", "import fxquant as fxq", "imports fxquant"),
        ("fxquant.backends.onnx.export", "from fxquant.passes import scales", "imports fxquant.passes.scales"),
        ("fxquant.api", "from torch import ao", "imports torch.ao"),
        ("fxquant.ir.graph", "import torch\nx = torch.ops.quantized.add(1)", "uses torch.ops.quantized"),
        ("fxquant.furniture", "", "is in no package"),
    ],
)
def test_a_planted_violation_is_found(name: str, line: str, expected: str) -> None:
    assert violations({**library(), name: line}) == [f"{name} {expected}"]


# ---- names of files ----------------------------------------------------------------------------------------------------------
HEAVY = ("onnx", "onnxruntime", "onnxscript", "networkx", "rich", "scipy", "matplotlib", "plotly", "sklearn", "safetensors", "PIL")
STEPS = {
    "import fxquant as fxq": (*HEAVY, "fxquant.api", "fxquant.ops", "fxquant.backends", "fxquant.tuning", "fxquant.reporting"),
    "fxq.prepare": ("onnx", "onnxruntime", "onnxscript", "scipy", "matplotlib", "plotly", "sklearn", "PIL", "fxquant.backends.onnx.export"),
    "fxq.QConfigMapping, fxq.State, fxq.Target": ("onnx", "onnxruntime", "fxquant.search.tune"),
}


def test_importing_fxquant_imports_nothing_that_is_not_used_yet() -> None:
    lines = [f"{step}; print(json.dumps(sorted(sys.modules)))" for step in STEPS]
    code = "; ".join(["import sys, json, torch", *lines])
    loaded = [set(json.loads(line)) for line in run_python("-c", code).stdout.splitlines()]
    for (step, names), there in zip(STEPS.items(), loaded, strict=True):
        assert not there.intersection(names), step
    assert "fxquant.api" in loaded[1]


def test_every_public_name_is_where_the_type_checker_is_told() -> None:
    source = ast.parse(Path(str(fxq.__file__)).read_text(encoding="utf-8"))
    (typed,) = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    modules = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name: module for name, module in modules.items() if module != "fxquant"} == fxq._WHERE  # type: ignore[attr-defined]
    assert {*modules, "__version__"} == set(fxq.__all__)
    assert len(fxq.__all__) <= 45
    for name, module in modules.items():
        holder = importlib.import_module(str(module))
        assert getattr(fxq, name) is getattr(holder, name)
    assert set(fxq.__all__) <= set(dir(fxq))


def test_modules_are_attributes_and_other_names_are_none() -> None:
    assert fxq.backends.get("bayes-e").name == "bayes-e"  # type: ignore[attr-defined]
    moved = {
        "layers": "; it is fxq.inspect.layers",
        "with_camera": "; it is fxq.board.with_camera",
        "checks": "; what it held is in fxq.inspect",
    }
    for name, said in {**moved, "quantize_": "", "_layers": ""}.items():
        with pytest.raises(AttributeError) as caught:
            getattr(fxq, name)
        assert str(caught.value) == f"module 'fxquant' has no attribute {name!r}{said}"
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        fxq.quantise  # type: ignore[attr-defined]  # noqa: B018

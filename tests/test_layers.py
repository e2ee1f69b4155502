"""Who may import whom. The tables are the rule; `ast` holds the code to them, imports inside functions included."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx
import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]

# What each module may import of ours; one in a room goes by its own name. A row covers the module and those below it, the longest
# row wins, and there is no row that does not have to be there: a new module gets its own.
BASE = {"arguments", "clamping", "errors", "files", "numerics", "rescaling", "observers", "rounding", "spec", "mapping"}
NOUNS = BASE | {
    "arithmetic", "batch_norm", "breaches", "copied", "copying", "factors", "facts", "graph", "learning", "lowering", "measures", "model",
    "ops", "owners", "pipeline", "prepared", "primitives", "proof", "quantizer", "remedies", "rewriting", "rules", "stage", "state",
    "stubs", "target", "text", "weights",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    # nouns, from the bottom up
    "fxquant.errors": set(),
    "fxquant.addresses": set(),
    "fxquant.forks": set(),
    "fxquant.arguments": {"errors"},
    "fxquant.files": {"errors"},
    "fxquant.numerics": {"errors"},
    "fxquant.rescaling": {"numerics"},
    "fxquant.quantization.observers": {"arguments", "errors", "numerics", "observers", "offers"},
    "fxquant.clamping": set(),
    "fxquant.quantization.rounding": {"clamping"},
    "fxquant.quantization.spec": {"arguments", "errors", "numerics", "observers", "rounding"},
    "fxquant.quantization.mapping": {"arguments", "errors", "spec"},
    "fxquant.quantization.state": {"errors"},
    "fxquant.version": set(),
    "fxquant.progress": set(),
    "fxquant.quantization": set(),
    "fxquant.analysis": set(),
    "fxquant.quantization.batch_norm": set(),
    "fxquant.carried": {"errors"},
    "fxquant.codegen": set(),
    "fxquant.facts": set(),
    "fxquant.graph": {"codegen", "facts"},
    "fxquant.stubs": {"facts", "graph"},
    "fxquant.copying": set(),
    "fxquant.model": {"forks", "codegen", "errors", "graph", "recomputation"},
    "fxquant.kernels": {
        "addresses",
        "forks",
        "facts",
        "graph",
        "interpreter",
        "kernels",
        "model",
        "numerics",
        "offers",
        "primitives",
        "progress",
    },
    "fxquant.quantization.rules": {"graph", "mapping", "ops", "spec"},
    "fxquant.target": {"arguments", "arithmetic", "errors", "numerics"},
    "fxquant.quantization.remembered": set(),
    "fxquant.quantization.learning": {"learning", "numerics", "remembered"},
    "fxquant.quantization.quantizer": BASE | {"learning", "remembered"},
    "fxquant.quantization.weights": BASE | {"sweeps", "learning", "quantizer"},
    "fxquant.primitives": {"forks", "clamping", "errors", "facts", "numerics", "primitives"},
    "fxquant.arithmetic": {"numerics", "primitives", "rescaling"},
    "fxquant.tensor_passes": set(),
    "fxquant.sweeps": {"addresses", "marks", "numerics", "offers", "primitives", "tensor_passes"},
    "fxquant.offers": set(),
    "fxquant.marks": {"offers"},
    "fxquant.joining": {"marks", "numerics", "offers", "primitives", "sweeps", "tensor_passes"},
    "fxquant.curves": {"joining", "numerics"},
    "fxquant.narrow": {"joining", "primitives", "sweeps"},
    "fxquant.eager": BASE
    | {"arithmetic", "curves", "joining", "narrow", "learning", "lowering", "primitives", "quantizer", "sweeps", "weights"},
    "fxquant.lowering": BASE | {"arithmetic", "sweeps", "batch_norm", "learning", "primitives", "quantizer", "weights", "facts"},
    "fxquant.copied": {"arithmetic", "facts", "graph", "lowering", "numerics", "ops", "weights"},
    "fxquant.functional": set(),
    "fxquant.gradient": {"rounding"},
    "fxquant.ops": BASE
    | {"functional", "batch_norm", "graph", "lowering", "ops", "primitives", "sweeps", "weights", "facts", "arithmetic"},
    "fxquant.ops.weighted": BASE
    | {"arithmetic", "batch_norm", "graph", "lowering", "ops", "primitives", "quantizer", "sweeps", "weights", "facts"},
    "fxquant.quantization.factors": {"numerics", "remembered"},
    "fxquant.quantization.prepared": BASE
    | {"arithmetic", "eager", "factors", "functional", "lowering", "ops", "primitives", "quantizer", "state", "sweeps", "weights"},
    "fxquant.analysis.node": {"numerics", "graph", "ops", "prepared", "primitives"},
    "fxquant.analysis.channels": {"facts", "factors", "graph", "node", "ops", "prepared"},
    "fxquant.interpreter": {"graph"},
    "fxquant.recomputation": {"errors"},
    "fxquant.hooks": {"carried", "channels", "errors", "graph", "interpreter", "model", "prepared"},
    "fxquant.analysis.text": {"arguments", "errors", "graph", "node", "facts", "numerics"},
    "fxquant.proof": {"arithmetic", "graph", "numerics", "primitives", "facts"},
    "fxquant.stage": {"errors", "graph", "numerics", "ops", "prepared", "primitives", "facts"},
    "fxquant.rewriting": {"graph", "pipeline", "rules"},
    "fxquant.pipeline": BASE | {"progress", "stage", "target", "text"},
    "fxquant.quantization.batches": {"errors", "graph", "facts"},
    "fxquant.quantization.distributed": {"errors", "observers"},
    "fxquant.quantization.owners": {"graph", "prepared"},
    "fxquant.quantization.cutting": BASE | {"prepared", "quantizer", "state"},
    "fxquant.quantization.unseen": BASE | {"prepared", "quantizer", "state"},
    "fxquant.quantization.calibration": BASE
    | {"left_out", "model", "batches", "cutting", "unseen", "distributed", "graph", "prepared", "progress", "quantizer", "state"},
    "fxquant.quantization.left_out": {"prepared", "state"},
    "fxquant.quantization.lost_inputs": {"graph", "ops", "prepared", "target"},
    "fxquant.quantization.observations": BASE | {"calibration", "channels", "factors", "graph", "ops", "prepared", "quantizer"},
    "fxquant.frontend": {
        "arguments",
        "carried",
        "codegen",
        "errors",
        "forks",
        "functional",
        "gradient",
        "graph",
        "interpreter",
        "mapping",
        "frontend",
        "facts",
        "model",
        "progress",
        "stubs",
    },
    "fxquant.serialization": BASE
    | {
        "arithmetic",
        "batch_norm",
        "carried",
        "factors",
        "gradient",
        "graph",
        "hooks",
        "learning",
        "observations",
        "ops",
        "owners",
        "prepared",
        "primitives",
        "proof",
        "quantizer",
        "serialization",
        "stage",
        "state",
        "stubs",
        "target",
        "frontend",
        "functional",
        "facts",
        "model",
        "weights",
    },
    "fxquant.analysis.cost": {"facts", "graph", "node", "numerics", "ops"},
    "fxquant.analysis.layers": {"arguments", "cost", "errors", "facts", "graph", "node", "parts"},
    "fxquant.analysis.parts": {"graph", "node", "ops"},
    "fxquant.analysis.fused": {"facts", "graph", "kernels", "model", "primitives", "record"},
    "fxquant.analysis.steps": {"layers"},
    "fxquant.analysis.explain": {"arguments", "fused", "graph", "layers", "frontend", "numerics", "parts", "steps"},
    "fxquant.analysis.site": {"facts", "graph", "ops"},
    "fxquant.analysis.windows": {"site"},
    "fxquant.analysis.measures": {"facts", "graph", "numerics", "ops", "site", "windows"},
    "fxquant.analysis.breaches": {"measures", "target"},
    "fxquant.analysis.check": {"breaches", "graph", "layers", "measures", "node", "ops", "target"},
    "fxquant.remedies": {"facts", "graph", "model", "ops", "remedies", "target"},
    "fxquant.analysis.partition": {"arguments", "errors", "facts", "graph", "node"},
    "fxquant.analysis.segments": {"facts", "graph", "node", "numerics"},
    "fxquant.analysis.record": {"batches", "errors", "graph", "interpreter", "node", "prepared", "state"},
    "fxquant.analysis.report": {"arguments"},
    "fxquant.analysis.compare": {"graph", "node", "record", "report", "segments"},
    "fxquant.analysis.verify": {"batches", "errors", "graph", "layers", "prepared", "record", "segments", "state"},
    # what makes a model more exact
    "fxquant.tuning": NOUNS
    | {
        "arguments",
        "batches",
        "calibration",
        "channels",
        "distributed",
        "eager",
        "errors",
        "facts",
        "files",
        "graph",
        "interpreter",
        "layers",
        "left_out",
        "lowering",
        "model",
        "node",
        "numerics",
        "ops",
        "prepared",
        "progress",
        "quantizer",
        "record",
        "rounding",
        "spec",
        "state",
        "tuning",
        "weights",
    },
    # verbs and targets: never each other
    "fxquant.passes": NOUNS | {"functional", "gradient"},
    "fxquant.backends": NOUNS | {"backends", "forks", "kernels", "partition", "progress", "segments", "version"},
    "fxquant.backends.aten": BASE | {"model", "facts", "frontend", "graph", "progress", "sample"},
    "fxquant.backends.bpu": {"arithmetic", "errors", "numerics", "rescaling", "target", "backends.bpu"},
    "fxquant.backends.c": {
        "arguments",
        "backends.c",
        "copied",
        "errors",
        "facts",
        "files",
        "frontend",
        "graph",
        "primitives",
        "progress",
        "segments",
        "version",
    },
    "fxquant.backends.horizon": {
        "arguments",
        "backends.horizon",
        "backends.onnx",
        "errors",
        "facts",
        "files",
        "graph",
        "numerics",
        "ops",
        "primitives",
        "progress",
        "record",
        "segments",
        "target",
    },
    "fxquant.backends.cpu": {"addresses", "arithmetic", "files", "sweeps", "joining", "marks", "tensor_passes", "graph", "observers"}
    | {"kernels", "numerics", "primitives", "target", "backends.cpu"},
    # what is shown of models and of two of their forms
    "fxquant.reporting": {
        "arguments",
        "backends",
        "cost",
        "target",
        "batch_norm",
        "batches",
        "channels",
        "check",
        "errors",
        "facts",
        "files",
        "frontend",
        "graph",
        "inspection",
        "interpreter",
        "layers",
        "lost_inputs",
        "node",
        "numerics",
        "ops",
        "parts",
        "prepared",
        "progress",
        "record",
        "reporting",
        "rounding",
        "spec",
        "state",
        "steps",
        "version",
    },
    # what joins them
    "fxquant.api": {"*"},
    "fxquant.forms": {"*"},
    **dict.fromkeys(
        ("fxquant.tuning.mixed_precision", "fxquant.tuning.observer_search", "fxquant.tuning.outputs", "fxquant.tuning.sensitivity"),
        NOUNS | {"api", "batches", "frontend", "observations", "progress", "tuning"},
    ),
    **dict.fromkeys(("fxquant.tuning.remedies", "fxquant.tuning.tune"), NOUNS | {"batches", "record", "serialization", "tuning"}),
    "fxquant.demo": {"", "arguments", "backends", "demo", "errors", "files", "graph", "primitives", "progress", "target"},
    "fxquant.conformance": {
        "api",
        "arguments",
        "arithmetic",
        "backends",
        "conformance",
        "demo",
        "errors",
        "files",
        "graph",
        "interpreter",
        "mapping",
        "primitives",
        "progress",
        "record",
        "reporting",
        "rescaling",
        "rows",
        "segments",
        "serialization",
        "spec",
        "target",
    },
    "fxquant.analysis.inspection": {
        "backends",
        "errors",
        "facts",
        "graph",
        "layers",
        "node",
        "numerics",
        "observers",
        "quantizer",
        "serialization",
        "text",
    },
    "fxquant.nn": {"errors", "nn", "ops"},
    "fxquant.cli": {"", "arguments", "demo", "errors", "inspection", "sample"},
    "fxquant.analysis.sample": {"errors", "graph", "node", "numerics", "facts"},
    # names of other toolkits, over what the user calls
    "fxquant.compat": {"errors", "mapping", "spec"},
    "fxquant.compat.mirror": {"errors", "compat.common"},
    "fxquant.compat.tracing": {"", "arguments"},
    "fxquant.compat.checkpoints": {"calibration", "graph", "ops", "prepared"},
    "fxquant.compat.torch_ao": BASE
    | {
        "",
        "calibration",
        "cutting",
        "compat.checkpoints",
        "compat.common",
        "compat.mirror",
        "compat.torch_ao",
        "compat.tracing",
        "frontend",
        "prepared",
        "state",
        "unseen",
    },
    "fxquant.compat.horizon": BASE
    | {
        "",
        "addresses",
        "backends",
        "batches",
        "tuning",
        "calibration",
        "compat.horizon",
        "compat.checkpoints",
        "compat.common",
        "compat.mirror",
        "compat.tracing",
        "frontend",
        "graph",
        "ops",
        "prepared",
        "quantizer",
        "state",
        "stubs",
    },
}
TABLES_OF_CONTENTS = {"fxquant": {"*"}, "fxquant.passes": NOUNS | {"passes"}}  # rows of an __init__.py alone

# Packages from outside that only these modules may import, if any.
CONFINED: dict[str, set[str]] = {
    "scipy": {"fxquant.tuning.program"},
    "matplotlib": {"fxquant.reporting.draw"},
    "plotly": {"fxquant.reporting.page", "fxquant.reporting.estimate"},
    "onnx": {"fxquant.conformance.compiled", "fxquant.conformance.kit"}
    | {
        f"fxquant.backends.onnx.{name}"
        for name in (
            "agreement",
            "connections",
            "emitter",
            "export",
            "fast",
            "files",
            "float_export",
            "float_file",
            "horizon",
            "kernels",
            "layouts",
            "metadata",
            "opsets",
            "parts",
            "reading",
            "runtime",
            "sums",
            "writer",
        )
    },
    "onnxruntime": {"fxquant.backends.onnx.runtime"},
    "onnxscript": {"fxquant.backends.onnx.float_export"},
    "sklearn": {"fxquant.demo.digits"},
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


def full_name(name: str, modules: Mapping[str, str]) -> str:
    """The module that a row means by a name."""
    rooms = [f"fxquant.{room}.{name}" for room in ("analysis", "quantization")]
    return next((room for room in rooms if room in modules), f"fxquant.{name}")


def row_of(name: str) -> set[str] | None:
    """The row that covers a module."""
    if name in TABLES_OF_CONTENTS:
        return TABLES_OF_CONTENTS[name]
    rows = [row for row in ALLOWED if below(name, row)]
    return ALLOWED[max(rows, key=len)] if rows else None


def violations(modules: Mapping[str, str]) -> list[str]:
    """Everything the tables do not allow."""
    found = []
    for name, source in modules.items():
        row = row_of(name)
        if row is None:
            found.append(f"{name} has no row in the table")
            continue
        for target in sorted(set(imported(source, modules))):
            if target.startswith("."):
                found.append(f"{name} imports {target}: imports are absolute")
            elif below(target, "fxquant"):
                own = target == name and name not in TABLES_OF_CONTENTS
                if not own and "*" not in row and not any(below(target, full_name(a, modules)) if a else target == "fxquant" for a in row):
                    found.append(f"{name} imports {target}")
            found.extend(f"{name} imports {target}" for c, allowed in CONFINED.items() if below(target, c) and name not in allowed)
        found.extend(f"{name} uses {text}" for text in sorted(attributes(source) & BANNED_ATTRIBUTES))
    return found


def circles(modules: Mapping[str, str]) -> list[list[str]]:
    """The sets of modules that import each other, in a circle; imports inside functions and for the type checker alone count."""
    graph = networkx.DiGraph()
    for name, source in modules.items():
        for target in imported(source, modules):
            if target in modules and target != name:
                graph.add_edge(name, target)
    return [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]


def test_imports_form_no_circle() -> None:
    assert circles(library()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from fxquant.frontend import handler",
        "import fxquant.frontend.handler",
        "def f():\n    from fxquant.frontend.handler import Handler",
        "if TYPE_CHECKING:\n    from fxquant.frontend.handler import Handler",
    ],
)
def test_a_planted_circle_is_found(source: str) -> None:
    modules = library()
    planted = {**modules, "fxquant.frontend.memory": modules["fxquant.frontend.memory"] + source}
    assert circles(planted) == [[f"fxquant.frontend.{name}" for name in ("arguments", "gradients", "handler", "memory", "snapshot")]]


def test_imports_keep_their_direction() -> None:
    assert violations(library()) == []


def test_every_row_is_about_a_module_that_exists() -> None:
    modules = library()
    assert [row for row in (*ALLOWED, *TABLES_OF_CONTENTS) if row not in modules] == []
    assert [name for names in CONFINED.values() for name in names if name not in modules] == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("fxquant.errors", "import fxquant.graph", "fxquant.errors imports fxquant.graph"),
        ("fxquant.numerics", "from fxquant import graph", "fxquant.numerics imports fxquant.graph"),
        ("fxquant.ops.pool", "from fxquant.stage import Stage", "fxquant.ops.pool imports fxquant.stage"),
        ("fxquant.ops.pool", "def f():\n    from fxquant.backends import bpu", "fxquant.ops.pool imports fxquant.backends.bpu"),
        ("fxquant.primitives.pool", "import onnx", "fxquant.primitives.pool imports onnx"),
        ("fxquant.passes.scales", "from fxquant.passes import specs", "fxquant.passes.scales imports fxquant.passes.specs"),
        ("fxquant.passes.scales", "from fxquant.passes.specs import annotate", "fxquant.passes.scales imports fxquant.passes.specs"),
        ("fxquant.passes.scales", "from . import specs", "fxquant.passes.scales imports .: imports are absolute"),
        ("fxquant.passes.scales", "import fxquant.backends", "fxquant.passes.scales imports fxquant.backends"),
        ("fxquant.passes.scales", "from onnx import helper", "fxquant.passes.scales imports onnx"),
        ("fxquant.passes.scales", "from fxquant.frontend import trace", "fxquant.passes.scales imports fxquant.frontend"),
        ("fxquant.passes.scales", "import fxquant as fxq", "fxquant.passes.scales imports fxquant"),
        ("fxquant.backends.onnx.export", "from fxquant.passes import scales", "fxquant.backends.onnx.export imports fxquant.passes.scales"),
        ("fxquant.backends.onnx.export", "import onnxruntime", "fxquant.backends.onnx.export imports onnxruntime"),
        ("fxquant.backends.bpu", "import onnx", "fxquant.backends.bpu imports onnx"),
        ("fxquant.analysis.verify", "from fxquant.api import prepare", "fxquant.analysis.verify imports fxquant.api"),
        ("fxquant.cli", "from fxquant.passes import PIPELINE", "fxquant.cli imports fxquant.passes"),
        ("fxquant.api", "from torch import ao", "fxquant.api imports torch.ao"),
        ("fxquant.api", "import torch.ao.quantization", "fxquant.api imports torch.ao.quantization"),
        ("fxquant.graph", "import torch\nx = torch.quint8", "fxquant.graph uses torch.quint8"),
        ("fxquant.graph", "import torch\nx = torch.ops.quantized.add(1)", "fxquant.graph uses torch.ops.quantized"),
        ("fxquant.furniture", "", "fxquant.furniture has no row in the table"),
    ],
)
def test_a_planted_violation_is_found(name: str, source: str, expected: str) -> None:
    assert violations({**library(), name: source}) == [expected]

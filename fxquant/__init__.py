"""fxquant: an FX graph-mode quantization compiler for PyTorch whose numbers are exact.

import fxquant as fxq

prepared = fxq.prepare(model, example_inputs, target="bayes-e")
fxq.calibrate(prepared, batches)
integer = fxq.convert(prepared)
path = fxq.export_onnx(integer, "model.onnx")
assert fxq.verify(integer, path, batches)
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout, passes/ and backends/ are next to this folder; in a wheel they are inside it.
if (_root := Path(__file__).resolve().parents[1]).joinpath("pyproject.toml").is_file():
    __path__.append(str(_root))

from fxquant.version import __version__

if TYPE_CHECKING:
    from fxquant import board, errors, export, extend, inspect, nn, observers, primitives, results, search, tuning
    from fxquant.accuracy.states import freeze, qparams, set_qparams, set_state
    from fxquant.analysis.explain import explain
    from fxquant.analysis.text import text
    from fxquant.api import at_sizes, calibrate, check, convert, dump, export_onnx, load, prepare, save
    from fxquant.errors import FxQuantError
    from fxquant.frontend import trace, wrap
    from fxquant.options import Options
    from fxquant.quantization.spec import ActivationConfig, QConfig, QConfigMapping, State, WeightConfig
    from fxquant.quantizing import quantize
    from fxquant.reporting.comparing import compare
    from fxquant.reporting.estimate import estimate
    from fxquant.reporting.forms import verify
    from fxquant.reporting.page import report
    from fxquant.search.tune import tune
    from fxquant.serialization.qconfig import load_qconfig, save_qconfig
    from fxquant.target import Target

__all__ = [
    "ActivationConfig", "FxQuantError", "Options", "QConfig", "QConfigMapping", "State", "Target", "WeightConfig", "__version__",
    "at_sizes", "board", "calibrate", "check", "compare", "convert", "dump", "errors", "estimate", "explain", "export", "export_onnx",
    "extend", "freeze", "inspect", "load", "load_qconfig", "nn", "observers", "prepare", "primitives", "qparams", "quantize", "report",
    "results", "save", "save_qconfig", "search", "set_qparams", "set_state", "text", "trace", "tune", "tuning", "verify", "wrap",
]  # fmt: skip

# The module of each public name; a module is imported when its first name is used.
_FROM = {
    "fxquant.analysis.explain": "explain",
    "fxquant.analysis.text": "text",
    "fxquant.api": "at_sizes calibrate check convert dump export_onnx load prepare save",
    "fxquant.accuracy.states": "freeze qparams set_qparams set_state",
    "fxquant.errors": "FxQuantError",
    "fxquant.frontend": "trace wrap",
    "fxquant.options": "Options",
    "fxquant.quantization.spec": "ActivationConfig QConfig QConfigMapping State WeightConfig",
    "fxquant.quantizing": "quantize",
    "fxquant.reporting.comparing": "compare",
    "fxquant.reporting.estimate": "estimate",
    "fxquant.reporting.forms": "verify",
    "fxquant.reporting.page": "report",
    "fxquant.search.tune": "tune",
    "fxquant.serialization.qconfig": "load_qconfig save_qconfig",
    "fxquant.target": "Target",
}
_WHERE = {name: module for module, names in _FROM.items() for name in names.split()}


def _moved(name: str) -> str:
    """Return where a name of the modules that gather others is, or of the module that they have names from; "" if it is in none."""
    for gathering in () if name.startswith("_") else ("board", "export", "extend", "inspect", "observers", "results", "search", "tuning"):
        module = import_module(f"{__name__}.{gathering}")
        if name in module.__all__:
            return f"; it is fxq.{gathering}.{name}"
        if any(getattr(getattr(module, public), "__module__", "").endswith(f".{name}") for public in module.__all__):
            return f"; what it held is in fxq.{gathering}"
    return ""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import and return a public name, or a module of this package."""
        if name in _WHERE:
            value = getattr(import_module(_WHERE[name]), name)
        elif name.startswith("__") or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_moved(name)}")
        else:
            value = import_module(f"{__name__}.{name}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

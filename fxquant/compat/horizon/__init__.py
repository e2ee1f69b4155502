"""Horizon's plugin for PyTorch over fxquant, with its modules, names, argument orders and defaults; docs/guide/from-horizon.md.

import fxquant.compat.horizon as horizon

horizon.set_march(horizon.March.BAYES_E)
model = horizon.quantization.prepare_qat_fx(model, {"": horizon.quantization.qconfig.default_calib_8bit_fake_quant_qconfig})
horizon.quantization.set_fake_quantize(model, horizon.quantization.FakeQuantState.CALIBRATION)

`install()` makes `import horizon_plugin_pytorch` an import of this package, and `python -m fxquant.compat.horizon program.py` runs a
program with it. Functions return fxquant's graphs and values: prepared models are calibrated, trained, saved and exported as any other.
"""

from pathlib import Path
from typing import Any

from fxquant.compat.common import refusals
from fxquant.compat.mirror import Tables

ALIASES = {"horizon_plugin_pytorch": "", "horizon_plugin_profiler": "profiler", "hbdk4": "hbdk4"}
HOMES = "fxquant.compat.horizon.served"
TABLES = Tables("fxquant.compat.horizon", HOMES, Path(__file__).with_name("names.tsv"), ALIASES, beside=refusals("beside"))

__all__ = [*(name for name in TABLES.names("") if not name.startswith("__")), "install"]  # made from the table

TABLES.activate()


def install(replace: bool = False) -> None:
    """Put this package into sys.modules as horizon_plugin_pytorch, horizon_plugin_profiler and hbdk4.

    replace   whether to hide installed packages of these names. If False, an installed one raises ConfigurationError.
    """
    TABLES.install(replace)


def __getattr__(name: str) -> Any:
    """Return the implementation of a name of the plugin. Raises MissingName, an AttributeError with the remedy, for an unsupported one."""
    return TABLES.value("quantization" if name == "qconfig" else "", name)


def __dir__() -> list[str]:
    return __all__

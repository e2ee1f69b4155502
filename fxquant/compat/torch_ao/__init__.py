"""PyTorch's torch.ao.quantization over fxquant: FX, eager and PT2E functions with its own QConfigs; docs/guide/from-torch-ao.md.

from fxquant.compat import torch_ao

prepared = torch_ao.prepare_fx(model, torch_ao.get_default_qconfig_mapping("x86"), (example,))
for batch in batches:
    prepared(batch)
integer = torch_ao.convert_fx(prepared)

The functions return fxquant's graphs: prepared models are calibrated, trained, saved and exported as any other. PyTorch's names that
only describe (QConfig, QConfigMapping, observers, fake quantizes, stubs, get_default_qconfig …) are PyTorch's own objects, and need a
PyTorch that has torch.ao. `install()` puts this package in place of torch.ao.quantization and of torchao; names and modules that it does
not serve stay PyTorch's own, also for PyTorch itself. `python -m fxquant.compat.torch_ao program.py` runs an unedited program with it.
"""

from __future__ import annotations

from typing import Any

from fxquant.compat.torch_ao.tables import TABLES

__all__ = [*TABLES.names(""), "install"]  # made from the table

TABLES.activate()


def install(replace: bool = True) -> None:
    """Put this package into sys.modules as torch.ao.quantization, torch.quantization and torchao, with PyTorch's own names for the rest.

    replace   whether to replace installed packages; if False, an installed one raises ConfigurationError
    """
    from fxquant.compat.torch_ao.exported import remember_programs

    remember_programs()
    TABLES.install(replace)


def __getattr__(name: str) -> Any:
    """Return a function of this package, or PyTorch's object of this name if it only describes.

    Raises MissingName, an AttributeError with the remedy, for an unsupported one, and ConfigurationError if this PyTorch has no torch.ao.
    """
    return TABLES.value("", name)

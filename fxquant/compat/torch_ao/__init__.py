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

import contextlib
import functools
import importlib
import itertools
from pathlib import Path
from typing import Any

import torch
import torch._export

from fxquant.compat.common import Refusal, refused
from fxquant.compat.mirror import Tables

ALIASES = {
    "torch.ao.quantization": "",
    "torch.quantization": "",
    "torch.ao.nn.intrinsic.qat": "intrinsic_qat",
    "torch.nn.intrinsic.qat": "intrinsic_qat",
    "torch.ao.ns._numeric_suite": "numeric_suite",
    "torchao": "torchao",
    "executorch": "executorch",
}
ABSENT = Refusal(
    "it is PyTorch's own, and this PyTorch does not have it",
    "import it from torchao.quantization.pt2e, or write the same rules with fxq.QConfig and fxq.QConfigMapping, which prepare_fx takes",
)

TABLES = Tables("fxquant.compat.torch_ao", "fxquant.compat.torch_ao", Path(__file__).with_name("names.tsv"), ALIASES, ABSENT)

__all__ = [*TABLES.names(""), "install"]  # made from the table

PROGRAM = "_fxquant_program"  # an attribute on the module of an exported program, set once `install` has run

TABLES.activate()


def install(replace: bool = True) -> None:
    """Put this package into sys.modules as torch.ao.quantization, torch.quantization and torchao, with PyTorch's own names for the rest.

    replace   whether to replace installed packages; if False, an installed one raises ConfigurationError
    """
    _remember_programs()
    for home, name in ((torch.export, "export_for_training"), (torch._export, "capture_pre_autograd_graph")):
        if not hasattr(home, name):  # programs for older releases of PyTorch use it
            setattr(home, name, torch.export.export if home is torch.export else _captured)
    for holder, name in itertools.product((torch.Tensor, torch), ("int_repr", "q_scale", "q_zero_point")):
        own = getattr(holder, name)
        if not hasattr(own, "__wrapped__"):
            setattr(holder, name, _of_quantized(own, name))
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.ao.quantization.quantize_fx")  # PyTorch's own modules expect that a program imports it
    TABLES.install(replace)


def _remember_programs() -> None:
    """Patch `ExportedProgram.module`, so that each module refers to its program: `prepare_pt2e` is given the module alone."""
    original = torch.export.ExportedProgram.module
    if getattr(original, "remembers", False):
        return

    def module(self: torch.export.ExportedProgram, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        result.__dict__[PROGRAM] = self
        return result

    module.remembers = True  # type: ignore[attr-defined]
    torch.export.ExportedProgram.module = module  # type: ignore[method-assign]


def _captured(f: torch.nn.Module, args: Any, kwargs: Any = None, dynamic_shapes: Any = None) -> Any:
    return torch.export.export(f, args, kwargs, dynamic_shapes=dynamic_shapes).module()


def _of_quantized(own: Any, name: str) -> Any:
    """Wrap PyTorch's method `own`: a float tensor, as an integer graph returns, raises ConfigurationError with the function to call."""

    @functools.wraps(own)
    def method(self: torch.Tensor) -> Any:
        if type(self) is torch.Tensor and not self.is_quantized:
            raise refused("int_repr", name=name, dtype=self.dtype)
        return own(self)

    return method


def __getattr__(name: str) -> Any:
    """Return a function of this package, or PyTorch's object of this name if it only describes.

    Raises MissingName, an AttributeError with the remedy, for an unsupported one, and ConfigurationError if this PyTorch has no torch.ao.
    """
    return TABLES.value("", name)

"""PyTorch's own objects by module: QConfigs, mappings, observers, fake quantizes and stubs, which only describe."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from fxquant.errors import ConfigurationError

HOME = "torch.ao.quantization"
SUBMODULES = ("qconfig", "qconfig_mapping", "observer", "fake_quantize", "stubs", "quantize_fx", "quantize", "fuse_modules", "utils",
              "fx.custom_config", "backend_config", "quantization_mappings", "fuser_method_mappings")  # fmt: skip
_kept: dict[str, ModuleType] = {}  # PyTorch's modules, once `install` has replaced them


def keep() -> None:
    """Keep references to PyTorch's modules before they are replaced."""
    if not _kept:
        for path in ("", *SUBMODULES):
            try:
                _kept[path] = importlib.import_module(".".join(filter(None, (HOME, path))))
            except ImportError:
                continue
        for name, module in list(sys.modules.items()):
            if name.startswith(HOME + "."):
                _kept.setdefault(name[len(HOME) + 1 :], module)


def find(path: str, name: str) -> Any:
    """Return PyTorch's object of this name. Raises ConfigurationError if this PyTorch has no torch.ao, AttributeError if it is unknown."""
    if name.startswith("_") and not name.startswith("_get") and name != "_with_args":
        raise AttributeError(f"module {HOME!r} has no attribute {name!r}")
    try:
        module = (
            _kept[path] if _kept and path in _kept else importlib.import_module(".".join(filter(None, (HOME, path)))) if not _kept else None
        )
    except ImportError as error:
        raise ConfigurationError(
            f"{name} is not supported",
            because=f"it is PyTorch's own, and this PyTorch has no {HOME}: {error}",
            remedy="write the same rules with fxq.QConfig and fxq.QConfigMapping, which prepare_fx takes as well",
        ) from None
    if module is not None and hasattr(module, name):
        return getattr(module, name)
    raise AttributeError(f"module {'.'.join(filter(None, (HOME, path)))!r} has no attribute {name!r}")

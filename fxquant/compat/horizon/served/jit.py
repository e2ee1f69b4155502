"""TorchScript programs that are stored together with the integer graph they were traced from."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch

import fxquant as fxq
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.errors import ConfigurationError, ExportError
from fxquant.support.arguments import FILE, PATH, checked
from fxquant.support.files import write_file

KEPT = "fxquant_integer.fxq"


@checked(f=FILE)
def save(m: torch.jit.ScriptModule, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
    """Write a trace of an integer model together with the integer graph. Raises ConfigurationError for a program of another model."""
    integer = integer_of(m, "horizon.jit.save")
    with tempfile.TemporaryDirectory() as folder:
        kept = fxq.save(integer, Path(folder) / KEPT).read_bytes()
    archive = io.BytesIO()
    torch.jit.save(m, archive, _extra_files={**(_extra_files or {}), KEPT: kept})
    write_file(f, archive.getvalue())


@checked(f=PATH)
def load(f: Any, map_location: Any = None, _extra_files: dict[str, Any] | None = None) -> torch.jit.ScriptModule:
    """Load a program that `save` wrote, for `compile_model`. Raises ExportError for any other file."""
    extra: dict[str, Any] = {KEPT: ""}
    try:
        program = torch.jit.load(f, map_location, extra)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, OSError) as error:
        raise ExportError(
            f"{f} is not a TorchScript program", because=str(error).splitlines()[0], remedy="pass what horizon.jit.save wrote"
        ) from None
    if extra[KEPT]:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / KEPT
            held = extra[KEPT]
            write_file(kept, held if isinstance(held, bytes) else held.encode("latin-1"))
            object.__setattr__(program, "fxquant_integer", fxq.load(kept))
    return program  # type: ignore[no-any-return]


def to_device(model: Any, device: Any) -> Any:
    """Raise ConfigurationError: a program has the device that it was traced on."""
    raise ConfigurationError(
        "a TorchScript program cannot be moved",
        because="its graph names the device it was traced on",
        remedy="trace the model on that device",
    )

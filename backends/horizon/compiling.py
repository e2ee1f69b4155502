"""Runs the vendor's compiler on a folder that `export_horizon` wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxquant.backends.horizon.export import HB_MAPPER, LAYERS, OUTPUT, SCRIPT
from fxquant.backends.horizon.tool import STEPS, Running, Tool, failure, step_of
from fxquant.errors import ConfigurationError
from fxquant.support.arguments import FOLDER, checked
from fxquant.support.files import write_file
from fxquant.support.progress import progress

LOG = "hb_mapper.log"


@checked(folder=FOLDER)
def compile_horizon(folder: str | os.PathLike[str], *, show_progress: bool | None = None) -> Path:
    """Compile the folder that `export_horizon` wrote with the vendor's hb_mapper, and return the path of the .bin file.

    The .bin, the compiler's models and its figures are in the folder's model_output, its whole output in hb_mapper.log. It takes three
    seconds for a layer, ten to thirty for a network. Files of an earlier run are replaced; if compilation fails, no old .bin remains.

    Raises ConfigurationError if the tool is not installed or the folder was not written by `export_horizon`, and CompilationError,
    with the layer, the user's source line and the remedy, if the compiler refuses the model or crashes.
    """
    directory = Path(folder).absolute()
    content = _known(directory)
    if content["march"] not in HB_MAPPER.marches:
        raise ConfigurationError(
            f"{directory} cannot be compiled here",
            because=f"it is for {content['march']}, and hb_mapper compiles for {', '.join(HB_MAPPER.marches)}",
            remedy=f"run {directory / SCRIPT} where hb_compile is installed",
        )
    tool = Tool.find()
    binary = directory / OUTPUT / f"{content['name']}.bin"
    binary.unlink(missing_ok=True)
    running = tool.start("hb_mapper", "makertbin", "--model-type", "onnx", "-c", f"{content['name']}.yaml", cwd=directory)
    try:
        for _ in progress(_steps(running), len(STEPS), f"compiling for {content['march']}", show_progress):
            pass
    finally:
        write_file(directory / LOG, running.text + "\n")
    if running.code or not binary.is_file():
        binary.unlink(missing_ok=True)
        raise failure("hb_mapper", running.code, running.lines, content["layers"], str(directory / LOG))
    return binary


def _steps(running: Running) -> Iterator[int]:
    """Yield one item for each step of the compiler that has begun."""
    last = -1
    for line in running:
        step = step_of(line)
        if step is not None and step > last:
            yield from range(last + 1, step + 1)
            last = step


def _known(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / LAYERS).read_text(encoding="utf-8"))
        if not isinstance(content["layers"], dict) or not (directory / f"{content['name']}.yaml").is_file():
            raise KeyError("name")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{directory} cannot be compiled",
            because=f"it is not a folder that fxq.board.export_horizon wrote: {LAYERS} or what it names is missing or damaged",
            remedy="pass what fxq.board.export_horizon(integer, folder) returns",
        ) from error
    return dict(content)

"""Models as files, at every stage: a graph as JSON and its tensors as safetensors, in one archive.

A file holds no code. Call targets and classes are names from closed tables, so that loading a file imports
nothing and runs nothing that fxquant and PyTorch do not already bring along.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import fx

from fxquant.errors import ExportError, FxQuantError
from fxquant.model import collection_paused
from fxquant.serialization.archive import pack, unpack, write
from fxquant.serialization.document import read_model, write_model
from fxquant.serialization.tree import TargetOf
from fxquant.serialization.values import Malformed

__all__ = ["load_model", "save_model"]


def save_model(model: fx.GraphModule, path: str | os.PathLike[str], target_of: TargetOf) -> Path:
    """Write a model to a file, whole or not at all; equal models give equal bytes. Raises ExportError, and writes nothing, if it cannot."""
    try:
        content = pack(*write_model(model, target_of))
    except Malformed as error:
        raise ExportError("the model cannot be saved", because=str(error), remedy="undo the change that was made to it") from error
    try:
        write(Path(path), content)
    except OSError as error:
        raise ExportError(f"{path} cannot be written", because=str(error), remedy="choose a file in a directory that exists") from error
    return Path(path)


def load_model(path: str | os.PathLike[str], target_of: TargetOf) -> fx.GraphModule:
    """The model in a file. Raises ExportError if there is none that this fxquant saved."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ExportError(f"{path} cannot be read", because=str(error), remedy="pass the path of a file that fxq.save wrote") from error
    try:
        with collection_paused(), torch.inference_mode(False):
            return read_model(*unpack(content), target_of)
    except Exception as error:  # whatever the readers of the parts say about a file that is damaged, or was made up
        because = f"{error.what}: {error.because}" if isinstance(error, FxQuantError) else str(error) or type(error).__name__
        raise ExportError(
            f"{path} holds no model that can be loaded", because=because, remedy="save the model again with fxq.save"
        ) from error

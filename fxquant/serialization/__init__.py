"""Models as files, at every stage, and observations: a document as JSON and its tensors as safetensors, in one archive.

A file holds no code. Call targets and classes are names from closed tables, so that loading a file imports
nothing and runs nothing that fxquant and PyTorch do not already bring along.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.calibration.observations import Observations
from fxquant.errors import ExportError, FxQuantError
from fxquant.ir.model import collection_paused
from fxquant.serialization.archive import pack, unpack
from fxquant.serialization.document import read_model, write_model
from fxquant.serialization.observed import FORMAT as OBSERVATIONS
from fxquant.serialization.observed import read_observations, write_observations
from fxquant.serialization.tree import TargetOf
from fxquant.serialization.values import Malformed
from fxquant.support.files import write_file

__all__ = ["load_file", "save_model", "save_observations"]


def save_model(model: fx.GraphModule, path: str | os.PathLike[str], target_of: TargetOf) -> Path:
    """Write a model to a file, whole or not at all; equal models give equal bytes. Raises ExportError, and writes nothing, if it cannot."""
    try:
        document, tensors = write_model(model, target_of)
    except Malformed as error:
        raise ExportError("the model cannot be saved", because=str(error), remedy="undo the change that was made to it") from error
    return _write(path, document, tensors)


def save_observations(observations: Observations, path: str | os.PathLike[str]) -> Path:
    """Write observations to a file, in the same way."""
    return _write(path, *write_observations(observations))


def _write(path: str | os.PathLike[str], document: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    return write_file(path, pack(document, tensors))


def load_file(path: str | os.PathLike[str], target_of: TargetOf) -> fx.GraphModule | Observations:
    """Return the model, or the observations, in a file. Raises ExportError if there are none that this fxquant saved."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ExportError(f"{path} cannot be read", because=str(error), remedy="pass the path of a file that fxq.save wrote") from error
    try:
        with collection_paused(), torch.inference_mode(False):
            document, tensors = unpack(content)
            if document.get("format") == OBSERVATIONS:
                return read_observations(document, tensors)
            return read_model(document, tensors, target_of)
    except Exception as error:  # whatever the readers of the parts say about a file that is damaged, or was made up
        because = f"{error.what}: {error.because}" if isinstance(error, FxQuantError) else str(error) or type(error).__name__
        raise ExportError(
            f"{path} holds no model that can be loaded", because=because, remedy="save the model again with fxq.save"
        ) from error

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
from fxquant.serialization.archive import as_text, pack, unpack
from fxquant.serialization.document import read_model, write_model
from fxquant.serialization.observed import FORMAT as OBSERVATIONS
from fxquant.serialization.observed import read_observations, write_observations
from fxquant.serialization.tree_writer import TargetOf
from fxquant.serialization.values import Malformed
from fxquant.support.files import write_file

Content = tuple[Mapping[str, Any], Mapping[str, Tensor]]  # of a file: its document and its tensors

__all__ = ["load_file", "save_model", "save_observations"]


def save_model(model: fx.GraphModule, path: str | os.PathLike[str], target_of: TargetOf) -> Path:
    """Write a model to a file that is proved to load before it is in place; equal models give equal bytes.

    Raises ExportError, and keeps the previous file, if the model cannot be written, or the file cannot be loaded.
    """
    try:
        document, tensors = write_model(model, target_of)
    except Malformed as error:
        raise ExportError("the model cannot be saved", because=str(error), remedy="undo the change that was made to it") from error
    return _write(path, document, tensors, target_of)


def save_observations(observations: Observations, path: str | os.PathLike[str], target_of: TargetOf) -> Path:
    """Write observations to a file, in the same way."""
    return _write(path, *write_observations(observations), target_of)


def _write(path: str | os.PathLike[str], document: Mapping[str, Any], tensors: dict[str, Tensor], target_of: TargetOf) -> Path:
    """Write a file, and put it in place once it is loaded and gives back this document and these tensors."""
    place = Path(path)

    def check(folder: Path) -> None:
        try:
            content = unpack((folder / place.name).read_bytes())
            _read(*content, target_of)
            _compare((document, tensors), content)
        except Exception as error:
            raise ExportError(
                f"the {'observations' if document['format'] == OBSERVATIONS else 'model'} cannot be saved",
                because=f"the file that was written cannot be loaded: {_reason(error)}; the previous file is kept",
                remedy="undo the change that was made to it after fxquant returned it; if there was none, this is a defect of fxq.save, and"
                " its state_dict() can be kept with torch.save",
            ) from error

    return write_file(place, pack(document, tensors), check)


def _compare(written: Content, read: Content) -> None:
    """Raise Malformed unless two documents are equal, and their tensors in every byte."""
    if as_text(written[0]) != as_text(read[0]):
        raise Malformed("its graph is not the graph that was written")
    if written[1].keys() != read[1].keys():
        raise Malformed("it has other tensors than were written")
    for name, tensor in written[1].items():
        other = read[1][name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape) or not torch.equal(_bytes(tensor), _bytes(other)):
            raise Malformed(f"its tensor {name} is not the tensor that was written")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def load_file(path: str | os.PathLike[str], target_of: TargetOf) -> fx.GraphModule | Observations:
    """Return the model, or the observations, in a file. Raises ExportError if there are none that this fxquant saved."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ExportError(f"{path} cannot be read", because=str(error), remedy="pass the path of a file that fxq.save wrote") from error
    try:
        return _read(*unpack(content), target_of)
    except Exception as error:  # whatever the readers of the parts say about a file that is damaged, or was made up
        raise ExportError(
            f"{path} holds no model that can be loaded",
            because=_reason(error),
            remedy="save the model again with this version's fxq.save, or prepare the float model again",
        ) from error


def _read(document: dict[str, Any], tensors: dict[str, Tensor], target_of: TargetOf) -> fx.GraphModule | Observations:
    with collection_paused(), torch.inference_mode(False):
        if document.get("format") == OBSERVATIONS:
            return read_observations(document, tensors)
        return read_model(document, tensors, target_of)


def _reason(error: Exception) -> str:
    return f"{error.what}: {error.because}" if isinstance(error, FxQuantError) else str(error) or type(error).__name__

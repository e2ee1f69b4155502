"""Models as files, at every stage, and observations: a document as JSON and its tensors as safetensors, in one archive.

A file holds no code. Call targets and classes are names from closed tables, so that loading a file imports
nothing and runs nothing that fxquant and PyTorch do not already bring along.
"""

import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, fx

from fxquant.accuracy.observations import Observations
from fxquant.errors import ExportError, FxQuantError
from fxquant.ir.model import collection_paused
from fxquant.serialization.document import OBSERVATIONS, read_model, read_observations, write_model, write_observations
from fxquant.serialization.tree import TargetOf
from fxquant.serialization.values import Malformed
from fxquant.support.files import write_file

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
            read_document, read_tensors = unpack((folder / place.name).read_bytes())
            _read(read_document, read_tensors, target_of)
            Malformed.unless(as_text(document) == as_text(read_document), "its graph is not the graph that was written")
            Malformed.unless(tensors.keys() == read_tensors.keys(), "it has other tensors than were written")
            for name, tensor in tensors.items():
                other = read_tensors[name]
                if (tensor.dtype, tensor.shape) != (other.dtype, other.shape) or not torch.equal(_bytes(tensor), _bytes(other)):
                    raise Malformed(f"its tensor {name} is not the tensor that was written")
        except Exception as error:
            raise ExportError(
                f"the {'observations' if document['format'] == OBSERVATIONS else 'model'} cannot be saved",
                because=f"the file that was written cannot be loaded: {_reason(error)}; the previous file is kept",
                remedy="undo the change that was made to it after fxquant returned it; if there was none, this is a defect of fxq.save, and"
                " its state_dict() can be kept with torch.save",
            ) from error

    return write_file(place, pack(document, tensors), check)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def load_file(path: str | os.PathLike[str], target_of: TargetOf) -> fx.GraphModule | Observations:
    """Return the model, or the observations, in a file. Raises ExportError if there are none that this fxquant saved."""
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a ValueError: it has a NUL character
        raise ExportError(f"{path} cannot be read", because=str(error), remedy="pass the path of a file that fxq.save wrote") from error
    try:
        return _read(*unpack(content), target_of)
    except Exception as error:  # whatever the readers of the parts say about a file that is damaged, or was made up
        remedy = "save the model again with this version's fxq.save, or prepare the float model again"
        raise ExportError(f"{path} holds no model that can be loaded", because=_reason(error), remedy=remedy) from error


def _read(document: dict[str, Any], tensors: dict[str, Tensor], target_of: TargetOf) -> fx.GraphModule | Observations:
    with collection_paused(), torch.inference_mode(False):
        if document.get("format") == OBSERVATIONS:
            return read_observations(document, tensors)
        return read_model(document, tensors, target_of)


def _reason(error: Exception) -> str:
    if isinstance(error, zipfile.BadZipFile):
        return "it is not a zip archive, and fxq.save writes one"
    return f"{error.what}: {error.because}" if isinstance(error, FxQuantError) else str(error) or type(error).__name__


# ---- the file itself: a zip archive of a graph as JSON and its tensors as safetensors, equal bytes for equal content ----
GRAPH, TENSORS = "graph.json", "tensors.safetensors"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time an archive can name
_REGULAR_FILE = 0o100644 << 16


def pack(document: Mapping[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Return the bytes of a file: they depend on nothing but the content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in ((GRAPH, as_text(document).encode("ascii")), (TENSORS, safetensors.torch.save(tensors))):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system, entry.external_attr = 3, _REGULAR_FILE
            archive.writestr(entry, content)
    return buffer.getvalue()


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors of a file. Nothing larger than the file itself is allocated for it.

    Raises Malformed, or errors of the readers of zip, JSON and safetensors.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if [entry.filename for entry in entries] != [GRAPH, TENSORS]:
            raise Malformed(f"it does not hold {GRAPH} and {TENSORS}, and nothing else")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.file_size > len(content):
                raise Malformed(f"{entry.filename} is not stored as it is")
        graph, packed = (archive.read(entry) for entry in entries)
    text = re.sub(r'("Part":{[^{}]*),"step":(?:null|\d+)}', r"\1}", graph.decode("ascii"))  # of which former files tell, and nothing reads
    document = json.loads(text, parse_constant=_refuse_constant)
    Malformed.unless(isinstance(document, dict), f"{GRAPH} is not an object")
    return document, {name: tensor.clone() for name, tensor in safetensors.torch.load(packed).items()}


def as_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON text, with one line for every item of its lists and objects."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_section(value)}" for key, value in document.items()) + "\n}\n"


def _section(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(_line(item) for item in value) + "\n]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_line(item)}" for key, item in value.items()) + "\n}"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _refuse_constant(name: str) -> None:
    raise Malformed(f"{name} is not a JSON number")

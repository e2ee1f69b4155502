"""What an exported file says about itself, in its `metadata_props`.

    fxquant.version          the fxquant that wrote it
    fxquant.style            "exact", "fast" or "qdq"
    fxquant.io               "float" or "integer": what the file takes and returns
    fxquant.target           the target it was compiled for
    fxquant.inputs           JSON: for each input, in order, its name, dtype (the ONNX element type, as "float") and shape, and the
                             name of the quantized tensor it is or is made into, "tensor", where there is one
    fxquant.outputs          JSON: the same for each output, with the quantized tensor it is or was
    fxquant.tensors          JSON: for each described value, by name, in the order they are computed:
                               kind        "quantized", "accumulator" (between two of them) or "float"
                               and of a quantized one
                               scale       a number, or a list along the dimension `axis`, counted from the end
                               dtype       its range: "int8", "int16", …
                               storage     the element type it is stored with: "int8", or "uint8" in style "fast"
                               zero_point  what stands for 0: real = (stored - zero_point) · scale
    fxquant.float            JSON: why the operators outside of the integer part are there, by name
    fxquant.session_options  JSON: session options of onnxruntime, by name, that the file's numbers rely on where it was written
    fxquant.session_options_without_vnni
                             JSON, style "fast": those they rely on where an x86 processor lacks VNNI; elsewhere they cost speed
    fxquant.kernels          JSON, style "fast": "integer", the operators that became integer kernels, and "refused", those whose
                             kernels were not exact where it was written, and that are as in style "exact"

The names are stable: what is added later gets names of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from fxquant.arguments import PATH, checked
from fxquant.errors import ExportError

PREFIX = "fxquant."
_PLAIN = ("version", "style", "io", "target")  # the others are JSON


def write_metadata(model: onnx.ModelProto, entries: Mapping[str, Any]) -> None:
    """Give the model these properties, by their names without the prefix."""
    onnx.helper.set_model_props(
        model, {PREFIX + name: value if name in _PLAIN else json.dumps(value, ensure_ascii=False) for name, value in entries.items()}
    )


def read_metadata(model: onnx.ModelProto, path: Path) -> dict[str, Any]:
    """The properties of a model that was read from this path. Raises ExportError if fxquant did not write it."""
    found = {entry.key.removeprefix(PREFIX): entry.value for entry in model.metadata_props if entry.key.startswith(PREFIX)}
    if "tensors" not in found:
        raise ExportError(
            f"{path} was not written by fxquant",
            because="its metadata has no entry fxquant.tensors",
            remedy="pass a file written by fxq.export_onnx",
        )
    return {name: value if name in _PLAIN else json.loads(value) for name, value in found.items()}


def read_model(path: Path) -> onnx.ModelProto:
    """The model in a file, without its external data. Raises ExportError if it is none."""
    try:
        return onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ExportError(
            f"{path} cannot be read as ONNX",
            because=str(error).splitlines()[0] or type(error).__name__,
            remedy="pass a file written by fxq.export_onnx",
        ) from None


@checked(path=PATH)
def onnx_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file that `export_onnx` wrote says about itself: version, style, io, target, inputs, outputs, tensors, …

    The keys are the properties' names without "fxquant."; their JSON is read. backends/metadata.py documents them.
    Raises ExportError if the file cannot be read, or was not written by fxquant.
    """
    return read_metadata(read_model(Path(path)), Path(path))

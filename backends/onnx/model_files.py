"""Writing of models to disk: each file is checked and complete, or unchanged; a model that is too large is split into two files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import set_external_data

from fxquant.backends.onnx.runtime import open_file
from fxquant.errors import ExportError
from fxquant.support.files import Content, write_files

LARGEST_FILE = 2**31 - 2**20  # a protobuf message is limited to 2 GiB; the remainder is for the graph
SMALLEST_EXTERNAL = 1024  # bytes; smaller tensors stay in the model itself


@dataclass(frozen=True)
class FileOptions:
    """The arguments of `fxq.export_onnx` that say how a file is written, whatever the model."""

    opset: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    external_data: bool | None = None
    layouts: Mapping[str, str] | None = None


def save_model(model: onnx.ModelProto, path: Path, external_data: bool | None, opened: bool = False) -> None:
    """Write a model to `path`; its tensors go to `path`.data if requested, or if one file cannot hold them.

    Raises ExportError as `save_models` does.
    """
    save_models({path.name: model}, path.parent, external_data, opened=opened)


def save_models(
    models: Mapping[str, onnx.ModelProto],
    folder: str | os.PathLike[str],
    external_data: bool | None,
    others: Mapping[str, Content] | None = None,
    opened: bool = False,
) -> None:
    """Check models and write them by their file names into one folder, followed by `others`, files that refer to them.

    Tensors are removed from a model whose data is written externally. Raises ExportError if a model is not valid, is too
    large for one file, cannot be written, or, with `opened`, if onnxruntime cannot open it; existing files are then unchanged.
    """
    contents = dict[str, Content]()
    for name, model in models.items():
        contents.update(_contents(model, name, external_data))
    write_files(folder, {**contents, **(others or {})}, lambda written: _check(written, models, folder, opened))


def _contents(model: onnx.ModelProto, name: str, external_data: bool | None) -> dict[str, Content]:
    """Return the files of a model: its tensors, if they have their own file, and the model."""
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if external_data is False and size > LARGEST_FILE:
        raise ExportError(
            f"{name} cannot be one file",
            because=f"its tensors have {size:,} bytes, and a file of ONNX ends at 2 GiB",
            remedy="leave external_data out, or pass external_data=True",
        )
    parts: list[bytes] = []
    if size > LARGEST_FILE if external_data is None else external_data:
        offset = 0
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= SMALLEST_EXTERNAL:
                parts.append(tensor.raw_data)
                set_external_data(tensor, f"{name}.data", offset, len(tensor.raw_data))
                offset += len(tensor.raw_data)
                tensor.ClearField("raw_data")
    return {**({f"{name}.data": parts} if parts else {}), name: model.SerializeToString()}


def _check(written: Path, models: Mapping[str, onnx.ModelProto], folder: str | os.PathLike[str], opened: bool) -> None:
    for name in models:
        try:
            onnx.checker.check_model(str(written / name), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(
                f"the file {Path(folder, name)} would not be valid",
                because=f"onnx says: {str(error).strip().splitlines()[0]}",
                remedy="keep the operator it names, if any, out of the model, and report this with the model",
            ) from error
        try:
            if opened:
                open_file(written / name)
        except Exception as error:  # the runtime's errors have no common class
            raise ExportError(
                f"onnxruntime could not open the file {Path(folder, name)}",
                because=f"it says: {str(error).strip().splitlines()[0]}",
                remedy="change the float operators that read or compute the value it names, or call them outside of the model; "
                "multiply by a number after a matrix product instead of before it",
            ) from error

"""Writing a model to disk: whole or not at all, and in two files where one would be too large."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx
from onnx.external_data_helper import set_external_data

from fxquant.errors import ExportError

LARGEST_FILE = 2**31 - 2**20  # a protobuf message ends at 2 GiB; what is left over is for the graph
SMALLEST_EXTERNAL = 1024  # bytes; smaller tensors stay in the model itself


def save_model(model: onnx.ModelProto, path: Path, external_data: bool | None) -> None:
    """Check the model and write it to `path`; its tensors to `path`.data if told to, or if one file cannot hold them.

    Raises ExportError if it is not valid, and leaves what was there as it was.
    """
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    external = size > LARGEST_FILE if external_data is None else external_data
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.name + ".data"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fxquant-") as directory:
        written = Path(directory) / path.name
        if external:
            # onnx.save's own option refuses a location that exists in the working directory, even a file to be replaced.
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) >= SMALLEST_EXTERNAL:
                    set_external_data(tensor, location=beside)
        onnx.save(model, str(written))
        _check(written, path)
        data = Path(directory) / beside
        if data.exists():
            os.replace(data, path.parent / beside)
        os.replace(written, path)


def _check(written: Path, path: Path) -> None:
    try:
        onnx.checker.check_model(str(written), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(
            f"the file {path} would not be valid",
            because=f"onnx says: {str(error).strip().splitlines()[0]}",
            remedy="keep the operator it names, if any, out of the model, and report this with the model",
        ) from error

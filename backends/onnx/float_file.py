"""A float model as an ONNX file: PyTorch's exporter writes it, and onnxruntime's results are compared with PyTorch's."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import onnx
from torch import fx

from fxquant.backends.onnx.agreement import LARGEST, apart
from fxquant.backends.onnx.export import FLOAT_OPSETS, check_choice
from fxquant.backends.onnx.fast import results_of
from fxquant.backends.onnx.layouts import with_layouts
from fxquant.backends.onnx.model_files import FileOptions, save_model
from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ExportError

logger = logging.getLogger("fxquant")


class FloatWriter(Writer):
    """Writes a traced graph as one region of float operators."""

    style = "float"

    def target(self) -> str:
        return ""


def export_float(traced: fx.GraphModule, path: str | os.PathLike[str], options: FileOptions) -> Path:
    """Write a traced float model, and return the path; the batch is dynamic if it was traced so.

    Before the file appears it is run in onnxruntime on random inputs. Raises ExportError if the result differs from PyTorch by
    more than rounding.
    """
    opsets, default = FLOAT_OPSETS
    opset = default if options.opset is None else options.opset
    check_choice("opset", opset, list(opsets))
    model = FloatWriter(traced, "float", opset).write(options.input_names, options.output_names)
    _check(traced, model)
    save_model(with_layouts(model, options.layouts, traced), Path(path), options.external_data)
    return Path(path)


def _check(traced: fx.GraphModule, model: onnx.ModelProto) -> None:
    for name, found, wanted in results_of(traced, model, {}):
        if not wanted.is_floating_point() and wanted.shape == found.shape:
            continue  # an index may change if two values are nearly equal
        far = apart(found, wanted)
        logger.info("output %s in onnxruntime: %.3g of its largest number from PyTorch, at most", name, far)
        if far > LARGEST:
            raise ExportError(
                f"the file would not compute the model's output {name!r}",
                because=f"onnxruntime is up to {far:.3g} of its largest number away from PyTorch on random inputs",
                remedy="export with another opset, and report this with the model",
            )

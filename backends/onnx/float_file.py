"""A float model as an ONNX file: PyTorch's exporter writes it, and onnxruntime's results are compared with PyTorch's."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from fxquant.backends.onnx.agreement import LARGEST, apart
from fxquant.backends.onnx.export import FLOAT_OPSETS, check_choice
from fxquant.backends.onnx.fast import random_input
from fxquant.backends.onnx.layouts import with_layouts
from fxquant.backends.onnx.model_files import FileOptions, save_model
from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ExportError
from fxquant.ir.graph import by_name

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
    generator = torch.Generator().manual_seed(0)
    inputs = [random_input(traced, node, generator) for node in traced.graph.find_nodes(op="placeholder")]
    wanted: list[Tensor] = []
    with torch.no_grad():
        results = traced(**by_name(traced, inputs))
        fx.node.map_aggregate(results, lambda value: wanted.append(value.cpu()) if isinstance(value, Tensor) else None)
    _, level, threads = RUNTIMES[0]
    found: Any = Runner(model, level, threads)(dict(zip((info.name for info in model.graph.input), inputs, strict=True)))
    for value, output in zip(wanted, model.graph.output, strict=True):
        other = found[output.name]
        if not value.is_floating_point() and value.shape == other.shape:
            continue  # an index may change if two values are nearly equal
        far = apart(other, value)
        logger.info("output %s in onnxruntime: %.3g of its largest number from PyTorch, at most", output.name, far)
        if far > LARGEST:
            raise ExportError(
                f"the file would not compute the model's output {output.name!r}",
                because=f"onnxruntime is up to {far:.3g} of its largest number away from PyTorch on random inputs",
                remedy="export with another opset, and report this with the model",
            )

"""Proof by running: what `fxq.verify` compares, and whether it can be compared.

The forms are the prepared model (in VALIDATE), the integer model, and an exported ONNX file, which is run
every way there is. The first difference is located: the node, its inputs, and both values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from fxquant.analysis.layers import layers
from fxquant.analysis.recording import GraphForm
from fxquant.analysis.segments import returned
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import is_deployed
from fxquant.prepared.batches import model_inputs
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.state import State


def check_batches(model: fx.GraphModule, batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the inputs of each batch. Raises CalibrationError where one does not fit."""
    for index, batch in enumerate(batches):
        yield model_inputs(model, batch, index)


def check_same_model(left: GraphForm, opened: Any) -> None:
    """Raise ExportError if a file cannot be compared with a model: another model's, or one that takes integers."""
    if opened.io != "float":
        raise ExportError(
            f"{opened.path} cannot be verified",
            because=f"it was exported with io={opened.io!r}, and takes integers where the model takes float tensors",
            remedy="export with io='float'; the inner nodes of both files are the same",
        )
    sizes = (sum(node.op == "placeholder" for node in left.model.graph.nodes), len(returned(left.model)))
    found = (len(opened.input_names), len(opened.output_names))
    if sizes != found:
        raise ExportError(
            f"{opened.path} is the file of another model",
            because=f"it has {found[0]} inputs and {found[1]} outputs, and this model has {sizes[0]} and {sizes[1]}",
            remedy="pass the file that fxq.export_onnx wrote of this model",
        )
    if is_deployed(left.model):
        names = [layer.name for layer in layers(left.model) if layer.grid is not None]
    else:
        names = [name for name, operator in quantized_operators(left.model).items() if operator.owns_output]
    missing = [name for name in names if name not in opened.tensors]
    if missing:
        raise ExportError(
            f"{opened.path} is the file of another model",
            because=f"it has no {', '.join('%' + name for name in missing[:5])}{' …' if len(missing) > 5 else ''}",
            remedy="pass the file that fxq.export_onnx wrote of this model",
        )


def form_of(model: Any) -> GraphForm:
    """Return the form of a model object. Raises ConfigurationError if it is neither prepared nor integer."""
    stage = getattr(model, "meta", {}).get("stage") if isinstance(model, fx.GraphModule) else None
    if stage in ("PREPARED", "INTEGER", "FUSED"):
        return GraphForm(model, State.VALIDATE)
    raise ConfigurationError(
        f"{type(model).__name__} cannot be verified",
        because="it is neither a prepared model, nor an integer model, nor the path of an ONNX file",
        remedy="pass the results of fxq.prepare, fxq.convert or fxq.export_onnx",
    )

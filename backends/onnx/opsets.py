"""Opsets of the models that PyTorch's exporters write: which it is, whether another is equivalent, and the exporter for old ones."""

from __future__ import annotations

import io
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from fxquant.ir.facts import BATCH_SIZES, BatchDim, TensorFact


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset of ONNX's own operators in a model."""
    return int(next(entry.version for entry in model.opset_import if entry.domain == ""))


def unchanged(model: onnx.ModelProto, written: int, wanted: int) -> bool:
    """Return whether every operator of a model has the same definition in an older opset as in the one that was written."""

    def since(operator: str, opset: int) -> int:
        try:
            found: int = onnx.defs.get_schema(operator, opset).since_version
        except onnx.defs.SchemaError:  # the operator was added later
            return 0
        return found

    nodes = model.graph.node
    plain = not model.functions and all(node.domain == "" and not any(a.HasField("g") for a in node.attribute) for node in nodes)
    return plain and all(since(node.op_type, written) == since(node.op_type, wanted) for node in nodes)


def by_the_older_exporter(part: fx.GraphModule, inputs: list[Any], outputs: int, opset: int) -> onnx.ModelProto | None:
    """Return a model of a module with inputs of these facts, by PyTorch's older exporter, which writes old opsets.

    Return None if the exporter fails, or PyTorch has it no more.
    """
    names = [f"region_input_{i}" for i in range(len(inputs))], [f"region_output_{i}" for i in range(outputs)]
    moving = {name: list(axes) for name, known in zip(names[0], inputs, strict=True) if (axes := dynamic_of(known))}
    written = io.BytesIO()
    try:
        torch.onnx.export(
            part,
            tuple(torch.as_tensor(example_of(known)) for known in inputs),
            written,  # type: ignore[arg-type]  # this exporter takes a buffer
            dynamo=False,
            opset_version=opset,
            input_names=names[0],
            output_names=names[1],
            dynamic_axes=moving,
        )
    except Exception:  # the reported reason is that of the newer exporter
        return None
    return onnx.load_from_string(written.getvalue())


def example_of(value: Any) -> Tensor | int:
    """Return the exporter's example for an input of this fact."""
    if isinstance(value, TensorFact):
        return torch.zeros(value.at(BATCH_SIZES[0]), dtype=value.dtype, device="cpu")
    return value.at(BATCH_SIZES[0]) if isinstance(value, BatchDim) else int(value)


def dynamic_of(value: Any) -> Any:
    """Return the dimensions of an input that depend on the batch, in the form that torch.export takes."""
    if not isinstance(value, TensorFact):
        return torch.export.Dim.DYNAMIC if isinstance(value, BatchDim) else None
    return {index: torch.export.Dim.DYNAMIC for index, size in enumerate(value.shape) if isinstance(size, BatchDim)} or None

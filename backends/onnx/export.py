"""Writing an integer graph as an ONNX file, in one of three styles."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import onnx
from torch import fx

from fxquant.backends.onnx.fast import float_nodes, has_kernels, write_fast
from fxquant.backends.onnx.layouts import with_layouts
from fxquant.backends.onnx.model_files import FileOptions, save_model
from fxquant.backends.onnx.qdq import QdqWriter
from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ConfigurationError, ExportError
from fxquant.prepared.stage import require_integer

logger = logging.getLogger("fxquant")

# For each style: the opsets that it can be written in, and the default.
FLOAT_OPSETS = (range(11, 22), 18)  # those of a float model
STYLES = {**dict.fromkeys(("auto", "exact", "fast"), (range(17, 22), 21)), "qdq": (range(11, 22), 17)}


def export_integer(integer: fx.GraphModule, path: str | os.PathLike[str], style: str, io: str, options: FileOptions) -> Path:
    """Write an integer model, and return the path; style and io are those of `fxq.export_onnx`."""
    check_arguments(integer, style, io, options.opset)
    version = STYLES[style][1] if options.opset is None else options.opset
    model = build(integer, style, io, version, options.input_names, options.output_names)
    # Float operators as PyTorch's exporter writes them can form what onnxruntime's optimizer breaks.
    save_model(with_layouts(model, options.layouts, integer), Path(path), options.external_data, opened=bool(float_nodes(integer)))
    return Path(path)


def build(
    integer: fx.GraphModule, style: str, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """Return the model in memory."""
    if style == "auto":
        found = _fast_if_exact(integer, io, opset, input_names, output_names) if has_kernels(integer) else None
        logger.info("style 'auto': written in style '%s'", "exact" if found is None else "fast")
        return Writer(integer, io, opset).write(input_names, output_names) if found is None else found
    if style == "fast":
        fast = write_fast(integer, io, opset, input_names, output_names)
        assert fast is not None
        return fast
    if style == "qdq":
        writer = QdqWriter(integer, io, opset)
        if writer.in_floats:
            logger.warning(
                "int16 tensors that opset %d has no integers for: %d, %s; they are rounded by Div, Round, Clip and Mul,"
                " which compilers for chips drop or keep in float: pass opset=21, or use fxq.export_horizon for Horizon's compiler",
                opset,
                len(writer.in_floats),
                ", ".join(f"%{node.name}" for node in writer.in_floats[:4]),
            )
        return writer.write(input_names, output_names)
    return Writer(integer, io, opset).write(input_names, output_names)


def _fast_if_exact(
    integer: fx.GraphModule, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto | None:
    try:
        return write_fast(integer, io, opset, input_names, output_names, plain=True)
    except ExportError as error:  # the model differs as a whole, or nothing can be written, which the exact style reports as well
        logger.warning("style 'auto': 'fast' cannot be used: %s", error.because)
        return None


def check_arguments(integer: fx.GraphModule, style: str, io: str, opset: int | None) -> None:
    """Raise ConfigurationError or ExportError for unsupported arguments."""
    require_integer(integer)
    check_choice("style", style, list(STYLES))
    check_choice("io", io, ["float", "integer"])
    opsets, default = STYLES[style]
    check_choice("opset", default if opset is None else opset, list(opsets))


def check_choice(name: str, value: object, known: list[object]) -> None:
    """Raise ConfigurationError for a value that is not one of these."""
    if value not in known:
        raise ConfigurationError(
            f"{name}={value!r} is unknown", because=f"it is one of {', '.join(map(str, known))}", remedy="pass one of these"
        )

"""Writing an integer graph as an ONNX file, in one of three styles."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import torch
from torch import fx

from fxquant.arguments import checked
from fxquant.backends.onnx.fast import has_kernels, write_fast
from fxquant.backends.onnx.files import save_model
from fxquant.backends.onnx.layouts import LAYOUTS, with_layouts
from fxquant.backends.onnx.qdq import QdqWriter
from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ConfigurationError, ExportError
from fxquant.graph import is_deployed, resolve
from fxquant.primitives import PRIMITIVES
from fxquant.target import Target

logger = logging.getLogger("fxquant")

# Of each style: the opsets it can be written in, and the one it is written in unless told otherwise.
FLOAT_OPSETS = (range(11, 22), 18)  # the same of a float model
STYLES = {"exact": (range(17, 22), 21), "fast": (range(17, 22), 21), "qdq": (range(11, 22), 17)}


@checked(layouts=LAYOUTS)
def export_onnx(
    integer: fx.GraphModule,
    path: str | os.PathLike[str],
    style: str = "auto",
    io: str = "float",
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    external_data: bool | None = None,
    layouts: Mapping[str, str] | None = None,
) -> Path:
    """Write the integer model as an ONNX file, and return its path.

    style  "auto": "fast" where this target has it and every kernel is exact here without session options, else "exact"; the log says
           which, and so does `onnx_metadata`.
           "exact": standard operators on whole numbers, the same bits in every runtime, at any optimisation
           "fast": the same bits by uint8 kernels, proved in onnxruntime before it is written; for targets with
           float32 requantization (nash-e, nash-m, x86, qnnpack). Its metadata names session options to run it with,
           above all on x86 processors without VNNI.
           "qdq": float operators between QuantizeLinear and DequantizeLinear, for other compilers. Not the same
           bits: `verify` measures the difference. Below opset 13 weights are floats on their quantized grid.
    io     "float" takes and returns what the float model does; "integer" takes and returns the integers.
    opset  17 to 21, and 21 unless given; in style "qdq" 11 to 21, and 17 unless given.
    external_data  True writes tensors of a kilobyte and more to `path`.data, False never does; by default it is
           done where one file cannot hold the model.
    layouts        {"image": "NHWC"}: inputs of the file, by name, that are given with their channels last. A Transpose inside puts
           them where PyTorch has them; `verify` and `record` take PyTorch's layout all the same.

    What the file says about itself is read by `onnx_metadata`: scales, zero points and dtypes of its inputs, outputs
    and inner tensors. Numbers and None beside the tensors that the model returns are no part of the file. The batch is
    dynamic where the model was traced so. The file is checked before it appears, and
    appears whole or not at all. Raises ConfigurationError or ExportError.
    """
    check_arguments(integer, style, io, opset)
    version = STYLES[_strict(style)][1] if opset is None else opset
    model = build(integer, style, io, version, input_names, output_names)
    save_model(with_layouts(model, layouts, integer), Path(path), external_data)
    return Path(path)


def build(
    integer: fx.GraphModule, style: str, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """The model in memory."""
    if style == "auto":
        found = _fast_if_exact(integer, io, opset, input_names, output_names) if _has_kernels(integer) else None
        logger.info("style 'auto': written in style '%s'", "exact" if found is None else "fast")
        return Writer(integer, io, opset).write(input_names, output_names) if found is None else found
    if style == "fast":
        fast = write_fast(integer, io, opset, input_names, output_names)
        assert fast is not None
        return fast
    return (QdqWriter if style == "qdq" else Writer)(integer, io, opset).write(input_names, output_names)


def _fast_if_exact(
    integer: fx.GraphModule, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto | None:
    try:
        return write_fast(integer, io, opset, input_names, output_names, plain=True)
    except ExportError as error:  # the whole differs, or nothing can be written, which the exact style says as well
        logger.warning("style 'auto': 'fast' cannot be used: %s", error.because)
        return None


def _strict(style: str) -> str:
    """The style that is as strict about opsets."""
    return "exact" if style == "auto" else style


def _has_kernels(integer: fx.GraphModule) -> bool:
    target: Target = integer.meta["target"]
    return has_kernels(target.arithmetic)


def check_arguments(integer: fx.GraphModule, style: str, io: str, opset: int | None) -> None:
    """Raise ConfigurationError or ExportError for arguments that nothing can be written with."""
    if not isinstance(integer, fx.GraphModule) or not is_deployed(integer):
        raise ConfigurationError(
            f"{type(integer).__name__} is no integer model",
            because="only the result of fxq.convert can be exported",
            remedy="call fxq.convert(prepared) first",
        )
    _check_constants(integer)
    check_choice("style", style, ["auto", *STYLES])
    check_choice("io", io, ["float", "integer"])
    opsets, default = STYLES[_strict(style)]
    check_choice("opset", default if opset is None else opset, list(opsets))
    target: Target = integer.meta["target"]
    if style == "fast" and not _has_kernels(integer):
        raise ConfigurationError(
            f"style='fast' cannot be used for {target.name}",
            because=f"it requantizes by {target.arithmetic.multiplies_by}, and ONNX's integer operators multiply by a float32 number",
            remedy="use style='exact', or compile for a target with float32 requantization: nash-e, nash-m, x86 or qnnpack",
        )


def _check_constants(integer: fx.GraphModule) -> None:
    """Raise ExportError if something has changed the dtype of what the integer part reads."""
    for node in integer.graph.nodes:
        if node.op != "get_attr" or not any(user.op == "call_function" and user.target in PRIMITIVES for user in node.users):
            continue
        found = resolve(integer, str(node.target)).dtype
        if found.is_floating_point and found != torch.float32:
            raise ExportError(
                "the integer model has lost the dtypes of its constants",
                because=f"{node.target} is {str(found).removeprefix('torch.')}: .double(), .half() or .to(dtype) was called on this model, "
                "or on the prepared one",
                remedy="convert a prepared model that nothing of the kind was done to; a float model may be of another dtype",
            )


def check_choice(name: str, value: object, known: list[object]) -> None:
    """Raise ConfigurationError for a value that is none of these."""
    if value not in known:
        raise ConfigurationError(
            f"{name}={value!r} is unknown", because=f"it is one of {', '.join(map(str, known))}", remedy="pass one of these"
        )

"""Outputs of a compiled model in the vendor's runtime, by `fxquant.backends.horizon`."""

from collections.abc import Sequence

import onnx
from torch import Tensor

from fxquant.backends.horizon.compiled_program import inner_values
from fxquant.backends.horizon.tool import Tool
from fxquant.conformance.kit import Compiled
from fxquant.errors import ConfigurationError


def require() -> None:
    """End the program with the reason where the vendor's tool is not installed."""
    try:
        Tool.find()
    except ConfigurationError as error:
        raise SystemExit(str(error)) from None


def outputs(compiled: Compiled, images: Sequence[Tensor]) -> list[list[Tensor]]:
    """The outputs that the vendor's runtime computes from the quantized model, for each image."""
    names = [output.name for output in onnx.load(str(compiled.quantized)).graph.output]
    by_image = [inner_values(Tool.find(), compiled.quantized, [image], names) for image in images]
    return [[values[name] for name in names] for values in by_image]

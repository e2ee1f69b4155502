"""Horizon's two functions that write ONNX, over `fxquant.export_onnx`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx

import fxquant as fxq
from fxquant.compat.common import Refusal, refuse_given
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.ir.graph import stage_of
from fxquant.support.arguments import FILE, checked

OPTIONS = {
    "export_params": Refusal("a file without its parameters cannot run", "leave it at True"),
    "verbose": Refusal("the exporter prints nothing", "print(fxq.text(model)) shows the graph"),
    "training": Refusal("the file is the deployed model", "leave it at TrainingMode.EVAL"),
    "dynamic_axes": Refusal("the batch is the one size that varies", "name dimension 0 of inputs and outputs alone, or leave it out"),
    "keep_initializers_as_inputs": Refusal("parameters are constants of the file", "leave it out"),
    "custom_opsets": Refusal("files have standard operators alone", "leave it out"),
    "do_constant_folding": Refusal("constants are folded when the model is prepared", "leave it at True"),
}
USUAL = {"export_params": True, "verbose": False, "do_constant_folding": True, "keep_initializers_as_inputs": False}


def _options(called: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an unsupported option that would change the file."""
    given = dict(options)
    if str(given.get("training", "")).endswith("EVAL"):
        given.pop("training")
    axes = given.pop("dynamic_axes", None) or {}
    if any(list(each) != [0] for each in axes.values()):
        given["dynamic_axes"] = axes
    refuse_given(called, {name: value for name, value in given.items() if value not in ({}, [])}, USUAL, OPTIONS)


@checked(f=FILE)
def export_to_onnx(
    model: Any,
    args: Any,
    f: Any,
    export_params: bool = True,
    verbose: bool = False,
    training: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: Any = None,
    opset_version: int = 11,
    do_constant_folding: bool = True,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: Any = None,
    custom_opsets: Any = None,
) -> Path:
    """Write a float model, or a prepared one with quantize and dequantize around float operators: for viewing, and other compilers.

    It does not have the bits of the integer model, which `export_quantized_onnx` writes. Operators are ONNX's own, whatever
    `operator_export_type` is. Return the path. Raises ConfigurationError for an unsupported option that would change the file.
    """
    _options("export_to_onnx", {**_given(export_params, verbose, training, do_constant_folding, dynamic_axes),
        "custom_opsets": custom_opsets,
        "keep_initializers_as_inputs": keep_initializers_as_inputs})  # fmt: skip
    names: Any = {"input_names": input_names, "output_names": output_names}
    if not isinstance(model, fx.GraphModule) or stage_of(model) is None:
        inputs = tuple(args) if isinstance(args, list) else args
        return fxq.export_onnx(model, f, example_inputs=inputs, opset=None if opset_version == 11 else opset_version, **names)
    return fxq.export_onnx(integer_of(model, "export_to_onnx"), f, style="qdq", opset=opset_version, **names)


@checked(f=FILE)
def export_quantized_onnx(
    model: Any,
    args: Any,
    f: Any,
    export_params: bool = True,
    verbose: bool = False,
    training: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: Any = None,
    opset_version: int | None = None,
    do_constant_folding: bool = True,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: Any = None,
    custom_opsets: Any = None,
) -> Path:
    """Write an integer model as standard operators on integers: it runs everywhere, with equal bits. Return the path.

    opset_version   11, the plugin's, means the style's default, because that opset lacks integer operators
    """
    _options("export_quantized_onnx", {**_given(export_params, verbose, training, do_constant_folding, dynamic_axes),
        "custom_opsets": custom_opsets, "keep_initializers_as_inputs": keep_initializers_as_inputs})  # fmt: skip
    opset = None if opset_version == 11 else opset_version
    return fxq.export_onnx(integer_of(model, "export_quantized_onnx"), f, opset=opset, input_names=input_names, output_names=output_names)


def _given(export_params: Any, verbose: Any, training: Any, do_constant_folding: Any, dynamic_axes: Any) -> dict[str, Any]:
    return {
        "export_params": export_params,
        "verbose": verbose,
        "training": training,
        "do_constant_folding": do_constant_folding,
        "dynamic_axes": dynamic_axes,
    }

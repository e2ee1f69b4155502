"""Inspection of an exported file: its graph as text, its constants, its shapes."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from fxquant.backends.onnx.runtime import OnnxModel
from fxquant.errors import ExportError
from fxquant.ir.graph import DTYPE_NAMES

P = ParamSpec("P")
R = TypeVar("R")


def _of_any_file(function: Callable[Concatenate[OnnxModel, P], R]) -> Callable[Concatenate[OnnxModel, P], R]:
    """Wrap a function so that it raises ExportError for any error of ONNX's readers about a damaged or forged file."""

    @functools.wraps(function)
    def call(opened: OnnxModel, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(opened, *args, **kwargs)
        except Exception as error:  # their errors have no common class
            because = str(error).strip().split("\n")[0] or type(error).__name__
            remedy = "export it again with fxq.export_onnx, and keep its .data file, if any, in the same folder"
            raise ExportError(f"{opened.path} cannot be read as ONNX", because=because, remedy=remedy) from error

    return call


@_of_any_file
def operators(opened: OnnxModel) -> dict[str, str]:
    """Return the operator of every node of the graph, by the name of its first output."""
    return {node.output[0]: node.op_type for node in opened.model.graph.node}


@_of_any_file
def shape(opened: OnnxModel, name: str) -> str:
    """Return the element type and shape of a value, as in f32[batch,3,8,8]; empty if the file does not state it."""
    graph = opened.model.graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.name == name:
            return _type(info.type.tensor_type)
    return ""


def _type(tensor: Any) -> str:
    array = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    sizes = ",".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{_NAMES.get(np.dtype(array), str(array))}[{sizes}]"


_NAMES = {torch.empty((), dtype=dtype, device="cpu").numpy().dtype: name for dtype, name in DTYPE_NAMES.items() if dtype != torch.bfloat16}


@_of_any_file
def constants(opened: OnnxModel) -> dict[str, Tensor]:
    """Return the constants of the graph by name."""
    return {tensor.name: _tensor(numpy_helper.to_array(tensor, str(opened.path.parent))) for tensor in opened.model.graph.initializer}


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    # Types that numpy and PyTorch do not share, such as int4, are shown in wider ones.
    return torch.from_numpy(array.copy() if array.dtype in _NAMES else array.astype(np.int8 if "int" in str(array.dtype) else np.float32))


@_of_any_file
def text(opened: OnnxModel) -> str:
    """Return the graph and its functions as text, one line for each node."""
    model = opened.model
    versions = ", ".join(f"{entry.domain or 'onnx'} {entry.version}" for entry in model.opset_import)
    lines = [f"graph   # {versions}", *(f"  %{info.name} = input   {_type(info.type.tensor_type)}" for info in model.graph.input)]
    lines += [f"  {_node(node)}" for node in model.graph.node]
    lines.append(f"  return {', '.join('%' + info.name for info in model.graph.output)}")
    for function in sorted(model.functions, key=lambda function: function.name):
        lines += [f"function {function.name}({', '.join('%' + name for name in function.input)})"]
        lines += [f"  {_node(node)}" for node in function.node]
        lines += [f"  return {', '.join('%' + name for name in function.output)}"]
    return "\n".join(lines) + "\n"


def _node(node: onnx.NodeProto) -> str:
    arguments = [f"%{name}" if name else "none" for name in node.input]
    arguments += [f"{attribute.name}={_value(helper.get_attribute_value(attribute))}" for attribute in node.attribute]
    return f"{', '.join('%' + name for name in node.output)} = {node.op_type}({', '.join(arguments)})"


def _value(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        array = numpy_helper.to_array(value)
        return str(array.tolist()) if array.size <= 4 else f"{array.dtype}{list(array.shape)}"
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

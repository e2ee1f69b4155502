"""The `Emitter` that collects ONNX nodes for the forms of primitives and operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from fxquant.errors import ExportError
from fxquant.ir.facts import BatchDim, Size

DOMAIN = "fxquant"
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int16: TensorProto.INT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
# The result has the element type of the input with this index; Cast and the listed constants give theirs themselves.
_TYPE_INPUT = {"Where": 1, "QuantizeLinear": 2, "QLinearConv": 7, "QLinearMatMul": 7}
_FIXED_TYPE = {
    "IsNaN": torch.bool,
    **dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Not", "And", "Or", "Xor"), torch.bool),
    "ArgMax": torch.int64,
    "ArgMin": torch.int64,
    "TopK": torch.int64,
    "Shape": torch.int64,
    "DequantizeLinear": torch.float32,
    "MatMulInteger": torch.int32,
    "ConvInteger": torch.int32,
}


# Operators that runtimes must not fuse with one of these before a cast of their operand. A Transpose before a product: onnxruntime 1.24 to
# 1.31 fuses the three on x86 processors, and the operating system then ends it (microsoft/onnxruntime#28392). A Pad before a pool:
# onnxruntime makes its zeros the pool's own padding, which no maximum sees; and 1.21 to 1.23 count uneven padding of means wrongly.
_APART = {"MatMul": "Transpose", "MaxPool": "Pad", "AveragePool": "Pad"}


class Emitter:
    """Collects ONNX nodes; implements `fxquant.primitives.Emitter` for a graph or for a function's body.

    No constant gets a name from `taken`.
    """

    def __init__(self, functions: dict[str, onnx.FunctionProto], opset: int, scope: str = "", taken: Collection[str] = ()) -> None:
        self.functions = functions
        self.opset = opset
        self.scope = scope
        self.taken = taken
        self.nodes: list[onnx.NodeProto] = []
        self.producers: dict[str, onnx.NodeProto] = {}  # by the value that each computes
        self.types: dict[str, torch.dtype] = {}
        self.constants: dict[Any, str] = {}
        self.initializers: list[onnx.TensorProto] = []
        self.count = 0

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        attributes = {name: TYPES[value] if isinstance(value, torch.dtype) else value for name, value in attributes.items()}
        if operator in _APART:
            inputs = tuple(self._kept_apart(operator, value) for value in inputs)
        output = self._fresh(operator)
        outputs = [f"{output}/values", output] if operator == "TopK" else [output]  # its second output, the indices, is the result
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, name=output, **attributes))
        self.producers[output] = self.nodes[-1]
        self.types[output] = self._result_type(operator, inputs, attributes)
        return output

    def named(self, result: str, name: str) -> str:
        """Give the result of the last node, and the node, another name, and return it."""
        last = self.producers[name] = self.nodes[-1]
        last.output[0] = last.name = name
        self.types[name] = self.types.pop(result)
        return name

    def results(self, operator: str, dtypes: Sequence[torch.dtype], *inputs: str, **attributes: Any) -> list[str]:
        output = self._fresh(operator)
        names = [f"{output}/{index}" for index in range(len(dtypes))]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=output, **attributes))
        self.types.update(zip(names, dtypes, strict=True))
        return names

    def _kept_apart(self, operator: str, value: str) -> str:
        """Return an operand; it gets a barrier if it is a cast of a node that a runtime would fuse with the operator."""
        cast = self.producers.get(value)
        moved = None if cast is None or cast.op_type != "Cast" else self.producers.get(cast.input[0])
        return value if moved is None or moved.op_type != _APART[operator] else self.node("Round", value)

    def _result_type(self, operator: str, inputs: Sequence[str], attributes: dict[str, Any]) -> torch.dtype:
        if operator == "Cast":
            return next(dtype for dtype, code in TYPES.items() if code == attributes["to"])
        return _FIXED_TYPE.get(operator) or self.types[inputs[_TYPE_INPUT.get(operator, 0)]]

    def constant(self, value: Tensor | float | int | list[int], dtype: torch.dtype | None = None) -> str:
        if isinstance(value, float) and dtype is None:
            dtype = torch.float32
        tensor = torch.as_tensor(value, dtype=dtype, device="cpu")
        array = tensor.contiguous().numpy(force=True)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = self._store(array)
            self.types[self.constants[key]] = tensor.dtype
        return self.constants[key]

    def own_constant(self, value: Tensor) -> str:
        """Return the name of an initializer with this value that no other node shares."""
        name = f"{self.scope}/constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value.contiguous().numpy(force=True), name))
        self.types[name] = value.dtype
        return name

    def _store(self, array: np.ndarray[Any, Any]) -> str:
        name = f"constant_{len(self.constants)}"
        while name in self.taken:
            name += "_"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def call(self, name: str, body: Callable[..., str], *inputs: str) -> str:
        function, result_type = self._define(name, body, inputs)
        called = self._shared(function)
        output = self._fresh(called)
        self.nodes.append(helper.make_node(called, list(inputs), [output], name=output, domain=DOMAIN))
        self.types[output] = result_type
        return output

    def _shared(self, function: onnx.FunctionProto) -> str:
        """Return the name of the one function with this body; a number is appended if another body has that name."""
        name, count = function.name, 1
        while self.functions.setdefault(function.name, function) != function:
            count += 1
            function.name = f"{name}_{count}"
        return str(function.name)

    def _define(self, name: str, body: Callable[..., str], inputs: Sequence[str]) -> tuple[onnx.FunctionProto, torch.dtype]:
        """Return a function, and the dtype of its result for these inputs; a function itself does not state dtypes."""
        inner = FunctionEmitter(self.functions, self.opset)
        parameters = [f"input_{index}" for index in range(len(inputs))]
        inner.types.update(zip(parameters, (self.types[value] for value in inputs), strict=True))
        result = body(inner, *parameters)
        function = helper.make_function(DOMAIN, name, parameters, [result], inner.nodes, [helper.make_opsetid("", self.opset)])
        return function, inner.types[result]

    def dtype(self, value: str) -> torch.dtype:
        return self.types[value]

    def _fresh(self, operator: str) -> str:
        self.count += 1
        return f"{self.scope}/{operator}_{self.count}" if self.scope else f"{operator}_{self.count}"


class FunctionEmitter(Emitter):
    """An emitter for the body of a function, in which constants are nodes."""

    def _store(self, array: np.ndarray[Any, Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name


def value_info(name: str, dtype: torch.dtype, shape: Sequence[Size]) -> onnx.ValueInfoProto:
    """Return the type of a value; the batch is symbolic."""
    dims: list[int | str] = [str(size).replace("B", "batch") if isinstance(size, BatchDim) else size for size in shape]
    if dtype not in TYPES:
        raise ExportError(
            f"the value {name!r} cannot be written",
            because=f"it is {str(dtype).removeprefix('torch.')}, which has no element type in ONNX that runtimes support",
            remedy="convert it to another dtype in forward",
        )
    return helper.make_tensor_value_info(name, TYPES[dtype], dims)

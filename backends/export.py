"""An integer graph as ONNX, style "exact": standard operators, every value a whole number, equal bits everywhere.

Requantization, table look-up and the splitting of wide sums are each one node that calls a model-local
function. Every node of the integer graph is a value of the same name in the ONNX graph.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, fx

from fxquant.backends.float_export import FloatRegions
from fxquant.errors import ConfigurationError, ExportError
from fxquant.graph import BatchDim, Size, TensorFact, annotation, fact, qparams, resolve
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.boundary import dequantize, quantize

DOMAIN = "fxquant"
DEFAULT_OPSET = 21
OPSETS = range(17, 22)
STYLES = ("exact",)
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
# The result's element type is that of this input; Cast and the listed constants say theirs themselves.
_TYPE_INPUT = {"Where": 1}
_FIXED_TYPE = {"IsNaN": torch.bool, "Shape": torch.int64}


class Emitter:
    """Collects ONNX nodes; implements `fxquant.primitives.Emitter` for a graph or for a function's body."""

    def __init__(self, functions: dict[str, tuple[onnx.FunctionProto, torch.dtype]], opset: int, scope: str = "") -> None:
        self.functions = functions
        self.opset = opset
        self.scope = scope
        self.nodes: list[onnx.NodeProto] = []
        self.types: dict[str, torch.dtype] = {}
        self.constants: dict[Any, str] = {}
        self.initializers: list[onnx.TensorProto] = []
        self.count = 0

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        attributes = {name: TYPES[value] if isinstance(value, torch.dtype) else value for name, value in attributes.items()}
        output = self._fresh(operator)
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        self.types[output] = self._result_type(operator, inputs, attributes)
        return output

    def _result_type(self, operator: str, inputs: Sequence[str], attributes: dict[str, Any]) -> torch.dtype:
        if operator == "Cast":
            return next(dtype for dtype, code in TYPES.items() if code == attributes["to"])
        return _FIXED_TYPE.get(operator) or self.types[inputs[_TYPE_INPUT.get(operator, 0)]]

    def constant(self, value: Tensor | float | int | list[int], dtype: torch.dtype | None = None) -> str:
        tensor = torch.as_tensor(value, dtype=dtype if dtype is not None else None)
        if isinstance(value, float) and dtype is None:
            tensor = tensor.float()
        array = tensor.detach().cpu().contiguous().numpy()
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = self._store(array)
            self.types[self.constants[key]] = tensor.dtype
        return self.constants[key]

    def _store(self, array: np.ndarray[Any, Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def call(self, name: str, body: Callable[..., str], *inputs: str) -> str:
        if name not in self.functions:
            self.functions[name] = self._define(name, body, inputs)
        output = self._fresh(name)
        self.nodes.append(helper.make_node(name, list(inputs), [output], name=output, domain=DOMAIN))
        self.types[output] = self.functions[name][1]
        return output

    def _define(self, name: str, body: Callable[..., str], inputs: Sequence[str]) -> tuple[onnx.FunctionProto, torch.dtype]:
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
    """The same inside a function, where constants are nodes."""

    def _store(self, array: np.ndarray[Any, Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name


def export_onnx(
    integer: fx.GraphModule,
    path: str | os.PathLike[str],
    style: str = "exact",
    io: str = "float",
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Path:
    """Write the integer model as an ONNX file that gives the same numbers, and return its path.

    io "float" takes and returns what the float model does; "integer" takes and returns the integers, whose
    scales stand in the metadata (`fxquant.tensors`, JSON). The batch is dynamic where the model was traced so.
    The file is checked before it is written. Raises ConfigurationError or ExportError.
    """
    _check_arguments(integer, style, io, opset)
    model = build(integer, io, opset or DEFAULT_OPSET, input_names, output_names)
    onnx.checker.check_model(model, full_check=True)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(target))
    return target


def _check_arguments(integer: fx.GraphModule, style: str, io: str, opset: int | None) -> None:
    if not isinstance(integer, fx.GraphModule) or integer.meta.get("stage") != "INTEGER":
        raise ConfigurationError(
            f"{type(integer).__name__} is no integer model",
            because="only the result of fxq.convert can be exported",
            remedy="call fxq.convert(prepared) first",
        )
    for name, value, known in (("style", style, STYLES), ("io", io, ("float", "integer")), ("opset", opset or DEFAULT_OPSET, list(OPSETS))):
        if value not in known:
            raise ConfigurationError(
                f"{name}={value!r} is unknown", because=f"it is one of {', '.join(map(str, known))}", remedy="pass one of these"
            )


def build(
    integer: fx.GraphModule, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """The model in memory."""
    return _Writer(integer, io, opset).write(input_names, output_names)


class _Writer:
    """Walks an integer graph once."""

    def __init__(self, integer: fx.GraphModule, io: str, opset: int) -> None:
        self.integer, self.io, self.opset = integer, io, opset
        self.emitter = Emitter({}, opset)
        self.inputs: list[onnx.ValueInfoProto] = []
        self.values: dict[fx.Node, Any] = {}  # names of values, or constant tensors
        self.tensors: dict[str, dict[str, Any]] = {}
        self.infos: list[onnx.ValueInfoProto] = []

    def write(self, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> onnx.ModelProto:
        placeholders = [node for node in self.integer.graph.nodes if node.op == "placeholder"]
        names = _names(input_names, [node.name for node in placeholders], "input_names")
        regions = FloatRegions(self.integer, self.opset)
        for node in self.integer.graph.nodes:
            self.emitter.scope, self.emitter.count = node.name, 0
            if node.op == "placeholder":
                self._placeholder(node, names[node.name])
            elif node.op == "get_attr":
                self.values[node] = resolve(self.integer, str(node.target))
            elif node.op == "call_function" and node.target in PRIMITIVES:
                self._primitive(node)
            elif node.op != "output":
                regions.emit(node, self.emitter, self.values)
        outputs = self._outputs(output_names)
        graph = helper.make_graph(
            self.emitter.nodes,
            "fxquant",
            self.inputs,
            outputs,
            self.emitter.initializers,
            value_info=[info for info in self.infos if info.name not in {o.name for o in outputs}],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1), *regions.opsets]
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            functions=[*(function for function, _ in self.emitter.functions.values()), *regions.functions],
            producer_name="fxquant",
            ir_version=onnx.IR_VERSION if self.opset > 21 else 10,
        )
        helper.set_model_props(
            model,
            {
                "fxquant.style": "exact",
                "fxquant.io": self.io,
                "fxquant.target": self.integer.meta["target"].name,
                "fxquant.tensors": json.dumps(self.tensors),
                "fxquant.float": json.dumps(_in_float(self.integer)),
            },
        )
        return model

    def _placeholder(self, node: fx.Node, name: str) -> None:
        if self.io == "integer":
            others = [user.name for user in node.users if user.target is not quantize]
            if others:
                raise ExportError(
                    f"io='integer' cannot be used: the input {node.name!r} is also read as a real number",
                    node=node,
                    because=f"{', '.join('%' + other for other in others)} stays in float",
                    remedy="export with io='float'",
                )
        self.values[node] = name
        if self.io == "float":
            self._declare_input(name, fact(node))

    def _declare_input(self, name: str, known: Any) -> None:
        if not isinstance(known, TensorFact):
            raise ExportError(
                f"the input {name!r} is no tensor", because="an ONNX input is a tensor of known type", remedy="trace with tensors as inputs"
            )
        self.inputs.append(_value_info(name, known.dtype, known.shape))
        self.emitter.types[name] = known.dtype

    def _primitive(self, node: fx.Node) -> None:
        record = PRIMITIVES[node.target]  # type: ignore[index]
        known: TensorFact = fact(node)
        if self.io == "integer" and node.target is quantize and node.args[0].op == "placeholder":  # type: ignore[union-attr]
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
            self._declare_input(self.values[node], known)
            self._describe(node, self.values[node], record.kind)
            return
        if self.io == "integer" and node.target is dequantize and all(user.op == "output" for user in node.users):
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
            return
        args = fx.node.map_aggregate(node.args, lambda value: self.values[value] if isinstance(value, fx.Node) else value)
        result = record.onnx(self.emitter, *args)
        name = self._named(result, node.name)
        self.values[node] = name
        self._describe(node, name, record.kind)
        self.infos.append(_value_info(name, self.emitter.types[name], known.shape))

    def _named(self, result: str, name: str) -> str:
        """The value under its graph name."""
        last = self.emitter.nodes[-1] if self.emitter.nodes else None
        if last is None or last.output[0] != result:
            result = self.emitter.node("Identity", result)
            last = self.emitter.nodes[-1]
        last.output[0] = last.name = name
        self.emitter.types[name] = self.emitter.types.pop(result)
        return name

    def _describe(self, node: fx.Node, name: str, kind: str) -> None:
        entry: dict[str, Any] = {"kind": kind}
        known = qparams(node)
        if known is not None:
            entry.update(scale=known.scale, dtype=known.dtype)
            if known.axis is not None:
                entry.update(axis=known.axis)
        self.tensors[name] = entry

    def _outputs(self, output_names: Sequence[str] | None) -> list[onnx.ValueInfoProto]:
        returned: list[fx.Node] = []
        fx.map_arg(next(n for n in reversed(list(self.integer.graph.nodes)) if n.op == "output").args[0], returned.append)
        defaults = [str(self.values[node]) for node in returned]
        wanted = list(output_names) if output_names is not None else defaults
        if len(wanted) != len(returned):
            raise ConfigurationError(
                f"output_names has {len(wanted)} names", because=f"the model has {len(returned)} outputs", remedy="pass one name per output"
            )
        outputs, taken = [], {info.name for info in self.inputs}
        for node, value, name in zip(returned, defaults, wanted, strict=True):
            while name in taken:
                name += "_output"
            taken.add(name)
            if name != value:
                self.emitter.nodes.append(helper.make_node("Identity", [value], [name], name=name))
            known: TensorFact = fact(node)
            outputs.append(_value_info(name, self.emitter.types[value], known.shape))
        return outputs


def _in_float(integer: fx.GraphModule) -> dict[str, str]:
    """Why the operators outside of the integer part are there, by name."""
    specs = {node.name: annotation(node) for node in integer.graph.nodes if node.target not in PRIMITIVES}
    return {name: spec.because for name, spec in specs.items() if spec is not None and spec.dtype is None}


def _names(given: Sequence[str] | None, defaults: list[str], what: str) -> dict[str, str]:
    if given is not None and len(given) != len(defaults):
        raise ConfigurationError(
            f"{what} has {len(given)} names", because=f"the model has {len(defaults)} inputs", remedy="pass one name per input"
        )
    return dict(zip(defaults, given or defaults, strict=True))


def _value_info(name: str, dtype: torch.dtype, shape: Sequence[Size]) -> onnx.ValueInfoProto:
    dims: list[int | str] = [_dimension(size) for size in shape]
    return helper.make_tensor_value_info(name, TYPES[dtype], dims)


def _dimension(size: Size) -> int | str:
    return str(size).replace("B", "batch") if isinstance(size, BatchDim) else size

"""Style "qdq": every operator as a float operator of ONNX between QuantizeLinear and DequantizeLinear.

%y = conv2d(%x, …)     →     y = QuantizeLinear(Clip(Conv(x/real, w/real, bias)))      y/real = DequantizeLinear(y)

It is written from the operators that an integer graph's nodes are the results of, with the graph's own integers as
weights: by the form in an operator's record or, without one, by its float function (`Operator.onnx`). Quantized
tensors keep their names. The results differ from those of the integer graph: float sums are rounded, and other compilers
choose other kernels. Below opset 21, whose QuantizeLinear is the first with int16, int16 tensors are integers in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.integer import Constant, Operation, QParams, Reference, operation, origin, qparams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME, Operator, Own
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE
from fxquant.ops.core.form import INT16_OPSET, Call
from fxquant.ops.movement.pad import pad
from fxquant.prepared.sizes import unrolled, with_integer_loops
from fxquant.primitives import PRIMITIVES, Primitive, Role, role_of, shape
from fxquant.primitives.quantization import as_float32, dequantize

LOOP_OPSET = 12  # the first whose operators count the steps of a loop


class QdqWriter(Writer):
    """Writes the operators that an integer graph's nodes belong to, in one traversal."""

    style = "qdq"
    calls = Call
    in_bytes = True
    unrolls = False  # whether loops are written step by step

    def __init__(self, integer: fx.GraphModule, io: str, opset: int) -> None:
        integer = unrolled(integer) if self.unrolls or opset < LOOP_OPSET else with_integer_loops(integer)
        super().__init__(integer, io, opset)
        self.nodes = {node.name: node for node in integer.graph.nodes}
        self.operations = {node.name: described for node in integer.graph.nodes if (described := operation(node)) is not None}
        self.lowered: dict[str, list[fx.Node]] = {}  # the primitives of each operator
        for node in integer.graph.nodes:
            if node.op == "call_function" and node.target in PRIMITIVES:
                self.lowered.setdefault(origin(node), []).append(node)
        self._check()

    @property
    def reals(self) -> dict[Any, str]:
        """The float value of each node, by the node's name."""
        return self.emitter.converted

    def _check(self) -> None:
        for node in self.in_floats if self.io == "integer" else ():
            if node.op == "placeholder" or any(user.op == "output" or user.target is dequantize for user in node.users):
                because = f"%{node.name} is int16, which QuantizeLinear and DequantizeLinear know since opset {INT16_OPSET}"
                remedy = f"export with opset={INT16_OPSET}, or with io='float'"
                raise ConfigurationError(f"io='integer' cannot be used with opset={self.opset}", because=because, remedy=remedy)
        if (missing := next((name for name in self.lowered if name not in self.operations), None)) is not None:
            because = f"it does not say which operator %{missing} is the result of"
            remedy = "convert the prepared model again"
            raise ExportError("this integer model cannot be written in style 'qdq'", because=because, remedy=remedy)

    @property
    def in_floats(self) -> list[fx.Node]:
        """Return the int16 tensors if the opset does not support that dtype."""
        if self.opset >= INT16_OPSET:
            return []
        return [node for node in self.nodes.values() if (grid := qparams(node)) is not None and grid.dtype == "int16"]

    def _describe(self, node: fx.Node, name: str, kind: str) -> None:
        if kind == "quantized" and self.emitter.types[name].is_floating_point:
            self.tensors[name] = {"kind": "float"}  # integers in float32, so that no reader takes them for stored integers
            return
        super()._describe(node, name, kind)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def emit(self, node: fx.Node, record: Primitive) -> str | None:
        if record.kind == "dynamic" or record.role in (Role.LOOP, Role.LEAVING):  # float values without a grid, or integers that only move
            return super().emit(node, record)
        applied = self.operations[origin(node)]
        operator = BY_NAME[applied.name]
        if operator.onnx is None and all(role_of(other.target) is Role.MOVEMENT for other in self.lowered[origin(node)]):
            value = record.onnx(self.emitter, *fx.node.map_aggregate(node.args, self._moved))
            if operation(node) is None and any(map(_repeats, self.lowered[origin(node)])):
                # onnxruntime cannot move QuantizeLinear of opset 21 past concatenations or repetitions: they are on the result's scale.
                value = self._rounding(self.nodes[origin(node)])(value)
            self.reals[node.name] = value
        elif operation(node) is None:
            return None
        elif operator is DEQUANTIZE:
            value = self._dequantized(applied.arguments["input"].node)
            dtype = applied.arguments.get("dtype")
            return value if dtype is None else self.emitter.node("Cast", value, to=dtype)
        elif operator is QUANTIZE:
            value = as_float32(self.emitter, str(self.values[self.nodes[applied.arguments["input"].node]]))
        else:
            call = self._call(applied, operator, node)
            value = call.exported() if operator.onnx is None else operator.onnx(call)
        if operation(node) is None:
            return None
        described = qparams(node)
        if described is None:  # booleans and integers have no scale
            return value
        if described.dtype == "int32":  # the accumulator of a last layer is returned unchanged
            if self.io == "integer":
                because = "its 32-bit output is a float in style 'qdq'"
                remedy = "export with io='float', or with style='exact'"
                raise ExportError("io='integer' cannot be used", node=node, because=because, remedy=remedy)
            self.reals[node.name] = self.values[node] = value  # a size is read from it
            self.tensors[node.name] = {"kind": "float"}
            return None
        # The results of these are within the range of their operands; onnxruntime fails on a Clip after some of them.
        return self._quantized(value, described, limited=not isinstance(operator.demand, Own) and operator.function is not pad)

    def _named(self, result: str, name: str) -> str:
        result = super()._named(result, name)
        if name in self.operations and self.operations[name].name != DEQUANTIZE.name:
            self.reals.pop(name, None)  # its readers read the quantized values
        return result

    def _moved(self, value: Any) -> Any:
        return self._real(value.name) if isinstance(value, fx.Node) and value.op != "get_attr" else self.operand(value)

    def _call(self, described: Operation, operator: Operator, node: fx.Node) -> Call:
        def read(value: Any) -> Any:
            return self._real(value.node) if isinstance(value, Reference) else value

        arguments = {name: fx.node.map_aggregate(value, read) for name, value in described.arguments.items()}
        between = None if described.intermediate is None else self._requantized(described.intermediate)
        constants = {role: self._constant(constant) for role, constant in described.constants.items()}

        def exported() -> str:
            return self._exported(described, operator, node, call)

        call = self.calls(
            self.emitter, described.name, arguments, constants, between, self._rounding(node), node, self.lowered[node.name], exported
        )
        return call

    def _exported(self, described: Operation, operator: Operator, node: fx.Node, call: Call) -> str:
        """Write a node's operator with PyTorch's exporter, and its fused residual and clamp; return the name of the float value."""
        rest = {name: value for name, value in described.arguments.items() if name not in ("residual", "clamp")}

        def referred(value: Any) -> Any:
            return self.nodes[value.node] if isinstance(value, Reference) else value

        operands = {name: fx.node.map_aggregate(value, referred) for name, value in rest.items()}
        parameters = {role: call.real(role) for role in call.constants if role in operator.parameter_names and role not in rest}
        return call.epilogue(self.regions.emit_function(node, operator.function, operands, parameters, self.emitter, self._real))

    def _rounding(self, node: fx.Node) -> Callable[[str], str]:
        """Return a function that quantizes and dequantizes a value on the scale of a node; a plain value is unchanged."""
        described = qparams(node)
        return (lambda value: value) if described is None else self._requantized(described)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _real(self, name: str) -> str:
        """Return the float value of a node: dequantized once, for its first reader; a host operator's value is unchanged."""
        if name not in self.reals:
            node = self.nodes[name]
            described = qparams(node)
            self.reals[name] = str(self.values[node]) if described is None else self._dequantize(str(self.values[node]), described)
        return self.reals[name]

    def _dequantized(self, name: str) -> str:
        """Write a separate dequantized tensor at the end of an integer part, and return its name."""
        node = self.nodes[name]
        described = qparams(node)
        assert described is not None
        if described.dtype == "int32":
            return self.emitter.node("Identity", self.reals[name])
        return self._dequantize(str(self.values[node]), described)

    def _quantized(self, value: str, described: QParams, limited: bool = False) -> str:
        """Write a value's integers; a range narrower than its storage needs a Clip, unless the value is already within it."""
        e, dtype = self.emitter, ACTIVATION_TYPES[described.dtype]
        scale = torch.tensor(described.scale, dtype=torch.float32, device="cpu")
        if described.dtype == "int16" and self.opset < INT16_OPSET:
            rounded = e.node("Round", e.node("Div", value, e.constant(scale)))
            return e.node("Clip", rounded, e.constant(float(dtype.low)), e.constant(float(dtype.high)))
        limits = torch.iinfo(dtype.storage)
        if not limited and (dtype.low, dtype.high) != (limits.min, limits.max):
            value = e.node("Clip", value, e.constant(float(scale * dtype.low)), e.constant(float(scale * dtype.high)))
        return e.node("QuantizeLinear", value, e.constant(scale), e.constant(described.zero_point, dtype.storage))

    def _dequantize(self, value: str, described: QParams) -> str:
        e = self.emitter
        scale = e.constant(torch.tensor(described.scale, dtype=torch.float32, device="cpu"))
        if described.dtype == "int16" and self.opset < INT16_OPSET:
            return e.node("Mul", value, scale)
        return e.node("DequantizeLinear", value, scale, e.constant(described.zero_point, e.dtype(value)))

    def _requantized(self, described: QParams) -> Callable[[str], str]:
        return lambda value: self._dequantize(self._quantized(value, described), described)

    def _constant(self, constant: Constant) -> tuple[Tensor, Tensor, int | None]:
        """Return the centred integers of a parameter, its scale or scales (float32), and the axis of the scales, counted from the end."""
        integers = self.values[self.nodes[constant.node]]
        if isinstance(constant.zero_point, tuple):
            integers = integers.to(torch.int64) - torch.tensor(constant.zero_point, dtype=torch.int64, device="cpu")
        elif constant.zero_point:
            integers = integers.to(torch.int32) - constant.zero_point
        if constant.times is not None:
            integers = integers // constant.times
            integers = integers.to(torch.int8 if int(integers.abs().max()) <= ACTIVATION_TYPES["int8"].high else torch.int16)
        return integers, torch.tensor(constant.scale, dtype=torch.float32, device="cpu"), constant.axis


def _repeats(node: fx.Node) -> bool:
    return node.target is shape.concatenate or node.target is shape.tile

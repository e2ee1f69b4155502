"""Style "horizon": the input of the vendor's compiler of bernoulli2, bayes and bayes-e, whose program computes the integer graph.

    %y = conv2d(%x, …)     →     y = DequantizeLinear(QuantizeLinear(Clip(Conv(x, w, bias))))

The tool derives the integers of a program from the scale of each tensor and of each weight (CHIP.md). A quantization and
its dequantization stand next to each other. `horizon::HzQuantize` and `horizon::HzDequantize` carry what QuantizeLinear of opset 11 cannot:
int16, and the scales of a weight that are not its largest magnitudes over 127.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.backends.onnx.connections import named_values
from fxquant.backends.onnx.qdq import QdqWriter
from fxquant.errors import ExportError
from fxquant.ir.integer import QParams
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_INT8, scale_from_range
from fxquant.ops import BY_NAME
from fxquant.ops.core.form import Call, channel_axis
from fxquant.ops.layers.convolution import conv1d
from fxquant.primitives import PRIMITIVES

DOMAIN = "horizon"
OPSET = 11
BITS = {torch.int8: 8, torch.int16: 16}


class HorizonCall(Call):
    """One operator in the form that the tool reads."""

    by_layers = True  # GlobalAveragePool and AveragePool round twice in the tool

    uncarried = "a transposed convolution of groups has several scales for an index of its weight, which the file cannot say"
    remedy = "quantize its weight by statistics, which the compiler computes again: fxq.WeightConfig()"

    def stays(self, role: str) -> bool:
        """Return whether a weight needs no nodes that round it, because the tool derives its scales."""
        return _derived(*self._per_channel(role))

    def on_grid(self, value: str, scale: Tensor, storage: torch.dtype, axis: int | None) -> str:
        """Write the nodes that round a float value, and return its float value on the grid."""
        return pair(self.e, value, scale, storage, axis)

    def weight(self, arrange: Any = lambda weight: weight, role: str = "weight") -> str:
        """Return a weight's float values on their grid, rounded by nodes of the tool's own unless it `stays`."""
        integers, scale, axis = self._per_channel(role)
        value = self.e.constant(arrange(self.grouped(role)).contiguous())
        if self.stays(role):
            return value
        if axis is not None and integers.shape[axis] != scale.numel():
            raise ExportError(
                f"the weight scales of %{self.node.name} cannot be carried to the chip",
                node=self.node,
                because=self.uncarried,
                remedy=self.remedy,
            )
        return self.on_grid(value, scale, integers.dtype, None if axis is None else channel_axis(integers, scale, axis, arrange))

    def as_convolution(self) -> bool:
        """Return whether to write a convolution: if the weight needs a pair, or it is one-dimensional.

        The tool crashes on a Gemm whose weight has a pair, and runs such a MatMul, and every one-dimensional Conv, on the processor.
        """
        return BY_NAME[self.name].function is conv1d or not _derived(*self._per_channel("weight"))

    def operand(self, role: str) -> str:
        if isinstance(self.arguments.get(role), str) or role not in self.constants:
            return super().operand(role)
        integers, scale, axis = self.constants[role]
        value = self.e.constant(self.real(role))
        if scale.numel() == 0 or integers.dtype not in BITS or self.stays(role):
            return value
        return self.on_grid(value, scale, integers.dtype, None if axis is None else integers.dim() + axis)

    def _per_channel(self, role: str) -> tuple[Tensor, Tensor, int | None]:
        """Return a weight's integers and scales; the tool takes one scale for each output channel."""
        integers, scale, axis = self.constants[role]
        if axis is None and scale.numel() == 1:
            return integers, scale.expand(len(integers)).contiguous(), -integers.dim()
        return integers, scale, axis


def _derived(integers: Tensor, scale: Tensor, axis: int | None) -> bool:
    """Return whether the scales of a weight are those that the tool derives: the largest magnitude of each channel over 127."""
    if integers.dtype != torch.int8 or axis is None:
        return False
    groups = scale.numel() // integers.shape[axis]  # more than one where scales run through groups along the first dimension
    parts = integers.reshape(groups, -1, *integers.shape[1:]).movedim(axis, 1).flatten(2)
    largest = parts.abs().amax(2).flatten().float() * scale
    return torch.equal(scale_from_range(-largest, largest, WEIGHT_INT8), scale)


def pair(e: Any, value: str, scale: Tensor, storage: torch.dtype, axis: int | None = None) -> str:
    """Write the pair that rounds a float value to integers on a scale, or on one for each index of `axis`; return its float value."""
    scales = scale.reshape(-1).float()
    zeros = torch.zeros(scales.shape, dtype=storage, device="cpu")
    place = {} if axis is None else {"axis": axis}
    quantized = e.node("HzQuantize", value, e.constant(scales), e.constant(zeros), domain=DOMAIN, bits=BITS[storage], **place)
    e.types[quantized] = storage
    result: str = e.node("HzDequantize", quantized, e.constant(scales), e.constant(zeros), domain=DOMAIN, **place)
    e.types[result] = torch.float32
    return result


def float_nodes(integer: fx.GraphModule, model: onnx.ModelProto) -> list[str]:
    """Return the names of the file's nodes for float operators, which run on the processor.

    Between quantized tensors the tool makes integers of whatever it can unless it is instructed otherwise, of convolutions above all.
    """
    floats = {node.name for node in integer.graph.nodes if node.op.startswith("call_") and node.target not in PRIMITIVES}
    return [node.name for node in model.graph.node if node.input and node.name.partition("/")[0] in floats]


def fixed_shape(info: onnx.ValueInfoProto) -> list[int]:
    """Return the sizes of a value at a batch of 1."""
    return [_at_one(dim.dim_param) if dim.dim_param else dim.dim_value for dim in info.type.tensor_type.shape.dim]


def _at_one(size: str) -> int:
    """Return a size as it is written in a file, such as "3batch/2+1", at a batch of 1."""
    factor, _, rest = size.partition("batch")
    divisor, sign, offset = re.fullmatch(r"(?:/(\d+))?([+-]?)(.*)", rest).groups()  # type: ignore[union-attr]
    value = Fraction(factor or 1) / int(divisor or 1) + (Fraction(f"{sign}{offset}") if offset else 0)
    return int(value)


class HorizonWriter(QdqWriter):
    """Writes the operators of an integer graph in one traversal. A quantized tensor is represented by its float value."""

    style = "horizon"
    renames = False
    calls = HorizonCall

    @property
    def in_floats(self) -> list[fx.Node]:
        return []  # the tool's own pairs support int16

    def _quantized(self, value: str, described: QParams, limited: bool = False) -> str:
        e, dtype = self.emitter, ACTIVATION_TYPES[described.dtype]
        scale = torch.tensor(described.scale, dtype=torch.float32, device="cpu")
        if dtype.storage == torch.int16:
            return pair(e, value, scale, dtype.storage)
        zero = e.constant(0, dtype.storage)
        return e.node("DequantizeLinear", e.node("QuantizeLinear", value, e.constant(scale), zero), e.constant(scale), zero)

    def _dequantize(self, value: str, described: QParams) -> str:
        return value

    def _dequantized(self, name: str) -> str:
        return self.emitter.node("Identity", super()._dequantized(name))

    def write(self, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> onnx.ModelProto:
        model = super().write(input_names, output_names)
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for dim, size in zip(info.type.tensor_type.shape.dim, fixed_shape(info), strict=True):
                dim.dim_value = size
        return model

    def _describe(self, node: fx.Node, name: str, kind: str) -> None:
        self.tensors[name] = {"kind": "float"}


def horizon_values(integer: fx.GraphModule) -> dict[str, str]:
    """Return the nodes of an integer graph by the names of their values in its file of style "horizon"."""
    writer = HorizonWriter(integer, "float", OPSET)
    found = named_values(writer.write(None, None))
    return {value: name for name, value in writer.reals.items()} | found  # operators that only move elements have no pair

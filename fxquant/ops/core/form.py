"""ONNX forms of operators: standard float operators, which style "qdq" puts between the quantized tensors of an operator.

    def _onnx_maximum(c: Call) -> str:
        return c.do("Max", c.operand("input"), c.operand("other"))

A record has such a form where other compilers look for a certain operator. Without one, an operator whose primitives only move elements
moves floats by them, and any other is its float function, as PyTorch's exporter writes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxquant.ir.graph import Size, fact, resolve
from fxquant.primitives import shape
from fxquant.primitives.record import Emitter

PER_CHANNEL_OPSET = 13  # the first in which DequantizeLinear has an axis
WHOLE_OPSET = 20  # the first with Gelu; HardSwish is older
INT16_OPSET = 21  # the first in which DequantizeLinear supports int16
LARGEST_BIAS = 2**23  # in steps; an operand that was narrowed has up to 2^8 as many steps


@dataclass(frozen=True)
class Call:
    """An operator to be written in ONNX."""

    e: Emitter
    name: str
    arguments: dict[str, Any]  # its canonical arguments, with the names of float values for activations
    constants: dict[str, tuple[Tensor, Tensor, int | None]]  # its parameters by role: integers, scales, and the axis these run along
    # Quantizes and dequantizes the value that a residual is added to, or None if the integer graph does not.
    between: Callable[[str], str] | None
    rounded: Callable[[str], str]  # quantizes and dequantizes a value on the scale of the result
    node: fx.Node  # the node of the integer graph that is its result
    primitives: list[fx.Node]  # the nodes it was lowered to
    exported: Callable[[], str]  # writes its float function as PyTorch's exporter does
    whole: bool = False  # whether an operator of opset 20 that not every compiler knows is written where there is one

    by_layers: ClassVar[bool] = False  # whether what is computed as a layer with one weight is written as one, and averages as means

    @property
    def images_alone(self) -> bool:
        """Whether every tensor is an image, of a batch of one."""
        return False

    def as_convolution(self) -> bool:
        """Return whether a layer with a weight is written as a two-dimensional convolution, whatever it is."""
        return False

    @property
    def input(self) -> str:
        """Float value of its one operand."""
        return str(self.arguments["input"])

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def do(self, operator: str, *inputs: str, **attributes: Any) -> str:
        return self.e.node(operator, *inputs, **attributes)

    def number(self, value: float) -> str:
        return self.e.constant(float(value))

    def integers(self, values: Sequence[int]) -> str:
        return self.e.constant(torch.tensor(list(values), dtype=torch.int64, device="cpu"))

    def operand(self, role: str) -> str:
        """Return an operand's float value: an activation, a parameter, or a number."""
        value = self.arguments.get(role)
        if isinstance(value, str):
            return value
        return self.e.constant(self.real(role)) if role in self.constants else self.number(self.arguments[role])

    def real(self, role: str) -> Tensor:
        """Return a parameter dequantized to float32; its scales must run along its dimension `axis`. Return a mask or an index as it is."""
        integers, scale, axis = self.constants[role]
        if scale.numel() == 0:
            return integers
        shaped = scale if axis is None else scale.reshape(-1, *[1] * (-axis - 1))
        return (integers.double() * shaped.double()).float()

    def weight(self, arrange: Callable[[Tensor], Tensor] = lambda weight: weight, role: str = "weight") -> str:
        """Write a weight: integers and a DequantizeLinear, or the dequantized weight where the opset has no such operator.

        `arrange` puts it, and the index of its channels, in another order of dimensions.
        """
        integers, scale, axis = self.constants[role]
        e = self.e
        old = e.opset < PER_CHANNEL_OPSET or (integers.dtype == torch.int16 and e.opset < INT16_OPSET)
        if old or (axis is not None and integers.shape[axis] != scale.numel()):
            return e.constant(arrange(self.grouped(role)))
        attributes = {} if axis is None else {"axis": channel_axis(integers, scale, axis, arrange)}
        # onnxruntime rewrites a weight and its zero point in place for "x64quantprecision", so each layer has its own.
        zero = e.own_constant(torch.zeros(scale.shape, dtype=integers.dtype, device="cpu"))
        return self.do("DequantizeLinear", e.own_constant(arrange(integers).contiguous()), e.constant(scale), zero, **attributes)

    def grouped(self, role: str) -> Tensor:
        """Return a dequantized weight, whose scales may run through groups along its first dimension."""
        integers, scale, axis = self.constants[role]
        if axis is None or integers.shape[axis] == scale.numel():
            return self.real(role).contiguous()
        groups = scale.numel() // integers.shape[axis]
        shaped = scale.reshape(groups, 1, integers.shape[axis], *[1] * (-axis - 1))
        return (integers.reshape(groups, -1, *integers.shape[1:]) * shaped).reshape(integers.shape)

    def primitive(self, target: Callable[..., Any]) -> fx.Node | None:
        """Return the first of its primitives of this kind."""
        return next((node for node in self.primitives if node.target is target), None)

    def epilogue(self, value: str) -> str:
        """Write the fused residual and clamp after a value; return the result's name."""
        if self.arguments.get("residual") is not None:
            value = value if self.between is None else self.between(value)
            value = self.do("Add", value, self.arguments["residual"])
        return self.clamped(value, *(self.arguments.get("clamp") or (None, None)))

    def clamped(self, value: str, low: float | None, high: float | None) -> str:
        low, high = None if low == -math.inf else low, None if high == math.inf else high
        if low is None and high is None:
            return value
        if low == 0 and high is None:
            return self.do("Relu", value)
        return self.do("Clip", value, "" if low is None else self.number(low), *([] if high is None else [self.number(high)]))

    def reduced(self, operator: str, value: str, axes: Sequence[int] | None, keepdim: bool) -> str:
        """Write a reduction, whose axes are an attribute in older opsets."""
        attributes: dict[str, Any] = {"keepdims": int(keepdim)}
        if axes is None:
            return self.do(operator, value, **attributes)
        if self.e.opset < (13 if operator == "ReduceSum" else 18):
            return self.do(operator, value, axes=list(axes), **attributes)
        return self.do(operator, value, self.integers(axes), **attributes)

    def unsqueezed(self, value: str, axis: int) -> str:
        return self.do("Unsqueeze", value, axes=[axis]) if self.e.opset < 13 else self.do("Unsqueeze", value, self.integers([axis]))

    @property
    def operand_shape(self) -> tuple[Size, ...]:
        """The shape of the first primitive's operand."""
        node = self.primitives[0].all_input_nodes[0]
        sizes: tuple[Size, ...] = fact(node).shape
        return sizes

    def selected(self) -> str:
        """Return the operand's elements as the integer graph selects them; the operand itself where it does not."""
        value = self.input
        for node in self.primitives:
            value = self.gathered(node, value) if node.target is shape.select else value
        return value

    def gathered(self, node: fx.Node, value: str) -> str:
        """Write the elements of a value that a selection of the integer graph takes."""
        indices: Any = node.args[2]
        return self.do("Gather", value, self.e.constant(resolve(indices.graph.owning_module, indices.target)), axis=node.args[1])

    def with_bias(self, sum_of: Callable[..., str], trailing: int) -> str:
        """Write `sum_of` with the bias as an input, if there is one; add a large bias after it: `trailing` dimensions follow its channels.

        onnxruntime converts a bias to int32, in steps of the operand's scale times the weight's, and does not check for overflow.
        """
        if "bias" not in self.constants:
            return sum_of()
        bias = self.real("bias")
        if float(self.constants["bias"][0].abs().max()) < LARGEST_BIAS:
            return sum_of(self.e.constant(bias))
        return self.do("Add", sum_of(), self.e.constant(bias.reshape(-1, *[1] * trailing)))


def channel_axis(integers: Tensor, scale: Tensor, axis: int, arrange: Callable[[Tensor], Tensor]) -> int:
    """Return the dimension of an arranged weight along which its scales run, which ran along `axis`, counted from the end."""
    channels = arrange(torch.arange(scale.numel(), device="cpu").reshape(-1, *[1] * (-axis - 1)).expand(integers.shape))
    return next(d for d in range(channels.dim()) if channels.shape[d] == scale.numel() and _runs(channels, d))


def _runs(channels: Tensor, dim: int) -> bool:
    """Return whether the index of channels is that of this dimension."""
    index = torch.arange(channels.shape[dim], device="cpu").reshape(-1, *[1] * (channels.dim() - dim - 1))
    return torch.equal(channels, index.expand(channels.shape))

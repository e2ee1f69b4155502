"""Style "fast" for targets that requantize by shifts: layers are sums of products of bytes, the rest is as in style "exact".

ONNX's integer operators with requantization multiply by a float32 number, which is never equal to a shift before a multiplier. So
the sum alone is an integer kernel, ConvInteger or MatMulInteger, and the following nodes read its int32.

onnxruntime has fast kernels for a left factor of uint8 and a right one of int8. The weights of a convolution are the left one, so they
are stored as uint8 with zero point 128; those of a linear layer are the right one. x86 processors with VNNI add such products in 32 bits,
others add pairs of them in 16, which saturate. A session option prevents this for MatMulInteger, none does for ConvInteger.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.writer import Writer
from fxquant.ir.graph import fact, resolve
from fxquant.primitives import Primitive, Role, role_of
from fxquant.primitives.accumulate import attributes_of
from fxquant.primitives.requantize import requantize_fixed

ZERO_POINT = 128  # of weights that are stored as uint8
BITWISE = 18  # the first opset with BitwiseXor
LEAST_PRODUCTS = 64  # in a sum: shorter ones are as fast in float32, whose layout onnxruntime keeps from layer to layer


class SumsWriter(Writer):
    """Writes an integer graph in one traversal. `refused` names the layers that must not be integer kernels."""

    style = "fast"

    def __init__(self, integer: fx.GraphModule, io: str, opset: int, refused: Collection[str] = ()) -> None:
        super().__init__(integer, io, opset)
        self.refused = refused
        self.shifted: dict[str, str] = {}

    def kernels(self) -> list[fx.Node]:
        """Return the convolutions and linear layers that are sums of products of bytes."""
        return [node for node in self.integer.graph.nodes if node.name not in self.refused and self._is_kernel(node)]

    def _is_kernel(self, node: fx.Node) -> bool:
        role = role_of(node.target)
        if role is not Role.CONVOLUTION and role is not Role.LINEAR:
            return False
        input, weight = node.args[0], self._weight(node)
        if weight is None or fact(input).dtype != torch.int8 or weight[0].numel() < LEAST_PRODUCTS:  # type: ignore[arg-type]
            return False
        return role is Role.LINEAR or bool(node.args[6] == 1)  # grouped sums gain no speed

    def _weight(self, node: fx.Node) -> Tensor | None:
        """Return the layer's weight if it is a constant of 8 bits."""
        weight = node.args[1]
        found = resolve(self.integer, str(weight.target)) if isinstance(weight, fx.Node) and weight.op == "get_attr" else None
        return found if found is not None and found.dtype == torch.int8 else None

    def metadata(self, outputs: list[onnx.ValueInfoProto]) -> dict[str, Any]:
        found = self.kernels()
        kernels = {"integer": [node.name for node in found], "computed": [], "refused": list(self.refused)}
        options = {"session_options_without_vnni": PRECISE, "relies_on_vnni": self.relies_on_vnni()}
        return {**super().metadata(outputs), **options, "kernels": kernels}

    def relies_on_vnni(self) -> bool:
        """Return whether x86 processors without VNNI compute other results, whatever the session's options."""
        return any(role_of(node.target) is Role.CONVOLUTION for node in self.kernels())

    def emit(self, node: fx.Node, record: Primitive) -> str | None:
        if node.name in self.refused or not self._is_kernel(node):
            return super().emit(node, record)
        e = self.emitter
        input, weight, bias, *sizes = (self.operand(argument) for argument in node.args)
        if record.role is Role.CONVOLUTION:
            stored = e.constant((weight.to(torch.int16) + ZERO_POINT).to(torch.uint8))
            zeros = e.constant(0, torch.int8), e.constant(ZERO_POINT, torch.uint8)
            total = e.node("ConvInteger", input, stored, *zeros, **attributes_of(weight, *sizes[:4]))
        else:
            # onnxruntime rewrites weights in place for "x64quantprecision", so each kernel has its own.
            stored = e.own_constant(weight.t().contiguous())
            total = e.node("MatMulInteger", self._shifted(input), stored, e.constant(ZERO_POINT, torch.uint8))
        if bias is not None:
            shape = [-1, *[1] * (weight.dim() - 2)]
            total = e.node("Add", total, e.constant(bias.to(torch.int32).reshape(shape)))
        if record.wide:
            return e.node("Cast", total, to=torch.float64)
        whole = all(user.target is requantize_fixed for user in node.users)
        return total if whole else e.node("Cast", total, to=torch.float32)

    def _shifted(self, value: str) -> str:
        if value not in self.shifted:
            e = self.emitter
            if self.opset >= BITWISE:
                moved = e.node("BitwiseXor", e.node("Cast", value, to=torch.uint8), e.constant(ZERO_POINT, torch.uint8))
            else:
                raised = e.node("Add", e.node("Cast", value, to=torch.float32), e.constant(float(ZERO_POINT)))
                moved = e.node("Cast", raised, to=torch.uint8)
            self.shifted[value] = moved
        return self.shifted[value]

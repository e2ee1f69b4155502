"""Which nodes of an integer graph form one integer kernel of style fast."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.backends.onnx import gates
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, resolve
from fxquant.ir.integer import zero_point
from fxquant.numerics.rescaling import LARGEST_NARROW_MULTIPLIER, NARROW_BITS
from fxquant.primitives import Role, elementwise, role_of
from fxquant.primitives.requantize import requantize_real

ZERO_POINT = 128  # of tensors that other styles store as int8
OPSET = 19  # in older opsets ONNX's own evaluator has no DequantizeLinear of uint8
EIGHT_BITS = (torch.int8, torch.uint8)
PRODUCTS = frozenset({Role.CONVOLUTION, Role.LINEAR, Role.MATRIX_PRODUCT})
_NARROW_STEPS = frozenset(2.0**-bits for bits in range(NARROW_BITS + 1))


def plain(value: Any) -> Any:
    """Return the operand of a node that centres integers, because kernels apply zero points themselves; any other value as it is."""
    return value.args[0] if isinstance(value, fx.Node) and value.target is elementwise.centre else value


def _terms(total: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands of a sum, each in steps of the sum's grid."""
    return tuple(term for term in total.args if isinstance(term, fx.Node) and term.target is elementwise.align_real)


def stored_zero_point(node: Any) -> int:
    """Return the stored value of 0 if a node's value is uint8; for a constant or an int8 tensor it is 128."""
    return zero_point(node) if isinstance(node, fx.Node) and fact(node).dtype == torch.uint8 else ZERO_POINT


def is_8_bits(node: Any) -> bool:
    """Return whether a node holds a tensor of 8 bits."""
    known = fact(node) if isinstance(node, fx.Node) else None
    return isinstance(known, TensorFact) and known.dtype in EIGHT_BITS


def parts_of(integer: fx.GraphModule, node: fx.Node, opset: int) -> tuple[fx.Node, ...]:
    """Return the nodes that form one kernel with this requantization, in order: a sum of 8-bit products or tensors; or none."""
    if node.target is not requantize_real or node.args[4] not in EIGHT_BITS:
        return ()
    total = node.args[0]
    assert isinstance(total, fx.Node)
    if len(total.users) != 1:
        return ()
    if role_of(total.target) in PRODUCTS:
        return (total,) if all(is_8_bits(plain(operand)) for operand in total.args[:2]) else ()
    if total.target is elementwise.multiply:
        return (total,) if divisor(integer, node, total, opset) is not None else ()
    return (*_terms(total), total) if _adds_exactly(integer, node, total, opset) else ()


def divisor(integer: fx.GraphModule, node: fx.Node, total: fx.Node, opset: int) -> float | None:
    """Return the divisor of a product of two 8-bit tensors; None if the product is not a kernel."""
    left, right = (plain(operand) for operand in total.args[:2])
    multiplier = resolve(integer, str(node.args[1].target))  # type: ignore[union-attr]
    if opset < OPSET or not (is_8_bits(left) and is_8_bits(right)) or multiplier.numel() != 1:
        return None
    return gates.divisor(float(multiplier), stored_zero_point(left), stored_zero_point(right), stored_zero_point(node))


def _adds_exactly(integer: fx.GraphModule, node: fx.Node, total: fx.Node, opset: int) -> bool:
    """Return whether float32 adds two tensors of 8 bits, as fractions of a step of the result, exactly: ARITHMETIC.md, section 21."""
    terms = _terms(total)
    if opset < OPSET or role_of(total.target) is not Role.ADDITION or len(terms) != 2:
        return False
    if not all(len(term.users) == 1 and is_8_bits(plain(term.args[0])) and plain(term.args[0]).op != "get_attr" for term in terms):
        return False
    factors = [resolve(integer, str(term.args[1].target)) for term in terms]  # type: ignore[union-attr]
    step = float(resolve(integer, str(node.args[1].target)))  # type: ignore[union-attr]
    whole = all(factor.numel() == 1 and float(factor) == int(factor) <= LARGEST_NARROW_MULTIPLIER for factor in factors)
    return whole and step in _NARROW_STEPS

"""The patterns of primitives that kernels replace. A pattern depends on the graph alone, and is the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.ir.integer import qparams
from fxquant.kernels.kernel import Match
from fxquant.primitives import POINTWISE, PRIMITIVES, Role, ZeroPoint, elementwise, pool, requantize, role_of, runtime_scales, shape
from fxquant.primitives.quantization import quantize

BYTES = (torch.int8, torch.uint8)
LAYERS = frozenset({Role.CONVOLUTION, Role.LINEAR})


def known_tensor(node: Any, *dtypes: torch.dtype, ranks: Sequence[int] = (2, 3, 4)) -> bool:
    """Return whether a value is a tensor of one of these dtypes and ranks."""
    known = fact(node) if isinstance(node, fx.Node) else None
    return isinstance(known, TensorFact) and known.dtype in dtypes and len(known.shape) in ranks


def bytes_of(node: Any, ranks: Sequence[int] = (2, 3, 4)) -> fx.Node | None:
    """Return the quantized tensor of 8 bits that is read: the operand itself, or the operand of its centring; None for others."""
    if isinstance(node, fx.Node) and node.target is elementwise.centre:
        node = node.args[0]
    if not known_tensor(node, *BYTES, ranks=ranks) or node.op == "get_attr" or qparams(node) is None:
        return None
    return node  # type: ignore[no-any-return]


def _read_once(node: Any) -> bool:
    """Return whether a value is a node with exactly one reader."""
    return isinstance(node, fx.Node) and len(node.users) == 1


def sum_of_products(root: fx.Node) -> Match | None:
    """Match a 2d convolution or a linear layer on bytes, the residual added to it, and the requantization to bytes.

    Match the sum itself where that is the output of a last layer.
    """
    requantized = role_of(root.target) is Role.REQUANTIZATION
    if not requantized and root.target is not requantize.accumulator_output:
        return None
    covers, total = [root], root.args[0]
    residual, factor, factor_shift = None, None, None
    if _read_once(total) and role_of(total.target) is Role.RESIDUAL:  # type: ignore[union-attr]
        covers.append(total)  # type: ignore[arg-type]
        total, added, factor, *shift = total.args  # type: ignore[union-attr]
        factor_shift = shift[0] if shift else None
        residual = bytes_of(added)
        if residual is None:
            return None
    if not _read_once(total) or (requantized and not known_tensor(root, *BYTES)):
        return None
    assert isinstance(total, fx.Node)
    if role_of(total.target) not in LAYERS:
        return None
    covers.append(total)
    is_linear = role_of(total.target) is Role.LINEAR
    operand, weight, bias, *attributes = total.args
    input = bytes_of(operand, (2, 3) if is_linear else (4,))
    if input is None or not known_tensor(weight, torch.int8) or (bias is not None and not known_tensor(bias, torch.int32, ranks=(1,))):
        return None
    window = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    if not is_linear:
        window = dict(zip(window, attributes, strict=False))
    parts = {"weight": weight, "bias": bias, "factor": factor, "factor_shift": factor_shift, "sum": total, **window}
    return Match(root, tuple(reversed(covers)), (input,) if residual is None else (input, residual), parts)


def quantization(root: fx.Node) -> Match | None:
    """Match the quantization of a 4d float32 tensor to bytes."""
    if root.target is not quantize or not known_tensor(root, *BYTES, ranks=(4,)):
        return None
    if not known_tensor(root.args[0], torch.float32):
        return None
    return Match(root, (root,), (root.args[0],))  # type: ignore[arg-type]


def maximum(root: fx.Node) -> Match | None:
    """Match a 2d max pool."""
    if root.target is not pool.max_pool or not known_tensor(root, *BYTES, ranks=(4,)) or bytes_of(root.args[0]) is None:
        return None
    window = dict(zip(("kernel", "stride", "begin", "end", "dilation"), root.args[1:], strict=True))
    return Match(root, (root,), (root.args[0],), window)  # type: ignore[arg-type]


def total(root: fx.Node) -> Match | None:
    """Match the sum over height and width."""
    if root.target is not pool.sum:
        return None
    operand = bytes_of(root.args[0], (4,))
    if operand is None or sorted(dim % 4 for dim in root.args[1]) != [2, 3] or not known_tensor(root, torch.int32):  # type: ignore[union-attr, operator]
        return None
    return Match(root, (root,), (operand,))


def pointwise(root: fx.Node) -> Match | None:
    """Match elementwise functions from one or two tensors of bytes to bytes, whose constants are the same for all elements."""
    if role_of(root.target) not in POINTWISE or not known_tensor(root, *BYTES) or qparams(root) is None:
        return None  # inside an operator bytes have no grid
    covers: list[fx.Node] = []
    reads: list[fx.Node] = []
    if not all(_pointwise(operand, covers, reads) for operand in root.all_input_nodes) or not 1 <= len(reads) <= 2:
        return None
    if len(reads) == 2 and math.prod(_trailing(reads[0])) == 1:
        reads.reverse()  # what has one pixel comes second
    return Match(root, (*covers, root), tuple(reads))


def _trailing(node: fx.Node) -> tuple[int, ...]:
    """Return height and width of an image; (0,) for anything else."""
    known = fact(node)
    assert isinstance(known, TensorFact)
    return tuple(size if isinstance(size, int) else 0 for size in known.shape[2:]) if len(known.shape) == 4 else (0,)


def _pointwise(node: fx.Node, covers: list[fx.Node], reads: list[fx.Node]) -> bool:
    """Return whether a value is a constant number, a tensor of bytes, or computed from such; collect the nodes it is computed from."""
    known = fact(node)
    if not isinstance(known, TensorFact):
        return False
    if node.op == "get_attr":
        return all(size == 1 for size in known.shape) or all(user.target is elementwise.lookup for user in node.users)
    if known.dtype in BYTES and qparams(node) is not None:
        if node not in reads:
            reads.append(node)
        return len(known.shape) in (2, 3, 4)
    inner = role_of(node.target) in POINTWISE and (len(node.users) == 1 or node.target is elementwise.centre)
    if not inner or not all(_pointwise(operand, covers, reads) for operand in node.all_input_nodes):
        return False
    if len(node.users) == 1:
        covers.append(node)
    return True


def joined(root: fx.Node) -> Match | None:
    """Match the concatenation of images along their channels."""
    if root.target is not shape.concatenate or not known_tensor(root, *BYTES, ranks=(4,)) or root.args[1] not in (1, -3):
        return None
    operands = tuple(root.args[0])  # type: ignore[arg-type]
    if any(bytes_of(operand, (4,)) is not operand for operand in operands):
        return None
    return Match(root, (root,), operands)


def dynamic_layer(root: fx.Node) -> Match | None:
    """Match a linear layer on float tensors, whose operand is quantized to bytes at run time."""
    if root.target is not runtime_scales.dynamic_linear:
        return None
    input, weight, scale, bias = root.args
    return Match(root, (root,), (input,), {"weight": weight, "scale": scale, "bias": bias})  # type: ignore[arg-type]


def without_negatives(model: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the quantized tensors that never hold negative centred integers."""
    found: set[fx.Node] = set()
    for node in model.graph.nodes:
        record = PRIMITIVES.get(node.target) if node.op == "call_function" else None
        if record is None:
            continue
        low = record.signature.bind(*node.args, **node.kwargs).arguments.get("low")
        if isinstance(low, int):
            never = low >= 0
        elif record.zero_point is ZeroPoint.EQUIVARIANT and not record.shifted:
            operands = [
                operand for operand in node.all_input_nodes if operand.op != "get_attr" and known_tensor(operand, *BYTES, ranks=range(9))
            ]
            never = bool(operands) and len(operands) == len(node.all_input_nodes) and found.issuperset(operands)
        else:
            continue
        if never:
            found.add(node)
    return frozenset(found)

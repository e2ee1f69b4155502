"""Float operators that PyTorch's ONNX exporter cannot write, expressed by others that it can: equal results up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.facts import BatchDim, TensorFact
from fxquant.ir.graph import fact
from fxquant.ops.attention.attention import scaled_dot_product_attention
from fxquant.ops.elementwise import pairs
from fxquant.ops.indexing import order
from fxquant.ops.pooling import totals
from fxquant.ops.reduction import distance, extremum, progression


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` of tensors with any number of dimensions."""
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores, -1) @ value


def own_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `attention` with the arguments of the operator in the table; without `enable_gqa`."""
    return attention(query, key, value, attn_mask, 0.0, is_causal, scale)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Compute `torch.chunk` along a dimension whose size is not fixed, into exactly this number of chunks."""
    size = input.shape[dim]
    step = (size + chunks - 1) // chunks
    return tuple(input.narrow(dim, index * step, step if index + 1 < chunks else size - index * step) for index in range(chunks))


def hypot(input: Tensor, other: Tensor) -> Tensor:
    """Compute `torch.hypot`; the larger operand is a factor, so that no square overflows."""
    large, small = torch.maximum(input.abs(), other.abs()), torch.minimum(input.abs(), other.abs())
    ratio = small / torch.where((large == 0) | (small == torch.inf), torch.ones_like(large), large)
    return large * (ratio * ratio + 1).sqrt()


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Compute `torch.cdist` in any norm, from the differences of all pairs of rows."""
    differences = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p == 0:
        return (differences != 0).to(x1.dtype).sum(-1)
    if p == math.inf:
        return differences.amax(-1)
    if p == 1:
        return differences.sum(-1)
    return (differences * differences).sum(-1).sqrt() if p == 2 else differences.pow(p).sum(-1).pow(1 / p)


def copysign(input: Tensor, other: Tensor) -> Tensor:
    """Compute `torch.copysign` of two tensors; 0 and -0 differ in the sign of their reciprocal."""
    negative = torch.where(other == 0, 1 / other, other) < 0
    return torch.where(negative, -input.abs(), input.abs())


def cumprod(input: Tensor, dim: int) -> Tensor:
    """Compute `torch.cumprod` along a dimension of fixed size, by products with the elements 1, 2, 4, … before."""
    size, reach = input.shape[dim], 1
    while reach < size:
        later = input.narrow(dim, reach, size - reach) * input.narrow(dim, 0, size - reach)
        input, reach = torch.cat((input.narrow(dim, 0, reach), later), dim), 2 * reach
    return input


def over_all(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a reduction along dimensions that names every dimension: the exporter writes an invalid node where none is named."""
    return lambda input, dim=None, keepdim=False: function(input, tuple(range(input.dim())), keepdim)


def aminmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `torch.aminmax` of all elements."""
    return over_all(torch.amin)(input, dim, keepdim), over_all(torch.amax)(input, dim, keepdim)


OVER_ALL: dict[Any, Callable[..., Any]] = {
    totals.mean: over_all(torch.mean),
    extremum.amax: over_all(torch.amax),
    extremum.amin: over_all(torch.amin),
    order.aminmax: aminmax,
}
WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.hypot, distance.hypot, "hypot"), hypot),
    **dict.fromkeys((torch.cdist, distance.cdist), cdist),
    **dict.fromkeys((torch.copysign, pairs.copysign, "copysign"), copysign),
}


def replacement(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that a node should call instead; None if the exporter writes the node as it is."""
    if node.target in WRITTEN_OUT:
        return WRITTEN_OUT[node.target] if len(node.all_input_nodes) == 2 or node.args[0] is node.args[1] else None
    if node.target in OVER_ALL and not any(isinstance(dim, int) or dim for dim in (*node.args[1:2], node.kwargs.get("dim"))):
        return OVER_ALL[node.target]
    if node.target in (torch.cumprod, progression.cumprod, "cumprod"):
        known, dim = _fact(node.args[0]), node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        sized = isinstance(known, TensorFact) and isinstance(dim, int) and known.shape and isinstance(known.shape[dim], int)
        return cumprod if sized and "dtype" not in node.kwargs else None
    if node.target is F.scaled_dot_product_attention:
        ranks = {len(known.shape) for operand in node.args[:3] if isinstance(known := _fact(operand), TensorFact)}
        return attention if ranks != {4} and "enable_gqa" not in node.kwargs and not node.kwargs.get("dropout_p") else None
    if node.target is scaled_dot_product_attention:
        ranks = {len(known.shape) for operand in node.args[:3] if isinstance(known := _fact(operand), TensorFact)}
        return own_attention if ranks != {4} and node.args[6:7] != (True,) and not node.kwargs.get("enable_gqa") else None
    if node.target is torch.chunk or (node.op == "call_method" and node.target == "chunk"):
        known, dim = _fact(node.args[0]), node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        count = node.kwargs.get("chunks", node.args[1] if len(node.args) > 1 else None)
        moving = isinstance(known, TensorFact) and isinstance(dim, int) and isinstance(known.shape[dim], BatchDim)
        return chunk if moving and isinstance(fact(node), tuple | list) and len(fact(node)) == count else None
    return _empty(node)


def _empty(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function for an empty tensor with the operand's number of items: a file cannot have -1 next to 0 in a reshape."""
    known, read = fact(node), _fact(node.args[0]) if node.args else None
    if not isinstance(known, TensorFact) or not isinstance(read, TensorFact) or 0 not in known.shape or not read.shape:
        return None
    (items, *rest), dtype = known.shape, known.dtype
    sizes = [size for size in rest if isinstance(size, int)]
    if items != read.shape[0] or len(sizes) != len(rest):
        return None

    def empty(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input.new_zeros((input.shape[0], *sizes), dtype=dtype)

    return empty


def _fact(value: Any) -> Any:
    return fact(value) if isinstance(value, fx.Node) else None

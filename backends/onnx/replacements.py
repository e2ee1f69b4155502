"""Operators that PyTorch's exporter cannot write, expressed by others that it can: equal results up to rounding."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import BatchDim, TensorFact, fact, target_name, varies_beyond_batch
from fxquant.ops.attention import attention
from fxquant.ops.elementwise import activation, comparison
from fxquant.ops.movement import pad as movement
from fxquant.ops.pooling import totals
from fxquant.ops.reduction import distance, progression


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the operator `scaled_dot_product_attention` of tensors with any number of dimensions."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    # The scores are scaled, not the query: onnxruntime fuses two scalings of one tensor into a graph that it cannot open.
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1), -torch.inf)
    if attn_mask is None:
        return torch.softmax(scores, -1) @ value
    boolean = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    hidden = ~attn_mask.any(-1, keepdim=True) if boolean else attn_mask.amax(-1, keepdim=True) == -torch.inf
    return (torch.softmax(scores, -1) @ value).masked_fill(hidden, 0.0)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Compute `torch.chunk` along a dimension whose size is not fixed, into exactly this number of chunks."""
    size = input.shape[dim]
    step = (size + chunks - 1) // chunks
    return tuple(input.narrow(dim, index * step, step if index + 1 < chunks else size - index * step) for index in range(chunks))


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


def clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Compute `torch.clamp` with an integer beside a float, for which the exporter has no overload."""
    return torch.clamp(input, None if min is None else float(min), None if max is None else float(max))


def pad(input: Tensor, widths: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Compute `F.pad` with negative widths, which ONNX's evaluator does not take, by slices and a pad of the others."""
    for dim, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True), 1):
        input = input.narrow(-dim, max(-before, 0), input.shape[-dim] + min(before, 0) + min(after, 0))
    return F.pad(input, [max(width, 0) for width in widths], mode, value)


def running(combined: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Return a cumulative function (product, maximum) along a dimension of fixed size, in log2 n steps at distances 1, 2, 4, …"""

    def function(input: Tensor, dim: int) -> Tensor:
        size, reach = input.shape[dim], 1
        while reach < size:
            later = combined(input.narrow(dim, reach, size - reach), input.narrow(dim, 0, size - reach))
            input, reach = torch.cat((input.narrow(dim, 0, reach), later), dim), 2 * reach
        return input

    return function


def aminmax(input: Tensor, dim: Any, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the minima and the maxima of a tensor along the dimensions `dim`."""
    return torch.amin(input, dim, keepdim), torch.amax(input, dim, keepdim)


cumprod = running(torch.mul)
RUNNING: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.cumprod, progression.cumprod, "cumprod"), cumprod),
    **dict.fromkeys((torch.cummax, "cummax"), lambda input, dim: (running(torch.maximum)(input, dim),)),
    **dict.fromkeys((torch.cummin, "cummin"), lambda input, dim: (running(torch.minimum)(input, dim),)),
}
REDUCTIONS: dict[Any, Any] = {
    **dict.fromkeys((torch.mean, totals.mean, "mean"), torch.mean),
    **dict.fromkeys((torch.amax, comparison.amax, "amax"), torch.amax),
    **dict.fromkeys((torch.amin, comparison.amin, "amin"), torch.amin),
    **dict.fromkeys((torch.aminmax, "aminmax"), aminmax),
}


def replacement(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that a node should call instead; None if the exporter writes the node as it is."""
    if "adaptive" in target_name(node) and varies_beyond_batch(_fact(node.args[0])):
        raise ValueError("it writes adaptive pools for the example's size alone; fix the sizes with fxq.at_sizes")
    if node.target in (torch.cdist, distance.cdist):
        return cdist
    if node.target in (torch.clamp, torch.clip, activation.clamp, "clamp", "clip"):
        return clamp if {int, float}.issubset(map(type, (*node.args[1:], *node.kwargs.values()))) else None
    if node.target in (F.pad, movement.pad):
        return pad if any(isinstance(width, int) and width < 0 for width in node.args[1]) else None  # type: ignore[union-attr]
    if node.target in RUNNING:
        input_fact, dim = _fact(node.args[0]), node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        sized = isinstance(input_fact, TensorFact) and isinstance(dim, int) and input_fact.shape and isinstance(input_fact.shape[dim], int)
        values = all(reader.target is operator.getitem and reader.args[1] == 0 for reader in node.users)
        return RUNNING[node.target] if sized and "dtype" not in node.kwargs and (values or RUNNING[node.target] is cumprod) else None
    if node.target is F.scaled_dot_product_attention:
        drops = node.kwargs.get("dropout_p")
        return None if drops else lambda *operands, dropout_p=0.0, **named: attend(*operands[:4], *operands[5:], **named)
    if node.target is attention.scaled_dot_product_attention:
        return attend
    if node.target is torch.chunk or (node.op == "call_method" and node.target == "chunk"):
        input_fact, dim = _fact(node.args[0]), node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        count = node.kwargs.get("chunks", node.args[1] if len(node.args) > 1 else None)
        moving = isinstance(input_fact, TensorFact) and isinstance(dim, int) and isinstance(input_fact.shape[dim], BatchDim)
        return chunk if moving and isinstance(fact(node), tuple | list) and len(fact(node)) == count else None
    return _over_everything(node) or _empty(node)


def _over_everything(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function for a reduction of all dimensions, which are named: the exporter writes invalid files, or none, without them."""
    function, operand = REDUCTIONS.get(node.target), _fact(node.args[0]) if node.args else None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if function is None or not isinstance(operand, TensorFact) or not operand.shape or dim not in (None, (), []) or "dtype" in node.kwargs:
        return None

    def reduced(input: Tensor, dim: Any = None, keepdim: bool = False, *_: Any) -> Any:
        return function(input, tuple(range(input.dim())), keepdim)

    return reduced


def _empty(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function for an empty tensor with the operand's number of items: a file cannot have -1 next to 0 in a reshape."""
    result, read = fact(node), _fact(node.args[0]) if node.args else None
    if not isinstance(result, TensorFact) or not isinstance(read, TensorFact) or 0 not in result.shape or not read.shape:
        return None
    (items, *rest), dtype = result.shape, result.dtype
    sizes = [size for size in rest if isinstance(size, int)]
    if items != read.shape[0] or len(sizes) != len(rest):
        return None

    def empty(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input.new_zeros((input.shape[0], *sizes), dtype=dtype)

    return empty


def _fact(value: Any) -> Any:
    return fact(value) if isinstance(value, fx.Node) else None

"""Attention: composites of matrix products and a softmax, with 16-bit intermediate tensors.

    attention(q, k, v) = softmax(scale · q kᵀ, over the unmasked positions) v

The scale is part of the table of the exponential, unless a mask adds a bias to the scores that it keeps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import dropped_in_training, largest_size
from fxquant.ops.attention import softmax as masking
from fxquant.ops.attention.softmax import HIDDEN, Hiding, added, is_scores, kept, may_hide, repeated, shares, terms_of, with_empty_rows
from fxquant.ops.core import OPERATORS, WIDE, Builder, TensorFact, composite, fact, is_parameter, taking
from fxquant.ops.core.declare import bound
from fxquant.ops.core.record import Parameter, calls
from fxquant.ops.core.samples import ATTENDED, HEADS, sampled
from fxquant.ops.elementwise.activation import dropout
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.layers.linear import linear, matmul
from fxquant.ops.movement.pad import pad
from fxquant.ops.movement.shape import MANY_SIZES, permute, reshape
from fxquant.ops.pooling.totals import mean
from fxquant.ops.reduction.progression import along


class Mask:
    """Attention masks combined into one boolean mask and one bias. Each tensor broadcasts against the scores."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.keep: fx.Node | None = None  # bool mask, the conjunction of all masks: False hides a score; None: nothing is hidden
        self.bias: fx.Node | None = None  # float, the sum of the added masks where they do not hide; None: 0
        self.empty = "zeros"  # the treatment of rows that are hidden completely: `empty` of `masked_softmax`
        self.scores: list[fx.Node] = []  # added tensors that layers compute, such as relative position scores: they hide nothing
        # Period of a constant mask along the batch: samples 0 … rows - 1 have different masks, and sample `rows` that of 0; else 1.
        self.rows = 1

    def hide(self, keep: fx.Node) -> None:
        """Hide in addition the scores where `keep` is False."""
        self.keep = keep if self.keep is None else self.build.host(torch.logical_and, self.keep, keep)

    def add(self, mask: fx.Node, dim: int = -1) -> None:
        """Add a boolean mask, which keeps where it is true, or a mask of float values."""
        if fact(mask).dtype == torch.bool:
            self.hide(mask)
            return
        hiding = Hiding(self.build, mask)
        visible = None if is_parameter(mask) else hiding.kept(mask, dim)
        if visible is not None:
            self.hide(visible)
            self.empty = hiding.empty
            return
        terms = terms_of(mask)
        if any(is_scores(term) or not may_hide(term) for term in terms):
            for term in terms:
                self.add(term, dim)
            return
        if self._chosen(mask, dim):
            return
        if is_scores(mask):
            self.scores.append(mask)
            return
        hides, adds = masking.parts_of(mask, dim)
        if hides:
            self.hide(self.build.host(kept, mask, dim))
        if adds:
            bias = self.build.host(added, mask, dim) if hides else mask
            self.bias = bias if self.bias is None else self.build.host(torch.add, self.bias, bias)

    def _chosen(self, mask: fx.Node, dim: int) -> bool:
        """Add a `where` of booleans, a tensor, and a number far below that hides; return whether the mask is one."""
        if not calls(mask, where):
            return False
        condition, value, far = OPERATORS[where].arguments(mask).values()
        if not isinstance(far, int | float) or far > HIDDEN or fact(condition).dtype != torch.bool or len(fact(condition).shape) < -dim:
            return False
        if not isinstance(value, fx.Node) or fact(condition).shape[dim] == 1 or not (is_scores(value) or not may_hide(value)):
            return False
        self.hide(with_empty_rows(self.build, condition, dim, None))
        self.add(value, dim)
        return True

    def causal(self, rows: fx.Node, columns: fx.Node) -> None:
        """Hide in every row the positions after its own: keep the lower triangle, of the sizes of these operands' positions."""
        most = [largest_size(fact(operand).shape[-2]) or 1 for operand in (rows, columns)]
        keep = self.build.constant(torch.ones(*most, dtype=torch.bool, device="cpu").tril())
        sizes = [self.build.size(operand, -2) for operand in (rows, columns)]
        whole = all(isinstance(size, int) for size in sizes)
        self.hide(keep if whole else self.build.host(getitem, keep, [slice(0, size) for size in sizes]))


def attend(
    build: Builder, query: fx.Node, key: fx.Node, value: fx.Node, mask: Mask, scale: float, share: float = 0.0
) -> tuple[fx.Node, fx.Node]:
    """Compute the attention of tensors whose last dimensions are positions and features, and the weights of every position.

    `share` is the probability with which a weight is dropped while training.
    """
    rank = len(fact(key).shape)
    scores = build(matmul, query, build(permute, key, [*range(rank - 2), rank - 1, rank - 2]), demand=WIDE)
    shape = build.sizes(scores) if mask.rows > 1 else []
    if mask.rows > 1:
        scores = build(reshape, scores, [-1, mask.rows, *shape[1:]])
    added = [] if mask.bias is None else [mask.bias]
    if (added or mask.scores) and scale != 1:
        scores, scale = build(mul, scores, scale, demand=WIDE), 1.0
    for term in (*added, *mask.scores):
        scores = build(add, scores, term, demand=WIDE)
    weights = shares(build, scores, mask.keep, -1, scale, mask.empty)
    if mask.rows > 1:
        weights = build(reshape, weights, shape)
    weights = build(dropout, weights, share, "dropout") if share else weights
    return build(matmul, weights, value), weights


def _repeated(build: Builder, operand: fx.Node, heads: int) -> Any:
    """Repeat each head as often as there are query heads for it."""
    own = fact(operand).shape[-3]
    times = heads // own
    return operand if times == 1 else along(build, operand, -3, [head for head in range(own) for _ in range(times)])


_TAKES = "query key value attn_mask dropout_p is_causal scale enable_gqa"


def _attention_arguments(*args: Any, **named: Any) -> dict[str, Any] | str:
    arguments: Any = taking(_TAKES, _TAKES.split())(*args, **named)
    return "it drops elements at random in eval mode as well" if arguments.pop("dropout_p", 0.0) != 0 else arguments


def _refuses_attention(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    facts = [fact(arguments[name]) for name in ("query", "key", "value")]
    if not all(isinstance(each, TensorFact) and len(each.shape) >= 2 for each in facts):
        return "one of its operands is not a tensor of two or more dimensions"
    if not isinstance(facts[0].shape[-1], int) or largest_size(facts[1].shape[-2]) is None:
        return "it sums over the batch, whose size is not fixed"
    scale = arguments["scale"]
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        return "its scale is not a positive number"
    return "its positions depend on the batch size" if arguments["is_causal"] and largest_size(facts[0].shape[-2]) is None else None


@composite(adapt=_attention_arguments, reads=("attn_mask",), refuses=_refuses_attention)
@sampled("scaled_dot_product_attention(x, y, y)", within=ATTENDED, x=(6, 6))
@sampled("scaled_dot_product_attention(x, y, y, is_causal=True, scale=0.4)", within=ATTENDED, x=(6, 6))
@sampled("scaled_dot_product_attention(x, y, y, torch.eye(6).bool().logical_not())", within=ATTENDED, x=(6, 6))
@sampled("scaled_dot_product_attention(x, y, y, torch.eye(6).cumsum(1) - 1e9 * torch.eye(6))", within=ATTENDED, x=(6, 6))
@sampled("scaled_dot_product_attention(x, y[:, :1], y[:, :1], enable_gqa=True)", within=ATTENDED)
def scaled_dot_product_attention(
    build: Builder, query: fx.Node, key: fx.Node, value: fx.Node, attn_mask: fx.Node | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute F.scaled_dot_product_attention; in training, attention weights have the dropout of the call in train mode."""
    features = fact(query).shape[-1]
    mask = Mask(build)
    if is_causal:
        mask.causal(query, key)
    if attn_mask is not None:
        constant = repeated(attn_mask)
        if constant is not None and len(fact(query).shape) == len(fact(attn_mask).shape) == 4:
            mask.rows, attn_mask = len(constant), build.constant(constant)
        mask.add(attn_mask)
    if enable_gqa:
        key, value = (_repeated(build, operand, fact(query).shape[-3]) for operand in (key, value))
    factor = 1 / math.sqrt(features) if scale is None else float(scale)
    return attend(build, query, key, value, mask, factor, dropped_in_training(build.node))[0]


HELD = (
    *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"),
    *("bias_k", "bias_v"),
)


def _multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False, parameters: Sequence[Tensor | None] = (),
    num_heads: int = 1, batch_first: bool = False, add_zero_attn: bool = False, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    turned = batch_first and query.dim() == 3
    first, second, third = (operand.transpose(0, 1) if turned else operand for operand in (query, key, value))
    named: dict[str, Any] = dict(zip(HELD, parameters, strict=True))
    result, weights = F.multi_head_attention_forward(
        first, second, third, query.shape[-1], num_heads, add_zero_attn=add_zero_attn, dropout_p=0.0, training=False,
        key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask, average_attn_weights=average_attn_weights,
        use_separate_proj_weight=named["in_proj_weight"] is None, is_causal=is_causal, **named,
    )  # fmt: skip
    return result.transpose(0, 1) if turned else result, weights


def _with_positions(build: Builder, operand: fx.Node, own: fx.Node | None, zeros: bool) -> fx.Node:
    """Append to keys or values by heads, [..., positions, features], a position that the layer itself has, and one of zeros."""
    if own is not None:
        operand = build(pad, operand, [0, 0, 0, 1], "constant", 0.0)
        heads, positions, features = fact(operand).shape[-3:]
        last = torch.arange(positions, device="cpu").reshape(-1, 1) == positions - 1
        operand = build(where, build.constant(last), build(reshape, own, [heads, 1, features]), operand)
    return build(pad, operand, [0, 0, 0, 1], "constant", 0.0) if zeros else operand


def _masks(
    build: Builder, query: fx.Node, key: fx.Node, key_padding_mask: fx.Node | None, attn_mask: fx.Node | None, is_causal: bool, more: int
) -> Mask:
    """Combine PyTorch's masks (True hides a position) into a `Mask`; the last `more` positions are never hidden."""
    mask = Mask(build)
    if more:
        both = (attn_mask, key_padding_mask)
        attn_mask, key_padding_mask = (None if each is None else _never_hiding(build, each, more) for each in both)
    if attn_mask is not None:
        tensor = build.host(torch.logical_not, attn_mask) if fact(attn_mask).dtype == torch.bool else attn_mask
        if len(fact(tensor).shape) == 3 and len(fact(query).shape) == 4:  # samples and heads are one dimension
            tensor = build.host(reshape, tensor, [-1, fact(query).shape[1], *build.sizes(tensor)[1:]])
        mask.add(tensor)
    elif is_causal:
        mask.causal(query, key)
    if key_padding_mask is not None:
        padding = fact(key_padding_mask).dtype == torch.bool
        tensor = build.host(torch.logical_not, key_padding_mask) if padding else key_padding_mask
        mask.add(tensor if len(fact(tensor).shape) == 1 else build.host(reshape, tensor, [-1, 1, 1, *build.sizes(tensor)[1:]]))
    return mask


def _never_hiding(build: Builder, mask: fx.Node, more: int) -> fx.Node:
    """Append to a mask, which hides where it is true or adds something, `more` columns that hide nothing and add nothing."""
    shape = fact(mask).shape
    if is_parameter(mask) or fact(mask).dtype != torch.bool or not shape[-1]:
        return build.host(F.pad, mask, (0, more))
    columns = [*range(shape[-1]), *[0] * more]
    own = torch.arange(len(columns), device="cpu") < shape[-1]
    return build.host(torch.logical_and, build.host(getitem, mask, [*[WHOLE] * (len(shape) - 1), columns]), build.constant(own))


def _heads_module(module: Any) -> dict[str, Any] | str:
    projection = {"out_proj_weight": Parameter("out_proj.weight"), "out_proj_bias": Parameter("out_proj.bias")}
    present = {name: Parameter(name) for name in HELD if not name.startswith("out") and getattr(module, name) is not None}
    if module.out_proj.bias is None:
        del projection["out_proj_bias"]
    parameters = [{**present, **projection}.get(name) for name in HELD]
    settings = {name: getattr(module, name) for name in ("num_heads", "batch_first", "add_zero_attn")}
    return {"parameters": parameters, **settings, "dropout_p": module.dropout}


def _heads_function(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    """F.multi_head_attention_forward, which the module calls."""
    arguments = bound(F.multi_head_attention_forward, *args, **kwargs)
    if arguments["training"] and arguments["dropout_p"]:
        return "it drops elements at random"
    if arguments["static_k"] is not None or arguments["static_v"] is not None:
        return "static_k and static_v, which are projected already, have no integer form: call F.scaled_dot_product_attention"
    parameters = [arguments[name] for name in HELD]
    if arguments["use_separate_proj_weight"]:
        parameters[0] = None
    names = (
        *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights"),
        *("is_causal", "num_heads", "add_zero_attn", "dropout_p"),
    )
    return {**{name: arguments[name] for name in names}, "parameters": parameters}


def _refuses_heads(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    facts = [fact(arguments[name]) for name in ("query", "key", "value")]
    if not all(isinstance(each, TensorFact) and len(each.shape) in (2, 3) for each in facts):
        return "one of its operands is not a tensor of two or three dimensions"
    position = 1 if arguments["batch_first"] and len(facts[0].shape) == 3 else 0
    if any(largest_size(each.shape[position]) is None for each in facts):
        return "its positions depend on the batch size"
    return MANY_SIZES if any(not isinstance(size, int) for each in facts for size in each.shape[2:]) else None


@composite(
    "multi_head_attention_forward",
    function=_multi_head_attention,
    adapt=_heads_function,
    modules={nn.MultiheadAttention: _heads_module},
    reads=("key_padding_mask", "attn_mask"),
    refuses=_refuses_heads,
)
@sampled("{nn.MultiheadAttention(6, 2, batch_first=True)}(x, x, x)[0]", within=HEADS, x=(6, 6))
@sampled(
    "a, b = {nn.MultiheadAttention(6, 1, bias=False, batch_first=True)}(x, y, y, average_attn_weights=False); return a + b[:, 0]",
    within=HEADS,
    x=(6, 6),
)
@sampled(
    "t = x.transpose(0, 1); return F.multi_head_attention_forward(t, t[:3], t[:3], 6, 3, {P(18, 6)}, None, None, None, False, 0.0, "
    "{P(6, 6)}, None, False, attn_mask=torch.tensor([[False, True, False]] * 6))[0]",
    within=HEADS,
    x=(6, 6),
)
def multi_head_attention(
    build: Builder, query: fx.Node, key: fx.Node, value: fx.Node, key_padding_mask: fx.Node | None = None, need_weights: bool = True,
    attn_mask: fx.Node | None = None, average_attn_weights: bool = True, is_causal: bool = False, parameters: Sequence[fx.Node | None] = (),
    num_heads: int = 1, batch_first: bool = False, add_zero_attn: bool = False, dropout_p: float = 0.0,
) -> Any:  # fmt: skip
    """Compute nn.MultiheadAttention: return (attention, weights or None); `parameters` are the module's, in the order of `HELD`."""
    rank, width = len(fact(query).shape), fact(query).shape[-1]
    joint, *separate, bias, out_weight, out_bias, bias_k, bias_v = parameters

    def third(parameter: fx.Node | None, number: int) -> Any:
        return None if parameter is None else along(build, parameter, 0, slice(number * width, (number + 1) * width))

    def heads(operand: fx.Node, number: int) -> Any:
        """Project an operand, and return it as samples, heads, positions, features."""
        weight = separate[number] if joint is None else third(joint, number)
        projected = build(linear, operand, weight, third(bias, number))
        split = build(reshape, projected, [*build.sizes(projected)[:-1], num_heads, width // num_heads])
        order = [1, 0, 2] if rank == 2 else [0, 2, 1, 3] if batch_first else [1, 2, 0, 3]
        return build(permute, split, order)

    query, key, value = heads(query, 0), heads(key, 1), heads(value, 2)
    more = (bias_k is not None) + add_zero_attn  # positions after those of the keys, which no mask hides
    mask = _masks(build, query, key, key_padding_mask, attn_mask, is_causal, more)
    key, value = (_with_positions(build, operand, own, add_zero_attn) for operand, own in ((key, bias_k), (value, bias_v)))
    attended, weights = attend(build, query, key, value, mask, 1 / math.sqrt(width // num_heads), dropout_p)
    joined = build(permute, attended, [1, 0, 2] if rank == 2 else [0, 2, 1, 3] if batch_first else [2, 0, 1, 3])
    result = build(linear, build(reshape, joined, [*build.sizes(joined)[:-2], width]), out_weight, out_bias)
    if not need_weights or not build.reads(1):
        return result, None
    return result, build(mean, weights, [rank - 2], False) if average_attn_weights else weights

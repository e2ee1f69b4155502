"""Softmax, its logarithm, and softmax with a mask: composites, 16 bits wide inside.

    softmax(x) = e / Σ e,   log_softmax(x) = d - log Σ e,   logsumexp(x) = max x + log Σ e,   with d = x - max x, e = exp(d)

No e is larger than 1, so its scale is constant: 2^-15. The scales of the differences d, the sum and its reciprocal are calibrated.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import BatchDim, TensorFact, is_parameter, parameter_value
from fxquant.ops.attention.hiding import HIDDEN, only_views
from fxquant.ops.core import NORMED, WIDE, Builder, Fixed, Trait, composite, fact, sample, sampled, taking, written
from fxquant.ops.core.places import constant_value
from fxquant.ops.core.record import OPERATORS, Same, calls, has_weights, operator_of, register
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.elementwise.comparison import any as any_of
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.table import by_table
from fxquant.ops.movement.shape import MANY_SIZES, many_sizes, numbers, rank_of, reshape
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.extremum import amax
from fxquant.ops.reduction.moments import over_dimensions, refuses_reduction

AT_MOST_ONE = Fixed(2.0**-15, "int16")


def _exponentials(build: Builder, input: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Return the maximum over `dims`, input minus maximum, its exponential, and the sum of exponentials over `dims`."""
    largest = build(amax, input, dims, True)
    difference = build(sub, input, largest, demand=WIDE)
    exponential = build(torch.exp, difference, demand=AT_MOST_ONE)
    return largest, difference, exponential, build(sum, exponential, dims, True, demand=WIDE)


FUNCTIONAL = taking("input dim _stacklevel dtype", ("input", "dim"))


def _chosen_dimension(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without a dimension, PyTorch chooses it, with a warning."""
    chosen = 0 if rank_of(arguments["input"]) in (0, 1, 3) else 1
    return arguments if arguments["dim"] is not None else {**arguments, "dim": chosen}


def _refuses_logsumexp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    because = refuses_reduction(arguments["input"], arguments["dim"])
    return because or (MANY_SIZES if not arguments["keepdim"] and many_sizes(node) else None)


@composite(
    function=lambda input, dim=None: F.softmax(input, dim, _stacklevel=5),
    takes="input dim dtype",
    calls={F.softmax: FUNCTIONAL},
    modules={nn.Softmax2d: lambda m: {"dim": -3}},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
    samples=(sample(input=(3, 6, 6), dim=-3),),
)
def softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(x) / Σ exp(x) along one dimension."""
    _, _, exponential, total = _exponentials(build, input, [dim])
    return build(mul, exponential, build(torch.reciprocal, total, demand=WIDE))


@composite(
    function=lambda input, dim=None: F.log_softmax(input, dim, _stacklevel=5),
    takes="input dim dtype",
    calls={F.log_softmax: FUNCTIONAL},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
    samples=(sample(input=(3, 6, 6), dim=-1),),
)
def log_softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute x - log Σ exp(x) along one dimension."""
    _, difference, _, total = _exponentials(build, input, [dim])
    return build(sub, difference, build(torch.log, total, demand=WIDE))


@composite(takes="input dim _stacklevel dtype", normalize=_chosen_dimension, samples=(sample(input=(3, 6, 6), dim=1),))
def softmin(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(-x) / Σ exp(-x) along one dimension."""
    return build(softmax, build(torch.neg, input), dim)


@composite(normalize=over_dimensions, refuses=_refuses_logsumexp, samples=(sample(input=(3, 6, 6), dim=[1, 3]),))
def logsumexp(build: Builder, input: fx.Node, dim: list[int], keepdim: bool = False) -> Any:
    """Compute log Σ exp(x) over dimensions."""
    largest, _, _, total = _exponentials(build, input, dim)
    logarithm = build(torch.log, total, demand=WIDE)
    if keepdim:
        return build(add, largest, logarithm)
    shape = [size for position, size in enumerate(numbers(fact(largest).shape)) if position not in dim]
    return build(add, build(reshape, largest, shape), build(reshape, logarithm, shape))


# ---- Softmax with a boolean mask: a composite with 16-bit inner tensors ----------------------------------------------
#
#     y = e / max(Σ e, 1),   e = exp(factor · (x - max x)) of the elements that are kept, and 0 of the others
#
# The maximum is taken over the kept elements, so that Σ e ≥ 1. A row that is hidden completely becomes zeros.
# An added mask (of -10000, -inf, …) is split into a boolean mask and a bias of the kept elements. Where the mask is computed from
# booleans, `fxquant.ops.attention.hiding` recovers these from the graph. Otherwise both are computed in float; for a constant, once.
LOWEST = -1e9  # saturates on every grid
SMALLEST = -12.0  # exp of it is less than half a step of 2^-15


def kept(mask: Tensor, dim: int) -> Tensor:
    """Return the bool mask of an added mask: True where an element is not far below the largest along `dim`."""
    value = mask.float()
    return value > value.amax(dim, keepdim=True) + HIDDEN


def added(mask: Tensor, dim: int) -> Tensor:
    """Return the bias of an added mask: mask - its maximum along `dim` for kept elements, 0 for hidden ones.

    A softmax does not change when the maximum is subtracted.
    """
    value = mask.float()
    return torch.where(kept(mask, dim), value - value.amax(dim, keepdim=True), 0.0)


def parts_of(mask: fx.Node, dim: int) -> tuple[bool, bool]:
    """Return whether an added mask hides elements, and whether it adds something to others: as it seems where it is not constant."""
    value = constant_value(mask)
    return (True, True) if value is None else (not bool(kept(value, dim).all()), bool((added(value, dim) != 0).any()))


def may_hide(mask: fx.Node) -> bool:
    """Return whether an added mask may hide scores; a constant position bias, whose elements lie close together, does not.

    Views and repetitions of such a constant do not either.
    """
    record = operator_of(mask)
    if not is_parameter(mask) and record is not None and only_views(record):
        return may_hide(record.arguments(mask)["input"])
    if not is_parameter(mask):
        return True
    value = constant_value(mask)
    if value is None or not value.is_floating_point() or value.numel() == 0:
        return False
    return not bool(value.max() - value.min() < -HIDDEN)


def is_scores(mask: fx.Node) -> bool:
    """Return whether an added mask depends on a layer with weights, so that it is a bias and hides nothing."""
    visited, open_ = {mask}, [mask]
    while open_:
        node = open_.pop()
        if has_weights(node):
            return True
        new = [operand for operand in node.all_input_nodes if operand not in visited and isinstance(fact(operand), TensorFact)]
        visited.update(new)
        open_ += new
    return False


def terms_of(mask: fx.Node) -> list[fx.Node]:
    """Return the tensors that a mask is the sum of; none where it is not a sum of two, or is a constant."""
    if not calls(mask, add):
        return []
    arguments = OPERATORS[add].arguments(mask)
    terms = [arguments["input"], arguments["other"]]
    return terms if arguments["alpha"] == 1 and all(isinstance(t, fx.Node) and isinstance(fact(t), TensorFact) for t in terms) else []


def repeated(mask: fx.Node) -> Tensor | None:
    """Return one sample's part of a mask computed from constants and the batch size, which repeats it along dimension 0.

    A window's mask is an example: it is the same for every image. None where a mask reads anything else, or does not repeat.
    """
    if is_parameter(mask) or not isinstance(fact(mask), TensorFact) or not fact(mask).shape:
        return None
    try:
        one, three = (_at(mask, batch, {}) for batch in (1, 3))
    except (LookupError, ValueError, RuntimeError, TypeError):
        return None
    same = isinstance(one, Tensor) and isinstance(three, Tensor) and torch.equal(three, one.repeat(3, *[1] * (one.dim() - 1)))
    return one if same else None


def _at(node: fx.Node, batch: int, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node at a batch size. Raise LookupError where it is not the same for all inputs of that size."""
    if node in values:
        return values[node]
    size, model = fact(node), node.graph.owning_module
    if isinstance(size, int | BatchDim):
        values[node] = size if isinstance(size, int) else size.at(batch)
    elif is_parameter(node) and model is not None:
        values[node] = parameter_value(model, node)
    elif operator_of(node) is None or node.op != "call_function" or not node.all_input_nodes:
        raise LookupError(node.name)
    else:
        arguments = fx.map_arg(node.args, lambda operand: _at(operand, batch, values))
        values[node] = node.target(*arguments)  # type: ignore[operator]
    return values[node]


HOST = tuple(
    register(name, function, ("mask",), refuses=lambda node, arguments: "an attention mask is computed in float, not in integers")
    for name, function in (("kept", kept), ("added", added))
)


def exponential(input: Tensor, factor: float = 1.0) -> Tensor:
    """Compute exp(factor · x) of numbers that are not positive."""
    return torch.exp(input * factor)


register(
    "exponential",
    exponential,
    ("input",),
    lambda lowering, input, factor: by_table(lowering, input, "exp", factor),
    keeps=lambda arguments, after, bits: (SMALLEST / arguments["factor"], math.inf),
    samples=written("torch.softmax(x.masked_fill({B(torch.eye(6).bool())}, -math.inf), -1)", within=NORMED),
    onnx=lambda c: c.do("Exp", c.input if c["factor"] == 1 else c.do("Mul", c.input, c.number(c["factor"]))),
)


def _masked_softmax(input: Tensor, keep: Tensor, dim: int, empty: str = "zeros", otherwise: Tensor | None = None) -> Tensor:
    missing = ~keep.expand_as(input).any(dim, keepdim=True)
    visible = keep if empty == "zeros" else keep | (missing if otherwise is None else missing & otherwise)
    scores = torch.where(keep, input, LOWEST) if empty == "equal" else input
    return torch.where(visible, torch.softmax(torch.where(visible, scores, -math.inf), dim), 0.0)


def shares(
    build: Builder, input: fx.Node, keep: fx.Node | None, dim: int, factor: float = 1.0, empty: str = "zeros",
    otherwise: fx.Node | None = None,
) -> Any:  # fmt: skip
    """Return the softmax of factor · input along a dimension, over the kept elements; `empty` and `otherwise` as in `masked_softmax`."""
    counted = keep
    if keep is not None:
        counted = keep if empty == "zeros" else with_empty_rows(build, keep, dim - len(fact(input).shape) if dim >= 0 else dim, otherwise)
        input = build(where, keep if empty == "equal" else counted, input, LOWEST, demand=Same(("input",)))
    difference = build(sub, input, build(amax, input, [dim], True), demand=WIDE)
    values = build(exponential, difference, float(factor), demand=AT_MOST_ONE)
    if keep is not None:
        values = build(where, counted, values, 0.0, demand=Same(("input",)))
    total = build(sum, values, [dim], True, demand=WIDE)
    if keep is not None:
        total = build(clamp, total, 1.0, None)
    return build(mul, values, build(torch.reciprocal, total, demand=WIDE))


def with_empty_rows(build: Builder, keep: fx.Node, dim: int, otherwise: fx.Node | None) -> fx.Node:
    """Return the mask `keep` with rows along the negative `dim` that are all False replaced: by `otherwise`, or by True if that is None."""
    value = constant_value(keep)
    if value is not None and value.dim() >= -dim and bool(value.any(dim).all()):
        return keep
    nonempty = build.host(any_of, keep, [dim], True) if len(fact(keep).shape) >= -dim else keep
    missing = build.host(torch.logical_not, nonempty)
    return build.host(torch.logical_or, keep, missing if otherwise is None else build.host(torch.logical_and, missing, otherwise))


@composite(operands=("input",), function=_masked_softmax, reads=("keep", "otherwise"), traits=frozenset({Trait.SOFTMAX}))
@sampled("torch.softmax(x.masked_fill({B(torch.eye(6).bool())}, -math.inf), -1)", within=NORMED)
def masked_softmax(build: Builder, input: fx.Node, keep: fx.Node, dim: int, empty: str = "zeros", otherwise: fx.Node | None = None) -> Any:
    """Compute the softmax along one dimension over the elements where `keep` is True; hidden elements become 0.

    `empty` is the result for a row that is hidden completely: "zeros"; "equal", the softmax of equal numbers; or "whole", the softmax
    without a mask. With `otherwise`, a bool mask, such a row keeps the elements where `otherwise` is True.
    """
    return shares(build, input, keep, dim, empty=empty, otherwise=otherwise)

"""Softmax under a mask, which hides elements by truth values: a composite, 16 bits wide inside.

    y = e / max(Σ e, 1),   e = exp(factor · (x - max x)) of the elements that are kept, and 0 of the others

The largest element of a row is one that is kept, so that Σ e is 1 at least, but in a row of which nothing is kept: that becomes zeros.
An added mask (of -10000, -inf, …) is truth values and what it adds to the elements that it keeps; both are found beside the integers,
in real numbers, and of a constant mask once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.facts import BatchDim, TensorFact
from fxquant.graph import fact, is_parameter, parameter_value
from fxquant.ops.activation import clamp
from fxquant.ops.arithmetic import mul, sub
from fxquant.ops.composite import Builder
from fxquant.ops.extremum import amax
from fxquant.ops.form import Call
from fxquant.ops.layer_norm import WIDE
from fxquant.ops.pool import sum
from fxquant.ops.record import Operator, Same, operator_of, register
from fxquant.ops.selection import where
from fxquant.ops.softmax import AT_MOST_ONE
from fxquant.ops.unary import by_table

HIDDEN = -64.0  # what lies so far below the largest element of its row has no share of it: exp(-64) < 2^-92
LOWEST = -1e9  # saturates on every grid
SMALLEST = -12.0  # exp of it is less than half a step of 2^-15


# ---- an added mask, in real numbers ---------------------------------------------------------------------------------


def kept(mask: Tensor, dim: int) -> Tensor:
    """Which elements an added mask keeps, as truth values: those not far below the largest of their row, which runs along `dim`."""
    value = mask.float()
    return value > value.amax(dim, keepdim=True) + HIDDEN


def kept_by(mask: Tensor, dim: int) -> Tensor:
    """Which elements truth values keep that choose between something and a number far below: in a row of which they keep none, all."""
    return mask | ~mask.any(dim, keepdim=True)


def added(mask: Tensor, dim: int) -> Tensor:
    """What a mask adds to the elements that it keeps, less the largest of each row, which makes no difference; 0 to the others."""
    value = mask.float()
    largest = value.amax(dim, keepdim=True)
    return torch.where(kept(mask, dim), value - largest, 0.0)


def parts_of(mask: fx.Node, dim: int) -> tuple[bool, bool]:
    """Whether an added mask hides elements, and whether it adds something to others: as it seems where it is not constant."""
    model = mask.graph.owning_module
    if is_parameter(mask) and model is not None:
        value = parameter_value(model, mask)
        return not bool(kept(value, dim).all()), bool((added(value, dim) != 0).any())
    return True, not _two_valued(mask)


def may_hide(mask: fx.Node) -> bool:
    """Whether what is added to scores may hide any of them; a constant whose elements lie close together, a position bias, does not."""
    model = mask.graph.owning_module
    if not is_parameter(mask) or model is None:
        return True
    value = parameter_value(model, mask)
    return not isinstance(value, Tensor) or value.numel() == 0 or not bool(value.max() - value.min() < -HIDDEN)


def is_scores(mask: fx.Node) -> bool:
    """Whether what is added to scores is computed by layers, as scores are, rather than a constant or the user's: it hides nothing."""
    seen, open_ = {mask}, [mask]
    while open_:
        node = open_.pop()
        record = operator_of(node)
        if not is_parameter(node) and record is not None and (record.sums or "weight" in record.arguments(node)):
            return True
        new = [operand for operand in node.all_input_nodes if operand not in seen and isinstance(fact(operand), TensorFact)]
        seen.update(new)
        open_ += new
    return False


def repeated(mask: fx.Node) -> Tensor | None:
    """What a mask that is computed from constants and the batch size repeats along its first dimension, once for each sample.

    So a window's mask is, which is the same for every image. None where it reads anything else, or is not of that kind.
    """
    if is_parameter(mask) or not isinstance(fact(mask), TensorFact) or not fact(mask).shape:
        return None
    try:
        one, three = (_at(mask, batch, {}) for batch in (1, 3))
    except (LookupError, ValueError, RuntimeError, TypeError):
        return None
    same = isinstance(one, Tensor) and isinstance(three, Tensor) and torch.equal(three, one.repeat(3, *[1] * (one.dim() - 1)))
    return one if same else None


def _at(node: fx.Node, batch: int, known: dict[fx.Node, Any]) -> Any:
    """The value of a node at a batch size. Raises LookupError where it is not the same for all inputs of that size."""
    if node in known:
        return known[node]
    size, model = fact(node), node.graph.owning_module
    if isinstance(size, int | BatchDim):
        known[node] = size if isinstance(size, int) else size.at(batch)
    elif is_parameter(node) and model is not None:
        known[node] = parameter_value(model, node)
    elif operator_of(node) is None or node.op != "call_function" or not node.all_input_nodes:
        raise LookupError(node.name)
    else:
        arguments = fx.map_arg(node.args, lambda operand: _at(operand, batch, known))
        known[node] = node.target(*arguments)  # type: ignore[operator]
    return known[node]


def _two_valued(mask: fx.Node) -> bool:
    """Whether a mask that is computed is 0 where it keeps, whatever it is given: chosen from two numbers, or a multiple of truth values."""
    record = operator_of(mask)
    if record is None:
        return False
    arguments = record.arguments(mask)
    if record.name in MOVES:
        return _two_valued(arguments["input"])
    if record.name == "where":
        branches = (arguments["input"], arguments["other"])
        numbers = [value for value in branches if isinstance(value, int | float)]
        zero = all(value == 0 or value <= HIDDEN for value in numbers)
        return zero and all(isinstance(value, int | float) or _zeros(value) for value in branches)
    if record.name == "mul":
        factors = (arguments["input"], arguments["other"])
        return any(
            isinstance(number, int | float) and number <= HIDDEN and isinstance(value, fx.Node) and _truth_values(value)
            for number, value in (factors, factors[::-1])
        )
    return False


MOVES = ("reshape", "permute", "expand", "getitem", "identity", "repeat")  # that move elements, and change none


def _zeros(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in ("zeros_like", "zeros", "new_zeros")


def _truth_values(node: fx.Node) -> bool:
    """Whether a tensor of numbers holds nothing but 0 and 1."""
    known = fact(node)
    if isinstance(known, TensorFact) and known.dtype == torch.bool:
        return True
    record = operator_of(node)
    name = record.name if record is not None else node.target if isinstance(node.target, str) else ""
    if name in ("sub", "rsub") and record is not None:
        arguments = record.arguments(node)
        other = arguments["other"]
        return arguments["input"] == 1 and arguments["alpha"] == 1 and isinstance(other, fx.Node) and _truth_values(other)
    source = node.args[0] if node.args else None
    return name in (*MOVES, "to", "float", "type", "type_as") and isinstance(source, fx.Node) and _truth_values(source)


HOST = tuple(
    register(
        Operator(
            name, function, ("mask",), refuses=lambda node, arguments: "an attention mask is read in real numbers, beside the integers"
        )
    )
    for name, function in (("kept", kept), ("kept_by", kept_by), ("added", added))
)


# ---- the exponential ------------------------------------------------------------------------------------------------


def exponential(input: Tensor, factor: float = 1.0) -> Tensor:
    """exp(factor · x) of numbers that are not positive."""
    return torch.exp(input * factor)


def _onnx_exponential(c: Call) -> str:
    return c.do("Exp", c.input if c["factor"] == 1 else c.do("Mul", c.input, c.number(c["factor"])))


register(
    Operator(
        "exponential",
        exponential,
        ("input",),
        lambda lowering, input, factor: by_table(lowering, input, "exp", factor),
        keeps=lambda arguments, after: (SMALLEST / arguments["factor"], math.inf),
        onnx=_onnx_exponential,
    )
)


# ---- softmax --------------------------------------------------------------------------------------------------------


def masked_softmax(input: Tensor, keep: Tensor, dim: int) -> Tensor:
    """exp(x) / Σ exp(x) along one dimension, over the elements that are kept; 0 of the others, and where none is."""
    return torch.where(keep, torch.softmax(torch.where(keep, input, -math.inf), dim), 0.0)


def shares(build: Builder, input: fx.Node, keep: fx.Node | None, dim: int, factor: float = 1.0) -> fx.Node:
    """The softmax of factor · input along a dimension, of what is kept."""
    if keep is not None:
        input = build(where, keep, input, LOWEST, demand=Same(("input",)))
    difference = build(sub, input, build(amax, input, [dim], True), demand=WIDE)
    values = build(exponential, difference, float(factor), demand=AT_MOST_ONE)
    if keep is not None:
        values = build(where, keep, values, 0.0, demand=Same(("input",)))
    total = build(sum, values, [dim], True, demand=WIDE)
    if keep is not None:
        total = build(clamp, total, 1.0, None)
    result: fx.Node = build(mul, values, build(torch.reciprocal, total, demand=WIDE))
    return result


def _expand(build: Builder, input: fx.Node, keep: fx.Node, dim: int) -> Any:
    return shares(build, input, keep, dim)


register(Operator("masked_softmax", masked_softmax, ("input",), reads=("keep",), expand=_expand))

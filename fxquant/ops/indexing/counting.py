"""Integers from counting: one-hot vectors, how many booleans are true, in which of several intervals a number lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import fact, is_parameter, shape_of
from fxquant.ops.core.operators import Builder, Call, Instead, Lowering, Plain, Quantized, TensorFact, are_fixed, composite, listed, lowered
from fxquant.ops.core.samples import sampled
from fxquant.ops.elementwise.comparison import threshold
from fxquant.ops.movement.shape import numbers, one_varying
from fxquant.primitives import comparison, scatter, selection, shape


def _refuses_real(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    return None if isinstance(known, TensorFact) and known.dtype == torch.int64 else "its operand is not an integer tensor"


# ---- one-hot vectors -----------------------------------------------------------------------------------------------------


def _refuses_one_hot(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    count = arguments["num_classes"]
    return None if isinstance(count, int) and count > 0 else "the size of its result depends on the data"


@lowered(
    adapt=lambda tensor, num_classes=-1: {"input": tensor, "num_classes": num_classes},
    reads=("input",),
    refuses=(_refuses_real, _refuses_one_hot),
    demand=Plain("int64"),
)
@sampled("one_hot(x.argmax(3), 6)")
def one_hot(lowering: Lowering, input: Any, num_classes: int) -> Any:
    """Return for each integer a vector of zeros with a 1 at its place, along a new last dimension: int64.

    Take rows of the unit matrix.
    """
    unit = lowering.given("unit", torch.eye(num_classes, dtype=torch.int64, device="cpu"), torch.int64)
    return lowering.call(shape.rows, unit, lowering.given("input", input, torch.int64))


# ---- how many hold -------------------------------------------------------------------------------------------------------


def _counted(input: Any, dim: Any = None) -> dict[str, Any] | Instead:
    rank = len(shape_of(input))
    chosen = range(rank) if dim is None else listed([dim])
    arguments = {"input": input, "dim": [d % rank for d in chosen]}
    return arguments if fact(input).dtype == torch.bool else Instead(count_of, arguments)


def _refuses_count(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = shape_of(arguments["input"])
    return None if sizes and are_fixed(sizes[d] for d in arguments["dim"]) else "it counts over the batch, whose size is not fixed"


@lowered(
    adapt=_counted,
    reads=("input",),
    onnx=lambda c: c.reduced("ReduceSum", c.do("Cast", c.operand("input"), to=torch.int64), list(c["dim"]), False),
    refuses=_refuses_count,
    demand=Plain("int64"),
)
@sampled("torch.count_nonzero(x > 0.2, (1, 2))")
def count_nonzero(lowering: Lowering, input: Any, dim: list[int]) -> Any:
    """Count how many of the booleans along dimensions are true: int64."""
    return lowering.call(scatter.count, lowering.given("input", input, torch.bool), list(dim), False)


@composite(function=lambda input, dim: torch.count_nonzero(input, dim), demand=Plain("int64"), refuses=_refuses_count)
@sampled("count_nonzero(x.relu(), 1)")
def count_of(build: Builder, input: fx.Node, dim: list[int]) -> Any:
    """Return how many of the numbers along dimensions are not 0: int64."""
    return build(count_nonzero, build(torch.ne, input, 0), dim)


# ---- between which of several numbers --------------------------------------------------------------------------------------


def _onnx_bucketize(c: Call) -> str:
    """Put the boundaries in the first dimension: onnxruntime cannot move QuantizeLinear of opset 21 after a new dimension by itself."""
    limits = c.e.constant(c.real("boundaries").reshape(-1, *[1] * len(c.operand_shape)))
    below = c.do("Not", c.do("Less", c.input, limits)) if c["right"] else c.do("Greater", c.input, limits)
    return c.reduced("ReduceSum", c.do("Cast", below, to=torch.int64), [0], False)


def _refuses_bucketize(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    boundaries = arguments["boundaries"]
    if not isinstance(boundaries, fx.Node) or not is_parameter(boundaries) or len(shape_of(boundaries)) != 1:
        return "its boundaries are not a constant one-dimensional tensor"
    return None if fact(node).dtype == torch.int64 else "its result is int32"


def _searched(
    sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> dict[str, Any] | str:
    if sorter is not None:
        return "its boundaries are not sorted (sorter is given)"
    return {"input": input, "boundaries": sorted_sequence, "right": right or side == "right"}


@lowered(
    adapt=lambda input, boundaries, *, out_int32=False, right=False: {"input": input, "boundaries": boundaries, "right": right},
    calls={torch.searchsorted: _searched},
    onnx=_onnx_bucketize,
    refuses=(_refuses_bucketize, one_varying),
    demand=Plain("int64"),
)
@sampled("bucketize(x, torch.tensor([-0.5, 0.0, 0.5]))", "torch.searchsorted(torch.tensor([0.2, 0.5]), x, side='right')")
def bucketize(lowering: Lowering, input: Quantized, boundaries: Tensor, right: bool = False) -> Any:
    """Return how many of the boundaries, a row in ascending order, are below each number, or, if `right`, not above it: int64.

    Compare with each of the boundaries, and count.
    """
    relation = "ge" if right else "gt"
    lowering.describe("boundaries", input.scale)
    limits = lowering.constant("boundaries", threshold(boundaries, input.grid, relation), torch.int32)
    value = lowering.call(shape.reshape, input.value, [*numbers(input.shape), 1])
    return lowering.call(scatter.count, lowering.call(comparison.compare, value, limits, relation), [len(input.shape)], False)


# ---- among which of several numbers ------------------------------------------------------------------------------------------


def _onnx_isin(c: Call) -> str:
    rank = len(c.operand_shape)
    same = c.do("Equal", c.unsqueezed(c.input, rank), c.e.constant(c.real("elements")))
    return c.do("Cast", c.reduced("ReduceMax", c.do("Cast", same, to=torch.float32), [rank], False), to=torch.bool)


def _is_in(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> dict[str, Any] | str:
    return "invert=True has no integer form" if invert else {"input": elements, "elements": test_elements}


def _refuses_isin(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    elements = arguments["elements"]
    constant = isinstance(elements, fx.Node) and is_parameter(elements) and fact(elements).dtype == torch.int64
    return None if constant else "its test elements are not a constant integer tensor"


@lowered(
    function=lambda input, elements: torch.isin(input, elements),
    operands=("input",),
    adapt=_is_in,
    moves=True,
    refuses=(_refuses_real, _refuses_isin, one_varying),
    onnx=_onnx_isin,
    demand=Plain("bool"),
)
@sampled("isin(x.argmax(1), torch.tensor([0, 3]))")
def isin(lowering: Lowering, input: Any, elements: Tensor) -> Any:
    """Return whether each integer is one of those of a constant.

    Compare with each of the elements.
    """
    value = input.value if isinstance(input, Quantized) else lowering.given("input", input, torch.int64)
    each = lowering.call(shape.reshape, value, [*numbers(input.shape), 1])
    known = lowering.given("elements", elements.flatten(), torch.int64)
    return lowering.call(selection.truth, lowering.call(comparison.compare, each, known, "eq"), [len(input.shape)], False, False)

"""Running sums, and triangles of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.record import Operator, Same, register
from fxquant.primitives import accumulate, comparison, shape

# ---- running sums ----------------------------------------------------------------------------------------------------


def cumsum(input: Tensor, dim: int) -> Tensor:
    """Return the sum of the elements up to each one along a dimension."""
    return torch.cumsum(input, dim)


def _lower_cumsum(lowering: Lowering, input: Quantized, dim: int) -> Quantized:
    """Return the product with a triangle of ones, along the last dimension."""
    rank, size = len(input.shape), input.shape[dim]
    assert isinstance(size, int)
    largest = lowering.prove(torch.tensor(float(size * input.grid.magnitude), dtype=torch.float64, device="cpu"), "the sum")
    order = [d for d in range(rank) if d != dim % rank] + [dim % rank]
    triangle = torch.ones(size, size, dtype=torch.float32, device=input.scale.device).tril()
    value = lowering.call(shape.permute, input.value, order)
    summing = accumulate.linear if largest < FLOAT32_EXACT else accumulate.linear_wide
    total = lowering.call(summing, value, lowering.constant("ones", triangle, torch.int8), None)
    result = lowering.requantize(total, Ratio((input.scale,)))
    return result.with_value(lowering.call(shape.permute, result.value, [order.index(d) for d in range(rank)]))


def _refuses_cumsum(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or not known.shape:
        return "its operand has no dimensions"
    return None if isinstance(known.shape[arguments["dim"]], int) else "it sums over the batch, whose size is not fixed"


def _summed(input: Any, dim: int, *, dtype: Any = None) -> dict[str, Any] | str:
    return {"input": input, "dim": dim} if dtype in (None, torch.float32) else f"it computes in {dtype}"


register(
    Operator(
        "cumsum",
        cumsum,
        ("input",),
        _lower_cumsum,
        functions={torch.cumsum: _summed},
        methods={"cumsum": _summed, "cumsum_": _summed},
        refuses=_refuses_cumsum,
    )
)

# ---- triangles -------------------------------------------------------------------------------------------------------


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return the elements on and below a diagonal; zeros above."""
    return torch.tril(input, diagonal)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return the elements on and above a diagonal; zeros below."""
    return torch.triu(input, diagonal)


def _refuses_triangle(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    fixed = isinstance(known, TensorFact) and all(isinstance(size, int) for size in known.shape[-2:])
    return None if fixed and isinstance(arguments["diagonal"], int) else "the size of its matrices is not fixed"


for _function in (tril, triu):

    def _lower_triangle(lowering: Lowering, input: Quantized, diagonal: int, function: Any = _function) -> Quantized:
        """0 is on every grid."""
        sizes = [size for size in input.shape[-2:] if isinstance(size, int)]
        kept = function(torch.ones(sizes, dtype=torch.bool, device=input.scale.device), diagonal)
        zero = lowering.stored(torch.zeros((), dtype=torch.float32, device=input.scale.device), input.grid)
        zeros = lowering.constant("zero", zero, input.dtype.storage)
        return input.with_value(lowering.call(comparison.choose, input.value, zeros, lowering.given("kept", kept, torch.bool)))

    _name = _function.__name__
    register(
        Operator(
            _name,
            _function,
            ("input",),
            _lower_triangle,
            Same(),
            functions={getattr(torch, _name): None},
            methods={_name: None, f"{_name}_": None},
            refuses=_refuses_triangle,
        )
    )

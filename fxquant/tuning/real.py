"""An operator's integer function before its result is rounded. It is differentiable, also with respect to the rounding of its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxquant.lowering.eager import EagerLowering
from fxquant.lowering.epilogue import Epilogue
from fxquant.lowering.lowering import Quantized
from fxquant.numerics.grids import INT32, INT32_MAX, Grid
from fxquant.ops import map_operands
from fxquant.ops.core.weighted import epilogue
from fxquant.prepared.operators import QuantizedOperator


class RealLowering(EagerLowering):
    """Forms sums of products as the integer function does, and leaves them as float values; operands need not be integers."""

    def prove(self, bound: Tensor, what: str, limit: int = INT32_MAX) -> float:
        """Return 0: values that are not integers are not split into parts, so every sum is formed in one."""
        return 0.0

    def requantize_by(self, accumulator: Any, end: Epilogue) -> Quantized:
        """Return the dequantized accumulator."""
        value: Tensor = accumulator * end.ratio.approximate().to(accumulator.dtype)
        return Quantized(value.float(), Grid(INT32, torch.ones((), dtype=torch.float32, device=value.device)), tuple(value.shape))


def is_weighted(operator: QuantizedOperator, arguments: dict[str, Any]) -> bool:
    """Return whether an operator, given its arguments with their values, forms sums of products with a weight of its own."""
    return operator.operator.sums and weight_of(operator, arguments) is not None


def weight_of(operator: QuantizedOperator, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return its weight as it is rounded: channels are dimension 0; None if there is none."""
    weight = None if operator.plain else operator.operator.weight(**arguments)
    return weight if isinstance(weight, Tensor) else None


def real_result(operator: QuantizedOperator, arguments: dict[str, Any], *, whole: bool = True) -> Tensor:
    """Compute the result of a weighted operator for float operands, which are not rounded, before the result is rounded.

    The weight has its integers, or the values that its rounding gives in their place. Without `whole` the fused limits are left out.
    """
    given = dict(arguments)
    residual, clamp = given.pop("residual", None), given.pop("clamp", None)
    used = {name: iter(q if isinstance(q, list) else [q]) for name, q in operator.inputs.items()}

    def take(name: str, value: Tensor) -> Quantized | Tensor:
        quantizer = next(used[name])
        if quantizer is None:
            return value
        grid = quantizer.grid
        return Quantized(value / grid.scale, grid, tuple(value.shape))

    result = operator.operator.lower(operator.lowering(RealLowering), **map_operands(operator.operator, given, take))
    return epilogue(result.real(), residual, clamp if whole else None, None)


def by_channel(result: Tensor, channels: int, rank: int) -> Tensor | None:
    """Return the result of a layer, shape (C, places); None if its channels are not those of the weight, which has so many dimensions."""
    axis = result.dim() - 1 - max(rank - 2, 0)
    if axis < 0 or result.shape[axis] != channels:
        return None
    return result.movedim(axis, 0).reshape(channels, -1)

"""Primitives whose constants depend on how many elements a sum has, where that number varies: tables of constants by the number.

Each table has its rows along dimension 0, the first for a sum of no elements. The number is an int, or a node of sizes in a graph.
"""

from typing import Any

import torch
from torch import Tensor

from fxquant.primitives import elementwise, quantization
from fxquant.primitives.record import Emitter, Range, Value, constant_of, primitive, within


def _row(e: Emitter, count: str) -> Any:
    """Return a function of a table that emits its row of this number."""
    return lambda table, dtype: e.node("Gather", e.constant(table, dtype), count, axis=0)


@primitive(
    lambda e, input, count, table: e.node("Add", input, _row(e, count)(table, e.dtype(input))),
    bounds=lambda input, count, table: within(input.magnitude + constant_of(table, "table").abs().max(), input.exact),
    kind="accumulator",
)
def add_counted(input: Tensor, count: int, table: Tensor) -> Tensor:
    """Add the table's integer of this number of elements to an accumulator; the result has the accumulator's dtype."""
    return input + table[count].to(input.dtype)


def _onnx_fixed(e: Emitter, accumulator: str, count: str, *constants: Any) -> str:
    return quantization.onnx_general_fixed(e, accumulator, *constants, _row(e, count))


def _bounds_fixed(count: Any, **arguments: Any) -> Range:
    return quantization.requantized_range(**arguments)


@primitive(_onnx_fixed, bounds=_bounds_fixed)
def requantize_fixed_counted(
    accumulator: Tensor, count: int, shift: Tensor, multiplier: Tensor, right_shift: Tensor, intermediate_bits: int, rounding: str,
    low: int, high: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `requantize_fixed` with the tables' shifts and multiplier of this number of elements, int32."""
    rest = intermediate_bits, rounding, low, high, dtype
    return quantization.requantize_fixed(accumulator, shift[count], multiplier[count], right_shift[count], *rest)


def _onnx_real(
    e: Emitter, accumulator: str, count: str, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str:
    return quantization.onnx_general_real(e, accumulator, multiplier, low, high, dtype, zero_point, placed=_row(e, count))


def _bounds_real(count: Any, accumulator: Value, multiplier: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    return quantization.real_range(accumulator, multiplier, low, high, dtype, zero_point)


@primitive(_onnx_real, bounds=_bounds_real)
def requantize_real_counted(
    accumulator: Tensor, count: int, multiplier: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> Tensor:
    """Compute `requantize_real` with the table's multiplier of this number of elements, float32."""
    return quantization.requantize_real(accumulator, multiplier[count], low, high, dtype, zero_point)


# Of each primitive with constants, the one that takes tables of them after its first argument and the number.
COUNTED = {
    elementwise.add_constant: add_counted,
    quantization.requantize_fixed: requantize_fixed_counted,
    quantization.requantize_real: requantize_real_counted,
}

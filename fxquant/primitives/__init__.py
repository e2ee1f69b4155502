"""The closed set of integer primitives that every operator is lowered to; they can be called without a model.

A primitive is one function whose body defines it; its ONNX form and its range are defined next to it. `PRIMITIVES` maps
each function to its record, and each of them is an attribute of this package:

    >>> import torch
    >>> from fxquant import primitives
    >>> x = torch.tensor([[-3, 4]], dtype=torch.int8)
    >>> w = torch.tensor([[2, 5], [-1, 7]], dtype=torch.int8)
    >>> acc = primitives.linear(x, w, None)
    >>> acc
    tensor([[14, 31]], dtype=torch.int32)
    >>> primitives.requantize_real(acc, torch.tensor([0.25, 0.5]), -128, 127, torch.int8)
    tensor([[ 4, 16]], dtype=torch.int8)

Quantized tensors are stored in the dtype of their range: int8, int16, or uint8 with a zero point. `centre` subtracts the zero
point, and a primitive that rounds into such a tensor adds it. Accumulators are int32, or int64 where int32 is too narrow.
Given the same integers in a floating-point tensor, a primitive returns the same numbers as floats. A parameter per channel,
such as a multiplier or a shift, is a tensor shaped to broadcast. `real_multiplier` and `fixed_requantization` of
`fxquant.numerics.rescaling` compute the parameters of a requantization from scales. The caller has to keep the bounds that a
docstring states; those of a graph are proved when it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxquant.primitives import (
    accumulate,
    boundary,
    comparison,
    cubic,
    dynamic,
    elementwise,
    matrix,
    pool,
    position,
    product,
    requantize,
    resize,
    sampling,
    scatter,
    selection,
    shape,
    transposed,
    whole,
)
from fxquant.primitives.record import BY_NAME, POINTWISE, PRIMITIVES, Emitter, Primitive, Role, ZeroPoint, primitive, role_of

__all__ = [
    "BY_NAME", "POINTWISE", "PRIMITIVES", "Emitter", "Primitive", "Role", "ZeroPoint", "accumulate", "boundary", "comparison",
    "cubic", "dynamic", "elementwise", "matrix", "pool", "position", "primitive", "product", "requantize", "resize", "role_of",
    "sampling", "scatter", "selection", "shape", "transposed", "whole",
]  # fmt: skip


def __getattr__(name: str) -> Callable[..., Tensor]:
    if name not in BY_NAME:
        raise AttributeError(f"there is no primitive called {name!r}")
    return BY_NAME[name].function


def __dir__() -> list[str]:
    return sorted({*__all__, *BY_NAME})

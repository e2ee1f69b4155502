"""The closed set of integer primitives every operator is lowered to; they can be called without a model.

A primitive is one function whose body is its meaning; its record has its ONNX form and its range. `PRIMITIVES` maps
each function to its record, and every one of them is an attribute of this package:

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
point; primitives that round into such a tensor add it. Accumulators are stored in int32, or in int64 beyond its range.
Given the same integers in a floating-point tensor, a primitive returns the same numbers as floats. Parameters per
channel (a multiplier, a shift) are tensors shaped to broadcast. The parameters of a requantization come from scales
by `fxquant.numerics.grids.real_multiplier` and `fixed_requantization`. Bounds that a docstring states are the caller's to
keep: in a graph they are proved when it is lowered.

The body is the target of the call in an integer graph, so that graph runs as it is. A primitive's record adds the ONNX form; a smooth
surrogate where the body has no useful gradient; the bounds of its result; its kind: quantized, accumulator, float or dynamic. Its role
is what fusions, writers and kernels ask for, and its rule for zero points is a fact, too. A test runs every criterion, and
tests/pages/test_listed_names.py finds lists of names elsewhere.
"""

from collections.abc import Callable

from torch import Tensor

from fxquant.primitives import (
    accumulate,
    elementwise,
    loop,
    pool,
    product,
    quantization,
    resize,
    runtime_scales,
    selection,
    shape,
    varying,
    whole,
)
from fxquant.primitives.record import BY_NAME, POINTWISE, PRIMITIVES, Emitter, Primitive, Role, ZeroPoint, primitive, role_of

__all__ = [
    "BY_NAME", "POINTWISE", "PRIMITIVES", "Emitter", "Primitive", "Role", "ZeroPoint", "accumulate", "elementwise", "loop", "pool",
    "primitive", "product", "quantization", "resize", "role_of", "runtime_scales", "selection", "shape", "varying", "whole",
]  # fmt: skip


def __getattr__(name: str) -> Callable[..., Tensor]:
    if name not in BY_NAME:
        raise AttributeError(f"no primitive is named {name!r}")
    return BY_NAME[name].function


def __dir__() -> list[str]:
    return sorted({*__all__, *BY_NAME})

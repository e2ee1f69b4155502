"""The closed set of integer primitives every operator is lowered to.

A primitive is one function whose body is its meaning; beside it stands its ONNX form. `PRIMITIVES` maps
each function to its record.
"""

from fxquant.primitives import accumulate, boundary, elementwise, pool, product, requantize, resize, shape, transposed
from fxquant.primitives.record import PRIMITIVES, Emitter, Primitive, primitive

__all__ = [
    "PRIMITIVES",
    "Emitter",
    "Primitive",
    "accumulate",
    "boundary",
    "elementwise",
    "pool",
    "primitive",
    "product",
    "requantize",
    "resize",
    "shape",
    "transposed",
]

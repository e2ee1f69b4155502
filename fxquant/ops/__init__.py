"""The operator table: one record per operator, one file per family.

Importing this package fills the table. Adding a unary function is one line in `unary`; adding another
operator is one record in one of these files.
"""

from fxquant.ops import (
    activation,
    arithmetic,
    boundary,
    convolution,
    dropout,
    extremum,
    index,
    join,
    linear,
    normalization,
    pad,
    pixels,
    pool,
    prelu,
    resize,
    shape,
    unary,
    weighted,
)
from fxquant.ops.record import FUNCTIONS, METHODS, MODULES, OPERATORS, Operator, Parameter, Scale, map_operands, operand_nodes, operator_of

__all__ = [
    "FUNCTIONS",
    "METHODS",
    "MODULES",
    "OPERATORS",
    "Operator",
    "Parameter",
    "Scale",
    "activation",
    "arithmetic",
    "boundary",
    "convolution",
    "dropout",
    "extremum",
    "index",
    "join",
    "linear",
    "map_operands",
    "normalization",
    "operand_nodes",
    "operator_of",
    "pad",
    "pixels",
    "pool",
    "prelu",
    "resize",
    "shape",
    "unary",
    "weighted",
]

"""The operator table: one record per operator, one file per family.

Importing this package fills the table. Adding a unary function is one line in `elementwise`; adding another
operator is one record in one of these files.
"""

from fxquant.ops import boundary, elementwise, normalization, pool, shape, weighted
from fxquant.ops.record import FUNCTIONS, METHODS, MODULES, OPERATORS, Operator, Parameter, Scale, map_operands, operand_nodes, operator_of

__all__ = [
    "FUNCTIONS",
    "METHODS",
    "MODULES",
    "OPERATORS",
    "Operator",
    "Parameter",
    "Scale",
    "boundary",
    "elementwise",
    "map_operands",
    "normalization",
    "operand_nodes",
    "operator_of",
    "pool",
    "shape",
    "weighted",
]

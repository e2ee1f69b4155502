"""The operator table: one record per operator, one file per family, one folder per kind.

Importing this package imports every module below it, which fills the table. Adding a unary function is one line in
`elementwise.unary`; adding another operator is one record in one of these files.
"""

from importlib import import_module
from pkgutil import walk_packages

from fxquant.ops.core.composite import carried, copies
from fxquant.ops.core.record import (
    BY_NAME,
    FUNCTIONS,
    METHODS,
    MODULES,
    OPERATORS,
    WIDE,
    Demand,
    Fixed,
    Instead,
    Operator,
    Own,
    Parameter,
    Plain,
    Same,
    Trait,
    calls,
    demand,
    has_weights,
    map_operands,
    matters,
    on_grid_of,
    operand_nodes,
    operands_of,
    operator_of,
    preferred_by,
    preferred_dtypes,
    read_nodes,
    shares,
    sharing_operands,
    supported_demand,
    traits_of,
)

__all__ = [
    "BY_NAME", "FUNCTIONS", "METHODS", "MODULES", "OPERATORS", "WIDE", "Demand", "Fixed", "Instead", "Operator", "Own", "Parameter",
    "Plain", "Same", "Trait", "calls", "carried", "copies", "demand", "has_weights", "map_operands", "matters", "on_grid_of",
    "operand_nodes", "operands_of", "operator_of", "preferred_by", "preferred_dtypes", "read_nodes", "shares", "sharing_operands",
    "supported_demand", "traits_of",
]  # fmt: skip

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

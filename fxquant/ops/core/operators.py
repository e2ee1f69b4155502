"""Gather what files of operators are written with, so that they import it in one line."""

from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import Guard, composite, declare, lowered, settings_of, spelled, taking
from fxquant.ops.core.demands import INNER, WIDE, Demand, Fixed, Own, Plain, Same
from fxquant.ops.core.form import Call
from fxquant.ops.core.guards import COMPUTED, NO_DIMENSIONS, fixed, is_tensor, nodes, numbers, one_of, shape_of, tensors
from fxquant.ops.core.record import BY_NAME, OPERATORS, Adapt, Instead, Operator, Parameter, operator_of, register
from fxquant.ops.core.samples import ABOVE_ONE, ALIGNED, JUMPS, NORMED, POSITIVE, SHARES, WITHIN_ONE, Sample, sample
from fxquant.ops.core.traits import Trait

__all__ = [
    "ABOVE_ONE", "ALIGNED", "BY_NAME", "COMPUTED", "INNER", "JUMPS", "NORMED", "NO_DIMENSIONS", "OPERATORS", "POSITIVE", "SHARES", "WIDE",
    "WITHIN_ONE", "Adapt", "Builder", "Call", "Demand", "Fixed", "Guard", "Instead", "Operator", "Own", "Parameter", "Plain", "Same",
    "Sample", "Trait", "composite", "declare", "fixed", "is_tensor", "lowered", "nodes", "numbers", "one_of", "operator_of", "register",
    "sample", "settings_of", "shape_of", "spelled", "taking", "tensors",
]  # fmt: skip

"""Gather what files of operators are written with, so that they import it in one line."""

from fxquant.ir.graph import BatchDim, Size, TensorFact, fact, is_parameter
from fxquant.lowering.lowering import Clamp, Lowering, Quantized
from fxquant.numerics.grids import FLOAT32_EXACT, Ratio
from fxquant.numerics.rounding import clamped
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import (
    COMPUTED,
    NO_DIMENSIONS,
    Guard,
    are_fixed,
    bound,
    composite,
    fixed,
    fixed_along,
    fixed_sizes,
    function_and_method,
    is_tensor,
    known_size,
    known_sizes,
    listed,
    lowered,
    needs,
    nodes,
    numbers,
    on_the_output,
    one_of,
    selected,
    settings_of,
    shape_of,
    spelled,
    taking,
)
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import (
    INNER,
    OPERATORS,
    WIDE,
    Adapt,
    Demand,
    Fixed,
    Instead,
    Layer,
    Operator,
    Own,
    Parameter,
    Plain,
    Same,
    Trait,
    operator_named,
    operator_of,
    register,
)
from fxquant.ops.core.samples import (
    ALIGNED,
    EXACT,
    FOLDED,
    HEADS,
    IMAGES,
    LIMITED,
    NORMED,
    POSITIVE,
    ROUNDED,
    SAMPLED,
    Sample,
    sample,
    sampled,
    written,
)

__all__ = [
    "ALIGNED", "COMPUTED", "EXACT", "FLOAT32_EXACT", "FOLDED", "HEADS", "IMAGES", "INNER", "LIMITED", "NORMED", "NO_DIMENSIONS",
    "OPERATORS", "POSITIVE", "ROUNDED", "SAMPLED", "WIDE", "Adapt", "BatchDim", "Builder", "Call", "Clamp", "Demand", "Fixed",
    "Guard", "Instead", "Layer", "Lowering", "Operator", "Own", "Parameter", "Plain", "Quantized", "Ratio", "Same", "Sample", "Size",
    "TensorFact", "Trait", "are_fixed", "bound", "clamped", "composite", "fact", "fixed", "fixed_along", "fixed_sizes",
    "function_and_method", "is_parameter", "is_tensor", "known_size", "known_sizes", "listed", "lowered", "needs", "nodes", "numbers",
    "on_the_output", "one_of", "operator_named", "operator_of", "register", "sample", "sampled", "selected", "settings_of",
    "shape_of", "spelled", "taking", "written",
]  # fmt: skip

"""Gather what files of operators are written with, so that they import it in one line."""

from fxquant.ir.facts import BatchDim, Size, TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.lowering.epilogue import Clamp
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.clamping import clamped
from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.constants import on_the_output, selected
from fxquant.ops.core.declare import Guard, bound, composite, function_and_method, listed, lowered, settings_of, spelled, taking
from fxquant.ops.core.demands import INNER, WIDE, Demand, Fixed, Own, Plain, Same
from fxquant.ops.core.form import Call
from fxquant.ops.core.guards import (
    COMPUTED,
    NO_DIMENSIONS,
    are_fixed,
    fixed,
    fixed_along,
    fixed_sizes,
    is_tensor,
    known_size,
    known_sizes,
    nodes,
    numbers,
    one_of,
    shape_of,
)
from fxquant.ops.core.record import OPERATORS, Adapt, Instead, Operator, Parameter, operator_named, operator_of, register
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
from fxquant.ops.core.traits import Trait

__all__ = [
    "ALIGNED", "COMPUTED", "EXACT", "FLOAT32_EXACT", "FOLDED", "HEADS", "IMAGES", "INNER", "LIMITED", "NORMED", "NO_DIMENSIONS",
    "OPERATORS", "POSITIVE", "ROUNDED", "SAMPLED", "WIDE", "Adapt", "BatchDim", "Builder", "Call", "Clamp", "Demand", "Fixed",
    "Guard", "Instead", "Lowering", "Operator", "Own", "Parameter", "Plain", "Quantized", "Ratio", "Same", "Sample", "Size", "TensorFact",
    "Trait", "are_fixed", "bound", "clamped", "composite", "fact", "fixed", "fixed_along", "fixed_sizes", "function_and_method",
    "is_parameter", "is_tensor", "known_size", "known_sizes", "listed", "lowered", "nodes", "numbers", "on_the_output", "one_of",
    "operator_named", "operator_of", "register", "sample", "sampled", "selected", "settings_of", "shape_of", "spelled", "taking",
    "written",
]  # fmt: skip

"""Re-export the names that most operator files use, so that they import them in one statement."""

from fxquant.ir.graph import BatchDim, Size, TensorFact, fact, is_parameter
from fxquant.lowering.lowering import Clamp, Lowering, Quantized
from fxquant.numerics.grids import FLOAT32_EXACT, Ratio
from fxquant.numerics.rounding import clamped
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import are_fixed, composite, is_tensor, known_size, lowered, numbers, selected, settings_of, spelled, taking
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import INNER, OPERATORS, WIDE, Fixed, Instead, Layer, Operator, Own, Plain, Same, Trait, operator_of, register
from fxquant.ops.core.samples import ALIGNED, EXACT, FOLDED, HEADS, IMAGES, NORMED, POSITIVE, ROUNDED, SAMPLED, sample, sampled, written

__all__ = [
    "ALIGNED", "EXACT", "FLOAT32_EXACT", "FOLDED", "HEADS", "IMAGES", "INNER", "NORMED", "OPERATORS", "POSITIVE", "ROUNDED", "SAMPLED",
    "WIDE", "BatchDim", "Builder", "Call", "Clamp", "Fixed", "Instead", "Layer", "Lowering", "Operator", "Own", "Plain", "Quantized",
    "Ratio", "Same", "Size", "TensorFact", "Trait", "are_fixed", "clamped", "composite", "fact", "is_parameter", "is_tensor", "known_size",
    "lowered", "numbers", "operator_of", "register", "sample", "sampled", "selected", "settings_of", "spelled", "taking", "written",
]  # fmt: skip

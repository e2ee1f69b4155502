"""Shared by the operator files: the record, its traits, call forms, type promotion, weighted sums, composites and user operators.

A record's `demand` states the scale and dtype of the result: `Own()` a separate, calibrated scale, `Own("int16")` the same in int16,
`Same()` the scale of the operands, `Fixed(scale, dtype)` a constant scale. `otherwise=` is for targets without that dtype. `headroom=`
multiplies the calibrated scale: inner tensors of norms, softmaxes and quotients have twice the calibrated range, since one saturated
statistic spoils a whole sample. `specs.annotate` takes the dtype from the demand, `scales.share` the tensors that share a scale, and
`quantizers.insert` the kind of observer. `dtypes` states the dtype that an operator prefers for an operand; the preference is passed
on to earlier operators, up to the next one with weights, and a rule of the qconfig overrides it.

A composite has `expand(build, **arguments)` in place of `lower`: it calls other operators, with demands on inner tensors, which can
be tied to one scale (the state of a recurrence). `composite.expand` runs after `rules.match`, since rules name the operators of the
user's code, and before the fusions, which see the parts. If the target refuses one part in integers, the whole composite stays in float.
Its float function is the only reference, and a test compares the parts with it.

A dynamically quantized layer (`Trait.DYNAMIC`) is float to all passes, and nothing is fused into it. It has a weight quantizer only,
and lowers to one primitive of the kind "dynamic", which quantizes its operand at run time.

The names that most operator files use can be imported from here in one statement.
"""

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

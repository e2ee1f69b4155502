"""Methods that make a calibrated model more exact, gathered from `fxquant.accuracy`.

`calibrate` takes most of them as steps (`fxquant.accuracy.STEPS`); here each takes all samples. The result is an `AdaptiveRounding`, a
scale, a `Coverage` of a weight's scale or a `BiasCorrection`, which `lower` reads in every state.
"""

from fxquant.accuracy.bias import correct_bias
from fxquant.accuracy.distill import distill
from fxquant.accuracy.equalize import equalize
from fxquant.accuracy.learn import adaround, reconstruct
from fxquant.accuracy.weights import round_weights
from fxquant.numerics.rounding import AdaptiveRounding, Nearest, Rounding

__all__ = [
    "AdaptiveRounding", "Nearest", "Rounding", "adaround", "correct_bias", "distill", "equalize", "reconstruct", "round_weights",
]  # fmt: skip

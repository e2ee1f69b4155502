"""Methods that make a calibrated model more exact, a module each."""

from fxquant.tuning.batch_norm import reestimate_batch_norm
from fxquant.tuning.bias import correct_bias
from fxquant.tuning.distillation import distill
from fxquant.tuning.equalization import equalize
from fxquant.tuning.reconstruction import reconstruct
from fxquant.tuning.result import TunedLayer, TuningResult
from fxquant.tuning.rounding import adaround
from fxquant.tuning.second_moment import round_weights

__all__ = [
    "TunedLayer",
    "TuningResult",
    "adaround",
    "correct_bias",
    "distill",
    "equalize",
    "reconstruct",
    "reestimate_batch_norm",
    "round_weights",
]

"""Methods that make a calibrated model more exact.

A method runs its samples through the graph once, node by node, in float and in integers (`walk`), and compares both at each layer or
block. Learned parameters pass through the layer's own `lower`, with a lowering whose accumulators are differentiable (`walk.RealLowering`).
At the end the outputs on held-out samples are compared, and a method without a clear gain is undone (`effects`).

`round_weights` needs no walk in integers (`second_moment`). `calibrate` runs it after the observers, and then `correct_bias`, on the first
samples (`first_samples`). `equalize` runs before there are scales, and compares estimates of the error. `distill` runs the whole graph in
every step, in integers with gradients and in float.

The result is an `AdaptiveRounding`, a scale, a `Coverage` of a weight's scale or a `BiasCorrection`. `lower` reads it in every
state, so that training, validation and deployment still agree.
"""

from fxquant.numerics.rounding import AdaptiveRounding, Nearest, Rounding
from fxquant.tuning.batch_norm import reestimate_batch_norm
from fxquant.tuning.bias import correct_bias
from fxquant.tuning.course import adaround, reconstruct
from fxquant.tuning.distillation import distill
from fxquant.tuning.equalization import equalize
from fxquant.tuning.second_moment import round_weights

__all__ = [
    "AdaptiveRounding", "Nearest", "Rounding", "adaround", "correct_bias", "distill", "equalize", "reconstruct", "reestimate_batch_norm",
    "round_weights",
]  # fmt: skip

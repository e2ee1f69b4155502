"""TQT: scales are powers of two, and the threshold that they are rounded up from is learned.

Jain, Gural, Wu, Dick: Trained Quantization Thresholds for accurate and efficient fixed-point inference, MLSys 2020, section 3.
With a threshold t, s = 2^ceil(log2 t) / 2^(bits - 1), and rounding up passed straight through:

    ∂v̂/∂(log2 t) = s · ln 2 · (q - v/s inside, q elsewhere)

What is trained is `log2_change`, 0 at first: the logarithm of the threshold minus that of the one that training started from. The paper
trains it with Adam, whose steps do not depend on the gradient's size; for other optimizers' sake a weight's is multiplied by
`Step.proportion`, as LSQ's is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxquant.numerics.grids import SMALLEST_SCALE
from fxquant.quantization.learning.method import Method, Parameters, Step


def _start(base: Tensor, reach: float) -> Parameters:
    return (torch.zeros_like(base),)


def _scale(base: Tensor, parameters: Parameters, reach: float) -> Tensor:
    return (base * torch.exp2(parameters[0])).clamp(SMALLEST_SCALE, 1 / SMALLEST_SCALE)  # an exponent overflows where a factor does not


def _gradients(step: Step) -> Parameters:
    return (step.of_logarithm() * math.log(2),)


TQT = Method("tqt", ("log2_change",), _start, _scale, _gradients, power_of_two=True)

"""PACT: the value at which an activation is clipped is learned.

Choi, Wang, Venkataramani, Chuang, Srinivasan, Gopalakrishnan: PACT, parameterized clipping activation for quantized neural networks, 2018,
section 3. v is clipped at α, which the largest integer stands for (of a symmetric grid, the smallest stands for -α):

    ∂v̂/∂v = 1 inside, 0 elsewhere          ∂v̂/∂α = 0 inside, q / reach elsewhere: 1 above, and, where the grid has a lower half, -1 below

α itself is trained, in the unit of the tensor: weight decay, which the paper uses with the weights' strength, pulls it to 0. Its gradient
is the plain sum.
"""

from __future__ import annotations

from torch import Tensor

from fxquant.numerics.grids import SMALLEST_SCALE
from fxquant.quantization.learning.method import Method, Parameters, Step


def _start(base: Tensor, reach: float) -> Parameters:
    return (base * reach,)


def _scale(base: Tensor, parameters: Parameters, reach: float) -> Tensor:
    return (parameters[0] / reach).clamp_min(SMALLEST_SCALE)


def _gradients(step: Step) -> Parameters:
    return (step.summed(step.gradient * step.integers * ~step.inside) / max(step.high, -step.low),)


PACT = Method("pact", ("alpha",), _start, _scale, _gradients)

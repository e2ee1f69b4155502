"""LSQ+: the scale and the offset of an affine grid are learned.

Bhalgat, Lee, Nagel, Blankevoort, Kwak: LSQ+, improving low-bit quantization through learnable offsets and better initialization, CVPR
Workshops 2020, section 3. The lowest integer stands for the float value β; with v/s inside the grid, and q from 0 to `steps`:

    ∂v̂/∂s = round(v/s) - v/s inside, q elsewhere          ∂v̂/∂β = 0 inside, 1 elsewhere

The zero point is round(-β / s), an integer of the dtype, so that 0 is exact, which the
integer arithmetic requires; the paper allows any β.

The trained parameters are LSQ's `scale_change` and `offset_change`. `offset_change` starts at 0, and is a fraction of the interval that
the grid covered at the start: β is its value at the start plus that fraction. So both parameters are dimensionless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.quantization.learning.lsq import changed
from fxquant.quantization.learning.method import Method, Parameters, Step

STEPS = 255  # of the one affine dtype, uint8


def _start(base: Tensor, reach: float) -> Parameters:
    return torch.zeros_like(base), torch.zeros_like(base)


def _end(base: Tensor, end: Tensor, parameters: Parameters) -> Tensor:
    return end + parameters[1] * base * STEPS


def _gradients(step: Step) -> Parameters:
    stored = step.integers - step.low  # as the zero point is part of β
    of_scale = step.summed(step.gradient * torch.where(step.inside, step.integers - step.real, stored))
    of_offset = step.summed(step.gradient * ~step.inside)
    return of_scale * step.scale.reshape(step.base.shape), of_offset * step.base * STEPS


LSQ_PLUS = Method("lsq+", ("scale_change", "offset_change"), _start, changed, _gradients, _end)

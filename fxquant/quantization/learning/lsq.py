"""LSQ, learned step size quantization.

Esser, McKinstry, Bablani, Appuswamy, Modha: Learned Step Size Quantization, ICLR 2020, section 2. For a real
number v on a scale s, with q = clip(round(v / s), low, high) and v̂ = q · s:

    ∂v̂/∂v = 1 where low ≤ v/s ≤ high, 0 elsewhere
    ∂v̂/∂s = q - v/s where low ≤ v/s ≤ high, q elsewhere

summed over the numbers that share s. On an affine grid q and the limits are centred, and the zero point is held.

What is trained is `scale_change`, 0 at first:

    scale = base · (1 + scale_change) where scale_change ≥ 0,   base / (1 - scale_change) where scale_change < 0

It is positive whatever an optimizer does, and has no unit: scales of 0.001 and of 10 train alike. Its gradient is s · ∂L/∂s, of a weight
multiplied by `Step.proportion`; weight decay pulls it to what calibration found.

The paper trains s itself, and multiplies its gradient by 1 / sqrt(n · high). It derives that factor from what it wants, that the steps of
scales and of weights be in proportion to them, with layers of few bits; what is done here keeps to the aim where the factor does not:

- A step of s in the tensor's unit is, in proportion to s, of any size: in a U-Net of 4 bits, activations' scales moved ten thousand times
  less than its weights did, and an int16 scale grew fivefold in four steps.
- At 8 bits a clipped weight's share is high = 127 times a step, and a layer of few weights has a scale that moves some hundred times
  faster than they do.
- n counts the batch, so that gradients accumulated over parts of a batch, or over processes, were not those of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.numerics.grids import SMALLEST_SCALE
from fxquant.quantization.learning.method import Method, Parameters, Step


def changed(base: Tensor, parameters: Parameters, reach: float = 0.0) -> Tensor:
    """The scale that a change, the first parameter, makes of another."""
    change = parameters[0]
    return torch.where(change < 0, base / (1 + change.abs()), base * (1 + change)).clamp_min(SMALLEST_SCALE)


def _start(base: Tensor, reach: float) -> Parameters:
    return (torch.zeros_like(base),)


def _gradients(step: Step) -> Parameters:
    return (step.of_logarithm(),)


LSQ = Method("learned", ("scale_change",), _start, changed, _gradients)

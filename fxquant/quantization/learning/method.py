"""The methods that learn a scale: the parameters of each, the scale they give, and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.numerics.grids import SMALLEST_SCALE

Parameters = tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """The values that gradients are computed from, where values v on a scale s were quantized to integers q.

    gradient   that of the dequantized values, of v's shape
    real       v / s
    integers   q; centred on an affine grid
    inside     the inverse saturation mask, bool of v's shape: true where v is inside the grid
    scale      s, which broadcasts against v
    base       the scale that training started from, of the shape of the trained parameters
    factor     of a weight: what the trained scale was multiplied by, of that shape; 0 where it was replaced by another
    low, high  the limits of q
    """

    gradient: Tensor
    real: Tensor
    integers: Tensor
    inside: Tensor
    scale: Tensor
    base: Tensor
    factor: Tensor | None
    low: int
    high: int

    def summed(self, values: Tensor) -> Tensor:
        """Sum the values that share a scale; the result has the shape of `base`."""
        return values.sum_to_size(self.scale.shape).reshape(self.base.shape)

    def of_logarithm(self) -> Tensor:
        """Compute s · ∂L/∂s, the gradient of log s, which is dimensionless; that of a weight's scale is multiplied by `proportion`.

        ∂L/∂s is the sum of gradient · (q - v/s) inside the grid, and of gradient · q outside.
        """
        of_scale = self.summed(self.gradient * (self.integers - self.real * self.inside))
        found = of_scale * self.scale.reshape(self.base.shape)
        return found if self.factor is None else found * self.factor.square() * self.proportion()

    def proportion(self) -> Tensor:
        """Compute the factor with which a weight's scale and its values change in proportion: 1 / (|v| · s · e).

        e is the root mean square of q - v/s inside the grid and q outside, at least that of rounding, sqrt(1/12). A gradient g that is
        independent of the rounding errors has s · ∂L/∂s ≈ |g| · s · e. So a step that changes the weight by |g| / |v| of it changes the
        scale by as much. v is the weight with its batch norm; in terms of the trained weight the factor is multiplied by `factor` squared.
        """
        error = self.integers - self.real * self.inside
        squares = self.summed(error.square()).clamp_min(self.real.numel() / self.base.numel() / 12)
        size = self.summed(self.real.square()).clamp_min(1.0)  # a weight of zeros has no gradient
        step = self.scale.reshape(self.base.shape)
        return ((self.real.numel() / self.base.numel()) / (size * squares)).sqrt() / step.square()


class Method:
    """A method that learns a scale.

    name          its name as a value of `training=`
    parameters    the names of its parameters, each of the scale's shape
    power_of_two  whether the scale is rounded up to a power of two
    moves_end     whether the lowest float value of an affine grid is learned, too
    """

    name: str
    parameters: tuple[str, ...]
    power_of_two = False
    moves_end = False

    def start(self, base: Tensor, reach: float) -> Parameters:
        """Return the parameters that give this scale, on a grid whose largest |integer| is `reach`. By default: 0."""
        return tuple(torch.zeros_like(base) for _ in self.parameters)

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        """Return the current scale, which is positive, for the one that training started from."""
        raise NotImplementedError

    def gradients(self, step: Step) -> Parameters:
        """Return the gradients of the parameters."""
        raise NotImplementedError

    def end(self, base: Tensor, end: Tensor, parameters: Parameters) -> Tensor:
        """Return the current lowest float value, for the scale and the lowest float value at the start."""
        raise NotImplementedError

    def __reduce__(self) -> str:
        """Return the name of the one instance, which copies and files hold by it."""
        return next(name for name, value in globals().items() if value is self)


class _LSQ(Method):
    """Learned step size quantization.

    Esser, McKinstry, Bablani, Appuswamy, Modha: Learned Step Size Quantization, ICLR 2020, section 2. For a real
    number v on a scale s, with q = clip(round(v / s), low, high) and v̂ = q · s:

        ∂v̂/∂v = 1 where low ≤ v/s ≤ high, 0 elsewhere
        ∂v̂/∂s = q - v/s where low ≤ v/s ≤ high, q elsewhere

    summed over the numbers that share s. On an affine grid q and the limits are centred, and the zero point is held.

    What is trained is `scale_change`, 0 at first:

        scale = base · (1 + scale_change) where scale_change ≥ 0,   base / (1 - scale_change) where scale_change < 0

    It is positive whatever an optimizer does, and has no unit: scales of 0.001 and of 10 train alike. Its gradient is s · ∂L/∂s, of a
    weight multiplied by `Step.proportion`; weight decay pulls it to what calibration found.

    The paper trains s itself, and multiplies its gradient by 1 / sqrt(n · high), so that the steps of scales and of weights are in
    proportion to them in layers of few bits. `Step.proportion` keeps to that aim where the factor does not:

    - A step of s in the tensor's unit is, in proportion to s, of any size: in a U-Net of 4 bits, activations' scales moved ten thousand
      times less than its weights did, and an int16 scale grew fivefold in four steps.
    - At 8 bits a clipped weight's share is high = 127 times a step, and a layer of few weights has a scale that moves some hundred times
      faster than they do.
    - n counts the batch, so that gradients accumulated over parts of a batch, or over processes, were not those of the whole.
    """

    name = "learned"
    parameters: tuple[str, ...] = ("scale_change",)

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        change = parameters[0]
        return torch.where(change < 0, base / (1 + change.abs()), base * (1 + change)).clamp_min(SMALLEST_SCALE)

    def gradients(self, step: Step) -> Parameters:
        return (step.of_logarithm(),)


class _LSQPlus(_LSQ):
    """LSQ+: the scale and the offset of an affine grid are learned.

    Bhalgat, Lee, Nagel, Blankevoort, Kwak: LSQ+, improving low-bit quantization through learnable offsets and better initialization, CVPR
    Workshops 2020, section 3. The lowest integer stands for the float value β; with v/s inside the grid, and q from 0 to `STEPS`:

        ∂v̂/∂s = round(v/s) - v/s inside, q elsewhere          ∂v̂/∂β = 0 inside, 1 elsewhere

    The zero point is round(-β / s), an integer of the dtype, so that 0 is exact, as integer arithmetic requires; the paper allows any β.
    `offset_change` starts at 0, and is a fraction of the interval that the grid covered at the start: β is its value at the start plus
    that fraction. So both parameters are dimensionless.
    """

    name = "lsq+"
    parameters: tuple[str, ...] = ("scale_change", "offset_change")
    moves_end = True

    def end(self, base: Tensor, end: Tensor, parameters: Parameters) -> Tensor:
        return end + parameters[1] * base * STEPS

    def gradients(self, step: Step) -> Parameters:
        stored = step.integers - step.low  # as the zero point is part of β
        of_scale = step.summed(step.gradient * torch.where(step.inside, step.integers - step.real, stored))
        of_offset = step.summed(step.gradient * ~step.inside)
        return of_scale * step.scale.reshape(step.base.shape), of_offset * step.base * STEPS


class _PACT(Method):
    """The value at which an activation is clipped is learned.

    Choi, Wang, Venkataramani, Chuang, Srinivasan, Gopalakrishnan: PACT, parameterized clipping activation for quantized neural networks,
    2018, section 3. v is clipped at α, which the largest integer stands for (of a symmetric grid, the smallest stands for -α):

        ∂v̂/∂v = 1 inside, 0 elsewhere     ∂v̂/∂α = 0 inside, q / reach elsewhere: 1 above, and, where the grid has a lower half, -1 below

    α itself is trained, in the unit of the tensor: weight decay, which the paper uses with the weights' strength, pulls it to 0. Its
    gradient is the plain sum.
    """

    name = "pact"
    parameters: tuple[str, ...] = ("alpha",)

    def start(self, base: Tensor, reach: float) -> Parameters:
        return (base * reach,)

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        return (parameters[0] / reach).clamp_min(SMALLEST_SCALE)

    def gradients(self, step: Step) -> Parameters:
        return (step.summed(step.gradient * step.integers * ~step.inside) / max(step.high, -step.low),)


class _TQT(Method):
    """Scales are powers of two, and the threshold that they are rounded up from is learned.

    Jain, Gural, Wu, Dick: Trained Quantization Thresholds for accurate and efficient fixed-point inference, MLSys 2020, section 3.
    With a threshold t, s = 2^ceil(log2 t) / 2^(bits - 1), and rounding up passed straight through:

        ∂v̂/∂(log2 t) = s · ln 2 · (q - v/s inside, q elsewhere)

    What is trained is `log2_change`, 0 at first: the logarithm of the threshold minus that of the one that training started from. The
    paper trains it with Adam, whose steps do not depend on the gradient's size; for other optimizers' sake a weight's is multiplied by
    `Step.proportion`, as LSQ's is.
    """

    name = "tqt"
    parameters: tuple[str, ...] = ("log2_change",)
    power_of_two = True

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        # an exponent overflows where a factor does not
        return (base * torch.exp2(parameters[0])).clamp(SMALLEST_SCALE, 1 / SMALLEST_SCALE)

    def gradients(self, step: Step) -> Parameters:
        return (step.of_logarithm() * math.log(2),)


STEPS = 255  # of the one affine dtype, uint8
LSQ, LSQ_PLUS, PACT, TQT = _LSQ(), _LSQPlus(), _PACT(), _TQT()

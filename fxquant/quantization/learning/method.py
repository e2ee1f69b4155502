"""The record of a method that learns a scale: its parameters, the scale they give, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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

    def of_scale(self) -> Tensor:
        """Compute ∂L/∂s: the sum of gradient · (q - v/s) inside the grid, and of gradient · q outside."""
        return self.summed(self.gradient * (self.integers - self.real * self.inside))

    def of_logarithm(self) -> Tensor:
        """Compute s · ∂L/∂s, the gradient of log s, which is dimensionless; that of a weight's scale is multiplied by `proportion`."""
        found = self.of_scale() * self.scale.reshape(self.base.shape)
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


@dataclass(frozen=True)
class Method:
    """A method that learns a scale.

    name          its name as a value of `training=`
    parameters    the names of its parameters, each of the scale's shape
    start         from a scale and the grid's reach, the largest |integer|: the values of the parameters that give this scale
    scale         from the scale that training started from, the parameters and the reach: the current scale, which is positive
    gradients     the gradients of the parameters
    end           None, or, from the scale and the lowest float value at the start and the parameters: the current lowest float value
    power_of_two  whether the scale is rounded up to a power of two
    """

    name: str
    parameters: tuple[str, ...]
    start: Callable[[Tensor, float], Parameters]
    scale: Callable[[Tensor, Parameters, float], Tensor]
    gradients: Callable[[Step], Parameters]
    end: Callable[[Tensor, Tensor, Parameters], Tensor] | None = None
    power_of_two: bool = False

"""What a way to learn a scale is: its parameters, the scale they give, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Parameters = tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """What gradients are made from, where numbers v on a scale s became integers q.

    gradient   that of the real number which each integer stands for, of v's shape
    real       v / s
    integers   q; centred on an affine grid
    inside     bool: where the grid reaches
    scale      s, which broadcasts against v
    base       the scale that training started from, of the shape of what is trained
    factor     of a weight: what the trained scale was multiplied by, of that shape; 0 where another took its place
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
        """The sum over the numbers that share a scale."""
        return values.sum_to_size(self.scale.shape).reshape(self.base.shape)

    def of_scale(self) -> Tensor:
        """∂L/∂s: the sum of gradient · (q - v/s) where the grid reaches, and gradient · q beyond."""
        return self.summed(self.gradient * (self.integers - self.real * self.inside))

    def of_logarithm(self) -> Tensor:
        """s · ∂L/∂s: that of the logarithm, which has no unit; of a weight, in the proportion of its steps to it."""
        found = self.of_scale() * self.scale.reshape(self.base.shape)
        return found if self.factor is None else found * self.factor.square() * self.proportion()

    def proportion(self) -> Tensor:
        """What makes a weight's scale move as its numbers do, in proportion: 1 / (|v| · s · e).

        e is the root mean square of q - v/s inside and q beyond, at least that of rounding, sqrt(1/12). A gradient g that knows nothing of
        roundings has s · ∂L/∂s ≈ |g| · s · e, so that a step which moves the weight by |g| / |v| of it moves the scale by as much. v is
        the weight with its batch norm; in terms of the one that is trained this is times `factor` squared.
        """
        error = self.integers - self.real * self.inside
        squares = self.summed(error.square()).clamp_min(self.real.numel() / self.base.numel() / 12)
        size = self.summed(self.real.square()).clamp_min(1.0)  # a weight of zeros has no gradient
        step = self.scale.reshape(self.base.shape)
        return ((self.real.numel() / self.base.numel()) / (size * squares)).sqrt() / step.square()


@dataclass(frozen=True)
class Method:
    """A way to learn a scale.

    name          what `training=` calls it
    parameters    the names of its parameters, each of the scale's shape
    start         from a scale and the grid's reach, the largest |integer|: the values of the parameters that give it
    scale         from the scale that training started from, the parameters and the reach: the scale of the moment, which is positive
    gradients     the gradients of the parameters
    end           None, or, from the start's scale and lowest real number and the parameters: the lowest real number of the moment
    power_of_two  whether the scale is rounded up to a power of two
    """

    name: str
    parameters: tuple[str, ...]
    start: Callable[[Tensor, float], Parameters]
    scale: Callable[[Tensor, Parameters, float], Tensor]
    gradients: Callable[[Step], Parameters]
    end: Callable[[Tensor, Tensor, Parameters], Tensor] | None = None
    power_of_two: bool = False

"""The end of an operator's integer function: how an accumulator becomes a quantized tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fxquant.numerics.grids import INT32_MAX, power_of_two
from fxquant.numerics.rescaling import Ratio
from fxquant.primitives.arithmetic import VALUE
from fxquant.quantization.quantizer import Quantizer

Clamp = tuple[float | None, float | None]


Lift = Callable[[Tensor], Tensor]
"""What the bias of a layer becomes larger by for an output on a scale: half a step, in steps of the sum; float64, shaped to broadcast."""


class ResidualFactor(NamedTuple):
    """The factor of a residual that is added to an accumulator: per channel, shaped to broadcast.

    multiplier   integers, with gradients while training
    right_shift  of the product, rounding down; None for none
    """

    multiplier: Any
    right_shift: Any = None

    def value(self) -> Tensor:
        """Return the factor as a tensor; only for eager lowering."""
        factor: Tensor = self.multiplier
        return factor if self.right_shift is None else factor * power_of_two(-self.right_shift)


@dataclass(frozen=True)
class Epilogue:
    """How an accumulator becomes a quantized tensor.

    ratio  the step of the accumulator
    clamp  the float interval that limits the result; None for none
    bound  the largest magnitude of the accumulator, where it may exceed 32 bits
    lift   what the bias of a layer holds of a step of the output; None for an accumulator without
    kind   what was accumulated
    to     the quantizer of the result; None for the operator's output
    role   the beginning of the names of its constants
    """

    ratio: Ratio
    clamp: Clamp | None = None
    bound: float = 0
    lift: Lift | None = None
    kind: str = VALUE
    to: Quantizer | None = None
    role: str = ""

    @property
    def accumulator_bits(self) -> int:
        """The bits that hold the accumulator."""
        return 32 if self.bound <= INT32_MAX else 48

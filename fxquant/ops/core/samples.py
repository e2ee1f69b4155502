"""Small samples of an operator's arguments, on its record: tests and benchmarks make their inputs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.numerics.grids import Interval

# Intervals that samples are uniform in.
POSITIVE, ABOVE_ONE, WITHIN_ONE, SHARES = (0.3, 3.0), (1.2, 3.0), (-0.9, 0.9), (0.1, 0.9)

IMAGES = {1: (3, 9), 2: (3, 6, 6), 3: (3, 4, 5, 6)}  # shapes, by the number of spatial dimensions
ALIGNED = 0.54  # steps, where operands are brought to a common scale first
NORMED = 1.5  # steps, of a result that does not grow with the operand, so that the largest of it may be cut off
JUMPS = 4.0  # steps, of a function that jumps from its largest value: it comes near it where no batch did


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    arguments  by canonical parameter: of one that takes an activation the shape of a float32 tensor, without the batch; of any other the
               value itself. A parameter that is absent has its default
    over       the interval in which activations are uniform; None: they are normal
    within     the largest distance of the integer result from the float function, in steps of the result's scale, for int8 activations
               that lie on their grid; None: what its kind of operator allows
    """

    arguments: Mapping[str, Any]
    over: Interval | None = None
    within: float | None = None


def sample(over: Interval | None = None, within: float | None = None, **arguments: Any) -> Sample:
    """Return a sample with these arguments, by name; see `Sample`."""
    return Sample(arguments, over, within)


def drawn(shape: tuple[int, ...], over: Interval | None, batch: int, generator: torch.Generator) -> Tensor:
    """Return a float32 CPU tensor of shape (batch, *shape): normal, or uniform in an interval."""
    if over is None:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float32, device="cpu")
    low, high = over
    return low + (high - low) * torch.rand(batch, *shape, generator=generator, dtype=torch.float32, device="cpu")

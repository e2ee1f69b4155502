"""Follow the ranges of batches in training: the threshold of a tensor moves with its range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxquant.numerics.grids import SMALLEST_SCALE, float32
from fxquant.quantization.observers import MinMaxObserver, MovingAverageMinMaxObserver
from fxquant.quantization.observers.ranges import averaged, in_numbers

FAR = 2.0  # times as far as a threshold


def stays(threshold: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return whether a threshold stays where it is, as the end of the range falls from `before` to `after`."""
    return (after.abs() < before.abs()) & (FAR * threshold.double().abs() < after.double().abs())


def follow_in_numbers(value: Tensor, range: MinMaxObserver, scale: Tensor, batches_used: Tensor, high: int) -> bool:
    """Follow a batch with Python numbers, each result rounded to float32 as in a tensor, which is faster for scalars.

    `range` and `scale` are those of a tensor of a symmetric dtype, whose highest integer is `high`. The range, the scale and the number
    of batches are changed in place. Return whether that was possible; if not, nothing is changed.
    """
    if type(range) not in (MinMaxObserver, MovingAverageMinMaxObserver) or not value.numel():
        return False
    moved = (range.low, range.high, range.count, scale)
    if not in_numbers(*moved):
        return False
    low, most = (float(end.float()) for end in torch.aminmax(value.detach()))
    own_low, own_high, count, step = float(moved[0]), float(moved[1]), int(moved[2]), float(scale)
    before = max(abs(own_low), abs(own_high))
    if not (math.isfinite(low) and math.isfinite(most) and 0 < before < math.inf) or count == 0:
        return False
    if isinstance(range, MovingAverageMinMaxObserver):
        constant = range.averaging_constant
        low, most = (averaged(own, end, count + 1, constant) for own, end in ((own_low, low), (own_high, most)))
    else:
        low, most = min(own_low, low), max(own_high, most)
    largest = max(abs(low), abs(most))
    if not (largest < before and FAR * step * high < largest):  # `stays`
        step = max(float32(step * float32(largest / before)), SMALLEST_SCALE)
    if not math.isfinite(step):
        return False
    for buffer, number in zip((*moved, batches_used), (low, most, count + 1, step, count + 1), strict=True):
        buffer.fill_(number)
    return True

"""Observers: they watch a tensor's values and say which scale, or which interval, covers them."""

from fxquant.quantization.observers.histogram import (
    ClipStdObserver,
    HistogramObserver,
    KLObserver,
    LpObserver,
    MSEObserver,
    PercentileObserver,
)
from fxquant.quantization.observers.ranges import ClipObserver, FixedScaleObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer

__all__ = [
    "ClipObserver", "ClipStdObserver", "FixedScaleObserver", "HistogramObserver", "KLObserver", "LpObserver", "MSEObserver",
    "MinMaxObserver", "MovingAverageMinMaxObserver", "Observer", "PercentileObserver",
]  # fmt: skip

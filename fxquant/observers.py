"""Observers of activations, and their statistics in files (observations), from which a later calibration starts."""

from fxquant.accuracy.observations import Observations, observations
from fxquant.quantization.observers import (
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    HistogramObserver,
    KLObserver,
    LpObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
)

__all__ = [
    "ClipObserver", "ClipStdObserver", "FixedScaleObserver", "HistogramObserver", "KLObserver", "LpObserver", "MSEObserver",
    "MinMaxObserver", "MovingAverageMinMaxObserver", "Observations", "Observer", "PercentileObserver", "observations",
]  # fmt: skip

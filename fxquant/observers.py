"""Observers of activations, and what they recorded: files of observations that a later calibration starts from."""

from fxquant.accuracy.observations import Observations, observations
from fxquant.quantization.observers import (
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    HistogramObserver,
    KLObserver,
    LpObserver,
    MinMaxObserver,
    MixObserver,
    MovingAverageMinMaxObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
)

__all__ = [
    "ClipObserver", "ClipStdObserver", "FixedScaleObserver", "HistogramObserver", "KLObserver", "LpObserver", "MSEObserver",
    "MinMaxObserver", "MixObserver", "MovingAverageMinMaxObserver", "Observations", "Observer", "PercentileObserver", "observations",
]  # fmt: skip

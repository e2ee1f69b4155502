"""Observers: they watch a tensor's values and say which scale, or which interval, covers them."""

from fxquant.quantization.observers.distribution import ClipStdObserver, KLObserver, MixObserver, PercentileObserver
from fxquant.quantization.observers.histogram import Gathering, HistogramObserver, LpObserver, MSEObserver, gathering, observe_together
from fxquant.quantization.observers.ranges import (
    CLASSES,
    SETTINGS,
    ClipObserver,
    FixedScaleObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    Observer,
    observer_named,
    settings,
)

__all__ = [
    "CLASSES",
    "SETTINGS",
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "Gathering",
    "HistogramObserver",
    "KLObserver",
    "LpObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "MovingAverageMinMaxObserver",
    "Observer",
    "PercentileObserver",
    "gathering",
    "observe_together",
    "observer_named",
    "settings",
]

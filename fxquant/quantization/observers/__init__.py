"""Observers: they watch a tensor's values and say which scale, or which interval, covers them."""

from fxquant.quantization.observers.distribution import ClipStdObserver, KLObserver, MixObserver, PercentileObserver
from fxquant.quantization.observers.histogram import HistogramObserver, LpObserver, MSEObserver, sampled
from fxquant.quantization.observers.ranges import (
    CLASSES,
    NAMED,
    SETTINGS,
    ClipObserver,
    FixedScaleObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    Observer,
    finite_range,
    observer_named,
    settings,
)
from fxquant.quantization.observers.together import Gathering, beside, gathering, many_at_ends, observe_together, on_step

__all__ = [
    "CLASSES",
    "NAMED",
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
    "beside",
    "finite_range",
    "gathering",
    "many_at_ends",
    "observe_together",
    "observer_named",
    "on_step",
    "sampled",
    "settings",
]

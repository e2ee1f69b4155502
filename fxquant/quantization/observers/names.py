"""The observers that go by a name of their own: fxquant's, PyTorch's and Horizon's words for the same."""

from __future__ import annotations

from collections.abc import Mapping

from fxquant.quantization.observers.distribution import ClipStdObserver, KLObserver, MixObserver, PercentileObserver
from fxquant.quantization.observers.histogram import HistogramObserver, LpObserver, MSEObserver
from fxquant.quantization.observers.ranges import MinMaxObserver, MovingAverageMinMaxObserver, Observer

NAMED: Mapping[str, type[Observer]] = {
    "min_max": MinMaxObserver,
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
    "mse": MSEObserver,
    "lp": LpObserver,
    "percentile": PercentileObserver,
    "kl": KLObserver,
    "entropy": KLObserver,
    "mix": MixObserver,
    "clip_std": ClipStdObserver,
}


def observer_named(name: str) -> type[Observer]:
    """Return the observer of this name, with its usual settings. Raises ValueError, with the list, if there is none."""
    if name not in NAMED:
        raise ValueError(f"the observers with a name are {', '.join(map(repr, NAMED))}")
    return NAMED[name]

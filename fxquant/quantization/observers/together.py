"""Which observers gather the same, so that what one has seen serves the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast

from torch import Tensor, nn

from fxquant.numerics.grids import IntType, end_on_step
from fxquant.quantization.observers.histogram import HistogramObserver
from fxquant.quantization.observers.ranges import MinMaxObserver, MovingAverageMinMaxObserver, Observer, finite_range, finite_ranges


@lru_cache
def standard() -> dict[type[Observer], Gathering | None]:
    """Observers that gather, between them, what each of fxquant's needs with its usual settings, and how each of them gathers."""
    return {kind: gathering(kind()) for kind in (MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver)}


Gathering = tuple[str, tuple[tuple[str, float], ...]]  # the name of a class, and the settings that say what it gathers


def observe_together(observers: Sequence[Observer], value: Tensor, items: bool = False) -> None:
    """Let observers take in one batch, a float tensor, whose range is computed once for all of fxquant's observers.

    With `items`, dimension 0 is the batch dimension, and the norms of the samples are distinguished.
    Raises ValueError, and changes none of these, if any value is NaN or infinite.
    """
    apart = items and value.dim() > 1 and any(isinstance(observer, HistogramObserver) for observer in observers)
    (low, high), each = finite_ranges(value) if apart else (finite_range(value), None)
    for observer in observers:
        if gathering(observer) is None:
            observer.observe(value)
        else:
            cast(_Gathers, observer).take(value, low, high, each)


def beside(observer: Observer) -> dict[str, nn.Module]:
    """Return the observers, by class, that have to observe beside this one, so that all of `standard` do."""
    there = gathering(observer)
    return {kind.__name__: kind() for kind, gathers in standard().items() if gathers != there}


def many_at_ends(observers: Sequence[Observer], dtype: IntType) -> tuple[bool, bool]:
    """Return whether many values lie at the smallest and at the largest value, by the histogram among these observers.

    Of a symmetric dtype both say whether many lie at the largest magnitude.
    """
    return next((each.crowded(dtype) for each in observers if isinstance(each, HistogramObserver)), (False, False))


def on_step(scale: Tensor, dtype: IntType, observers: Sequence[Observer]) -> Tensor:
    """Return the scale of a symmetric dtype, float32, changed so that the largest magnitude is the last step if many values lie there.

    Only a magnitude less than one step beyond that changes it.
    """
    histogram = next((each for each in observers if isinstance(each, HistogramObserver)), None)
    if histogram is None or not histogram.crowded(dtype)[1]:
        return scale
    return end_on_step(scale, histogram.largest, dtype.high)


def gathering(observer: Observer) -> Gathering | None:
    """How an observer gathers, so that observers of one way, which differ in how they choose a scale, can take over from each other.

    None if its class has a method `observe` of its own, whose statistics mean something to that class alone.
    """
    for kind, names in _GATHERING.items():
        if type(observer).observe is kind.observe:
            return kind.__name__, tuple((name, getattr(observer, name)) for name in names)
    return None


_Gathers = MinMaxObserver | HistogramObserver
_GATHERING: Mapping[type[Observer], tuple[str, ...]] = {
    MinMaxObserver: (),
    MovingAverageMinMaxObserver: ("averaging_constant",),
    HistogramObserver: ("bins", "sample"),
}

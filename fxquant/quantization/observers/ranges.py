"""Observe tensors: the statistics of a whole tensor, the base class of observers, and the observers of the smallest and largest value.

An observer streams: it stores a few numbers for any number of batches. Another observer is a class with
`observe` and `scale`, and with `interval` if affine dtypes are to use their zero point. `names=` gives it names:

    class LaplaceObserver(HistogramObserver, names="laplace"): ...
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.errors import ConfigurationError
from fxquant.numerics.grids import FLOAT32_EPSILON, INT8, Interval, IntType, float32, scale_from_range
from fxquant.support import Offers
from fxquant.support.arguments import checked

# ---- the statistics that observers compute of a whole tensor: the minimum and maximum of its items, and histograms ---
#
# They are computed in PyTorch here, on every device. A backend may offer kernels that read the tensor once, without copies (`OFFERS`).
OFFERS = Offers[Any]()  # kernels of a backend, each with the results of the function of its name in this module


def ends(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of each row, of shape (rows,); NaN where a row holds one."""
    offered = OFFERS.first(rows)
    if offered is not None:
        return offered.ends(rows)  # type: ignore[no-any-return]
    low, high = torch.aminmax(rows, dim=1)
    return low, high


def magnitudes(value: Tensor, count: int, bins: int, reach: float, negative: bool) -> tuple[Tensor, Tensor | None, float]:
    """Count the magnitudes in each bin of [0, reach].

    Return the counts of all values and of the negative ones alone, each of shape (bins,), and how many elements of the tensor one counted
    element represents. Of a tensor of twice `count` elements or more, `count` are counted (see `sampled`). Where `negative` is false, the
    tensor holds no negative values, and their counts are None.
    """
    share = 1.0 if value.numel() < 2 * count else value.numel() / count
    offered = OFFERS.first(value)
    if offered is not None:
        counts, below = offered.magnitudes(value, None if share == 1.0 else places(value.numel(), count), bins, reach)
        return counts, below if negative else None, share
    values = sampled(value, count).float()
    counts = torch.histc(values.abs(), bins, 0.0, reach)
    return counts, torch.histc(-values[values < 0], bins, 0.0, reach) if negative and bool((values < 0).any()) else None, share


def signed(rows: Tensor, chosen: Sequence[int] | None, apart: int, bins: int, top: float) -> Tensor:
    """Count every `apart`-th element of the chosen rows in the bins of [-top, top]; the result has shape (bins,). None: of all rows."""
    offered = OFFERS.first(rows)
    if offered is not None:
        return offered.signed(rows, range(len(rows)) if chosen is None else chosen, apart, bins, top)  # type: ignore[no-any-return]
    few = rows[:, ::apart]
    return torch.histc(few if chosen is None else few[list(chosen)], bins, -top, top)


def sampled(value: Tensor, count: int) -> Tensor:
    """Return `count` of a tensor's elements, one-dimensional; every element if there are fewer than 2 · `count`.

    The tensor, read in the order of its dimensions, is cut into `count` sections of equal length, and one element is taken at a random
    index of each, so that every element is equally likely, whatever period the values have. The indices depend on the two sizes alone:
    the same values give the same sample on every thread and rank.
    """
    return value.flatten() if value.numel() < 2 * count else torch.take(value, places(value.numel(), count).to(value.device))


@lru_cache(maxsize=16)
def places(size: int, count: int) -> Tensor:
    """Return the indices of the elements that `sampled` takes, int64 of shape (count,)."""
    return ((torch.arange(count, dtype=torch.float64, device="cpu") + _within(count)) * (size / count)).long().clamp_max_(size - 1)


@lru_cache(maxsize=4)
def _within(count: int) -> Tensor:
    """Return where in its section each element is taken, in [0, 1), float64 of shape (count,)."""
    return torch.rand(count, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))


class Method(Enum):
    """The way in which calibration chooses the ranges of the default observer; `ERROR` is the usual one."""

    ERROR = "the squared error of all samples"
    EACH = "the noise of each sample"
    MIN_MAX = "the smallest and the largest value"
    PERCENTILE = "99.995 % of the values"


class Observer(nn.Module):
    """The base class of observers. `observed` is False until the first batch.

    A subclass that is declared with `names=`, of several words or none, is known by each of them, as in `ActivationConfig(observer="mse")`.
    Files then hold it by its class and by the arguments of its constructor, which are its attributes. Raises ConfigurationError where
    another class has one of the names.
    """

    count: Tensor

    def __init_subclass__(cls, names: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if names is not None:
            for other in (CLASSES.get(cls.__name__), *map(NAMED.get, names.split())):
                if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                    what = f"the observer {cls.__name__} cannot be declared with names={names!r}"
                    because = f"{other.__module__}.{other.__qualname__} has that name, and files and configs would mean either"
                    remedy = "choose another name; a class that is declared a second time replaces the first"
                    raise ConfigurationError(what, because=because, remedy=remedy)
            NAMED.update(dict.fromkeys(names.split(), cls))
            CLASSES[cls.__name__] = cls
            SETTINGS[cls] = tuple(inspect.signature(cls.__init__).parameters)[1:]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device="cpu"))

    @property
    def observed(self) -> bool:
        return bool(self.count > 0)

    @property
    def only_zeros(self) -> bool:
        """Whether all observed values were 0. By default: whether the scale is FLOAT32_EPSILON, the scale of tensors of zeros."""
        return self.observed and bool(self.scale(INT8) == FLOAT32_EPSILON)

    def observe(self, value: Tensor) -> None:
        """Take in one batch, a float tensor of any shape. Raises ValueError, and changes nothing, if any value is NaN or infinite."""
        raise NotImplementedError

    def scale(self, dtype: IntType) -> Tensor:
        """Return the scale for the observed values, float32 of shape ()."""
        raise NotImplementedError

    def scale_before_rounding(self, dtype: IntType) -> Tensor:
        """Return the scale for the observed values, where it is then rounded up to a power of two. By default: `scale`."""
        return self.scale(dtype)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        """Return the interval of float values, float32, that the integers of an affine dtype should stand for.

        By default: the interval of int8 with this observer's scale; the zero point is then 128.
        """
        scale = self.scale(INT8)
        return scale * INT8.low, scale * INT8.high

    def range_observer(self) -> MinMaxObserver:
        """Return the observer whose range the scale follows in state TRAIN. By default: a moving average."""
        return MovingAverageMinMaxObserver()

    def of_output(self) -> Observer:
        """Return the observer that chooses the scale where the tensor is an output of the model. By default: this observer."""
        return self

    def read_by(self, functions: tuple[Callable[[Tensor], Tensor], ...]) -> Observer:
        """Return the observer that chooses the scale of a tensor read only by elementwise `functions`. By default: the observer itself."""
        return self

    def by(self, method: Method) -> Observer:
        """Return the observer that chooses the scale by `method`, from the same observations. By default: the observer itself."""
        return self

    def reset(self) -> None:
        """Discard all observations. By default: every buffer becomes zero."""
        for buffer in self.buffers():
            buffer.zero_()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in SETTINGS.get(type(self), ()))


# The observers that are declared with names: by each name, by that of their class, and the arguments of their constructors.
NAMED: dict[str, type[Observer]] = {}
CLASSES: dict[str, type[Observer]] = {}
SETTINGS: dict[type[nn.Module], tuple[str, ...]] = {}


def observer_named(name: str) -> type[Observer]:
    """Return the observer of this name, with its usual settings. Raises ValueError, with the list, if there is none."""
    if name not in NAMED:
        raise ValueError(f"the observers with a name are {', '.join(map(repr, NAMED))}")
    return NAMED[name]


class MinMaxObserver(Observer, names="min_max minmax"):
    """Covers every observed value: the scale comes from the smallest and the largest one."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("high", torch.zeros((), dtype=torch.float32, device="cpu"))

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of the range."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def only_zeros(self) -> bool:
        return self.observed and bool(self.largest == 0)

    @property
    def ends(self) -> Tensor:
        """The range, widened to hold 0: float32 of shape (2,)."""
        return torch.stack((self.low.clamp_max(0.0), self.high.clamp_min(0.0)))

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))

    def take(self, value: Tensor, low: Tensor, high: Tensor, items: tuple[Tensor, Tensor] | None = None) -> None:
        """Take in a batch whose range is known."""
        if in_numbers(low, high, self.low, self.high, self.count):
            more = int(self.count) > 0
            self.low.fill_(min(float(self.low), float(low)) if more else float(low))
            self.high.fill_(max(float(self.high), float(high)) if more else float(high))
        else:
            first = self.count == 0
            self.low.copy_(torch.where(first, low, torch.minimum(self.low, low)))
            self.high.copy_(torch.where(first, high, torch.maximum(self.high, high)))
        self.count.add_(1)

    def scale(self, dtype: IntType) -> Tensor:
        return scale_from_range(self.low, self.high, dtype)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        low, high = self.ends
        return low, high

    def range_observer(self) -> MinMaxObserver:
        return MinMaxObserver()


class MovingAverageMinMaxObserver(MinMaxObserver, names="moving_average"):
    """Covers the average of the batches' ranges.

    The first 1/averaging_constant batches count equally; later ones enter with weight `averaging_constant`, as the second one does already
    in PyTorch's observer of this name.
    """

    @checked()
    def __init__(self, averaging_constant: float = 0.01) -> None:
        super().__init__()
        self.averaging_constant = averaging_constant

    def observe(self, value: Tensor) -> None:
        self.take(value, *finite_range(value))  # its own: observers are distinguished apart by the `observe` of their class

    def take(self, value: Tensor, low: Tensor, high: Tensor, items: tuple[Tensor, Tensor] | None = None) -> None:
        """Take in a batch whose range is known."""
        self.count.add_(1)
        if in_numbers(low, high, self.low, self.high, self.count):
            for end, observed in ((self.low, low), (self.high, high)):
                end.fill_(averaged(float(end), float(observed), int(self.count), self.averaging_constant))
            return
        weight = torch.clamp_min(1 / self.count, self.averaging_constant)
        self.low.add_((low - self.low) * weight)
        self.high.add_((high - self.high) * weight)

    def range_observer(self) -> MinMaxObserver:
        return MovingAverageMinMaxObserver(self.averaging_constant)


class ClipObserver(MinMaxObserver, names=""):
    """Covers the observed range, clipped to two bounds around 0: values outside count as the bound."""

    @checked()
    def __init__(self, lowest: float, highest: float) -> None:
        super().__init__()
        if not lowest <= 0 <= highest or lowest == highest:
            because = "0 has an integer in every dtype, so it lies between the bounds"
            remedy = "pass lowest=… that is 0 or negative and highest=… that is 0 or positive"
            raise ConfigurationError(f"ClipObserver({lowest}, {highest}) covers nothing", because=because, remedy=remedy)
        self.lowest, self.highest = lowest, highest

    @property
    def ends(self) -> Tensor:
        """Return the observed range, widened to hold 0 and clipped to `lowest` and `highest`: float32 of shape (2,)."""
        return super().ends.clamp(self.lowest, self.highest)

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of the clipped range."""
        return self.ends.abs().max()

    def scale(self, dtype: IntType) -> Tensor:
        low, high = self.ends
        return scale_from_range(low, high, dtype)

    def range_observer(self) -> MinMaxObserver:
        return ClipObserver(self.lowest, self.highest)


class FixedScaleObserver(Observer):
    """A constant scale in the form of an observer: configs take it as `scale=` or `threshold=` of ActivationConfig; it observes nothing."""

    @checked()
    def __init__(self, scale: float | None = None, threshold: float | None = None) -> None:
        super().__init__()
        if (scale is None) == (threshold is None):
            what = f"FixedScaleObserver(scale={scale}, threshold={threshold}) gives {'no scale' if scale is None else 'two scales'}"
            because = "a threshold also defines the scale: it is the float value of the largest integer"
            remedy = "pass one of them"
            raise ConfigurationError(what, because=because, remedy=remedy)
        self.given_scale, self.given_threshold = scale, threshold


def settings(observer: Observer) -> tuple[Any, ...]:
    """Return the settings of an observer: its class, its attributes without buffers, and the settings of observers inside it."""
    own = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in observer.__dict__.items()
        if name not in _EVERY_MODULES
    }
    return type(observer), own, [(name, settings(child)) for name, child in observer.named_children() if isinstance(child, Observer)]


_EVERY_MODULES = frozenset(nn.Module().__dict__)


def averaged(end: float, value: float, count: int, averaging_constant: float) -> float:
    """Return the end of an average of ranges after batch number `count`; each result is rounded to float32, as in a tensor."""
    weight = max(float32(1 / count), float32(averaging_constant))
    return float32(end + float32(float32(value - end) * weight))


def in_numbers(*scalars: Tensor) -> bool:
    """Return whether scalars may be computed as Python numbers: in a tenth of the time, with the same bits."""
    for each in scalars:
        if type(each) not in _PLAIN or not each.is_cpu:
            return False
    return not torch._C._are_functorch_transforms_active()


_PLAIN = (Tensor, nn.Parameter)

FAR = 2.0  # times as far as a threshold


def stays(threshold: Any, before: Any, after: Any) -> Any:
    """Return whether a threshold stays where it is, as the end of the range falls from `before` to `after`: of tensors, or of numbers."""
    return (abs(after) < abs(before)) & (FAR * abs(threshold) < abs(after))


def moved_range(value: Tensor, range: MinMaxObserver) -> tuple[Interval, Interval] | None:
    """Return a range before and after it takes in a batch, as Python numbers, rounded to float32 like tensors, which is faster for scalars.

    Nothing is changed. Return None where the observer or the devices do not allow numbers, or the range holds none but 0.
    """
    if type(range) not in (MinMaxObserver, MovingAverageMinMaxObserver) or not value.numel():
        return None
    if not in_numbers(range.low, range.high, range.count):
        return None
    low, most = (float(end.float()) for end in torch.aminmax(value.detach()))
    before, count = (float(range.low), float(range.high)), int(range.count)
    if not (math.isfinite(low) and math.isfinite(most) and 0 < max(map(abs, before)) < math.inf) or count == 0:
        return None
    if not isinstance(range, MovingAverageMinMaxObserver):
        return before, (min(before[0], low), max(before[1], most))
    constant = range.averaging_constant
    return before, (averaged(before[0], low, count + 1, constant), averaged(before[1], most, count + 1, constant))


def finite_range(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value, float32. Raises ValueError if any is NaN or infinite, or if there is none."""
    if value.numel() == 0:
        raise ValueError("the tensor is empty")
    return _finite(*torch.aminmax(value.detach()))


def finite_ranges(value: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the (low, high) of a tensor and of each item of dimension 0. Raises ValueError if it is empty or not finite."""
    if value.numel() == 0:
        raise ValueError("the tensor is empty")
    low, high = ends(value.detach().flatten(1))
    return _finite(low.min(), high.max()), (low.float(), high.float())


def _finite(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    plain = in_numbers(low, high)
    if not (math.isfinite(low) and math.isfinite(high) if plain else bool(torch.isfinite(low) & torch.isfinite(high))):
        raise ValueError(f"the tensor holds {'NaN' if bool(torch.isnan(low)) else 'infinite values'}")
    return low.float(), high.float()

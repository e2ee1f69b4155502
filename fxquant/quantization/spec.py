"""The configuration of an operator: dtypes, observers and scales. `QConfig` is structured like PyTorch's."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES, IntType, is_scale, scale_from_threshold
from fxquant.numerics.rounding import Nearest, Rounding
from fxquant.quantization.observers import FixedScaleObserver, HistogramObserver, Observer
from fxquant.quantization.observers.ranges import observer_named, settings
from fxquant.support.arguments import FLAG, KINDS, Kind, checked_class, instance, shown, such

LEARNED, LSQ_PLUS, PACT, TQT = "learned", "lsq+", "pact", "tqt"  # methods of fxquant.quantization.learning
STATISTICS, FROZEN = "statistics", "frozen"


def _dtype(value: Any) -> str:
    """Return a dtype by name, or by PyTorch's dtype of that name."""
    if not isinstance(value, str | torch.dtype):
        raise TypeError
    return str(value).removeprefix("torch.")


def _observer(value: Any) -> Any:
    """Return a factory of observers, or an unused copy of an observer. Raises ValueError for anything else."""
    if isinstance(value, str):
        return observer_named(value)
    try:
        made = value if isinstance(value, Observer) else value()
    except FxQuantError:
        raise
    except Exception as error:
        raise ValueError(f"calling it raises {type(error).__name__}: {error}") from error
    if type(made) is Observer or not isinstance(made, Observer):
        raise ValueError(f"{shown(made)} is not an observer")
    return _unused(value) if isinstance(value, Observer) else value


def _unused(observer: Observer) -> Observer:
    """Return a copy of an observer, with its settings, without observations."""
    copied = copy.deepcopy(observer)
    copied.reset()
    return copied


DTYPE = Kind("a dtype by name, like 'int8'", _dtype)


def _rounding(value: Any) -> type[Rounding]:
    if not (isinstance(value, type) and issubclass(value, Rounding)) or value is Rounding:
        raise TypeError
    return value


ACTIVATION_DTYPE = DTYPE.or_none("the target's default")
OBSERVER = Kind(
    "a class of observers, the name of one, an observer that is copied, or a function without arguments that makes one", _observer
)


@checked_class(dtype=ACTIVATION_DTYPE, observer=OBSERVER)
@dataclass(frozen=True)
class ActivationConfig:
    """How an activation is quantized: dtype, and a scale that is observed, or fixed (directly or by a threshold).

    dtype          "int8", "int4", "int16" are symmetric: 0 stands for 0. "uint8" is affine: an integer q stands for
                   (q - zero_point) · scale, and the zero point is found with the scale. "int32" is the accumulator of a last
                   layer. None is the target's default: "uint8" for x86 and qnnpack, "int8" for any other
    zero_point     the zero point of "uint8", given with a scale; 128 if only a scale or a threshold is given
    observer       the observer that finds the scale; each tensor has its own. A class of observers, the name of one, as "mse", an
                   observer whose settings all of them have, as PercentileObserver(99.9), or any function without arguments that
                   returns one. A FixedScaleObserver becomes the scale or the threshold that it gives
    training       what an observed scale does in state TRAIN, from the calibrated one on:
                   "statistics"  it grows and shrinks with the range of the batches: a moving average, or the range of all
                                 observed values with MinMaxObserver
                   "learned"     it is a parameter with the gradient of LSQ
                   "lsq+"        the zero point is learned, too: LSQ+. For a symmetric dtype, which has none, it equals "learned"
                   "pact"        where the tensor is clipped is a parameter in its own unit, `alpha`, which weight decay pulls to 0: PACT
                   "tqt"         the logarithm of a threshold is a parameter, and the scale the next power of two: TQT
                   "frozen"      it stays
                   That of a tensor that was 0 in calibration, or too small for the sum that reads it, follows the batches in any case
    power_of_two   round an observed or learned scale up to a power of two, as some targets do for all scales

    Immutable. Two are equal if they ask for the same: their observers are compared by class and settings, however they are made,
    and an observer that is given is copied.
    """

    dtype: str | None = None
    observer: Observer | Callable[[], Observer] = HistogramObserver
    scale: float | None = None
    threshold: float | None = None
    training: str = STATISTICS
    power_of_two: bool = False
    zero_point: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            _check(self.dtype, ACTIVATION_TYPES, "activation")
        _check_training(self.training, (STATISTICS, LEARNED, LSQ_PLUS, PACT, TQT, FROZEN), "an activation's scale")
        self._take_fixed_scale()
        if self.scale is not None and self.threshold is not None:
            raise ConfigurationError(
                f"scale={self.scale:g} and threshold={self.threshold:g} are both given",
                because="a threshold also defines the scale: it is the float value of the largest integer",
                remedy="pass one of them",
            )
        if self.dtype == "int32" and (self.scale, self.threshold) != (None, None):
            raise ConfigurationError(
                "an int32 output has no scale to give",
                because="it is the accumulator itself, on the scale of its weight times that of its input",
                remedy="leave scale and threshold out, or ask for int8 or int16",
            )
        self._check_zero_point()
        for name, value in (("scale", self.scale), ("threshold", self.threshold)):
            if value is not None and not is_scale(value if name == "scale" else scale_from_threshold(value, self.type)):
                raise ConfigurationError(
                    f"{name}={value} is not usable",
                    because="a scale is a float32 number, which lies between 2^-126 (1.2e-38) and 3.4e38",
                    remedy=f"pass a {name} that is of the size of the tensor's values",
                )

    def _take_fixed_scale(self) -> None:
        """Take over the scale or the threshold of a FixedScaleObserver; raise ConfigurationError if one is given otherwise, too."""
        made = self.observer if isinstance(self.observer, Observer | type) else self.observer()
        if not isinstance(made, FixedScaleObserver):
            return
        if (self.scale, self.threshold) != (None, None):
            raise ConfigurationError(
                "a FixedScaleObserver and a scale are both given", because="either gives the scale", remedy="pass one of them"
            )
        for name, value in (("scale", made.given_scale), ("threshold", made.given_threshold), ("observer", HistogramObserver)):
            object.__setattr__(self, name, value)

    def _check_zero_point(self) -> None:
        if self.zero_point is None:
            return
        if self.dtype is None or not self.type.affine:
            raise ConfigurationError(
                f"zero_point={self.zero_point} is given for {self.dtype or 'the default dtype of the target'}",
                because="only integers of uint8 have a zero point; those of other dtypes are symmetric",
                remedy='pass dtype="uint8" with it, or leave it out',
            )
        if self.scale is None:
            raise ConfigurationError(
                f"zero_point={self.zero_point} is given without a scale",
                because="both are observed, or both are fixed",
                remedy="pass scale=… as well, or leave it out",
            )
        if not self.type.low <= self.zero_point <= self.type.high:
            raise ConfigurationError(
                f"zero_point={self.zero_point} is not usable",
                because=f"it is one of the integers of {self.dtype}, {self.type.low} to {self.type.high}",
                remedy="pass one of these",
            )

    @property
    def type(self) -> IntType:
        """The integer type of its dtype; that of int8 where the dtype is left to the target."""
        return ACTIVATION_TYPES[self.dtype or "int8"]

    def resolved(self, default: str) -> ActivationConfig:
        """Return this config, with the dtype `default` where none is given."""
        return self if self.dtype is not None else replace(self, dtype=default)

    def of(self, dtype: str) -> ActivationConfig:
        """Return this config with another dtype; a zero point is left out where the dtype is symmetric."""
        return replace(self, dtype=dtype, zero_point=self.zero_point if ACTIVATION_TYPES[dtype].affine else None)

    def new_observer(self) -> Observer:
        """Return a new observer for a tensor."""
        return _unused(self.observer) if isinstance(self.observer, Observer) else self.observer()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActivationConfig):
            return NotImplemented
        if self is other:
            return True
        if self._plain != other._plain:
            return False
        return self.observer is other.observer or settings(self.new_observer()) == settings(other.new_observer())

    def __hash__(self) -> int:
        return hash((*self._plain, self.observer if isinstance(self.observer, type) else type(self.new_observer())))

    @property
    def _plain(self) -> tuple[Any, ...]:
        return tuple(getattr(self, part.name) for part in fields(self) if part.name != "observer")

    @property
    def fixed_scale(self) -> float | None:
        """The scale that was asked for; None if it is to be observed."""
        return self.scale if self.threshold is None else scale_from_threshold(self.threshold, self.type)

    @property
    def fixed_zero_point(self) -> int:
        """The zero point beside a fixed scale: what was asked for, or the one that covers what int8 does."""
        return (128 if self.type.affine else 0) if self.zero_point is None else self.zero_point

    @property
    def fixed_grid(self) -> tuple[float, int] | None:
        """The scale and zero point that were asked for; None if they are to be observed."""
        return None if self.fixed_scale is None else (self.fixed_scale, self.fixed_zero_point)


@checked_class(
    dtype=DTYPE,
    p=KINDS["p"].or_none("the largest weight is covered"),
    rounding=Kind("a class of roundings, like Nearest: a subclass of Rounding", _rounding),
)
@dataclass(frozen=True)
class WeightConfig:
    """How a weight is quantized: dtype, and a scale for each output channel or one for all.

    training       where the scale comes from, in every state:
                   "statistics"  the largest magnitude of the weight at hand
                   "learned"     it is a parameter with the gradient of LSQ, of convolutions, linear layers and products with
                                 a matrix parameter; it starts where the squared error is least
                   "tqt"         the same with a power of two, and the logarithm of a threshold as its parameter: TQT
    power_of_two   round it up to a power of two, as some targets do for all scales
    p              the scale has the least Σ |error|^p for the weight at hand, for each output channel, or for all of them where they have
                   one: with p = 2 the squared error, with a larger one large errors count for more. It cuts off the largest weights.
                   None: it covers them
    rounding       how such a layer's weight, in steps of its scale, becomes integers: a class of roundings, of which every layer
                   has its own; what it learns trains with the model. What else is constant is rounded to the nearest
    """

    dtype: str = "int8"
    per_channel: bool = True
    training: str = STATISTICS
    power_of_two: bool = False
    rounding: type[Rounding] = Nearest
    p: float | None = None

    def __post_init__(self) -> None:
        _check(self.dtype, WEIGHT_TYPES, "weight")
        _check_training(self.training, (STATISTICS, LEARNED, TQT), "a weight's scale")

    @property
    def type(self) -> IntType:
        return WEIGHT_TYPES[self.dtype]


def _check(dtype: str, known: Any, what: str) -> None:
    if dtype not in known:
        raise ConfigurationError(
            f"{dtype!r} is not a dtype of {what}s", because=f"the {what} dtypes are {', '.join(known)}", remedy="pass one of them by name"
        )


def _check_training(training: str, known: tuple[str, ...], what: str) -> None:
    if training not in known:
        raise ConfigurationError(
            f"training={training!r} is unknown",
            because=f"{what} is, in training, {' or '.join(map(repr, known))}",
            remedy="pass one of these",
        )


OUTPUT = instance("an ActivationConfig, as in QConfig(output=ActivationConfig('int8'))", ActivationConfig)


@checked_class(
    dynamic=FLAG,
    output=OUTPUT,
    weight=instance("a WeightConfig, as in QConfig(weight=WeightConfig('int8'))", WeightConfig),
    input=such("an ActivationConfig of any dtype but int32", OUTPUT.take, lambda config: config.dtype != "int32").or_none(
        "as an output is"
    ),
)
@dataclass(frozen=True)
class QConfig:
    """How an operator is quantized: its output, its weight, and its input where that is a float tensor.

    dynamic  linear and recurrent layers are quantized at run time, on targets that support it: the input of each is quantized to uint8,
             on a grid from its own range, and the result is a float tensor. Only `weight` has an effect then; nothing is calibrated, and
             all other operators stay in float
    """

    output: ActivationConfig = field(default_factory=ActivationConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    input: ActivationConfig | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        if not self.dynamic:
            return
        if self.output != ActivationConfig() or self.input is not None:
            raise ConfigurationError(
                f"a dynamic QConfig is given {'an input' if self.input is not None else 'an output'}",
                because="its layers find the grid of their input at run time, and their outputs are float",
                remedy="leave it out, or leave out dynamic=True",
            )
        if self.weight.type.bits > 8:
            raise ConfigurationError(
                f"a dynamic QConfig has {self.weight.dtype} weights",
                because="its products are of 8-bit integers",
                remedy="pass a WeightConfig of int8 or int4",
            )

    def resolved(self, default: str) -> QConfig:
        """Return this config, with the dtype `default` for activations that are given none."""
        if self.dynamic:
            return self
        if self.output.dtype is not None and (self.input is None or self.input.dtype is not None):
            return self
        return replace(self, output=self.output.resolved(default), input=None if self.input is None else self.input.resolved(default))


class State(enum.Enum):
    """The state of a prepared operator, which determines what it computes.

    FLOAT      the float model; nothing observes
    CALIBRATE  the float model; ranges are observed, in train and in eval mode alike
    TRAIN      the integer function, with straight-through gradients; in train mode statistics move
    VALIDATE   the integer function, with fixed statistics: exactly what is deployed
    """

    FLOAT = "float"
    CALIBRATE = "calibrate"
    TRAIN = "train"
    VALIDATE = "validate"

    @classmethod
    def _missing_(cls, value: object) -> State:
        """Return a state by its name in any case. Raises ConfigurationError for anything else."""
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if found is None:
            raise ConfigurationError(
                f"{value!r} is not a state", because=f"the states are {', '.join(cls.__members__)}", remedy="pass a fxq.State, or its name"
            )
        return found

"""Configure operators: dtypes, observers and scales, and where each configuration applies.

`QConfig` and `QConfigMapping` are structured like PyTorch's.
"""

from __future__ import annotations

import copy
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES, IntType, is_scale, scale_from_threshold
from fxquant.numerics.rounding import Nearest, Rounding
from fxquant.quantization.observers import FixedScaleObserver, HistogramObserver, Observer
from fxquant.quantization.observers.ranges import observer_named, settings
from fxquant.support import logger
from fxquant.support.arguments import FLAG, KINDS, Kind, checked, checked_class, instance, shown, such

LEARNED, LSQ_PLUS, PACT, TQT = "learned", "lsq+", "pact", "tqt"  # methods of fxquant.quantization.learning
STATISTICS, FROZEN = "statistics", "frozen"


def _observer(value: Any) -> Any:
    """Return a factory of observers, or an unused copy of an observer. Raises ValueError for anything else."""
    if isinstance(value, str):
        return observer_named(value)
    try:
        observer = value if isinstance(value, Observer) else value()
    except FxQuantError:
        raise
    except Exception as error:
        raise ValueError(f"calling it raises {type(error).__name__}: {error}") from error
    if type(observer) is Observer or not isinstance(observer, Observer):
        raise ValueError(f"{shown(observer)} is not an observer")
    return _unused(value) if isinstance(value, Observer) else value


def _unused(observer: Observer) -> Observer:
    """Return a copy of an observer, with its settings, without observations."""
    copied = copy.deepcopy(observer)
    copied.reset()
    return copied


# PyTorch's dtype of that name is taken as well.
DTYPE = Kind("a dtype by name, like 'int8'", lambda value: str(instance("", str, torch.dtype).take(value)).removeprefix("torch."))
ROUNDING = such(
    "a class of roundings, like Nearest: a subclass of Rounding",
    instance("", type).take,
    lambda kind: issubclass(kind, Rounding) and kind is not Rounding,
)
ACTIVATION_DTYPE = DTYPE.or_none("the target's default")
OBSERVER = Kind(
    "a class of observers, the name of one, an observer that is copied, or a function without arguments that makes one", _observer
)


@checked_class(dtype=ACTIVATION_DTYPE, observer=OBSERVER)
@dataclass(frozen=True)
class ActivationConfig:
    """The quantization of an activation: its dtype, and a scale that is observed, or constant (directly or by a threshold).

    dtype          "int8", "int4", "int16" are symmetric: the value of q is q · scale. "uint8" is affine: it is
                   (q - zero_point) · scale, and the zero point is calibrated with the scale. "int32" is the accumulator of a last
                   layer. None is the target's default: "uint8" for x86 and qnnpack, "int8" for any other
    zero_point     the zero point of "uint8" with a constant scale; by default 128
    observer       the observer that chooses the scale; each tensor has its own. An observer class, its name, as "mse", an instance whose
                   settings are copied, as PercentileObserver(99.9), or a function without arguments that returns an observer. A
                   FixedScaleObserver sets the constant scale or threshold
    training       how a calibrated scale changes in state TRAIN:
                   "statistics"  it grows and shrinks with the range of the batches: a moving average, or the range of all
                                 observed values with MinMaxObserver
                   "learned"     it is a parameter with the gradient of LSQ
                   "lsq+"        the zero point is learned, too: LSQ+. For a symmetric dtype it equals "learned"
                   "pact"        the clipping threshold is a parameter `alpha`, in the tensor's unit, which weight decay pulls to 0: PACT
                   "tqt"         the logarithm of a threshold is a parameter, and the scale the next power of two: TQT
                   "frozen"      it does not change
                   The scale of a tensor that was 0 in calibration, or too small for the sum that reads it, always follows the batches
    power_of_two   round an observed or learned scale up to a power of two, as some targets do for all scales

    Immutable. Configs are equal if their settings are: observers are compared by class and settings, and an instance is copied.
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
            what = f"scale={self.scale:g} and threshold={self.threshold:g} are both given"
            because = "a threshold also defines the scale: it is the float value of the largest integer"
            remedy = "pass one of them"
            raise ConfigurationError(what, because=because, remedy=remedy)
        if self.dtype == "int32" and (self.scale, self.threshold) != (None, None):
            because = "it is the accumulator itself, on the scale of its weight times that of its input"
            remedy = "leave scale and threshold out, or ask for int8 or int16"
            raise ConfigurationError("an int32 output has no scale to give", because=because, remedy=remedy)
        self._check_zero_point()
        for name, value in (("scale", self.scale), ("threshold", self.threshold)):
            if value is not None and not is_scale(value if name == "scale" else scale_from_threshold(value, self.type)):
                because = "a scale is a float32 number, which lies between 2^-126 (1.2e-38) and 3.4e38"
                remedy = f"pass a {name} that is of the size of the tensor's values"
                raise ConfigurationError(f"{name}={value} is not usable", because=because, remedy=remedy)

    def _take_fixed_scale(self) -> None:
        """Set the scale or the threshold from a FixedScaleObserver; raise ConfigurationError if the config has another one as well."""
        observer = self.observer if isinstance(self.observer, Observer | type) else self.observer()
        if not isinstance(observer, FixedScaleObserver):
            return
        if (self.scale, self.threshold) != (None, None):
            raise ConfigurationError(
                "a FixedScaleObserver and a scale are both given", because="either gives the scale", remedy="pass one of them"
            )
        for name, value in (("scale", observer.given_scale), ("threshold", observer.given_threshold), ("observer", HistogramObserver)):
            object.__setattr__(self, name, value)

    def _check_zero_point(self) -> None:
        if self.zero_point is None:
            return
        if self.dtype is None or not self.type.affine:
            what = f"zero_point={self.zero_point} is given for {self.dtype or 'the default dtype of the target'}"
            because = "only integers of uint8 have a zero point; those of other dtypes are symmetric"
            remedy = 'pass dtype="uint8" with it, or leave it out'
            raise ConfigurationError(what, because=because, remedy=remedy)
        if self.scale is None:
            because = "both are observed, or both are fixed"
            remedy = "pass scale=… as well, or leave it out"
            raise ConfigurationError(f"zero_point={self.zero_point} is given without a scale", because=because, remedy=remedy)
        if not self.type.low <= self.zero_point <= self.type.high:
            because = f"it is one of the integers of {self.dtype}, {self.type.low} to {self.type.high}"
            remedy = "pass one of these"
            raise ConfigurationError(f"zero_point={self.zero_point} is not usable", because=because, remedy=remedy)

    @property
    def type(self) -> IntType:
        """The integer type of its dtype; that of int8 where the dtype is left to the target."""
        return ACTIVATION_TYPES[self.dtype or "int8"]

    def resolved(self, default: str) -> ActivationConfig:
        """Return this config, with the dtype `default` if it has none."""
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
    def is_open(self) -> bool:
        """Whether it gives neither a dtype nor a scale."""
        return self.dtype is None and self.scale is None and self.threshold is None

    @property
    def fixed_zero_point(self) -> int:
        """The zero point of a constant scale: `zero_point`, or by default 128 for an affine dtype, the range of int8, else 0."""
        return (128 if self.type.affine else 0) if self.zero_point is None else self.zero_point

    @property
    def fixed_grid(self) -> tuple[float, int] | None:
        """The scale and zero point that were asked for; None if they are to be observed."""
        return None if self.fixed_scale is None else (self.fixed_scale, self.fixed_zero_point)


@checked_class(dtype=DTYPE, p=KINDS["p"].or_none("the largest weight is covered"), rounding=ROUNDING)
@dataclass(frozen=True)
class WeightConfig:
    """The quantization of a weight: its dtype, and a scale per output channel or per tensor.

    training       the source of the scale, in every state:
                   "statistics"  the largest magnitude of the current weight
                   "learned"     it is a parameter with the gradient of LSQ, of convolutions, linear layers and products with
                                 a matrix parameter; it starts where the squared error is least
                   "tqt"         the same with a power of two, and the logarithm of a threshold as its parameter: TQT
    power_of_two   round it up to a power of two, as some targets do for all scales
    p              the scale has the least Σ |error|^p for the current weight, and clips the largest weights: the larger p, the more
                   large errors count. None: the scale covers all weights
    rounding       the class that rounds a layer's weight in units of its scale; every layer has an instance, whose parameters train with
                   the model. Other constants are rounded to the nearest
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


def _check(dtype: str, dtypes: Any, what: str) -> None:
    if dtype not in dtypes:
        raise ConfigurationError(
            f"{dtype!r} is not a dtype of {what}s", because=f"the {what} dtypes are {', '.join(dtypes)}", remedy="pass one of them by name"
        )


def _check_training(training: str, methods: tuple[str, ...], what: str) -> None:
    if training not in methods:
        because = f"{what} is, in training, {' or '.join(map(repr, methods))}"
        remedy = "pass one of these"
        raise ConfigurationError(f"training={training!r} is unknown", because=because, remedy=remedy)


OUTPUT = instance("an ActivationConfig, as in QConfig(output=ActivationConfig('int8'))", ActivationConfig)


@checked_class(
    dynamic=FLAG,
    output=OUTPUT,
    weight=instance("a WeightConfig, as in QConfig(weight=WeightConfig('int8'))", WeightConfig),
    input=such("an ActivationConfig of any dtype but int32", OUTPUT.take, lambda one: one.dtype != "int32").or_none("as an output is"),
)
@dataclass(frozen=True)
class QConfig:
    """The quantization of an operator: its output, its weight, and its input if that is a float tensor.

    dynamic  quantize linear and recurrent layers dynamically, on targets that support it: the input of each to uint8 with a scale from
             its range at run time, and a float result. Only `weight` has an effect then, and all other operators stay in float
    """

    output: ActivationConfig = field(default_factory=ActivationConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    input: ActivationConfig | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        if not self.dynamic:
            return
        if self.output != ActivationConfig() or self.input is not None:
            what = f"a dynamic QConfig is given {'an input' if self.input is not None else 'an output'}"
            because = "its layers find the grid of their input at run time, and their outputs are float"
            remedy = "leave it out, or leave out dynamic=True"
            raise ConfigurationError(what, because=because, remedy=remedy)
        if self.weight.type.bits > 8:
            because = "its products are of 8-bit integers"
            remedy = "pass a WeightConfig of int8 or int4"
            raise ConfigurationError(f"a dynamic QConfig has {self.weight.dtype} weights", because=because, remedy=remedy)

    def resolved(self, default: str) -> QConfig:
        """Return this config, with the dtype `default` for activations without a dtype."""
        if self.dynamic:
            return self
        if self.output.dtype is not None and (self.input is None or self.input.dtype is not None):
            return self
        return replace(self, output=self.output.resolved(default), input=None if self.input is None else self.input.resolved(default))


class State(enum.Enum):
    """The state of a prepared operator, which determines the function it computes.

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
        state = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if state is None:
            raise ConfigurationError(
                f"{value!r} is not a state", because=f"the states are {', '.join(cls.__members__)}", remedy="pass a fxq.State, or its name"
            )
        return state


# ---- where a QConfig applies: rules by name, pattern, type or function, and the attribute of a module ----------------
Chosen = QConfig | None  # None keeps the operator in float


@dataclass(frozen=True)
class Call:
    """One call in a module's forward, for a rule."""

    module: str  # the module's path; "" is the model itself
    kind: Any  # a layer's class, a function, or the name of a tensor's method
    index: int  # its index among the calls of this kind in that forward

    def __str__(self) -> str:
        return f"{self.index} of {_written(self.kind)} in {self.module or 'the model itself'}"


def _written(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__qualname__", str(kind))


@dataclass(frozen=True)
class Rule:
    """The source of a QConfig: the attribute of a module, a rule of the mapping, or its default."""

    kind: str  # "attribute", "call", "name", "pattern", "type" or "default"
    key: Any = ""  # the module's path, the Call, the name, the pattern, or the type or function

    def __str__(self) -> str:
        return f"{self.kind} {self.key if isinstance(self.key, Call) else _written(self.key)}".rstrip()


def is_dynamic(chosen: Chosen) -> bool:
    """Return whether a QConfig asks for dynamic quantization."""
    return chosen is not None and chosen.dynamic


DEFAULT = Rule("default")
MatchedRules = tuple[tuple[Rule, Chosen], ...]  # every rule that covers one of the user's operators with what it chooses: the nearest first


def _rules(key: Callable[[Any], Any]) -> Kind:
    dicts = instance("", Mapping)
    return Kind("a dict from rules to QConfigs", lambda value: {key(one): CHOSEN.take(chosen) for one, chosen in dicts.take(value).items()})


def _spelling(value: Any) -> Any:
    """Return a key by which an operator can be called: a class, a function or the name of a method. Raise TypeError for anything else."""
    if not (callable(value) or isinstance(value, str)) or isinstance(value, nn.Module):
        raise TypeError
    hash(value)
    return value


CHOSEN = instance("a QConfig", QConfig).or_none("stay in float")


MODULE = instance('the path of a module, "" for the model itself', str)


def _call(value: Any) -> Call:
    module, kind, index = (value.module, value.kind, value.index) if isinstance(value, Call) else value
    return Call(MODULE.take(module), _spelling(kind), KINDS["seed"].take(index))


_HELD = ("types", "patterns", "names", "calls")  # the fields of a mapping that hold rules
SPELLING = Kind("a module's class, a function like F.relu, or the name of a tensor's method", _spelling)


@checked_class(
    default=CHOSEN, types=_rules(_spelling), patterns=_rules(KINDS["pattern"].take), names=_rules(KINDS["name"].take), calls=_rules(_call)
)
@dataclass(eq=False)
class QConfigMapping:
    """The QConfigs of a model: global < operator or module type < name pattern < name < one call of a type < attribute `qconfig`.

    Names are dotted module paths ("layer1.0.conv1") or node names. A name also covers everything below it. A pattern matches from the
    start of a path, and covers everything below the match; the first matching pattern counts. A QConfig of None keeps operators in float.
    For a fused operator the rules of all its parts count: see the guide.

    The setters are PyTorch's: each changes the mapping and returns it, so that calls chain. `copy.copy` returns a mapping that changes
    apart. Functions that take a mapping use its rules at the time of the call. Two mappings are equal if they say the same.
    """

    default: Chosen = field(default_factory=QConfig)
    types: dict[Any, Chosen] = field(default_factory=dict)
    patterns: dict[str, Chosen] = field(default_factory=dict)
    names: dict[str, Chosen] = field(default_factory=dict)
    calls: dict[Call, Chosen] = field(default_factory=dict)

    @checked(qconfig=CHOSEN)
    def set_global(self, qconfig: Chosen) -> QConfigMapping:
        """Set the default, and return this mapping."""
        self.default = qconfig
        return self

    @checked(kind=SPELLING, qconfig=CHOSEN)
    def set_object_type(self, kind: Any, qconfig: Chosen) -> QConfigMapping:
        """Add a rule for a module's class, a function, or a tensor's method by name; return this mapping.

        A class means its modules alone. A function or a method means that function in every call form: torch.softmax is F.softmax,
        x.softmax() and nn.Softmax; torch.add is + and +=. A rule for the call form that the model uses has precedence over others.
        """
        self.types[kind] = qconfig
        return self

    @checked()
    def set_host(self, *where: Any) -> QConfigMapping:
        """Add rules that keep operators in float, on the host: by types and functions, module paths or node names. Return this mapping.

        Elsewhere this is a `hybrid_dict`. A rule with a QConfig does the opposite: it keeps integers between operators on the host.
        """
        for one in where:
            self.set_module_name(one, None) if isinstance(one, str) else self.set_object_type(one, None)
        return self

    @checked(qconfig=CHOSEN)
    def set_module_name_regex(self, pattern: str, qconfig: Chosen) -> QConfigMapping:
        """Add a rule for module paths that a regular expression matches, and return this mapping; an existing rule keeps its place."""
        self.patterns[pattern] = qconfig
        return self

    @checked(qconfig=CHOSEN)
    def set_module_name(self, name: str, qconfig: Chosen) -> QConfigMapping:
        """Add a rule for a module's path or a node's name, and return this mapping."""
        self.names[name] = qconfig
        return self

    @checked(module_name=MODULE, object_type=SPELLING, index=KINDS["seed"], qconfig=CHOSEN)
    def set_module_name_object_type_order(self, module_name: str, object_type: Any, index: int, qconfig: Chosen) -> QConfigMapping:
        """Add a rule for one call: the one with this index, from 0, among a type's calls in a module's forward. Return this mapping.

        `module_name` is the path of the module whose forward has the call, "" for the model's own; a layer's calls are its parent's.
        """
        self.calls[Call(module_name, object_type, index)] = qconfig
        return self

    @property
    def _value(self) -> tuple[Any, ...]:
        rules = (frozenset(self.types.items()), tuple(self.patterns.items()), frozenset(self.names.items()), frozenset(self.calls.items()))
        return self.default, *rules

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, QConfigMapping) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has dicts of its own
        return type(self), (self.default, *(dict(getattr(self, name)) for name in _HELD))

    def __repr__(self) -> str:
        rules = {name: dict(getattr(self, name)) for name in _HELD}
        return f"QConfigMapping({', '.join([f'default={self.default!r}', *(f'{name}={rule!r}' for name, rule in rules.items() if rule)])})"

    def rules(self) -> list[tuple[Rule, Chosen]]:
        """Return every rule but the default, with its QConfig."""
        kinds = (("call", self.calls), ("name", self.names), ("pattern", self.patterns), ("type", self.types))
        return [(Rule(kind, key), chosen) for kind, rules in kinds for key, chosen in rules.items()]

    def covering(self, node_name: str, path: str, kinds: tuple[Any, ...], places: Sequence[Call] = ()) -> MatchedRules:
        """Return the rules, nearest first, that cover a node with this name, module path, types (its call forms) and calls."""
        calls = [(Rule("call", call), self.calls[call]) for call in places if call in self.calls]
        names = [(Rule("name", name), self.names[name]) for name in dict.fromkeys((node_name, *prefixes(path))) if name in self.names]
        patterns = [(Rule("pattern", pattern), chosen) for pattern, chosen in self.patterns.items() if path and re.match(pattern, path)]
        types = [(Rule("type", kind), self.types[kind]) for kind in dict.fromkeys(kinds) if kind in self.types]
        return *calls, *names, *patterns, *types, (DEFAULT, self.default)


def prefixes(path: str) -> list[str]:
    """Return a module path and the paths of its parents, nearest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)] if path else []


def attached_qconfigs(model: nn.Module) -> dict[str, Chosen]:
    """Return the attributes `qconfig` of a model's modules, by module path; None keeps a module in float.

    Objects of another library under that name are left out, with one log line; a None beside them is that library's, too.
    """
    attributes = {path: module.__dict__["qconfig"] for path, module in model.named_modules() if "qconfig" in module.__dict__}
    foreign = {path: qconfig for path, qconfig in attributes.items() if qconfig is not None and not isinstance(qconfig, QConfig)}
    if not foreign:
        return attributes
    kinds = ", ".join(sorted({f"{type(qconfig).__module__}.{type(qconfig).__qualname__}" for qconfig in foreign.values()}))
    logger.warning("the qconfig of %d modules is ignored, since it is not an fxquant.QConfig but a %s", len(foreign), kinds)
    return {path: qconfig for path, qconfig in attributes.items() if isinstance(qconfig, QConfig)}


def as_mapping(qconfig: QConfig | QConfigMapping | None) -> QConfigMapping:
    """Return a new mapping for a mapping, one QConfig for everything, or None."""
    if isinstance(qconfig, QConfigMapping):
        return copy.copy(qconfig)
    if qconfig is not None and not isinstance(qconfig, QConfig):
        raise ConfigurationError(
            f"a {type(qconfig).__name__} is not a qconfig",
            because="a qconfig is a fxq.QConfig for every operator, a fxq.QConfigMapping, or None for the default",
            remedy="pass one of these",
        )
    return QConfigMapping(default=qconfig or QConfig())

"""What the user asks for: which dtype, which observer, which scale, and where.

`QConfig` and `QConfigMapping` follow the shape of PyTorch's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxquant.errors import ConfigurationError
from fxquant.numerics import ACTIVATION_TYPES, WEIGHT_TYPES, IntType, is_scale, scale_from_threshold
from fxquant.observers import HistogramObserver, Observer

LEARNED, STATISTICS, FROZEN = "learned", "statistics", "frozen"

logger = logging.getLogger("fxquant")


@dataclass(frozen=True)
class ActivationConfig:
    """How an activation is quantized: dtype, and a scale that is observed, or fixed (directly or by a threshold).

    training       what an observed scale does in state TRAIN, from the calibrated one on:
                   "statistics"  it grows and shrinks with the range of the batches: a moving average, or all that was
                                 seen where MinMaxObserver observes
                   "learned"     it is a parameter with the gradient of LSQ
                   "frozen"      it stays
    power_of_two   round an observed or learned scale up to a power of two, as some targets do for all scales
    """

    dtype: str = "int8"
    observer: Callable[[], Observer] = HistogramObserver
    scale: float | None = None
    threshold: float | None = None
    training: str = STATISTICS
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check(self.dtype, ACTIVATION_TYPES, "activation")
        _check_training(self.training, (STATISTICS, LEARNED, FROZEN), "an activation's scale")
        for name, value in (("scale", self.scale), ("threshold", self.threshold)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(
                    f"{name}={value} is not usable", because="a scale is a positive, finite number", remedy=f"pass a positive {name}"
                )
            if value is not None and not is_scale(value if name == "scale" else scale_from_threshold(value, self.type)):
                raise ConfigurationError(
                    f"{name}={value} is not usable",
                    because="a scale is a float32 number, which lies between 2^-126 (1.2e-38) and 3.4e38",
                    remedy=f"pass a {name} that is of the size of the tensor's values",
                )

    @property
    def type(self) -> IntType:
        return ACTIVATION_TYPES[self.dtype]

    @property
    def fixed_scale(self) -> float | None:
        """The scale that was asked for; None if it is to be observed."""
        return self.scale if self.threshold is None else scale_from_threshold(self.threshold, self.type)


@dataclass(frozen=True)
class WeightConfig:
    """How a weight is quantized: dtype, and a scale for each output channel or one for all.

    training       where the scale comes from, in every state:
                   "statistics"  the largest magnitude of the weight at hand
                   "learned"     it is a parameter with the gradient of LSQ, of convolutions, linear layers and products with
                                 a matrix parameter; it starts where the squared error is least
    power_of_two   round it up to a power of two, as some targets do for all scales
    """

    dtype: str = "int8"
    per_channel: bool = True
    training: str = STATISTICS
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check(self.dtype, WEIGHT_TYPES, "weight")
        _check_training(self.training, (STATISTICS, LEARNED), "a weight's scale")

    @property
    def type(self) -> IntType:
        return WEIGHT_TYPES[self.dtype]


def _check(dtype: str, known: Any, what: str) -> None:
    if dtype not in known:
        raise ConfigurationError(
            f"{dtype!r} is no {what} dtype", because=f"the {what} dtypes are {', '.join(known)}", remedy="pass one of them by name"
        )


def _check_training(training: str, known: tuple[str, ...], what: str) -> None:
    if training not in known:
        raise ConfigurationError(
            f"training={training!r} is unknown",
            because=f"{what} is, in training, {' or '.join(map(repr, known))}",
            remedy="pass one of these",
        )


@dataclass(frozen=True)
class QConfig:
    """How an operator is quantized: its output, its weight, and its input where that comes from outside."""

    output: ActivationConfig = field(default_factory=ActivationConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    input: ActivationConfig | None = None


Chosen = QConfig | None  # None keeps the operator in float


@dataclass
class QConfigMapping:
    """Which QConfig applies where: global < operator or module type < name pattern < name < the attribute `qconfig` of a module.

    Names are dotted module paths ("layer1.0.conv1") or node names; a name also covers everything below it.
    A QConfig of None keeps what it applies to in float. Setters return the mapping, so calls chain.
    """

    default: Chosen = field(default_factory=QConfig)
    types: dict[Any, Chosen] = field(default_factory=dict)
    patterns: dict[str, Chosen] = field(default_factory=dict)
    names: dict[str, Chosen] = field(default_factory=dict)
    used: set[Any] = field(default_factory=set)

    def set_global(self, qconfig: Chosen) -> QConfigMapping:
        self.default = qconfig
        return self

    def set_object_type(self, kind: Any, qconfig: Chosen) -> QConfigMapping:
        self.types[kind] = qconfig
        return self

    def set_module_name_regex(self, pattern: str, qconfig: Chosen) -> QConfigMapping:
        self.patterns[pattern] = qconfig
        return self

    def set_module_name(self, name: str, qconfig: Chosen) -> QConfigMapping:
        self.names[name] = qconfig
        return self

    def choose(self, node_name: str, path: str, kinds: tuple[Any, ...]) -> Chosen:
        """The QConfig of the node with this name, from this module path, spelled by one of these types or functions."""
        for name in (node_name, *_prefixes(path)):
            if name in self.names:
                return self._use(name, self.names[name])
        for pattern, qconfig in self.patterns.items():
            if path and re.match(pattern, path):
                return self._use(pattern, qconfig)
        for kind in kinds:
            if kind in self.types:
                return self._use(kind, self.types[kind])
        return self.default

    def is_rule(self, qconfig: Chosen) -> bool:
        """Whether a rule chose this QConfig, rather than nothing but the default."""
        return qconfig is not self.default

    def unused(self) -> list[str]:
        """The rules that matched nothing so far."""
        return [str(rule) for rule in (*self.types, *self.patterns, *self.names) if rule not in self.used]

    def _use(self, rule: Any, qconfig: Chosen) -> Chosen:
        self.used.add(rule)
        return qconfig


def _prefixes(path: str) -> list[str]:
    """The path, then every path above it, nearest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)] if path else []


def attached_qconfigs(model: nn.Module) -> dict[str, Chosen]:
    """The QConfigs that stand on a model's modules as their attribute `qconfig`, by module path; None keeps a module in float.

    Objects of another library under that name are left out, with one log line; a None beside them is that library's, too.
    """
    found = {path: module.__dict__["qconfig"] for path, module in model.named_modules() if "qconfig" in module.__dict__}
    foreign = {path: qconfig for path, qconfig in found.items() if qconfig is not None and not isinstance(qconfig, QConfig)}
    if not foreign:
        return found
    kinds = ", ".join(sorted({f"{type(qconfig).__module__}.{type(qconfig).__qualname__}" for qconfig in foreign.values()}))
    logger.warning("the qconfig of %d modules is ignored, since it is no fxquant.QConfig but a %s", len(foreign), kinds)
    return {path: qconfig for path, qconfig in found.items() if isinstance(qconfig, QConfig)}


def nearest(attached: Mapping[str, Chosen], path: str, default: Any) -> Any:
    """What is attached to the module at a path, or to the nearest module around it; `default` if there is nothing."""
    return next((attached[name] for name in (*_prefixes(path), "") if name in attached), default)


def as_mapping(qconfig: QConfig | QConfigMapping | None) -> QConfigMapping:
    """The mapping a user means by a mapping, by one QConfig for everything, or by nothing."""
    if isinstance(qconfig, QConfigMapping):
        return qconfig
    if qconfig is not None and not isinstance(qconfig, QConfig):
        raise ConfigurationError(
            f"a {type(qconfig).__name__} is no qconfig",
            because="a qconfig is a fxq.QConfig for every operator, a fxq.QConfigMapping, or None for the default",
            remedy="pass one of these",
        )
    return QConfigMapping(default=qconfig or QConfig())

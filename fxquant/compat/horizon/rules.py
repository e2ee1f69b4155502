"""Horizon's qconfig_dict, hybrid_dict, setters and templates as a fxq.QConfigMapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

import fxquant as fxq
from fxquant.compat.horizon.qconfig import dtype_of, get_qconfig
from fxquant.errors import ConfigurationError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    return list(rules.items()) if isinstance(rules, Mapping) else [(kind, chosen) for kind, chosen in rules]


def _only(given: Any, known: tuple[str, ...], what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"a {type(given).__name__} is no {what}", because=f"it is a dict with {', '.join(map(repr, known))}", remedy="pass one"
        )
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"{key!r} is no part of a {what}",
                because=f"its keys are {', '.join(map(repr, known))}",
                remedy="name rules by one of these",
            )
    return given


def of_dict(qconfig_dict: Any) -> fxq.QConfigMapping:
    """{"": global, "module_type": [(type, qconfig)], "module_name": [(name, qconfig)] or {name: qconfig}}. What none covers is float."""
    if isinstance(qconfig_dict, fxq.QConfigMapping):
        return qconfig_dict
    if qconfig_dict is None or isinstance(qconfig_dict, fxq.QConfig):
        return fxq.QConfigMapping(default=qconfig_dict)
    parts = _only(qconfig_dict, ("", "module_type", "object_type", "module_name"), "qconfig_dict")
    types = _pairs(parts.get("module_type", ())) + _pairs(parts.get("object_type", ()))
    return fxq.QConfigMapping(parts.get(""), dict(types), names=dict(_pairs(parts.get("module_name", ()))))


def on_host(mapping: fxq.QConfigMapping, hybrid_dict: Any) -> fxq.QConfigMapping:
    """The mapping with what hybrid_dict names on the host: {"module_type": [type], "module_name": [name]}."""
    parts = _only(hybrid_dict, ("module_type", "module_name"), "hybrid_dict")
    return mapping.set_host(*parts.get("module_type", ()), *parts.get("module_name", ()))


# ---- setters and templates ------------------------------------------------------------------------------------------------


def _asked(base: fxq.QConfig, value: Any, *, output: bool = True) -> fxq.QConfig:
    """A QConfig with a dtype in place of another, {"dtype": …, "threshold": …}, or one of these for "input", "output" and "weight"."""
    if isinstance(value, fxq.QConfig):
        return value
    if not isinstance(value, Mapping):
        value = {"output": value}
    if not value.keys() & {"input", "output", "weight"}:
        value = {"output": value}
    parts = _only(value, ("input", "output", "weight"), "template's value")
    changed: dict[str, Any] = {}
    for name in ("input", "output"):
        if name in parts:
            changed[name] = _activation(base.output, parts[name])
    if "weight" in parts:
        changed["weight"] = replace(base.weight, dtype=dtype_of(parts["weight"]))
    return replace(base, **changed)


def _activation(base: fxq.ActivationConfig, value: Any) -> fxq.ActivationConfig:
    if not isinstance(value, Mapping):
        return replace(base, dtype=dtype_of(value))
    parts = _only(value, ("dtype", "threshold"), "template's value")
    dtype = dtype_of(parts["dtype"]) if "dtype" in parts else base.dtype
    return replace(base, dtype=dtype, threshold=parts.get("threshold"))


@dataclass(frozen=True)
class ModuleNameTemplate:
    """Dtypes and thresholds by a module's name. A dtype that the march has not is an error, frozen or not: nothing falls back."""

    map: Mapping[str, Any]
    freeze: bool = False

    def add(self, mapping: fxq.QConfigMapping, base: fxq.QConfig) -> fxq.QConfigMapping:
        """The mapping with its rules."""
        for name, value in self.map.items():
            mapping = mapping.set_global(_asked(base, value)) if name == "" else mapping.set_module_name(name, _asked(base, value))
        return mapping


@dataclass(frozen=True)
class ConvDtypeTemplate:
    """The dtype of the weights of convolutions. What they read has the dtype of what made it, so `input_dtype` is the reference's."""

    input_dtype: Any = "qint8"
    weight_dtype: Any = "qint8"

    def add(self, mapping: fxq.QConfigMapping, base: fxq.QConfig) -> fxq.QConfigMapping:
        """The mapping with its rules."""
        if dtype_of(self.input_dtype) != (base.output.dtype or "int8"):
            raise ConfigurationError(
                f"ConvDtypeTemplate(input_dtype={self.input_dtype}) cannot be done",
                because="an operand has the dtype of the operator that made it",
                remedy="say the dtype of those operators' outputs, with a ModuleNameTemplate",
            )
        for kind in CONVOLUTIONS:
            mapping = mapping.set_object_type(kind, _asked(base, {"weight": self.weight_dtype}))
        return mapping


@dataclass(frozen=True)
class SensitivityTemplate:
    """16 bits for the operators at the head of a table of sensitivities: rows that begin with a name, the worst first.

    topk_or_ratio    how many rows, as a whole number, or which share of them
    sensitive_type   what becomes wide: "activation", "weight" or "both"
    """

    sensitive_table: Any
    topk_or_ratio: int | float
    sensitive_type: str = "both"
    low_precision_dtype: Any = "qint8"
    high_precision_dtype: Any = "qint16"

    def add(self, mapping: fxq.QConfigMapping, base: fxq.QConfig) -> fxq.QConfigMapping:
        """The mapping with its rules."""
        rows = [row if isinstance(row, str) else row[0] for row in self.sensitive_table]
        count = self.topk_or_ratio if isinstance(self.topk_or_ratio, int) else round(len(rows) * self.topk_or_ratio)
        parts = {"activation": ("output",), "weight": ("weight",), "both": ("output", "weight")}
        if self.sensitive_type not in parts:
            raise ConfigurationError(
                f"sensitive_type={self.sensitive_type!r} is unknown", because=f"it is one of {', '.join(parts)}", remedy="pass one of these"
            )
        value = dict.fromkeys(parts[self.sensitive_type], self.high_precision_dtype)
        for name in dict.fromkeys(rows[:count]):
            mapping = mapping.set_module_name(str(name), _asked(base, value))
        return mapping


class _Automatic:
    """A template for what is done anyhow: 16 bits for the positions that images are read at, integers for constants, int8 for layers."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def add(self, mapping: fxq.QConfigMapping, base: fxq.QConfig) -> fxq.QConfigMapping:
        """The mapping as it is."""
        return mapping


class GEMMToGridSampleGridInt16Template(_Automatic):
    """Positions that images are read at have 16 bits where the march has them, back to the layer that makes them, unasked."""


class ConstTensorQuantTemplate(_Automatic):
    """Constants are quantized without being asked for."""


class GEMMInt8Template(_Automatic):
    """Layers with weights have int8 unless another rule says otherwise."""


class DefaultTemplate(_Automatic):
    """The reference qconfig is the default of every operator."""


class HighPrecisionOutputTemplate(_Automatic):
    """Layers whose sums the model returns have 32-bit outputs: `prepare` looks for them (see `fxquant.high_precision_outputs`)."""


def has_high_precision_outputs(setters: Any) -> bool:
    """Whether one of these setters has the template for them."""
    several = setters if isinstance(setters, tuple | list) else (setters,)
    return any(isinstance(template, HighPrecisionOutputTemplate) for setter in several for template in getattr(setter, "templates", ()))


@dataclass(frozen=True)
class QconfigSetter:
    """A reference qconfig, and templates that change it in places; a later one goes before an earlier one."""

    reference_qconfig: fxq.QConfig = field(default_factory=get_qconfig)
    templates: Any = ()
    enable_optimize: bool = False

    def mapping(self) -> fxq.QConfigMapping:
        """The rules of all templates."""
        mapping = fxq.QConfigMapping(default=self.reference_qconfig)
        for template in self.templates:
            mapping = template.add(mapping, self.reference_qconfig)
        return mapping


@dataclass(frozen=True)
class ModuleNameQconfigSetter:
    """QConfigs by a module's name."""

    qconfigs: Mapping[str, Any]

    def mapping(self) -> fxq.QConfigMapping:
        """The rules."""
        return fxq.QConfigMapping(default=None, names=dict(self.qconfigs))


@dataclass(frozen=True)
class TemplateQconfigSetter:
    """The older spelling of `QconfigSetter`."""

    default_qconfig: fxq.QConfig
    templates: Any = ()

    def mapping(self) -> fxq.QConfigMapping:
        """The rules of all templates."""
        return QconfigSetter(self.default_qconfig, self.templates).mapping()


def of_setters(setters: Any) -> fxq.QConfigMapping:
    """The mapping of one setter, or of several: the first that speaks of a place decides; a qconfig, a dict and a mapping do as well."""
    if setters is None:
        setters = QconfigSetter()
    mapping = fxq.QConfigMapping(default=None)
    for setter in reversed(setters if isinstance(setters, tuple | list) else (setters,)):
        one = setter.mapping() if hasattr(setter, "mapping") else of_dict(setter)
        default = mapping.default if one.default is None else one.default
        mapping = fxq.QConfigMapping(
            default,
            {**mapping.types, **one.types},
            {**mapping.patterns, **one.patterns},
            {**mapping.names, **one.names},
            {**mapping.calls, **one.calls},
        )
    return mapping

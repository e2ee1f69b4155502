"""Horizon's setters and templates. Templates change the request for an operator field by field, in the order of their list.

A request has three operands: output, weight and input. A later template of a list overrides an earlier one in the operands that it
sets, and leaves the others as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat.horizon.served.qconfig import as_qconfig, dtype_of, get_qconfig, is_float_dtype
from fxquant.errors import ConfigurationError
from fxquant.quantization.mapping import Chosen

LAYERS: tuple[Any, ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear,
    torch.conv1d, torch.conv2d, torch.conv3d,
)  # fmt: skip
MATRICES: tuple[Any, ...] = (torch.matmul, torch.bmm, operator.matmul, torch.Tensor.matmul, torch.Tensor.bmm, "matmul", "bmm", "__matmul__")
OPERANDS = ("input", "weight", "output")

UNSAID: Any = object()  # a setter has no rule for an operator
FLOAT: Any = object()  # an operand in float


class Place(NamedTuple):
    """An operator of a traced model: its node's name, its module's path, and its class or function."""

    name: str
    path: str
    kind: Any

    @property
    def is_layer(self) -> bool:
        """Return whether it is a convolution or a linear layer."""
        return self.kind in LAYERS or (isinstance(self.kind, type) and issubclass(self.kind, LAYERS[:7]))

    @property
    def is_batch_norm(self) -> bool:
        """Return whether it is a batch norm."""
        return self.kind is F.batch_norm or (isinstance(self.kind, type) and issubclass(self.kind, nn.modules.batchnorm._BatchNorm))

    @property
    def is_product(self) -> bool:
        """Return whether it is a product of two tensors."""
        return self.kind in MATRICES

    def below(self, name: str) -> bool:
        """Return whether a name covers it: its node's, its module's, or an enclosing module's; "" covers all."""
        return name in ("", self.name, self.path) or self.path.startswith(name + ".")


@dataclass(frozen=True)
class Asked:
    """The requested quantization of an operator's output, weight and input; FLOAT for an operand in float."""

    output: Any
    weight: fxq.WeightConfig
    input: Any = None

    @staticmethod
    def of(qconfig: fxq.QConfig) -> Asked:
        """Return the request of a qconfig."""
        return Asked(qconfig.output, qconfig.weight, qconfig.input)

    @property
    def has_floats(self) -> bool:
        """Return whether an operand is requested in float."""
        return self.output is FLOAT or self.input is FLOAT

    def qconfig(self, place: Place) -> Chosen:
        """Return its fxq.QConfig. A layer with integer operands and a float output returns its accumulator, which is dequantized."""
        if self.input is FLOAT:
            return None
        if self.output is FLOAT:
            sums = self.input is not None and (place.is_layer or place.is_product)
            return fxq.QConfig(fxq.ActivationConfig("int32"), self.weight, self.input) if sums else None
        return fxq.QConfig(self.output, self.weight, self.input)

    def with_dtype(self, operand: str, dtype: Any) -> Asked:
        """Return a copy with another dtype of an operand; if the operand has no config, its scale is found as the output's."""
        if operand == "weight":
            return replace(self, weight=replace(self.weight, dtype=dtype_of(dtype)))
        if is_float_dtype(dtype):
            in_float: dict[str, Any] = {operand: FLOAT}
            return replace(self, **in_float)
        now = getattr(self, operand)
        base = now if isinstance(now, fxq.ActivationConfig) else self.output
        base = base if isinstance(base, fxq.ActivationConfig) and base.dtype != "int32" else fxq.ActivationConfig()
        changed: dict[str, Any] = {operand: base.of(dtype_of(dtype))}
        return replace(self, **changed)

    def with_threshold(self, operand: str, threshold: float) -> Asked:
        """Return a copy with a given threshold of an operand."""
        now = getattr(self, operand)
        base = now if isinstance(now, fxq.ActivationConfig) else self.output
        base = base if isinstance(base, fxq.ActivationConfig) else fxq.ActivationConfig("int8")
        changed: dict[str, Any] = {operand: replace(base, scale=None, threshold=float(threshold))}
        return replace(self, **changed)


def _by_operand(value: Any, what: str) -> dict[str, Any]:
    """Return a value for the output, or a dict of values, by operand."""
    if not isinstance(value, Mapping):
        return {"output": value}
    for name in value:
        if name not in OPERANDS:
            raise ConfigurationError(
                f"{name!r} is not an operand of a template's {what}",
                because=f"operands are {', '.join(OPERANDS)}",
                remedy="name one of these",
            )
    return dict(value)


@dataclass(frozen=True)
class ModuleNameTemplate:
    """Dtypes and thresholds by module name; "" covers every operator, and the longest name takes precedence.

    config_mapping   a dtype, of the output; a dict of dtypes by operand; or {"dtype": …, "threshold": …} with these
    freeze           no effect: a dtype that the march does not support is an error, without a fallback
    """

    config_mapping: Mapping[str, Any]
    freeze: bool = False

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request for an operator after this template."""
        for name in sorted((name for name in self.config_mapping if place.below(name)), key=len):
            value = self.config_mapping[name]
            if isinstance(value, fxq.QConfig):
                asked = Asked.of(value)
                continue
            parts = value if isinstance(value, Mapping) and value.keys() & {"dtype", "threshold"} else {"dtype": value}
            for key in parts:
                if key not in ("dtype", "threshold"):
                    raise ConfigurationError(
                        f"{key!r} is not a key of a template's value", because="they are 'dtype' and 'threshold'", remedy="use one of these"
                    )
            for operand, dtype in _by_operand(parts.get("dtype", {}), "dtype").items():
                asked = asked.with_dtype(operand, dtype)
            for operand, threshold in _by_operand(parts.get("threshold", {}), "threshold").items():
                asked = asked.with_threshold(operand, threshold)
        return asked

    def names(self) -> list[str]:
        """Return the names that it has rules for."""
        return list(self.config_mapping)


@dataclass(frozen=True)
class ConvDtypeTemplate:
    """The dtypes of the input and the weight of convolutions and linear layers."""

    input_dtype: Any = "qint8"
    weight_dtype: Any = "qint8"
    prefix: str | None = None

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request for an operator after this template."""
        if not place.is_layer or not place.below(self.prefix or ""):
            return asked
        if self.input_dtype is not None:
            asked = asked.with_dtype("input", self.input_dtype)
        return asked if self.weight_dtype is None else asked.with_dtype("weight", self.weight_dtype)


@dataclass(frozen=True)
class MatmulDtypeTemplate:
    """The input dtype of products of two tensors. Raises ConfigurationError for two different dtypes: both operands share one."""

    input_dtypes: Any = "qint8"
    prefix: str | None = None

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request for an operator after this template."""
        if not place.is_product or not place.below(self.prefix or ""):
            return asked
        several = (
            [self.input_dtypes] if isinstance(self.input_dtypes, str) or not isinstance(self.input_dtypes, Sequence) else self.input_dtypes
        )
        if len({dtype_of(each) for each in several}) != 1:
            raise ConfigurationError(
                f"MatmulDtypeTemplate(input_dtypes={list(several)}) cannot be done",
                because="both operands of a product are read in one dtype",
                remedy="pass one dtype, the wider one; an operand that has fewer bits loses nothing by it",
            )
        return asked.with_dtype("input", several[0])


@dataclass(frozen=True)
class GEMMInt8Template:
    """Int8 inputs and weights for layers with weights, and int8 inputs for products."""

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request for an operator after this template."""
        return MatmulDtypeTemplate().apply(place, ConvDtypeTemplate().apply(place, asked))


@dataclass(frozen=True)
class SensitivityTemplate:
    """16 bits for the most sensitive operators of a table: rows that begin with a name, the worst first.

    sensitive_table  rows (name, "activation" or "weight", …), or names, or what `QuantAnalysis.sensitivity` returns
    topk_or_ratio    how many rows, as an integer, or which fraction of them
    sensitive_type   what becomes wide: "activation", "weight" or "both"
    """

    sensitive_table: Any
    topk_or_ratio: int | float
    sensitive_type: str = "both"
    low_precision_dtype: Any = "qint8"
    high_precision_dtype: Any = "qint16"

    def wide(self) -> list[tuple[str, str]]:
        """Return the operands that become wide, by operator."""
        parts = {"activation": ("output",), "weight": ("weight",), "both": ("output", "weight")}
        if self.sensitive_type not in parts:
            raise ConfigurationError(
                f"sensitive_type={self.sensitive_type!r} is unknown", because=f"it is one of {', '.join(parts)}", remedy="pass one of these"
            )
        rows = [(row, None) if isinstance(row, str) else (str(row[0]), row[1] if len(row) > 1 else None) for row in self.sensitive_table]
        count = self.topk_or_ratio if isinstance(self.topk_or_ratio, int) else round(len(rows) * self.topk_or_ratio)
        found = []
        for name, kind in rows[:count]:
            said = parts[kind] if isinstance(kind, str) and kind in parts else parts[self.sensitive_type]
            found += [(name, operand) for operand in said if operand in parts[self.sensitive_type]]
        return found

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request for an operator after this template."""
        for name, operand in self.wide():
            if name and place.below(name):
                asked = asked.with_dtype(operand, self.high_precision_dtype)
        return asked

    def names(self) -> list[str]:
        """Return the names that it has rules for."""
        return [name for name, _ in self.wide()]


class _Automatic:
    """A template for behaviour that is automatic here."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request unchanged."""
        return asked


class GEMMToGridSampleGridInt16Template(_Automatic):
    """Sampling positions have 16 bits if the march supports them, back to the layer that computes them; automatic here."""


class ConstTensorQuantTemplate(_Automatic):
    """Constants are quantized; automatic here."""


class DefaultTemplate(_Automatic):
    """The reference qconfig is the default of every operator."""


class HighPrecisionOutputTemplate(_Automatic):
    """Layers whose sums the model returns have 32-bit outputs: `prepare` checks for it (see `fxquant.high_precision_outputs`)."""


def _is_wide(templates: Any) -> bool:
    return any(isinstance(template, HighPrecisionOutputTemplate) for template in templates)


@dataclass(frozen=True)
class QconfigSetter:
    """A reference qconfig, and templates that change it operand by operand, in order.

    enable_optimize         no effect: requests are not changed, and an unsupported one is an error
    save_dir                a folder for qconfig.json, the resulting rules for a model; None: nothing is written
    custom_qconfig_mapping  qconfigs by module name, which override the templates
    """

    reference_qconfig: fxq.QConfig = field(default_factory=get_qconfig)
    templates: Any = ()
    enable_optimize: bool = False
    save_dir: str | Path | None = None
    custom_qconfig_mapping: Mapping[str, Any] | None = None

    @property
    def high_precision_outputs(self) -> bool:
        """Return whether the template for high-precision outputs is among its own."""
        return _is_wide(self.templates)

    def of(self, place: Place) -> Any:
        """Return the request for an operator."""
        own = _nearest(self.custom_qconfig_mapping or {}, place)
        if own is not UNSAID:
            return own
        asked = Asked.of(self.reference_qconfig)
        for template in self.templates:
            asked = template.apply(place, asked)
        return asked

    def names(self) -> list[str]:
        """Return the names that its templates have rules for."""
        return [name for template in self.templates for name in getattr(template, "names", list)()]


def _nearest(qconfigs: Mapping[str, Any], place: Place) -> Any:
    """Return the qconfig of the longest name that covers an operator; UNSAID if there is none."""
    covering = [name for name in qconfigs if place.below(name)]
    return as_qconfig(qconfigs[max(covering, key=len)]) if covering else UNSAID


@dataclass(frozen=True)
class ModuleNameQconfigSetter:
    """QConfigs by module name."""

    module_name_to_qconfig: Mapping[str, Any]

    def of(self, place: Place) -> Any:
        """Return the request for an operator."""
        return _nearest(self.module_name_to_qconfig, place)

    def names(self) -> list[str]:
        """Return the names that it has rules for."""
        return list(self.module_name_to_qconfig)


@dataclass(frozen=True)
class TemplateQconfigSetter:
    """The older form of `QconfigSetter`."""

    default_qconfig: fxq.QConfig
    templates: Any = ()

    @property
    def high_precision_outputs(self) -> bool:
        """Return whether the template for high-precision outputs is among its own."""
        return _is_wide(self.templates)

    def of(self, place: Place) -> Any:
        """Return the request for an operator."""
        return QconfigSetter(self.default_qconfig, self.templates).of(place)


@dataclass(frozen=True)
class SensitiveQconfigSetter:
    """A qconfig for the most sensitive operators of a table, and no rule for the others."""

    qconfig: fxq.QConfig
    table: Any
    topk: int | None = None
    ratio: float | None = None

    def names(self) -> list[str]:
        """Return the operators that it has rules for."""
        rows = list(dict.fromkeys(row if isinstance(row, str) else str(row[0]) for row in self.table))
        return rows[: self.topk if self.topk is not None else round(len(rows) * self.ratio) if self.ratio is not None else len(rows)]

    def of(self, place: Place) -> Any:
        """Return the request for an operator."""
        return self.qconfig if any(name and place.below(name) for name in self.names()) else UNSAID

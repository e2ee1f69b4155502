"""Horizon's setters and templates, its qconfig_dict and hybrid_dict, as rules of a fxq.QConfigMapping.

Templates change the request for an operator field by field, in the order of their list. A request has three operands: output, weight
and input. A later template of a list overrides an earlier one in the operands that it sets, and does not change the others.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends
from fxquant.compat.common import refused, unknown
from fxquant.compat.horizon.served.qconfig import NAMED, REFUSED, activation, as_qconfig, dtype_of, get_qconfig, is_float_dtype
from fxquant.ir.functional import dequant_stub, quant_stub
from fxquant.ir.graph import computes_tensor, module_path, resolve
from fxquant.quantization.spec import DEFAULT, Chosen

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
    """An operator of a traced model: its node's name, its module's path, its class or function, and whether only outputs read it."""

    name: str
    path: str
    kind: Any
    is_last: bool = False

    @property
    def is_layer(self) -> bool:
        return self.kind in LAYERS or (isinstance(self.kind, type) and issubclass(self.kind, LAYERS[:7]))

    @property
    def is_batch_norm(self) -> bool:
        return self.kind is F.batch_norm or (isinstance(self.kind, type) and issubclass(self.kind, nn.modules.batchnorm._BatchNorm))

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
        return Asked(qconfig.output, qconfig.weight, qconfig.input)

    def qconfig(self, place: Place) -> Chosen:
        """Return its fxq.QConfig. A layer with integer operands and a float output returns its accumulator, which is dequantized."""
        if self.input is FLOAT:
            return None
        if self.output is FLOAT:
            sums = self.input is not None and (place.is_layer or place.kind in MATRICES)
            return fxq.QConfig(fxq.ActivationConfig("int32"), self.weight, self.input) if sums else None
        return fxq.QConfig(self.output, self.weight, self.input)

    def with_dtype(self, operand: str, dtype: Any) -> Asked:
        """Return a copy with another dtype of an operand; if the operand has no config, its scale is found as the output's."""
        if operand == "weight":
            return replace(self, weight=replace(self.weight, dtype=dtype_of(dtype)))
        if is_float_dtype(dtype):
            return self._with(operand, FLOAT)
        base = self._config(operand)
        return self._with(operand, (base if base.dtype != "int32" else fxq.ActivationConfig()).of(dtype_of(dtype)))

    def with_threshold(self, operand: str, threshold: float) -> Asked:
        return self._with(operand, replace(self._config(operand), scale=None, threshold=float(threshold)))

    def _with(self, operand: str, config: Any) -> Asked:
        return replace(self, **{operand: config})

    def _config(self, operand: str) -> fxq.ActivationConfig:
        """Return the config of an operand, or the output's; that of int8 without either."""
        configs = (config for config in (getattr(self, operand), self.output) if isinstance(config, fxq.ActivationConfig))
        return next(configs, fxq.ActivationConfig("int8"))


def _by_operand(value: Any, what: str) -> dict[str, Any]:
    """Return a value for the output, or a dict of values, by operand."""
    return dict(_only(value, OPERANDS, f"template's {what}")) if isinstance(value, Mapping) else {"output": value}


class Template:
    """A change of the requests for some operators."""

    def apply(self, place: Place, asked: Asked) -> Asked:
        """Return the request for an operator after this template."""
        return asked

    def names(self) -> list[str]:
        """Return the names that it has rules for."""
        return []


@dataclass(frozen=True)
class ModuleNameTemplate(Template):
    """Dtypes and thresholds by module name; "" covers every operator, and the longest name takes precedence."""

    config_mapping: Mapping[str, Any]  # a dtype, of the output; a dict of dtypes by operand; or {"dtype": …, "threshold": …} with these
    freeze: bool = False  # no effect: a dtype that the march does not support is an error, without a fallback

    def apply(self, place: Place, asked: Asked) -> Asked:
        for name in sorted((name for name in self.config_mapping if place.below(name)), key=len):
            value = self.config_mapping[name]
            if isinstance(value, fxq.QConfig):
                asked = Asked.of(value)
                continue
            parts = value if isinstance(value, Mapping) and value.keys() & {"dtype", "threshold"} else {"dtype": value}
            _only(parts, ("dtype", "threshold"), "template's value")
            for operand, dtype in _by_operand(parts.get("dtype", {}), "dtype").items():
                asked = asked.with_dtype(operand, dtype)
            for operand, threshold in _by_operand(parts.get("threshold", {}), "threshold").items():
                asked = asked.with_threshold(operand, threshold)
        return asked

    def names(self) -> list[str]:
        return list(self.config_mapping)


@dataclass(frozen=True)
class ConvDtypeTemplate(Template):
    """The dtypes of the input and the weight of convolutions and linear layers."""

    input_dtype: Any = "qint8"
    weight_dtype: Any = "qint8"
    prefix: str | None = None

    def apply(self, place: Place, asked: Asked) -> Asked:
        if not place.is_layer or not place.below(self.prefix or ""):
            return asked
        if self.input_dtype is not None:
            asked = asked.with_dtype("input", self.input_dtype)
        return asked if self.weight_dtype is None else asked.with_dtype("weight", self.weight_dtype)


@dataclass(frozen=True)
class MatmulDtypeTemplate(Template):
    """The input dtype of products of two tensors. Raises ConfigurationError for two different dtypes: both operands share one."""

    input_dtypes: Any = "qint8"
    prefix: str | None = None

    def apply(self, place: Place, asked: Asked) -> Asked:
        if place.kind not in MATRICES or not place.below(self.prefix or ""):
            return asked
        dtypes = self.input_dtypes
        several = dtypes if isinstance(dtypes, Sequence) and not isinstance(dtypes, str) else [dtypes]
        if len({dtype_of(each) for each in several}) != 1:
            raise refused("MatmulDtypeTemplate", value=list(several))
        return asked.with_dtype("input", several[0])


@dataclass(frozen=True)
class GEMMInt8Template(Template):
    """Int8 inputs and weights for layers with weights, and int8 inputs for products."""

    def apply(self, place: Place, asked: Asked) -> Asked:
        return MatmulDtypeTemplate().apply(place, ConvDtypeTemplate().apply(place, asked))


@dataclass(frozen=True)
class SensitivityTemplate(Template):
    """16 bits for the most sensitive operators of a table: rows that begin with a name, the worst first."""

    sensitive_table: Any  # rows (name, "activation" or "weight", …), or names, or what `QuantAnalysis.sensitivity` returns
    topk_or_ratio: int | float  # how many rows, as an integer, or which fraction of them
    sensitive_type: str = "both"  # what becomes wide: "activation", "weight" or "both"
    low_precision_dtype: Any = "qint8"
    high_precision_dtype: Any = "qint16"

    def wide(self) -> list[tuple[str, str]]:
        """Return the operands that become wide, by operator."""
        parts = {"activation": ("output",), "weight": ("weight",), "both": ("output", "weight")}
        if self.sensitive_type not in parts:
            raise unknown("sensitive_type", self.sensitive_type, f"one of {', '.join(parts)}")
        rows = [(row, None) if isinstance(row, str) else (str(row[0]), row[1] if len(row) > 1 else None) for row in self.sensitive_table]
        count = self.topk_or_ratio if isinstance(self.topk_or_ratio, int) else round(len(rows) * self.topk_or_ratio)
        wide_operands = []
        for name, kind in rows[:count]:
            operands = parts[kind] if isinstance(kind, str) and kind in parts else parts[self.sensitive_type]
            wide_operands += [(name, operand) for operand in operands if operand in parts[self.sensitive_type]]
        return wide_operands

    def apply(self, place: Place, asked: Asked) -> Asked:
        for name, operand in self.wide():
            if name and place.below(name):
                asked = asked.with_dtype(operand, self.high_precision_dtype)
        return asked

    def names(self) -> list[str]:
        return [name for name, _ in self.wide()]


class Automatic(Template):
    """A template for what is done without being asked for.

    Sampling positions have 16 bits if the march supports them, back to the layer that computes them; constants are quantized; and the
    reference qconfig is the default of every operator.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...


GEMMToGridSampleGridInt16Template = ConstTensorQuantTemplate = DefaultTemplate = Automatic


class HighPrecisionOutputTemplate(Automatic):
    """Layers that the model returns have 32-bit outputs. Rules for others that say int8 leave the dtype to `fxquant.prepare`."""

    def apply(self, place: Place, asked: Asked) -> Asked:
        return replace(asked, output=fxq.ActivationConfig("int32")) if place.is_last else asked


@dataclass(frozen=True)
class QconfigSetter:
    """A reference qconfig, and templates that change it operand by operand, in order."""

    reference_qconfig: fxq.QConfig = field(default_factory=get_qconfig)
    templates: Any = ()
    enable_optimize: bool = False  # no effect: requests are not changed, and an unsupported one is an error
    save_dir: str | Path | None = None  # a folder for qconfig.json, the resulting rules for a model; None: nothing is written
    custom_qconfig_mapping: Mapping[str, Any] | None = None  # qconfigs by module name, which override the templates

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
        return [name for template in self.templates for name in template.names()]


def _nearest(qconfigs: Mapping[str, Any], place: Place) -> Any:
    """Return the qconfig of the longest name that covers an operator; UNSAID if there is none."""
    covering = [name for name in qconfigs if place.below(name)]
    return as_qconfig(qconfigs[max(covering, key=len)]) if covering else UNSAID


@dataclass(frozen=True)
class ModuleNameQconfigSetter:
    """QConfigs by module name."""

    module_name_to_qconfig: Mapping[str, Any]

    def of(self, place: Place) -> Any:
        return _nearest(self.module_name_to_qconfig, place)

    def names(self) -> list[str]:
        return list(self.module_name_to_qconfig)


class TemplateQconfigSetter(QconfigSetter):
    """The older form of `QconfigSetter`, which does not report names that match nothing."""

    def __init__(self, default_qconfig: fxq.QConfig, templates: Any = ()) -> None:
        super().__init__(default_qconfig, templates)

    def names(self) -> list[str]:
        return []


def _sensitive(qconfig: Any, table: Any, topk: int | None = None, ratio: float | None = None) -> ModuleNameQconfigSetter:
    """Return a setter of a qconfig for the most sensitive operators of a table."""
    rows = list(dict.fromkeys(row if isinstance(row, str) else str(row[0]) for row in table))
    count = topk if topk is not None else round(len(rows) * ratio) if ratio is not None else len(rows)
    return ModuleNameQconfigSetter(dict.fromkeys(filter(None, rows[:count]), qconfig))


def _ready(qconfig: str, *more: Any) -> TemplateQconfigSetter:
    return TemplateQconfigSetter(NAMED[qconfig], (HighPrecisionOutputTemplate(), *more))


default_calibration_qconfig_setter = _ready("default_calib_8bit_fake_quant_qconfig")
default_qat_qconfig_setter = _ready("default_qat_8bit_fake_quant_qconfig")
default_qat_fixed_act_qconfig_setter = _ready("default_qat_8bit_fixed_act_fake_quant_qconfig")
calibration_8bit_weight_16bit_act_qconfig_setter = _ready("default_calib_8bit_weight_16bit_act_fake_quant_qconfig")
qat_8bit_weight_16bit_act_qconfig_setter = _ready("default_qat_8bit_weight_16bit_act_fake_quant_qconfig")
qat_8bit_weight_16bit_fixed_act_qconfig_setter = _ready("default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig")
gemm_int8_calibration_qconfig_setter = _ready("default_calib_8bit_weight_16bit_act_fake_quant_qconfig", GEMMInt8Template())
gemm_int8_qat_qconfig_setter = _ready("default_qat_8bit_weight_16bit_act_fake_quant_qconfig", GEMMInt8Template())
all_fp16_qconfig_setter = QconfigSetter(templates=(ModuleNameTemplate({"": torch.float16}),))

# Functions of (table, topk=None, ratio=None).
_by_name_of = {name: functools.partial(_sensitive, qconfig) for name, qconfig in NAMED.items()}
sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter = _by_name_of["default_calib_8bit_weight_16bit_act_fake_quant_qconfig"]
sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter = _by_name_of["default_qat_8bit_weight_16bit_act_fake_quant_qconfig"]
sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter = _by_name_of["default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig"]


def get_sensitive_op_qconfig_setter(
    sensitive_type: str, origin_dtype: Any, qconfig: Any, table: Any, topk: int | None = None, ratio: float | None = None
) -> ModuleNameQconfigSetter:
    """Return a setter of a qconfig for the operators whose rows of the table are of a type: "activation" or "weight"."""
    rows = [row for row in table if isinstance(row, str) or len(row) < 2 or row[1] == sensitive_type]
    return _sensitive(as_qconfig(qconfig) or fxq.QConfig(activation(None)), rows, topk, ratio)


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    return list(rules.items()) if isinstance(rules, Mapping) else [(kind, chosen) for kind, chosen in rules]


def _only(table: Any, names: tuple[str, ...], what: str) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise refused("template.dict", kind=type(table).__name__, what=what, known=", ".join(map(repr, names)))
    for key in table:
        if key not in names:
            raise refused("template.key", key=key, what=what, known=", ".join(map(repr, names)))
    return table


def of_dict(qconfig_dict: Any) -> fxq.QConfigMapping:
    """Convert {"": global, "module_type": [(type, qconfig)], "module_name": [(name, qconfig)] or {name: qconfig}}. The rest is float."""
    if isinstance(qconfig_dict, fxq.QConfigMapping):
        return qconfig_dict
    if qconfig_dict is None or not isinstance(qconfig_dict, Mapping):
        return fxq.QConfigMapping(default=as_qconfig(qconfig_dict))
    parts = _only(qconfig_dict, ("", "module_type", "object_type", "module_name"), "qconfig_dict")
    types = _pairs(parts.get("module_type", ())) + _pairs(parts.get("object_type", ()))
    names = {name: as_qconfig(chosen) for name, chosen in _pairs(parts.get("module_name", ()))}
    return fxq.QConfigMapping(as_qconfig(parts.get("")), {kind: as_qconfig(chosen) for kind, chosen in types}, names=names)


def on_host(mapping: fxq.QConfigMapping, hybrid_dict: Any) -> fxq.QConfigMapping:
    """Return the mapping with what hybrid_dict names on the host: {"module_type": [type], "module_name": [name]}."""
    parts = _only(hybrid_dict, ("module_type", "module_name"), "hybrid_dict")
    return copy.copy(mapping).set_host(*parts.get("module_type", ()), *parts.get("module_name", ()))


def of_setters(setters: Any, traced: fx.GraphModule, march: str) -> fxq.QConfigMapping:
    """Return the mapping that setters define for a traced model.

    The first of several setters with a rule for an operator decides; a qconfig, a dict and a mapping are setters as well. The mapping has
    a rule for each operator that differs from the default. Raises ConfigurationError for float operands on a march without float16.
    """
    if setters is None:
        setters = QconfigSetter()
    several = list(setters) if isinstance(setters, tuple | list) else [setters]
    if len(several) == 1 and not hasattr(several[0], "of"):
        return of_dict(several[0])
    is_open = any(isinstance(each, HighPrecisionOutputTemplate) for setter in several for each in getattr(setter, "templates", ()))

    def chosen(place: Place) -> Chosen:
        for setter in several:
            asked = setter.of(place) if hasattr(setter, "of") else _of_mapping(of_dict(setter), place)
            if asked is not UNSAID:
                qconfig: Chosen = asked.qconfig(place) if isinstance(asked, Asked) else asked
                if isinstance(asked, Asked) and FLOAT in (asked.output, asked.input) and not backends.get(march).float16:
                    raise REFUSED["float"].error(f"a float dtype of {place.path or 'all operators'} cannot be used on {march}")
                if is_open and qconfig is not None and qconfig.output.dtype == "int8":
                    return replace(qconfig, output=replace(qconfig.output, dtype=None))
                return qconfig
        return None

    default = chosen(Place("", "", None))
    places = {place: chosen(place) for place in places_of(traced)}
    names = _by_name(traced, places, default)
    for setter in several:
        listed: Sequence[str] = getattr(setter, "names", tuple)()
        names.update((name, default) for name in listed if name and not any(place.below(name) for place in places))  # `prepare` reports it
    mapping = fxq.QConfigMapping(default, names=names)
    for setter in several:
        if getattr(setter, "save_dir", None) is not None:
            fxq.save_qconfig(mapping, Path(setter.save_dir) / "qconfig.json")
    return mapping


def _by_name(traced: fx.GraphModule, places: Mapping[Place, Chosen], default: Chosen) -> dict[str, Chosen]:
    """Return rules for the operators that differ from the default, by their nodes' names."""
    names = {place.name: qconfig for place, qconfig in places.items() if qconfig != default}
    if default is None and any(qconfig is not None and qconfig.output.dtype == "int32" for qconfig in names.values()):
        # The accumulator of a dequantized layer includes only its batch norm; operators after it would read their operands as integers.
        names.update((place.name, None) for place, qconfig in places.items() if qconfig is None and not place.is_batch_norm)
    of_node = {place.name: qconfig for place, qconfig in places.items()}
    for node in traced.graph.nodes:  # the grid of a stub is its own rule's, not that of its readers
        if node.target is quant_stub and any(of_node.get(user.name, of_node[node.name]) != of_node[node.name] for user in node.users):
            names[node.name] = of_node[node.name]
    return names


def places_of(traced: fx.GraphModule) -> list[Place]:
    """Return the operators of a traced model, in the order they are computed."""
    places = {
        node: Place(node.name, module_path(node), type(resolve(traced, str(node.target))) if node.op == "call_module" else node.target)
        for node in traced.graph.nodes
        if computes_tensor(node) and node.target is not dequant_stub
    }
    ends: set[fx.Node] = set()  # outputs, stubs, and the batch norms of layers that only these read
    for node in reversed(traced.graph.nodes):
        place, ended = places.get(node), all(user in ends for user in node.users)
        norm = place is not None and place.is_batch_norm and any(places[it].is_layer for it in node.all_input_nodes if it in places)
        if place is not None and ended and (norm or place.is_layer):
            places[node] = place._replace(is_last=True)
        if node.op == "output" or (ended and (norm or node.target is dequant_stub)):
            ends.add(node)
    return list(places.values())


def _of_mapping(mapping: fxq.QConfigMapping, place: Place) -> Any:
    """Return the rule of a mapping for an operator; UNSAID if only its default of None covers it."""
    rule, chosen = mapping.covering(place.name, place.path, (place.kind,))[0]
    return UNSAID if rule == DEFAULT and chosen is None else chosen

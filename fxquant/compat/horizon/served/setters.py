"""The plugin's predefined setters."""

from __future__ import annotations

from typing import Any

import torch

import fxquant as fxq
from fxquant.compat.horizon.served.qconfig import NAMED, activation, as_qconfig
from fxquant.compat.horizon.served.templates import (
    GEMMInt8Template,
    HighPrecisionOutputTemplate,
    ModuleNameTemplate,
    QconfigSetter,
    SensitiveQconfigSetter,
    TemplateQconfigSetter,
)


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


def sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(
    table: Any, topk: int | None = None, ratio: float | None = None
) -> SensitiveQconfigSetter:
    """Return a setter of 16-bit activations for the most sensitive operators, of a model that is calibrated."""
    return SensitiveQconfigSetter(NAMED["default_calib_8bit_weight_16bit_act_fake_quant_qconfig"], table, topk, ratio)


def sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter(
    table: Any, topk: int | None = None, ratio: float | None = None
) -> SensitiveQconfigSetter:
    """Return a setter of 16-bit activations for the most sensitive operators, of a model that is trained."""
    return SensitiveQconfigSetter(NAMED["default_qat_8bit_weight_16bit_act_fake_quant_qconfig"], table, topk, ratio)


def sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter(
    table: Any, topk: int | None = None, ratio: float | None = None
) -> SensitiveQconfigSetter:
    """Return a setter of 16-bit activations for the most sensitive operators, with fixed scales from calibration."""
    return SensitiveQconfigSetter(NAMED["default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig"], table, topk, ratio)


def get_sensitive_op_qconfig_setter(
    sensitive_type: str, origin_dtype: Any, qconfig: Any, table: Any, topk: int | None = None, ratio: float | None = None
) -> SensitiveQconfigSetter:
    """Return a setter of a qconfig for the operators whose rows of the table are of a type: "activation" or "weight"."""
    rows = [row for row in table if isinstance(row, str) or len(row) < 2 or row[1] == sensitive_type]
    made = as_qconfig(qconfig)
    if made is None:
        made = fxq.QConfig(activation(None))
    return SensitiveQconfigSetter(made, rows, topk, ratio)

"""Horizon's plugin for PyTorch over fxquant: its names, argument orders and defaults; docs/from-horizon.md.

from fxquant.compat import horizon

horizon.set_march(horizon.March.BAYES_E)
model = horizon.prepare_qat_fx(model, {"": horizon.default_calib_8bit_fake_quant_qconfig}, example_inputs=(x,))
horizon.set_fake_quantize(model, horizon.FakeQuantState.CALIBRATION)

What these return are fxquant's graphs and values: prepared models are calibrated, trained, saved and exported as any other.
"""

from __future__ import annotations

from typing import Any

from fxquant.compat.common import Refusal, refusing
from fxquant.compat.horizon import debug, march, profiling, qconfig, quantization, rules, stubs
from fxquant.compat.horizon.compiling import compile_model, export_hbir, perf_model, visualize_model
from fxquant.compat.horizon.debug import (
    check_deploy_device,
    check_model,
    check_qconfig,
    export_quantized_onnx,
    export_to_onnx,
    featuremap_similarity,
    get_module_called_count,
)
from fxquant.compat.horizon.march import March, get_march, set_march
from fxquant.compat.horizon.profiling import check_unfused_operations, compare_weights, model_profiler
from fxquant.compat.horizon.qconfig import NAMED, FakeQuant, FakeQuantize, QConfig, get_default_qconfig, get_qconfig
from fxquant.compat.horizon.quantization import (
    FakeQuantState,
    PrepareMethod,
    QATMode,
    convert,
    convert_fx,
    fuse_fx,
    fuse_modules,
    get_qat_mode,
    load_observer_params,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
    set_qat_mode,
    weight_reconstruction,
)
from fxquant.compat.horizon.rules import (
    ConstTensorQuantTemplate,
    ConvDtypeTemplate,
    DefaultTemplate,
    GEMMInt8Template,
    GEMMToGridSampleGridInt16Template,
    HighPrecisionOutputTemplate,
    ModuleNameQconfigSetter,
    ModuleNameTemplate,
    QconfigSetter,
    SensitivityTemplate,
    TemplateQconfigSetter,
)
from fxquant.compat.horizon.stubs import DeQuantStub, FloatFunctional, QuantStub
from fxquant.quantization.spec import ActivationConfig, WeightConfig

__all__ = [
    "ConstTensorQuantTemplate",
    "ConvDtypeTemplate",
    "DeQuantStub",
    "DefaultTemplate",
    "FakeQuantState",
    "FakeQuantize",
    "FloatFunctional",
    "GEMMInt8Template",
    "GEMMToGridSampleGridInt16Template",
    "HighPrecisionOutputTemplate",
    "March",
    "ModuleNameQconfigSetter",
    "ModuleNameTemplate",
    "PrepareMethod",
    "QATMode",
    "QConfig",
    "QconfigSetter",
    "QuantStub",
    "SensitivityTemplate",
    "TemplateQconfigSetter",
    "check_deploy_device",
    "check_model",
    "check_qconfig",
    "check_unfused_operations",
    "compare_weights",
    "compile_model",
    "compiling",
    "convert",
    "convert_fx",
    "debug",
    "export_hbir",
    "export_quantized_onnx",
    "export_to_onnx",
    "featuremap_similarity",
    "fuse_fx",
    "fuse_modules",
    "get_default_qconfig",
    "get_march",
    "get_module_called_count",
    "get_qat_mode",
    "get_qconfig",
    "load_observer_params",
    "march",
    "model_profiler",
    "perf_model",
    "prepare",
    "prepare_qat",
    "prepare_qat_fx",
    "profiling",
    "qconfig",
    "quantization",
    "rules",
    "set_fake_quantize",
    "set_march",
    "set_qat_mode",
    "stubs",
    "visualize_model",
    "weight_reconstruction",
]

_FLOATS = Refusal("floats are the host's", "give the operators None in the qconfig_dict")
MISSING = {
    "AdaRoundFakeQuantize": Refusal("rounding belongs to the weight", "pass fxq.WeightConfig(rounding=…), a class of fxq.Rounding"),
    "ConsistencyStrategy": Refusal("a consistency level is part of the march", "set_march('nash-e-level1'), or level2"),
    "DynamicFakeQuantize": Refusal("scales are those of calibration or training", "use FakeQuantize"),
    "FakeCast": _FLOATS,
    "GlobalFakeQuantSwitch": Refusal("states are set from outside", "call fxq.set_state(prepared, 'float', 'module.path')"),
    "MatmulDtypeTemplate": Refusal(
        "an operand has the dtype of the operator that made it", "give those operators a dtype with ModuleNameTemplate"
    ),
    "QuantAnalysis": Refusal("it is several functions here", "call fxq.compare, model_profiler, or fxq.sensitivity"),
    "all_fp16_qconfig_setter": _FLOATS,
    "auto_calibrate": Refusal("the search starts from the float model", "call fxq.search_observers(model, batches, target)"),
    "compare_script_models": Refusal("there is no TorchScript", "compare two forms bit for bit with fxq.verify"),
    "default_fp16_fake_cast": _FLOATS,
    "fuse_conv_shared_modules": Refusal("a layer that is called several times is fused at each call", "leave it out"),
    "get_default_calib_qconfig": Refusal("it was given up by the plugin", "use default_calib_8bit_fake_quant_qconfig"),
    "get_default_qat_out_qconfig": Refusal("it was given up by the plugin", "use default_qat_8bit_weight_32bit_out_fake_quant_qconfig"),
    "get_default_qat_qconfig": Refusal("it was given up by the plugin", "use default_qat_8bit_fake_quant_qconfig"),
    "get_raw_features": Refusal("values are read batch by batch", "call fxq.record(model, batches)"),
    "get_sensitive_op_qconfig_setter": Refusal(
        "a table of sensitivities is a template", "QconfigSetter(templates=[SensitivityTemplate(…)])"
    ),
    "jit": Refusal("there is no TorchScript", "save a model with fxq.save, and load it with fxq.load"),
    "prepare_calibration": Refusal(
        "it was given up by the plugin", "prepare_qat_fx, and set_fake_quantize(model, FakeQuantState.CALIBRATION)"
    ),
    "prepare_calibration_fx": Refusal(
        "it was given up by the plugin", "prepare_qat_fx, and set_fake_quantize(model, FakeQuantState.CALIBRATION)"
    ),
    "profile_featuremap": Refusal("values are read batch by batch", "call fxq.record(model, batches, real=True)"),
    "profile_module_constraints": Refusal("limits are checked on the whole graph", "call check_model, or fxq.check"),
    "script_profile": Refusal("there is no TorchScript", "compare two forms bit for bit with fxq.verify"),
    "set_preserve_qat_mode": Refusal("an integer graph is integer", "keep an operator in float with None in the qconfig_dict"),
    "show_cuda_memory_consumption": Refusal("it is no part of quantization", "use torch.cuda.memory"),
    "split_compilable_model": Refusal("a compiled model is cut where devices change", "call fxq.export_segments"),
}
_refuse = refusing(__name__, MISSING)


def __getattr__(name: str) -> Any:
    """A qconfig, a fake quantize or an observer by its name."""
    if name in NAMED:
        return NAMED[name]
    found = vars(qconfig).get(name)
    described = isinstance(found, str | FakeQuant | ActivationConfig | WeightConfig) and not name.startswith("__")
    return found if described else _refuse(name)

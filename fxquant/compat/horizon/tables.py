"""The plugin's modules and names: the implementation, first release and differences of each. The modules are built from these rows."""

from __future__ import annotations

import re

from fxquant.compat.mirror import Row, Tables, refuse, serve

ALIASES = {"horizon_plugin_pytorch": "", "horizon_plugin_profiler": "profiler", "hbdk4": "hbdk4"}
OWN = "its own observers and fake quantizes are fxquant's"
NO_SCRIPT = "a TorchScript program holds no integer graph"
HOST = "in float, on the host, one call of Python in a graph"

MARCH = serve("march", "March set_march get_march", native='`target=` of `fxq.prepare`: "bayes-e", "nash-m", "x5" …')
NASH = serve("march", "is_nash_series", "2.0")
DTYPES = serve("qconfig", "qint4 qint8 qint16 qint32 qinfo QuantDType", note="names of fxquant's dtypes")

PREPARING = [
    *serve("flow", "prepare_qat_fx prepare_qat", native="`fxq.prepare`, in state `CALIBRATE`",
           note="without example_inputs, prepared by the first batch; in state QAT"),
    *serve("flow", "prepare PrepareMethod", "2.0", "`fxq.prepare`", "every method traces"),
    *serve("march", "QATMode set_qat_mode get_qat_mode", native='`batch_norm="folded"`, `"live"`', note="two of them are one"),
]  # fmt: skip
FLOW = [
    *serve("flow", "FakeQuantState set_fake_quantize", native="`fxq.set_state(prepared, state, \"module.path\")`"),
    *serve("flow", "convert convert_fx", native="`fxq.convert`", note="the prepared model stays usable; fast_mode has no effect"),
    *serve("flow", "fuse_fx fuse_modules fuse_known_modules", native="none is needed", note="return the model, which `prepare` fuses"),
    *serve("flow", "load_observer_params", native="`fxq.observers.observations`"),
    *serve("flow", "weight_reconstruction", native="`fxq.tuning.adaround`",
           note="keeps what lowers a layer's error on samples held out, if the outputs gain"),
]  # fmt: skip
STUBS = serve("markers", "QuantStub DeQuantStub", native="none is needed", note="a QuantStub without a scale: see below")
FUNCTIONAL_MODULES = serve("markers", "FloatFunctional", note="one instance may be called several times")
COMPILING = [
    *serve("debug", "check_model", native="`fxq.check`", note="limits of the march, and what stays in float"),
    *serve("exporting", "compile_model export_hbir", native="`fxq.board.export_horizon`, `fxq.board.compile_horizon`, `fxq.verify`",
           note="runs the vendor's installed hb_mapper; inputs are float32 in memory"),
    *serve("exporting", "perf_model", native="`fxq.estimate(compiled=)`", note="for nash, fxquant's own bounds alone"),
    *serve("exporting", "visualize_model", native="`fxq.report`", note="a page of fxquant's own"),
]  # fmt: skip

_ACTS = ("8bit", "8bit_weight_16bit_act", "8bit_weight_32bit_out", "16bit", "out_8bit")
NAMED_QCONFIGS = [f"default_{use}_{act}_fake_quant_qconfig" for use in ("qat", "calib") for act in _ACTS]
NAMED_QCONFIGS += [f"default_qat_{bits}bit_{how}_quant_qconfig" for bits in (8, 16) for how in ("lsq", "pact")]
NAMED_QCONFIGS += [f"default_qat_8bit_{act}fixed_act_fake_quant_qconfig" for act in ("", "weight_16bit_")] + [
    "per_channel_qat_8bit_qconfig"
]
QCONFIG = [
    *serve("qconfig", "QConfig get_default_qconfig replace_qconfig_dtype", native="`fxq.QConfig`"),
    *serve("qconfig", "get_qconfig", "3.0", "`fxq.QConfig`"),
    *serve("qconfig", "get_default_qat_qconfig get_default_calib_qconfig get_default_qat_out_qconfig", "0.9", "`fxq.QConfig`"),
    *serve("qconfig", " ".join(["per_channel_qat_8bit_qconfig", *NAMED_QCONFIGS]), native="`fxq.QConfig`"),
]
FAKE = [
    *serve("qconfig", "FakeQuantize CalibFakeQuantize _LearnableFakeQuantize PACTFakeQuantize",
           native="`fxq.ActivationConfig(training=…)`", note="a description of what a quantizer is made from"),
    *serve("qconfig", "FakeCast", "2.0", "`None` in a `fxq.QConfigMapping`", "keeps an operator in float"),
    *serve("qconfig", """default_8bit_fake_quant default_4bit_fake_quant default_16bit_fake_quant default_calib_fake_quant
           default_8bit_fixed_act_fake_quant default_16bit_fixed_act_fake_quant default_8bit_lsq_quant default_4bit_lsq_quant
           default_16bit_lsq_quant default_4bit_pact_quant default_8bit_pact_quant default_16bit_pact_quant default_fp16_fake_cast
           default_weight_8bit_fake_quant default_weight_4bit_fake_quant default_weight_16bit_fake_quant default_weight_8bit_lsq_quant
           default_weight_4bit_lsq_quant default_weight_16bit_lsq_quant per_channel_8bit_fake_quant""",
           native="`fxq.ActivationConfig`, `fxq.WeightConfig`"),
    *refuse("default_uint4_fake_quant", "the marches' integers are symmetric", "use default_4bit_fake_quant"),
    *refuse("AdaRoundFakeQuantize", "rounding belongs to the weight", "pass fxq.WeightConfig(rounding=…), a class of fxq.tuning.Rounding"),
    *refuse("DynamicFakeQuantize", "scales are those of calibration or training", "use FakeQuantize", "3.0"),
    *refuse("GlobalFakeQuantSwitch", "states are set from outside", "call fxq.set_state(prepared, 'float', 'module.path')"),
]  # fmt: skip
OBSERVERS = [
    *serve("qconfig", """MinMaxObserver MovingAverageMinMaxObserver PerChannelMinMaxObserver MovingAveragePerChannelMinMaxObserver
           FixedScaleObserver ClipObserver PercentileObserver KLObserver MixObserver ClipStdObserver CalibObserver""",
           native="observers of `fxq`, by class", note="names with settings"),
    *serve("qconfig", "MSEObserver HistogramObserver", native="`observers.HistogramObserver`", note="both have the least squared error"),
    *serve("qconfig", "min_max fixed_scale clip percentile mse clip_std kl mix", native="observers of `fxq`, by class"),
    *refuse("ObserverBase", OWN, "subclass fxq.observers.Observer"),
]  # fmt: skip
TEMPLATES = [
    *serve("templates", "ModuleNameQconfigSetter TemplateQconfigSetter", "2.0", "`fxq.QConfigMapping`"),
    *serve("templates", """default_calibration_qconfig_setter default_qat_qconfig_setter default_qat_fixed_act_qconfig_setter
           calibration_8bit_weight_16bit_act_qconfig_setter qat_8bit_weight_16bit_act_qconfig_setter
           qat_8bit_weight_16bit_fixed_act_qconfig_setter sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter
           sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter
           get_sensitive_op_qconfig_setter gemm_int8_calibration_qconfig_setter gemm_int8_qat_qconfig_setter""", "2.0",
           "`fxq.QConfigMapping`", "last layers have 32-bit outputs"),
    *serve("templates", "all_fp16_qconfig_setter", "2.0", "`QConfigMapping(default=None)`", "for nash-p and nash-h alone"),
    *serve("templates", "GEMMInt8Template", "2.0", "`fxq.QConfig(input=…)`"),
    *serve("templates", "HighPrecisionOutputTemplate", "2.0", "`fxq.ActivationConfig` without a dtype"),
    *serve("templates", "GEMMToGridSampleGridInt16Template ConstTensorQuantTemplate DefaultTemplate", "2.0", "none is needed",
           "accepted: done without being asked for"),
]  # fmt: skip
SETTERS = [
    *serve("templates", "QconfigSetter", "3.0", "`fxq.QConfigMapping`", "enable_optimize has no effect: nothing falls back"),
    *serve("templates", "ModuleNameTemplate ConvDtypeTemplate MatmulDtypeTemplate SensitivityTemplate", "3.0",
           "rules of a `fxq.QConfigMapping`, `fxq.QConfig(output, weight, input)`"),
    *refuse("SetDynamicQuantTemplate", "no march finds scales at run time", "leave it out, and calibrate", "3.0"),
    *refuse("ConstDtypeTemplate", "a constant has the dtype in which its reader reads it",
            'pass ModuleNameTemplate({"name.of.the.reader": {"dtype": {"input": qint16}}})', "3.0"),
    *refuse("LoadFromFileTemplate", "the file holds the plugin's objects", "pass fxq.load_qconfig(path) as the setter", "3.0"),
]  # fmt: skip
CONSISTENCY = refuse("ConsistencyStrategy", "a consistency level is part of the march", "set_march('nash-e-level1'), or level2", "3.0")
AUTO = refuse("auto_calibrate", "the search starts from the float model", "call fxq.search.search_observers(model, batches, target)")
OLD_CALIBRATION = refuse("prepare_calibration prepare_calibration_fx", "the plugin gave it up",
                         "prepare_qat_fx, and set_fake_quantize(model, FakeQuantState.CALIBRATION)", "0.9")  # fmt: skip
OTHERS = [
    *AUTO,
    *OLD_CALIBRATION,
    *refuse("FuseMode", "operators are fused in the graph", "leave it out, and fuse_mode of prepare"),
    *refuse("fuse_conv_shared_modules", "a layer that is called several times is fused at each call", "leave it out"),
    *refuse("split_compilable_model", "a compiled model is cut where devices change", "call fxq.export.export_segments"),
    *refuse("get_default_qat_qconfig_dict", "it is a dict with one qconfig", 'pass {"": get_default_qat_qconfig()}', "0.9"),
]

DEBUG = [
    *serve("debug", "featuremap_similarity", native="`fxq.compare`, `fxq.inspect.record`", note="rows, and similarity.txt"),
    *serve("debug", "check_qconfig", native="`fxq.explain`", note="the text of `fxq.explain`, and qconfig_info.txt"),
    *serve("debug", "check_qat_model", "2.0", "`fxq.inspect`", "a text, and model_check_result.txt with save_results"),
    *serve("debug", "check_deploy_device", native="`fxq.inspect.layers`"),
    *serve("debug", "get_module_called_count", native="`fxq.inspect.call_counts`"),
    *serve("debug", "model_profiler compare_weights check_unfused_operations", native="`fxq.report`, `fxq.inspect`",
           note="a page, and rows"),
    *serve("debug", "QuantAnalysis", "2.0", "`fxq.compare`, `fxq.search.sensitivity`"),
    *refuse("get_raw_features", "values are read batch by batch", "call fxq.inspect.record(model, batches)"),
    *refuse("profile_featuremap", "values are read batch by batch", "call fxq.inspect.record(model, batches, real=True)"),
    *refuse("profile_module_constraints", "limits are checked on the whole graph", "call check_model, or fxq.check"),
    *refuse("script_profile compare_script_models", NO_SCRIPT, "compare two forms bit for bit with fxq.verify"),
    *refuse("set_preserve_qat_mode", "an integer graph is integer", "keep an operator in float with None in the qconfig_dict"),
    *refuse("show_cuda_memory_consumption", "it is not part of quantization", "use torch.cuda.memory"),
    *refuse("ModelProfiler HbirModelProfiler ConsistencyAnalyzer QatBcEditor HbmServerSession ModelProfilerv2",
            "files of the vendor's compiler are not read", "call fxq.compare(reference, model, batches), or fxq.verify", "2.0"),
]  # fmt: skip
ONNX = serve("exporting", "export_to_onnx export_quantized_onnx", native="`fxq.export_onnx`",
             note="*qdq* for a prepared model; *exact*, which runs, for an integer one")  # fmt: skip
JIT = [
    *serve("exporting", "save load", native="`fxq.save`, `fxq.load`", note="the integer graph is saved with the program"),
    *refuse("to_device", "a program's graph names the device that it was traced on", "trace the model on the other device"),
]
COLOURS = serve("modules", """rgb2yuv bgr2yuv rgb2centered_yuv bgr2centered_yuv rgb2gray bgr2gray rgb2centered_gray bgr2centered_gray
                rgb2bgr bgr2rgb centered_yuv2rgb centered_yuv2bgr""", native="modules of `fxq.nn`")  # fmt: skip
NN_FUNCTIONAL = [
    *serve("modules", "bgr_to_yuv444 point_pillars_scatter filter window_partition window_reverse", native="modules of `fxq.nn`"),
    Row("nms", "detection:nms_of_scores", "1.0", "", HOST),
    *serve("detection", "batched_nms point_pillars_preprocess voxelization", note=HOST),
    *serve("modules", "rle", note=HOST),
    *refuse("decode get_top_n filter_by_max_score", "they are steps of one module", "call horizon.nn.DetectionPostProcess"),
]
FUNCTIONAL = [
    *COLOURS,
    *serve("modules", "sort stable_sort argmax", native="functions of `torch`"),
    *serve("detection", "nms batched_nms", note=HOST),
    *refuse("batched_nms_with_padding", "padding is a part of the module", "call horizon.nn.DetectionPostProcessV1(nms_padding_mode=…)"),
    *refuse("nms_rotated", "overlaps of turned boxes are not computed here", "wrap a function that does: fxq.wrap(function)"),
]
FUNCTIONAL_IMPL = [Row("_voxelization", "detection:voxelization", "1.0", "", HOST)]
NN = [
    *serve("modules", """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Div Erf Exp Floor HardLog Log Reciprocal Remainder Rsqrt Selu
           Sin Sinh Sqrt Tan Where Topk Sign Matmul Pow Norm SetItem""", native="functions of `torch`"),
    *serve("modules", "Interpolate LayerNorm LayerNorm2d", native="`torch.nn`"),
    *serve("modules", "GridSample", native="`fxq.nn.Warp`"),
    Row("warp", "modules:GridSample", "1.0", "`fxq.nn.Warp`", "a module's class, called with mode and padding"),
    *serve("modules", "BaseGridGenerator", native="`torch.meshgrid`"),
    *serve("modules", """BgrToYuv444 Correlation AnchorGenerator PointPillarsScatter LookUpTable SegmentLUT
           MultiScaleDeformableAttention""", native="modules of `fxq.nn`",
           note="an argument that cannot be served raises ConfigurationError"),
    *serve("detection", "RoIAlign MultiScaleRoIAlign", native="`fxq.nn.RoIAlign`",
           note="an argument that cannot be served raises ConfigurationError"),
    *serve("detection", "DetectionPostProcess DetectionPostProcessV1", native="`fxq.nn.DetectionPostProcess`", note=HOST),
    *serve("detection", "BevPoolV2", "3.0", "`fxq.nn.BEVPool`", "in float: where points go is data"),
    *serve("modules", """Identity ChannelShuffle Softmax GroupNorm RMSNorm MultiheadAttention LSTM LSTMCell GRU GRUCell
           TransformerEncoder TransformerEncoderLayer TransformerDecoder TransformerDecoderLayer""", "2.0", "`torch.nn`"),
    Row("FloatFunctional", "markers:FloatFunctional"),
    *refuse("RcnnPostProcess", "which of its scores is the background, and how its boxes are rounded, is not public",
            "call horizon.nn.DetectionPostProcess with background_class_idx"),
]  # fmt: skip
WRAP = [
    *serve("markers", "wrap", native="`fxq.wrap`, `leaf` of `fxq.Options`",
           note="wrapped functions are traced; with skip_compile=True they stay one call, in float, on the host"),
    *serve("markers", "Tracer", "2.0", "none is needed", "dynamic_block marks nothing: what cannot be traced raises TraceError"),
    *refuse("replace_torch_op", "operators of PyTorch are read as they are called", "call the module in forward"),
]  # fmt: skip
CHECKED = serve("markers", "typechecked", note="checks nothing: arguments are checked where they are used")
MODEL_HELPER = [
    *serve("debug", "get_module_called_count"),
    *refuse("register_hook_on_leaf swap_ff_with_horizonff", "modules are traced, not replaced", "leave it out"),
]
HBDK4_EXPORT = serve("hbdk4", "export pre_export get_hbir_input_flattener get_hbir_output_unflattener", "2.0", "`fxq.convert`",
                     "modules are fxquant's graphs")  # fmt: skip
HBDK4_COMPILER = [
    *serve("hbdk4", "convert save load statistics Module March", "2.0", "`fxq.convert`, `fxq.save`", "files are fxquant's own"),
    *serve("hbdk4", "compile hbm_perf visualize", "2.0", "`fxq.export_onnx`, `fxq.estimate`",
           "for nash, compile is refused with the remedy"),
    *refuse("leap link Hbm", "the compiler's own language and runtime are closed",
            "write fxq.export_onnx, and run it with onnxruntime", "2.0"),
]  # fmt: skip
QTENSOR = refuse(
    "QTensor HorizonTensor", "integers of a graph are tensors of integer dtypes", "read them with fxq.inspect.record(model, batches)"
)
VERSION = [Row("__version__", ":__version__", "1.0", "", "the release whose names are served")]
SERIALIZATION = refuse("save_with_version get_version_from_scriptmodule", NO_SCRIPT, "use horizon.jit.save, or fxq.save")

QUANTIZATION = [
    *PREPARING, *FLOW, *STUBS, *COMPILING, *QCONFIG, *FAKE, *OBSERVERS, *SETTERS, *TEMPLATES, *DTYPES, *OTHERS, *QTENSOR, *CONSISTENCY,
    Row("March", "march:March"),
]  # fmt: skip


def _named(rows: list[Row], *names: str) -> list[Row]:
    return [row for row in rows if row.name in names]


MODULES: dict[str, list[Row]] = {
    "": [*MARCH, *QUANTIZATION, *DEBUG, *ONNX, *COLOURS, *FUNCTIONAL_MODULES, *VERSION],
    "march": [*MARCH, *NASH],
    "dtype": DTYPES,
    "qtensor": QTENSOR,
    "qat_mode": [*[row for row in PREPARING if "qat_mode" in row.name or row.name == "QATMode"], *CONSISTENCY],
    "version": VERSION,
    "quantization": QUANTIZATION,
    "quantization.qconfig": [*QCONFIG, *FAKE],
    "quantization.qconfig_template": [*TEMPLATES, *SETTERS],
    "quantization.qconfig_setter": [*SETTERS, *TEMPLATES],
    **dict.fromkeys(("quantization.observer", "quantization.observer_v2"), OBSERVERS),
    "quantization.fake_quantize": [*FAKE, *[row for row in FLOW if "ake" in row.name]],
    "quantization.fake_cast": [row for row in FAKE if "ast" in row.name],
    "quantization._learnable_fake_quantize": _named(FAKE, "_LearnableFakeQuantize"),
    "quantization.pact_fake_quantize": _named(FAKE, "PACTFakeQuantize"),
    "quantization.quantize_fx": [row for row in (*PREPARING, *FLOW, *OLD_CALIBRATION) if row.name.endswith("_fx")],
    "quantization.quantize": _named([*PREPARING, *FLOW, *OLD_CALIBRATION], "prepare_qat", "convert", "prepare_calibration"),
    "quantization.prepare": _named(PREPARING, "prepare", "PrepareMethod"),
    "quantization.fuse_modules": [row for row in (*FLOW, *OTHERS) if row.name.startswith("fuse_")],
    "quantization.stubs": STUBS,
    "quantization.auto_calibration": AUTO,
    "quantization.weight_reconstruction": _named(FLOW, "weight_reconstruction"),
    "quantization.hbdk4": HBDK4_EXPORT,
    **{"nn." + re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", row.name).lower(): [row] for row in NN if row.name[0].isupper()},
    "nn": NN,
    "nn.functional": NN_FUNCTIONAL,
    "nn.quantized": [
        *FUNCTIONAL_MODULES,
        Row("QFunctional", "markers:FloatFunctional"),
        Row("Quantize", "markers:QuantStub"),
        Row("DeQuantize", "markers:DeQuantStub"),
    ],
    "nn.qat.stubs": STUBS,
    "nn.qat": [
        *FUNCTIONAL_MODULES,
        *STUBS,
        *_named(NN, "SetItem", "SegmentLUT"),
        *serve("modules", "GELU", native="`torch.nn`"),
        *refuse("Conv2d ConvBN2d ConvReLU2d Linear", "modules are traced, not replaced", "name PyTorch's class: torch.nn.Conv2d"),
    ],
    "nn.intrinsic": refuse("ConvReLU2d ConvAdd2d ConvAddReLU2d", "operators are fused in the graph", "leave it out"),
    "nn.quantized.functional_impl": FUNCTIONAL_IMPL,
    "nn.quantized.functional": _named(NN_FUNCTIONAL, "point_pillars_scatter", "point_pillars_preprocess"),
    "nn.linear": _named(NN, "Identity"),
    "nn.multi_scale_roi_align": [Row("bbox_clip_with_qtensor", "detection:bbox_clip"), *_named(NN, "MultiScaleRoIAlign")],
    "nn.grid_sample": _named(NN, "GridSample", "warp"),
    "functional": FUNCTIONAL,
    **dict.fromkeys(("fx", "fx.fx_helper", "fx.jit_scheme", "utils.fx_helper"), WRAP),
    "jit": JIT,
    "memory_opt": refuse("MemoryOptManager MemoryOptSwitch", "PyTorch saves memory itself", "use torch.utils.checkpoint"),
    "utils.onnx_helper": ONNX,
    "utils.check_model": [row for row in DEBUG if row.name == "check_qat_model"],
    "utils.quant_profiler": DEBUG,
    **dict.fromkeys(("utils.typeguard", "profiler.utils.typeguard"), CHECKED),
    "utils.quant_switch": _named(FAKE, "GlobalFakeQuantSwitch"),
    **dict.fromkeys(("utils.model_helper", "profiler.utils.model_helper"), MODEL_HELPER),
    "utils.serialization": SERIALIZATION,
    "utils.checkpoint": refuse("checkpoint CheckpointState", "PyTorch saves memory itself", "use torch.utils.checkpoint"),
    "utils.load_state_dict_helper": refuse("get_version replace_mod_name", "checkpoints are read by load_state_dict", "leave it out"),
    "profiler": DEBUG,
    "profiler.bc_editor.bc_editor": _named(DEBUG, "QatBcEditor"),
    "hbdk4.compiler": HBDK4_COMPILER,
    "hbdk4.compiler.overlay": [row for row in HBDK4_COMPILER if row.name == "Module"],
    "hbdk4.compiler.onnx": refuse(
        "export statistics", "modules are made of PyTorch models", "call quantization.hbdk4.export of one", "2.0"
    ),
    "hbdk4.compiler.hbm": refuse(
        "Hbm Hbo", "the compiler's files and runtime are closed", "run fxq.export_onnx's file with onnxruntime", "2.0"
    ),
}

TABLES = Tables("fxquant.compat.horizon", "fxquant.compat.horizon.served", MODULES, ALIASES)

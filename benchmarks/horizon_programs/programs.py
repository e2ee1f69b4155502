"""Programs for Horizon's plugin: a table of march, network and calls, which `run` makes one after the other.

The calls are those of users' programs, from releases 0.x to 3.x: what a row or a function names is imported from the plugin and called as
there. `python -m fxquant.compat.horizon benchmarks/horizon_programs/programs.py NAME` runs one program by itself.
"""

import copy
import sys
from types import SimpleNamespace

import horizon_plugin_pytorch as horizon
import horizon_plugin_pytorch.nn as hnn
import torch
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.functional import rgb2centered_yuv
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    FakeQuantize,
    FakeQuantState,
    MovingAverageMinMaxObserver,
    PrepareMethod,
    QconfigSetter,
    check_model,
    compile_model,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_qconfig,
    load_observer_params,
    perf_model,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
    visualize_model,
    weight_reconstruction,
)
from horizon_plugin_pytorch.quantization.observer_v2 import FixedScaleObserver, HistogramObserver, MinMaxObserver, MSEObserver
from horizon_plugin_pytorch.quantization.qconfig import (
    QConfig,
    default_calib_8bit_fake_quant_qconfig,
    default_calib_8bit_weight_16bit_act_fake_quant_qconfig,
    default_calib_8bit_weight_32bit_out_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_fixed_act_fake_quant_qconfig,
    default_qat_8bit_lsq_quant_qconfig,
    default_qat_8bit_pact_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    default_qat_8bit_weight_32bit_out_fake_quant_qconfig,
    get_default_qconfig,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    SensitivityTemplate,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_qconfig_setter,
    gemm_int8_calibration_qconfig_setter,
    qat_8bit_weight_16bit_fixed_act_qconfig_setter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from torch import distributed, nn
from torch.quantization import QConfig as TorchQConfig

from benchmarks.horizon_programs.networks import (
    GIVEN,
    OBSERVED,
    OBSERVED_EAGER,
    Attention,
    Classifier,
    Detector,
    Eager,
    Gated,
    Net,
    OfPluginModules,
    WithAuxiliaryLoss,
)

# ---- calls that most programs make ------------------------------------------------------------------------------------


def calibrate(model, batches):
    """Return a prepared model after it has observed the batches."""
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


def train(model, batches, optimizer=None, loss=lambda output: output.square().mean()):
    """Return a prepared model after one step of training for each batch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    set_fake_quantize(model, FakeQuantState.QAT)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


def load_state(calibrated, student):
    student.load_state_dict(calibrated.state_dict())


def calibrated_fx(rules, **options):
    """1.x: calibrate what `prepare_qat_fx` returns by a dict of qconfigs."""

    def call(run):
        run.qat_model = calibrate(prepare_qat_fx(copy.deepcopy(run.float_model), rules, **options), run.batches)

    return call


def trained_fx(rules, load=load_state, by_example=False):
    """1.x: train a second model, which begins from the calibrated one."""

    def call(run):
        options = {"example_inputs": run.batches[0]} if by_example else {}
        student = prepare_qat_fx(copy.deepcopy(run.float_model).train(), rules, **options)
        load(run.qat_model, student)
        run.qat_model = train(student, run.batches)

    return call


def calibrated_eager(qconfigs, by_example=False, **options):
    """Return a call that sets `qconfigs`, by module path, prepares with `prepare_qat` in eager mode, and calibrates."""

    def call(run):
        model = copy.deepcopy(run.float_model)
        for path, qconfig in qconfigs.items():
            model.get_submodule(path).qconfig = qconfig
        student = prepare_qat(model, **options, **({"example_inputs": (run.batches[0],)} if by_example else {}))
        run.qat_model = calibrate(model if options.get("inplace") else student, run.batches)

    return call


def calibrated_by(setter, method=PrepareMethod.JIT_STRIP):
    """2.x: calibrate what `prepare` returns by a setter of qconfigs, or several."""

    def call(run):
        model = prepare(copy.deepcopy(run.float_model), example_inputs=run.batches[0], qconfig_setter=setter, method=method)
        run.qat_model = calibrate(model, run.batches)

    return call


def trained_by(setter, **options):
    """2.x: train a second model, which begins from the calibrated one."""

    def call(run):
        model = copy.deepcopy(run.float_model).train()
        student = prepare(model, example_inputs=run.batches[0], qconfig_setter=setter, method=PrepareMethod.JIT_STRIP)
        load_state(run.qat_model, student)
        run.qat_model = train(student, run.batches, **options)

    return call


def calibrated_from(*templates):
    """3.x: calibrate what `prepare` returns by templates in their order."""

    def call(run):
        setter = QconfigSetter(get_qconfig(observer=HistogramObserver), templates=list(templates))
        run.qat_model = calibrate(prepare(copy.deepcopy(run.float_model), (run.batches[0],), qconfig_setter=setter), run.batches)

    return call


def to_integers(run):
    run.quantized_model = convert_fx(run.qat_model)


def to_integers_eager(run):
    run.quantized_model = convert(run.qat_model)


# ---- calls of one program ---------------------------------------------------------------------------------------------


def reconstruct(run):
    run.qat_model = weight_reconstruction(run.qat_model, run.batches, None, {"num_batches": 4, "num_steps": 10})


def images_of_a_camera(run):
    images = [torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8) for _ in range(4)]
    run.batches = [rgb2centered_yuv(image) / 128 for image in images]


def train_from_another_head(run):
    """The checkpoint of ten classes starts the training of four, which is interrupted and resumed."""
    large = calibrate(prepare_qat_fx(OBSERVED(classes=10).eval(), {"": default_calib_8bit_fake_quant_qconfig}), run.batches)
    torch.save(large.state_dict(), "large.pth")
    student = prepare_qat_fx(OBSERVED().train(), {"": default_qat_8bit_fake_quant_qconfig}, example_inputs=run.batches[0])
    missing, _ = student.load_state_dict(torch.load("large.pth"), strict=False)
    assert {"head.weight", "head.bias"} <= set(missing)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    train(calibrate(student, run.batches), run.batches, optimizer)
    torch.save({"model": student.state_dict(), "optimizer": optimizer.state_dict()}, "last.pth")

    resumed = torch.load("last.pth")
    run.qat_model = prepare_qat_fx(OBSERVED().train(), {"": default_qat_8bit_fake_quant_qconfig}, example_inputs=run.batches[0])
    run.qat_model.load_state_dict(resumed["model"])
    optimizer = torch.optim.AdamW(run.qat_model.parameters(), lr=1e-4)
    optimizer.load_state_dict(resumed["optimizer"])
    train(run.qat_model, run.batches[:1], optimizer)


def train_a_classifier(run):
    """A scheduler changes the rate, and the best epoch is kept."""
    labels = [torch.randint(0, 10, (8,)) for _ in run.batches]
    run.float_model.train()
    for batch in run.batches:
        run.float_model(batch)  # batch norms
    calib_model = prepare_qat_fx(copy.deepcopy(run.float_model).eval(), {"": default_calib_8bit_fake_quant_qconfig})
    calibrate(calib_model, run.batches)
    qat_model = run.qat_model = prepare_qat_fx(copy.deepcopy(run.float_model).train(), {"": default_qat_8bit_fake_quant_qconfig})
    qat_model.load_state_dict(calib_model.state_dict())
    optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3, momentum=0.9, weight_decay=4e-5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    best, state = 1e9, None
    for _ in range(2):
        qat_model.train()
        set_fake_quantize(qat_model, FakeQuantState.QAT)
        for batch, label in zip(run.batches, labels, strict=True):
            loss = nn.functional.cross_entropy(qat_model(batch), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        qat_model.eval()
        set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
        with torch.no_grad():
            error = sum(float(nn.functional.cross_entropy(qat_model(b), t)) for b, t in zip(run.batches, labels, strict=True))
        if error < best:
            best, state = error, copy.deepcopy(qat_model.state_dict())
    qat_model.load_state_dict(state)


def train_on_ranks(run):
    """A prepared model is trained in DistributedDataParallel, whose state is loaded into another."""
    student = prepare_qat_fx(copy.deepcopy(run.float_model).train(), {"": default_qat_8bit_fake_quant_qconfig})
    student.load_state_dict(run.qat_model.state_dict())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    wrapped = nn.parallel.DistributedDataParallel(student)
    set_fake_quantize(wrapped, FakeQuantState.QAT)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    for batch in run.batches:
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
    torch.save({"state_dict": wrapped.state_dict()}, "epoch.pth")
    distributed.destroy_process_group()
    run.qat_model = prepare_qat_fx(run.float_model, {"": default_qat_8bit_fake_quant_qconfig}, example_inputs=run.batches[0])
    run.qat_model.load_state_dict(torch.load("epoch.pth")["state_dict"])
    set_fake_quantize(run.qat_model, FakeQuantState.VALIDATION)


def export_onnx(run):
    export_to_onnx(run.float_model, run.batches[0], "float.onnx")
    export_to_onnx(run.qat_model, (run.batches[0],), "qat.onnx", input_names=["image"], dynamic_axes={"image": {0: "batch"}})
    export_quantized_onnx(run.quantized_model, (run.batches[0],), "quantized.onnx")


def export_hybrid(run):
    export_to_onnx(run.qat_model, run.batches[0], "hybrid.onnx", opset_version=11, operator_export_type=None)


def save_a_trace(run):
    script_model = torch.jit.trace(run.quantized_model, run.batches[0])
    horizon.jit.save(script_model, "model.pt")
    loaded = horizon.jit.load("model.pt")
    assert torch.equal(loaded(run.batches[0]), run.quantized_model(run.batches[0]))
    horizon.quantization.visualize_model(loaded, [run.batches[0]], save_path="model.html")


def before_1_0(run):
    from horizon_plugin_pytorch.quantization import prepare_calibration_fx

    prepare_calibration_fx(None)


def optimizer_before_shapes(run):
    qat_model = prepare_qat_fx(copy.deepcopy(run.float_model), {"": default_qat_8bit_fake_quant_qconfig})
    torch.optim.SGD(qat_model.parameters(), lr=1e-3)


def price_and_compile(run):
    perf_model(run.quantized_model, [run.batches[0]], out_dir="perf", layer_details=True)
    compile_model(run.quantized_model, [run.batches[0]], hbm="model.hbm", input_source="ddr", opt="O3")


def check_a_trace(run):
    script_model = torch.jit.trace(run.quantized_model.cpu(), run.batches[0])
    assert torch.equal(script_model(run.batches[0]), run.quantized_model(run.batches[0]))


def compile_a_trace(run):
    script_model, inputs = torch.jit.trace(run.quantized_model.cpu(), run.batches[0]), [run.batches[0]]
    assert check_model(script_model, inputs) == 0
    compile_model(script_model, inputs, hbm="model.hbm", input_source="ddr", opt="O3")
    perf_model(script_model, inputs, out_dir="perf_out", hbm="model.hbm", input_source="ddr", opt="O3", layer_details=True)
    visualize_model(script_model, inputs, save_path="model.svg", show=False)


def compile_hybrid(run):
    compile_model(run.quantized_model, [run.batches[0]], hbm="model.hbm", input_source="ddr", opt="O2")


def compare_stages(run):
    from horizon_plugin_pytorch.utils.quant_profiler import featuremap_similarity

    featuremap_similarity(run.qat_model, run.quantized_model, run.batches[0], "L1", out_dir=".")


def search(run):
    from horizon_plugin_pytorch.quantization import auto_calibrate

    run.qat_model = auto_calibrate(run.qat_model, run.batches, num_batches=2)


def first_consistency_level(run):
    from horizon_plugin_pytorch.qat_mode import ConsistencyStrategy

    ConsistencyStrategy.set_consistency_level(1)


def auxiliary_loss(outputs):
    output, extra = outputs
    return output.square().mean() + extra.square().mean()


def train_after_templates(run):
    """A model in training mode is prepared by templates in order, which are saved; then it is calibrated and trained."""
    setter = QconfigSetter(
        reference_qconfig=get_qconfig(observer=MSEObserver),
        templates=[
            ModuleNameTemplate({"": qint8, "stem": qint16}),
            ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8),
            ModuleNameTemplate({"head": {"dtype": {"input": qint16, "output": qint16}, "threshold": {"output": 8.0}}}),
        ],
        save_dir="./qconfig",
    )
    model = prepare(run.float_model.train(), (run.batches[0],), qconfig_setter=setter)
    run.qat_model = train(calibrate(model, run.batches), run.batches)


def correlate(run):
    hnn.Correlation(kernel_size=3)


def scales_at_run_time(run):
    from horizon_plugin_pytorch.quantization.qconfig_setter import SetDynamicQuantTemplate

    calibrated_from(*IN_8_BITS, SetDynamicQuantTemplate({"head": qint8}))(run)


def files_for_the_s100(run):
    from hbdk4.compiler import convert as convert_hbir
    from hbdk4.compiler import save
    from horizon_plugin_pytorch.quantization.hbdk4 import export

    save(convert_hbir(export(run.qat_model, run.batches[0]), "nash-e"), "quantized.bc")


def one_layer_in_float(run):
    set_fake_quantize(run.qat_model.deep, FakeQuantState._FLOAT)
    partly = run.qat_model(run.batches[0])
    set_fake_quantize(run.qat_model.deep, FakeQuantState.VALIDATION)
    assert not torch.equal(partly, run.qat_model(run.batches[0]))


# ---- settings ---------------------------------------------------------------------------------------------------------

CALIB, QAT = default_calib_8bit_fake_quant_qconfig, default_qat_8bit_fake_quant_qconfig
WIDE_CALIB, SUM_CALIB = default_calib_8bit_weight_16bit_act_fake_quant_qconfig, default_calib_8bit_weight_32bit_out_fake_quant_qconfig
WIDE_QAT = default_qat_8bit_weight_16bit_act_fake_quant_qconfig
HOST_DEEP = {"hybrid": True, "hybrid_dict": {"module_name": ["deep"]}}
BY_MSE, WIDE_BY_MSE = (get_default_qconfig(activation_qkwargs={"observer": "mse", **more}) for more in ({}, {"dtype": "qint16"}))
CHANNELS = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
BY_PERCENTILE = get_default_qconfig(
    activation_fake_quant="fake_quant",
    weight_fake_quant="fake_quant",
    activation_observer="percentile",
    weight_observer="min_max",
    activation_qkwargs={"percentile": 99.99, "dtype": "qint16"},
    weight_qkwargs=CHANNELS,
)
FIXED_SCALE = get_default_qconfig(activation_observer="fixed_scale", activation_qkwargs={"scale": 1 / 16, "zero_point": 0})
# A QConfig of PyTorch's with the plugin's fake quantizes, as the old algorithm toolkit wrote it.
AVERAGED = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype="qint8", **CHANNELS)
OF_TORCH = TorchQConfig(activation=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver), weight=AVERAGED)
WIDE_OF_TORCH = TorchQConfig(activation=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype=qint16), weight=AVERAGED)
BY_NAME = ModuleNameQconfigSetter(
    {
        "quant": QConfig(output=FakeQuantize.with_args(observer=FixedScaleObserver, dtype=qint16, scale=4 / 32768)),
        "deep": QConfig(
            output=FakeQuantize.with_args(observer=MinMaxObserver, dtype=qint16),
            weight=FakeQuantize.with_args(observer=MinMaxObserver, dtype=qint8, **CHANNELS),
        ),
    }
)
BY_SENSITIVITY = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(
    [["stem.0", "activation", 0.5], ["deep", "activation", 0.1]], topk=1
)
WIDE_WEIGHTS = ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint16)
CONVS_IN_8_BITS = ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8)
MATMULS_IN_8_BITS = MatmulDtypeTemplate(input_dtypes=[qint8, qint8])
FROZEN_HEAD = ModuleNameTemplate({"head": {"dtype": qint16, "threshold": {"output": 8.0}}}, freeze=True)
SENSITIVE_HEAD = SensitivityTemplate(sensitive_table=[["deep", "activation"], ["head", "weight"]], topk_or_ratio=1, sensitive_type="both")
IN_8_BITS = ModuleNameTemplate({"": qint8}), CONVS_IN_8_BITS, MATMULS_IN_8_BITS
CALIBRATED = calibrated_fx({"": CALIB})
QUICK_START = (
    calibrated_fx({"": CALIB, "module_name": {"head": SUM_CALIB}}),
    trained_fx({"": QAT, "module_name": {"head": default_qat_8bit_weight_32bit_out_fake_quant_qconfig}}),
    to_integers,
)

# ---- the table: march, network, calls ---------------------------------------------------------------------------------

PROGRAMS = {
    # eager mode: fused by hand, qconfigs as attributes
    "eager_quick_start": (March.BAYES, Eager, lambda run: run.float_model.fuse_model(), calibrated_eager({"": get_default_qat_qconfig()}),
        lambda run: train(run.qat_model, run.batches), to_integers_eager),
    "eager_inplace": (March.BAYES_E, OBSERVED_EAGER, calibrated_eager({"": get_default_qat_qconfig()}, inplace=True), to_integers_eager),
    "eager_attributes": (March.BAYES, OBSERVED_EAGER,
        calibrated_eager({"": get_default_qat_qconfig(), "conv2": WIDE_QAT, "head": None}, by_example=True), to_integers_eager),
    "eager_stub_qconfig": (March.BAYES, OBSERVED_EAGER,
        calibrated_eager({"": get_default_qat_qconfig(), "quant": get_default_qat_qconfig(dtype="qint16")}, by_example=True),
        to_integers_eager),
    # 1.x: calibration, training, fixed point, a trace, and the check; to its end the model is compiled, priced and drawn
    "v1_quick_start": (March.BAYES_E, GIVEN, *QUICK_START, check_a_trace),
    "v1_quick_start_compile": (March.BAYES_E, GIVEN, *QUICK_START, compile_a_trace),
    "v1_perf_without_tool": (March.NASH_E, OBSERVED, CALIBRATED, to_integers, price_and_compile),
    # a stub without a scale, which is 1/128 in releases for Bayes; one that is observed; one behind a camera
    "v1_default_stub": (March.BAYES, Net, CALIBRATED, to_integers),
    "v1_observed_stub": (March.BERNOULLI2, OBSERVED, CALIBRATED, to_integers),
    "v1_camera": (March.BAYES_E, GIVEN, images_of_a_camera, CALIBRATED, to_integers),
    # dtypes and rules
    "v1_int16": (March.BAYES, OBSERVED, calibrated_fx({"": WIDE_CALIB}), to_integers),
    "v1_module_type": (March.BAYES_E, OBSERVED,
        calibrated_fx({"": CALIB, "module_type": [(nn.Conv2d, WIDE_CALIB)], "module_name": [("head", SUM_CALIB)]}), to_integers),
    "v1_float_part": (March.BAYES, OBSERVED, calibrated_fx({"": CALIB, "module_name": [("deep", None)]}), to_integers),
    "v1_functional_rule": (March.BAYES_E, Gated, calibrated_fx({"": BY_MSE, "module_name": {"gate.skip": WIDE_BY_MSE}}), to_integers),
    "v1_detector": (March.BAYES_E, Detector, calibrated_fx({"": CALIB, "module_name": [("cls", SUM_CALIB), ("reg", SUM_CALIB)]}),
        to_integers),
    "v1_get_default_qconfig": (March.BAYES, OBSERVED, calibrated_fx({"": BY_PERCENTILE}), to_integers),
    "v1_fixed_scale_observer": (March.BAYES, OBSERVED, calibrated_fx({"": get_default_qconfig(), "module_name": {"head": FIXED_SCALE}}),
        to_integers),
    "v1_lambda_qconfig_of_torch": (March.BAYES, OBSERVED, calibrated_fx({"": OF_TORCH, "module_name": {"deep": WIDE_OF_TORCH}}),
        to_integers),
    # names of releases before 1.0
    "v1_old_calibration": (March.BAYES, Net, before_1_0),
    "v1_old_qconfigs": (March.BAYES, OBSERVED,
        calibrated_fx({"": get_default_calib_qconfig(), "module_name": {"head": get_default_qat_out_qconfig()}}), to_integers),
    # training: learned scales, PACT, scales that stay, live batch norms, roundings that are learned, checkpoints, ranks
    "v1_lsq": (March.BAYES_E, OBSERVED, CALIBRATED,
        trained_fx({"": default_qat_8bit_lsq_quant_qconfig}, load_observer_params, by_example=True), to_integers),
    "v1_pact": (March.BAYES, OBSERVED, CALIBRATED,
        trained_fx({"": default_qat_8bit_pact_quant_qconfig}, load_observer_params, by_example=True), to_integers),
    "v1_fixed_act": (March.BAYES, OBSERVED, CALIBRATED, trained_fx({"": default_qat_8bit_fixed_act_fake_quant_qconfig}), to_integers),
    "v1_with_bn": (March.BAYES, OBSERVED, lambda run: set_qat_mode(QATMode.WithBN), CALIBRATED, trained_fx({"": QAT}), to_integers),
    "v1_adaround": (March.BAYES, OBSERVED, CALIBRATED, reconstruct, to_integers),
    "v1_another_head": (March.BAYES, OBSERVED, train_from_another_head, to_integers),
    "v1_classifier": (March.BAYES_E, Classifier, train_a_classifier, to_integers),
    "v1_distributed": (March.BAYES_E, OBSERVED, CALIBRATED, train_on_ranks, to_integers),
    "v1_optimizer_before_batch": (March.BAYES, Net, optimizer_before_shapes),
    # chosen operators on the host: an ONNX file, and a program of the vendor's compiler
    "v1_hybrid": (March.BAYES, OBSERVED, calibrated_fx({"": CALIB}, **HOST_DEEP), to_integers, export_hybrid),
    "v1_hybrid_compile": (March.BAYES, OBSERVED, calibrated_fx({"": CALIB}, **HOST_DEEP), to_integers, compile_hybrid),
    # files, and tools for diagnosis
    "v1_export_onnx": (March.BAYES, OBSERVED, CALIBRATED, to_integers, export_onnx),
    "v1_jit_save": (March.BAYES, OBSERVED, CALIBRATED, to_integers, save_a_trace),
    "v1_similarity": (March.BAYES, OBSERVED, CALIBRATED, to_integers, compare_stages),
    # 2.x: ready setters, setters by name and by a table of sensitivities, analysis
    "v2_default_setters": (March.NASH_E, Net, calibrated_by(default_calibration_qconfig_setter), trained_by(default_qat_qconfig_setter)),
    "v2_int16_setters": (March.NASH_M, Net, calibrated_by(calibration_8bit_weight_16bit_act_qconfig_setter),
        trained_by(qat_8bit_weight_16bit_fixed_act_qconfig_setter)),
    "v2_auxiliary_loss": (March.NASH_E, WithAuxiliaryLoss, calibrated_by(default_calibration_qconfig_setter),
        trained_by(default_qat_qconfig_setter, loss=auxiliary_loss)),
    "v2_module_names": (March.NASH_E, Net, calibrated_by((BY_NAME, default_calibration_qconfig_setter))),
    "v2_sensitive": (March.NASH_E, Net, calibrated_by((BY_SENSITIVITY, default_calibration_qconfig_setter))),
    "v2_attention": (March.NASH_E, Attention, calibrated_by(gemm_int8_calibration_qconfig_setter)),
    "v2_eager_method": (March.NASH_E, Eager, calibrated_by(default_calibration_qconfig_setter, PrepareMethod.EAGER)),
    "v2_auto_calibrate": (March.NASH_E, Net, calibrated_by(None), search),
    "v2_consistency": (March.NASH_E, Net, first_consistency_level, calibrated_by(None)),
    # 3.x: templates in their order
    "v3_all_int8": ("nash-e", Net, calibrated_from(*IN_8_BITS)),
    "v3_int16_gemm_int8": ("nash-e", Net, calibrated_from(ModuleNameTemplate({"": qint16}), CONVS_IN_8_BITS)),
    # a name after the templates keeps the weights that they chose
    "v3_order": ("nash-m", Net, calibrated_from(ModuleNameTemplate({"": qint8}), WIDE_WEIGHTS, ModuleNameTemplate({"deep": qint16}))),
    "v3_freeze_and_threshold": ("nash-e", Net,
        calibrated_from(ModuleNameTemplate({"": qint8, "quant": {"threshold": 4.0}}), FROZEN_HEAD, CONVS_IN_8_BITS)),
    "v3_sensitivity": ("nash-e", Net, calibrated_from(*IN_8_BITS, SENSITIVE_HEAD)),
    "v3_mixed": ("nash-e", OBSERVED, train_after_templates),
    "v3_dynamic": ("nash-e", Net, scales_at_run_time),
    "v3_matmul": ("nash-e", Attention, calibrated_from(ModuleNameTemplate({"": qint16}), MATMULS_IN_8_BITS)),
    "v3_matmul_mixed": ("nash-e", Attention,
        calibrated_from(ModuleNameTemplate({"": qint8}), MatmulDtypeTemplate(input_dtypes=[qint8, qint16]))),
    "v3_float16": ("nash-p", Net,
        calibrated_from(ModuleNameTemplate({"": torch.float16}), CONVS_IN_8_BITS, MatmulDtypeTemplate(input_dtypes=qint8))),
    "v3_float16_on_s100": ("nash-e", Net, calibrated_from(ModuleNameTemplate({"": torch.float16}))),
    "v3_nn_modules": ("nash-e", OfPluginModules, calibrated_from(ModuleNameTemplate({"": qint16}))),
    "v3_correlation": ("nash-e", Net, calibrated_from(*IN_8_BITS), correlate),
    "v3_segments": ("nash-e", Net, calibrated_from(*IN_8_BITS), one_layer_in_float),
    "v3_s100": ("nash-e", Net, calibrated_from(*IN_8_BITS), files_for_the_s100),  # modules of the compiler, which is closed
}  # fmt: skip


def run(name):
    """Run a program; return its batches and models, by the names that programs of users have for them."""
    march, network, *calls = PROGRAMS[name]
    set_march(march)
    torch.manual_seed(0)
    float_model = network().eval()
    scope = SimpleNamespace(float_model=float_model, batches=[torch.randn(float_model.shape) for _ in range(4)])
    for call in calls:
        call(scope)
    return vars(scope)


if __name__ == "__main__":
    run(sys.argv[1])

"""The outcome that each program asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Expected:
    """The required outcome of a program.

    layers   by module path: the dtypes of output, weight and input that the program asks for; None where it does not say
    scales   by module path, of the output: the scale that is asked for
    floats   paths of modules that stay in float
    sqnr     the least signal to noise ratio of the outputs, in dB, against the same model in float
    refused  words of the error that the program ends in; empty where it has to run
    without  the same where the vendor's compiler is not installed
    file     what the program leaves, which has to compute the integers of its integer model: an ONNX file, a .bin for the vendor's
             simulator, or a folder for hb_compile, beside which a program that is refused leaves its integer model, quantized.bc
    """

    layers: Mapping[str, tuple[str | None, str | None, str | None]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    floats: tuple[str, ...] = ()
    sqnr: float = 20.0
    refused: str = ""
    without: str = ""
    file: str = ""


NARROW, WIDE, SUM = ("int8", "int8", "int8"), ("int16", "int8", "int16"), ("int32", "int8", None)


def all_layers(one: tuple[str | None, str | None, str | None]) -> dict[str, tuple[str | None, str | None, str | None]]:
    """Return the same dtypes for the three layers that most programs have."""
    return {"stem.0": one, "deep": one, "head": one}


ABSENT = "is not installed"
ALL_NARROW = (
        "v1_observed_stub", "v1_lsq", "v1_pact", "v1_fixed_act", "v1_export_onnx", "v1_with_bn", "v1_jit_save", "v1_adaround",
        "v1_distributed", "v1_another_head", "v3_all_int8", "v3_segments",
)  # fmt: skip
EXPECTED: dict[str, Expected] = {
    **dict.fromkeys(ALL_NARROW, Expected(all_layers(NARROW))),
    "v1_quick_start": Expected({"stem.0": NARROW, "deep": NARROW, "head": SUM}, {"quant": 1 / 128}, sqnr=3),  # 1/128 clips what it is given
    "v1_default_stub": Expected(all_layers(NARROW), {"quant": 1 / 128}, sqnr=3),
    "v1_int16": Expected(all_layers(WIDE), sqnr=35),
    "v1_module_type": Expected({"stem.0": ("int16", "int8", None), "deep": ("int16", "int8", None), "head": SUM}, sqnr=25),
    "v1_float_part": Expected({"stem.0": ("int8", "int8", None), "head": ("int8", "int8", None)}, floats=("deep",)),
    "v1_get_default_qconfig": Expected(all_layers(WIDE), sqnr=35),
    "v1_hybrid": Expected({"head": ("int8", "int8", None)}, floats=("deep",)),
    "v1_fixed_scale_observer": Expected(all_layers(NARROW), {"head": 1 / 16}, sqnr=10),
    "v1_perf_without_tool": Expected(refused="hb_compile"),
    "v1_quick_start_compile": Expected(
        {"stem.0": NARROW, "deep": NARROW, "head": SUM}, {"quant": 1 / 128}, sqnr=3, without=ABSENT, file="model.bin"
    ),
    "v1_hybrid_compile": Expected({"head": ("int8", "int8", None)}, floats=("deep",), without=ABSENT, file="model.bin"),
    "v1_optimizer_before_batch": Expected(refused="example_inputs"),
    "v1_old_calibration": Expected(refused="prepare_qat_fx"),
    "v1_old_qconfigs": Expected({"stem.0": NARROW, "deep": NARROW, "head": SUM}),
    "v1_lambda_qconfig_of_torch": Expected({"stem.0": NARROW, "deep": ("int16", "int8", None), "head": ("int8", "int8", None)}),
    "v1_camera": Expected(all_layers(NARROW), {"quant": 1 / 128}),
    "v1_classifier": Expected({"stem.0": NARROW, "layers.0.conv1": NARROW, "layers.1.conv2": NARROW, "head": NARROW}),
    "v1_detector": Expected({"c3.0": NARROW, "tower.0": NARROW, "cls": SUM, "reg": SUM}),
    "v1_functional_rule": Expected(
        {"stem": NARROW, "gate.conv": NARROW, "gate.skip": ("int16", None, None), "head": ("int8", "int8", "int16")}
    ),
    "v3_mixed": Expected({"stem.0": ("int16", "int8", "int8"), "deep": NARROW, "head": ("int16", "int8", "int16")}, {"head": 8 / 32768}),
    "eager_quick_start": Expected({"conv1": NARROW, "conv2": NARROW, "head": NARROW}, {"quant": 1 / 128}, sqnr=3),
    "eager_inplace": Expected({"conv1": NARROW, "conv2": NARROW, "head": NARROW}),
    "eager_attributes": Expected({"conv1": NARROW, "conv2": (None, "int8", None)}, floats=("head",)),
    "eager_stub_qconfig": Expected({"quant": ("int16", None, None), "conv1": ("int8", "int8", "int16"), "head": NARROW}),
    "v2_default_setters": Expected({"stem.0": NARROW, "deep": NARROW, "head": SUM}),
    "v2_int16_setters": Expected({"stem.0": WIDE, "deep": WIDE, "head": SUM}, sqnr=30),
    "v2_module_names": Expected(
        {"quant": ("int16", None, None), "deep": ("int16", "int8", None), "stem.0": ("int8", "int8", "int16"), "head": SUM},
        {"quant": 4 / 32768},
    ),
    "v2_sensitive": Expected({"stem.0": ("int16", "int8", None), "deep": ("int8", "int8", "int16"), "head": SUM}),
    "v2_auxiliary_loss": Expected({"stem.0": NARROW, "deep": NARROW}),
    "v2_attention": Expected({"q": ("int16", "int8", "int8"), "k": ("int16", "int8", "int8"), "head": ("int32", "int8", "int8")}, sqnr=25),
    "v2_eager_method": Expected({"conv1": NARROW, "conv2": NARROW, "head": SUM}),
    "v2_auto_calibrate": Expected(refused="fxq.tune"),
    "v2_consistency": Expected(refused="nash-e-level1"),
    "v1_similarity": Expected(refused="fxq.compare"),
    "v3_s100": Expected(refused="fxq.convert"),
    "v3_int16_gemm_int8": Expected(all_layers(("int16", "int8", "int8"))),
    "v3_order": Expected({"stem.0": ("int8", "int16", "int8"), "deep": ("int16", "int16", "int8"), "head": ("int8", "int16", "int8")}),
    "v3_freeze_and_threshold": Expected({"stem.0": NARROW, "head": ("int16", "int8", "int8")}, {"quant": 4 / 128, "head": 8 / 32768}),
    "v3_sensitivity": Expected({"stem.0": NARROW, "deep": ("int16", "int8", "int8"), "head": NARROW}),
    "v3_float16": Expected({"stem.0": SUM, "deep": SUM, "head": SUM}),
    "v3_float16_on_s100": Expected(refused="float"),
    "v3_matmul": Expected({"q": WIDE, "head": WIDE}, sqnr=25),
    "v3_matmul_mixed": Expected(refused="one dtype"),
    "v3_nn_modules": Expected({"conv": WIDE, "head": WIDE}, sqnr=30),
    "v3_correlation": Expected(refused="fxq.nn"),
    "v3_dynamic": Expected(refused="calibrate"),
}

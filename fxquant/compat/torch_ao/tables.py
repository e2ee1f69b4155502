"""Names of PyTorch's quantization, and of PT2E's, with their implementations. Names without a row are PyTorch's own descriptions."""

from __future__ import annotations

from fxquant.compat.common import Refusal
from fxquant.compat.mirror import Row, Tables, refuse, serve

FX = serve("functions", "prepare_fx prepare_qat_fx convert_fx fuse_fx", native="`fxq.prepare`, `fxq.convert`")
EAGER = serve("functions", "prepare prepare_qat convert quantize_dynamic", native="`fxq.prepare`, `fxq.convert`")
FUSE = serve("functions", "fuse_modules fuse_modules_qat", native="none is needed", note="return the model")
SWITCHES = serve(
    "functions",
    "disable_fake_quant disable_observer enable_fake_quant enable_observer freeze_bn_stats update_bn_stats get_observer_dict",
    native="`fxq.set_state`, `fxq.freeze`",
)
REFUSED = [
    *refuse("convert_to_reference_fx", "the integer graph is the only form",
            "write quantize and dequantize with fxq.export_onnx(…, style='qdq')"),
    *refuse("quantize", "it hides what is calibrated", "call fxq.quantize(model, batches, target='x86')"),
    *refuse("quantize_qat", "it hides what is trained", "call prepare_qat, train, and call convert"),
]  # fmt: skip
MODES = serve("exported", "move_exported_model_to_eval move_exported_model_to_train allow_exported_model_train_eval", "2.3")
PT2E = [*serve("exported", "prepare_pt2e prepare_qat_pt2e convert_pt2e", "2.1", "`fxq.prepare`, `fxq.convert`"), *MODES]
X86 = serve("exported", "X86InductorQuantizer get_default_x86_inductor_quantization_config", "2.2", '`target="x86"`')
XNNPACK = serve("exported", "XNNPACKQuantizer get_symmetric_quantization_config", "2.1", '`target="qnnpack"`')
QUANTIZERS = refuse("Quantizer QuantizationAnnotation ComposableQuantizer EmbeddingQuantizer ArmInductorQuantizer",
                    "a quantizer of PyTorch's writes on its own graph",
                    "write rules: fxq.QConfigMapping", "2.1")  # fmt: skip

MODULES: dict[str, list[Row]] = {
    "": [*FX, *EAGER, *FUSE, *SWITCHES, *MODES, *REFUSED],
    "quantize_fx": [*FX, *[row for row in REFUSED if row.name.endswith("_fx")]],
    "quantize": [*EAGER, *[row for row in REFUSED if not row.name.endswith("_fx")]],
    "fuse_modules": FUSE,
    "fake_quantize": SWITCHES[:4],
    "intrinsic_qat": [row for row in SWITCHES if row.name.endswith("_bn_stats")],
    "quantize_pt2e": PT2E,
    "quantizer": [*X86, *XNNPACK, *QUANTIZERS],
    "quantizer.quantizer": QUANTIZERS,
    "quantizer.x86_inductor_quantizer": X86,
    "quantizer.xnnpack_quantizer": XNNPACK,
    "torchao.quantization.pt2e": [*PT2E, *X86, *XNNPACK],
    "torchao.quantization.pt2e.quantize_pt2e": PT2E,
    "torchao.quantization.pt2e.quantizer": [*X86, *QUANTIZERS],
    "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer": X86,
}
ALIASES = {
    "torch.ao.quantization": "",
    "torch.quantization": "",
    "torch.ao.nn.intrinsic.qat": "intrinsic_qat",
    "torch.nn.intrinsic.qat": "intrinsic_qat",
    "torchao": "torchao",
}
ABSENT = Refusal(
    "it is PyTorch's own, and this PyTorch has no torch.ao.quantization",
    "write the same rules with fxq.QConfig and fxq.QConfigMapping, which prepare_fx takes as well",
)

TABLES = Tables("fxquant.compat.torch_ao", "fxquant.compat.torch_ao", MODULES, ALIASES, ABSENT)

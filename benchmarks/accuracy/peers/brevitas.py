"""Brevitas's post-training quantization of a graph, as its ImageNet example configures it; tuning adds equalization and bias correction."""

import warnings

import torch

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized
from benchmarks.accuracy.settings import TRAINING, TUNING, Setting


def refuses(setting: Setting, mode: str) -> str | None:
    if mode == TRAINING:
        return "not trained here"
    return "its graph mode gives all layers the same bits" if min(setting.weights, setting.activations) < 8 else None


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str) -> Quantized:
    from brevitas.graph.quantize import preprocess_for_quantize
    from brevitas_examples.imagenet_classification.ptq.ptq_common import apply_bias_correction, calibrate, quantize_model

    # The examples' loops read pairs of images and labels.
    loader = [(batch, torch.zeros(len(batch))) for batch in checkpoint.data.calibration]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready = preprocess_for_quantize(
            checkpoint.load(), equalize_iters=20 if mode == TUNING else 0, equalize_merge_bias=mode == TUNING, merge_bn=True
        )
        quantized = quantize_model(
            ready,
            backend="fx",
            weight_bit_width=setting.weights,
            act_bit_width=setting.activations,
            bias_bit_width=32,
            weight_quant_granularity="per_channel" if setting.per_channel else "per_tensor",
            act_quant_percentile=99.999,
            act_quant_type="sym",
            scale_factor_type="po2_scale" if setting.power_of_two else "float_scale",
            quant_format="int",
        )
        quantized.eval()
        calibrate(loader, quantized)
        if mode == TUNING:
            apply_bias_correction(loader, quantized)
    quantized.eval()
    count = sum(type(module).__module__.startswith("brevitas.nn") for module in quantized.modules())
    assert count, "Brevitas quantizes nothing"
    return quantized

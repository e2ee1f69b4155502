"""NNCF's post-training quantization with its defaults; its fake-quantized model."""

import warnings

import torch

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized
from benchmarks.accuracy.settings import CALIBRATION, TRAINING, Setting


def refuses(setting: Setting, mode: str) -> str | None:
    if setting.power_of_two:
        return "no power-of-two scales"
    if min(setting.weights, setting.activations) < 8:
        return "post-training quantization has 8 bits"
    return "not trained here" if mode == TRAINING else None


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str) -> Quantized:
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters

    samples = torch.cat(checkpoint.data.calibration)
    weights = QuantizationParameters(per_channel=setting.per_channel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = nncf.quantize(
            checkpoint.load(),
            nncf.Dataset([sample.unsqueeze(0) for sample in samples]),
            subset_size=len(samples),
            fast_bias_correction=mode == CALIBRATION,
            advanced_parameters=AdvancedQuantizationParameters(weights_quantization_params=weights),
        )
    count = sum("Quantizer" in type(module).__name__ for module in quantized.modules())
    assert count, "NNCF quantizes nothing"
    return quantized.eval()

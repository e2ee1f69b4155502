"""MCT's post-training quantization with its defaults, for TFLite; in powers of two for its IMX500, where weights have real scales."""

import warnings
from collections.abc import Iterator

from torch import Tensor

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized, torchvision_names
from benchmarks.accuracy.settings import CALIBRATION, Setting


def refuses(setting: Setting, mode: str) -> str | None:
    if min(setting.weights, setting.activations) < 8:
        return "its platforms have 4 bits in mixed precision alone"
    if not setting.per_channel:
        return "its platforms have weights per channel"
    return None if mode == CALIBRATION else "not tuned or trained here"


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str) -> Quantized:
    torchvision_names.define()
    import model_compression_toolkit as toolkit

    def samples() -> Iterator[list[Tensor]]:
        for batch in checkpoint.data.calibration:
            yield [batch]

    platform = toolkit.get_target_platform_capabilities("1.0", "imx500" if setting.power_of_two else "tflite")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized, _ = toolkit.ptq.pytorch_post_training_quantization(checkpoint.load(), samples, target_platform_capabilities=platform)
    assert any("Quantiz" in type(module).__name__ for module in quantized.modules()), "MCT quantizes nothing"
    return quantized.eval()  # type: ignore[no-any-return]

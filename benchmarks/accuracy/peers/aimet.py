"""AIMET's simulation with its default configuration, batch norms folded: symmetric weights, affine activations; equalized or not."""

import warnings
from pathlib import Path

from torch import nn

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized, torchvision_names
from benchmarks.accuracy.settings import CALIBRATION, Setting


def refuses(setting: Setting, mode: str, *, equalization: bool) -> str | None:
    if setting.power_of_two:
        return "no power-of-two scales"
    return None if mode == CALIBRATION else "not tuned or trained here"


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str, *, equalization: bool) -> Quantized:
    torchvision_names.define()
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.common import quantsim_config
    from aimet_torch.cross_layer_equalization import equalize_model
    from aimet_torch.model_preparer import prepare_model
    from aimet_torch.quantsim import QuantizationSimModel

    batches = checkpoint.data.calibration
    example = batches[0][:1]
    configuration = "default_config_per_channel.json" if setting.per_channel else "default_config.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready = prepare_model(checkpoint.load()).eval()
        if equalization:
            equalize_model(ready, dummy_input=example)
        else:
            fold_all_batch_norms(ready, None, example)
        simulated = QuantizationSimModel(
            ready,
            example,
            default_output_bw=setting.activations,
            default_param_bw=setting.weights,
            config_file=str(Path(next(iter(quantsim_config.__path__))) / configuration),
        )
        _keep_eight_bits(simulated.model)
        simulated.compute_encodings(lambda model: [model(batch) for batch in batches])
    quantized = simulated.model.eval()
    assert any(type(module).__name__ == "QuantizeDequantize" for module in quantized.modules()), "AIMET quantizes nothing"
    return quantized  # type: ignore[no-any-return]


def _keep_eight_bits(simulated: nn.Module) -> None:
    """Give the first and the last layer 8 bits: their weights, what the first one reads, and what the last one gives."""
    layers = [module for module in simulated.modules() if "weight" in getattr(module, "param_quantizers", ())]
    for layer in (layers[0], layers[-1]):
        for quantizer in (*layer.param_quantizers.values(), *layer.input_quantizers, *layer.output_quantizers):
            if quantizer is not None:
                quantizer.bitwidth = 8

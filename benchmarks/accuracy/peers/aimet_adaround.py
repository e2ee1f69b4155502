"""AIMET's adaptive rounding (AdaRound), layers equalized first: each weight is rounded up or down by what its layer returns."""

import tempfile
import warnings
from pathlib import Path

from torch import nn

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized, torchvision_names
from benchmarks.accuracy.settings import TUNING, Setting

WEIGHTS = nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | nn.Linear


def refuses(setting: Setting, mode: str, *, iterations: int | None) -> str | None:
    if mode != TUNING:
        return "a method of tuning"
    if setting.power_of_two:
        return "no power-of-two scales"
    return None


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str, *, iterations: int | None) -> Quantized:
    torchvision_names.define()
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
    from aimet_torch.common import quantsim_config
    from aimet_torch.cross_layer_equalization import equalize_model
    from aimet_torch.model_preparer import prepare_model
    from aimet_torch.quantsim import QuantizationSimModel

    batches = checkpoint.data.calibration
    example = batches[0][:1]
    named = "default_config_per_channel.json" if setting.per_channel else "default_config.json"
    configuration = str(Path(next(iter(quantsim_config.__path__))) / named)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")
        ready = prepare_model(checkpoint.load()).eval()
        equalize_model(ready, dummy_input=example)
        layers = [(name, module) for name, module in ready.named_modules() if isinstance(module, WEIGHTS)]
        outer = [layers[0][0], layers[-1][0]]
        rounded = Adaround.apply_adaround(
            ready,
            example,
            AdaroundParameters(batches, len(batches), iterations, forward_fn=lambda model, batch: model(batch)),
            path=place,
            filename_prefix="rounded",
            default_param_bw=setting.weights,
            param_bw_override_list=[(module, 8) for name, module in layers if name in outer],
            default_config_file=configuration,
        )
        simulated = QuantizationSimModel(
            rounded, example, default_output_bw=setting.activations, default_param_bw=setting.weights, config_file=configuration
        )
        for name in outer:
            layer = simulated.model.get_submodule(name)
            for quantizer in (*layer.param_quantizers.values(), *layer.input_quantizers, *layer.output_quantizers):
                if quantizer is not None:
                    quantizer.bitwidth = 8
        simulated.set_and_freeze_param_encodings(encoding_path=str(Path(place) / "rounded.encodings"))
        simulated.compute_encodings(lambda model: [model(batch) for batch in batches])
    return simulated.model.eval()  # type: ignore[no-any-return]

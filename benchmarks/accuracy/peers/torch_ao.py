"""torch.ao's FX graph mode: affine activations under a histogram observer, weights symmetric between their extremes.

With reduce_range, its default on x86, an activation has 7 bits, and what is calibrated is converted and run by PyTorch's integer kernels.
Without it these kernels may saturate, and for 4 bits there are none: then, and after training, the model is fake-quantized.
"""

import functools
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.methods import outer_layers
from benchmarks.accuracy.peers import Quantized
from benchmarks.accuracy.settings import TRAINING, TUNING, Setting
from benchmarks.accuracy.training import train


def refuses(setting: Setting, mode: str, *, reduce_range: bool) -> str | None:
    if setting.power_of_two:
        return "no power-of-two scales"
    if mode == TUNING:
        return "no tuning"
    return "reduce_range is for 8 bits" if reduce_range and setting.activations < 8 else None


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str, *, reduce_range: bool) -> Quantized:
    from torch.ao import quantization as ao
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

    network, example = checkpoint.load(), (checkpoint.data.calibration[0],)
    converted = reduce_range and mode != TRAINING
    qconfig = functools.partial(_qconfig, per_channel=setting.per_channel, reduce_range=reduce_range)
    mapping = ao.QConfigMapping().set_global(qconfig(setting.weights, setting.activations))
    for name in outer_layers(network):
        mapping.set_module_name(name, qconfig(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(network, mapping, example) if converted else prepare_qat_fx(network.train(), mapping, example)
        _require_quantized(prepared, checkpoint.load())
        prepared.eval().apply(ao.disable_fake_quant)
        with torch.no_grad():
            for batch in checkpoint.data.calibration:
                prepared(batch)
        prepared.apply(ao.enable_fake_quant).apply(ao.disable_observer)
        if converted:
            torch.backends.quantized.engine = "x86"
            return convert_fx(prepared)
    if mode == TRAINING:
        _train(prepared, checkpoint)
    return prepared


def _train(prepared: nn.Module, checkpoint: Checkpoint) -> None:
    """Ranges follow the batches until the last epoch."""
    from torch.ao import quantization as ao

    def freeze() -> None:
        prepared.apply(ao.disable_observer)
        prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)

    prepared.train().apply(ao.enable_observer)
    train(prepared, checkpoint, freeze)
    prepared.eval()


def _require_quantized(prepared: nn.Module, network: nn.Module) -> None:
    """Raise AssertionError where fewer activations are quantized than there are layers with weights."""
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear | nn.ConvTranspose2d) for module in network.modules())
    observers = sum(name.startswith("activation_post_process") for name, _ in prepared.named_children())
    assert observers > layers, f"torch.ao leaves activations in float: it quantizes {observers}, beside {layers} layers"


def _qconfig(weights: int, activations: int, *, per_channel: bool, reduce_range: bool) -> Any:
    from torch.ao import quantization as ao

    output = {"quant_min": 0, "quant_max": 2**activations - 1, "dtype": torch.quint8, "reduce_range": reduce_range}
    weight = {"quant_min": -(2 ** (weights - 1)), "quant_max": 2 ** (weights - 1) - 1, "dtype": torch.qint8}
    observer = ao.PerChannelMinMaxObserver if per_channel else ao.MinMaxObserver
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    return ao.QConfig(
        activation=ao.FakeQuantize.with_args(observer=ao.HistogramObserver, qscheme=torch.per_tensor_affine, **output),
        weight=ao.FakeQuantize.with_args(observer=observer, qscheme=scheme, **weight),
    )

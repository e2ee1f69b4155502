"""Calibrate, tune and train checkpoints with fxquant, and compute the outputs of the integer model."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from benchmarks.accuracy.floats import EVALUATED, Checkpoint
from benchmarks.accuracy.settings import CALIBRATION, TRAINING, TUNING, Setting
from benchmarks.accuracy.training import train

LEARNED_BELOW = 8  # bits; at 8 bits the scales follow the ranges of the batches


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str) -> Tensor | str:
    """The integer model's outputs for the whole test; asserts that they are the prepared model's. Text: why there are none."""
    prepared = MODES[mode](checkpoint, setting)
    if isinstance(prepared, str):
        return prepared
    prepared.eval()
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return exact_outputs(prepared, fxq.convert(prepared), checkpoint.data.test_inputs)


def exact_outputs(prepared: fx.GraphModule, integer: fx.GraphModule, inputs: Tensor) -> Tensor:
    """Return the outputs of both models. Raises AssertionError where the models differ in a bit."""
    results = []
    with torch.no_grad():
        for batch in torch.split(inputs, EVALUATED):
            outputs = integer(batch)
            assert torch.equal(outputs, prepared(batch)), "integer and prepared model differ"
            results.append(outputs)
    return torch.cat(results)


def outer_layers(network: nn.Module) -> tuple[str, str]:
    """The names of the first and the last layer with weights, which keep 8 bits on every side."""
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d | nn.Linear | nn.ConvTranspose2d)]
    return layers[0], layers[-1]


def mapping(network: nn.Module, setting: Setting, activation: Mapping[str, Any], weight: Mapping[str, Any]) -> fxq.QConfigMapping:
    """Return the bits of a setting, 8 for the first and the last layer, with further arguments of ActivationConfig and WeightConfig."""

    def qconfig(weights: int, activations: int) -> fxq.QConfig:
        dtype = None if activations == 8 else f"int{activations}"
        weight_config = fxq.WeightConfig(f"int{weights}", per_channel=setting.per_channel, **weight)
        return fxq.QConfig(fxq.ActivationConfig(dtype, **activation), weight_config)

    rules = fxq.QConfigMapping(qconfig(setting.weights, setting.activations))
    for name in outer_layers(network):
        rules = rules.set_module_name(name, qconfig(8, 8))
    return rules


def prepare(checkpoint: Checkpoint, setting: Setting, *, learned: bool = False) -> fx.GraphModule:
    """Prepared with fxquant's defaults, but for the bits that the setting says; not calibrated yet."""
    network, training = checkpoint.load(), {"training": "learned" if learned else "statistics"}
    return fxq.prepare(network, checkpoint.data.calibration[0], setting.target, mapping(network, setting, training, training))


def calibrated(checkpoint: Checkpoint, setting: Setting) -> fx.GraphModule:
    return fxq.calibrate(prepare(checkpoint, setting), checkpoint.data.calibration, show_progress=False)


def tuned(checkpoint: Checkpoint, setting: Setting) -> fx.GraphModule | str:
    """Calibrated, then every step of `STEPS` that this fxquant has, in this order."""
    if not any(_function(name) for name, _ in STEPS):
        return "this fxquant has no fxquant.tuning"
    prepared = fxq.calibrate(prepare(checkpoint, setting), checkpoint.data.calibration, show_progress=False)
    for name, applies in STEPS:
        function = _function(name)
        if function is not None and applies(setting):
            function(prepared, checkpoint.data.calibration, show_progress=False)
    return prepared


def _function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module("fxquant.tuning"), name, None)
    except ModuleNotFoundError:
        return None


STEPS: tuple[tuple[str, Callable[[Setting], bool]], ...] = (
    ("round_weights", lambda setting: True),
    ("distill", lambda setting: setting.weights < 8 or setting.activations < 8),
    ("correct_bias", lambda setting: setting.weights == setting.activations == 8),
)
"""Functions of fxquant.tuning, and the settings they are for; equalization is a part of calibration."""


def trained(checkpoint: Checkpoint, setting: Setting) -> fx.GraphModule:
    """Calibrated, then trained; below 8 bits with learned scales, as the guide recommends."""
    learned = min(setting.weights, setting.activations) < LEARNED_BELOW
    prepared = fxq.calibrate(prepare(checkpoint, setting, learned=learned), checkpoint.data.calibration, show_progress=False)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    train(prepared, checkpoint, lambda: fxq.freeze(prepared, scales=not learned))
    return prepared


MODES: dict[str, Callable[[Checkpoint, Setting], fx.GraphModule | str]] = {CALIBRATION: calibrated, TUNING: tuned, TRAINING: trained}

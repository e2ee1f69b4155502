"""Batches that a search runs again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.recording import still
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import by_name
from fxquant.ir.model import autocast_off
from fxquant.prepared.batches import as_batches, first_batches, model_inputs, no_batches
from fxquant.tuning.simulation import Simulation, real_outputs

Metric = Callable[[Any], float]


def taken(prepared: fx.GraphModule, batches: Any, num_batches: int | None, batch_fn: Callable[[Any], Any] | None) -> list[list[Any]]:
    """Return the model's inputs of each batch. Raises CalibrationError if there is none, or one does not fit."""
    found = [
        model_inputs(prepared, batch if batch_fn is None else batch_fn(batch), index)
        for index, batch in enumerate(first_batches(as_batches(batches), num_batches))
    ]
    if not found:
        raise no_batches(num_batches)
    return found


class Reference:
    """The outputs of the float model for some batches, and the distance of other outputs from them.

    The noise of other outputs is the mean, over the floating-point outputs of the model, of Σ(y' - y)² / Σy²: 0.001 is an SQNR of 30 dB.
    """

    def __init__(self, simulation: Simulation, samples: Sequence[Sequence[Any]]) -> None:
        self.samples = samples
        with torch.no_grad():
            self.outputs = [simulation.outputs(inputs) for inputs in samples]
        if not self.outputs[0]:
            raise ConfigurationError(
                "the model returns no float tensor to measure an error of",
                because="noise is measured in float outputs",
                remedy="pass a metric, or a model that returns its scores as well",
            )
        squares = [sum(float(output.double().square().sum()) for output in each) for each in zip(*self.outputs, strict=True)]
        self.power = [square or 1.0 for square in squares]

    def noise(self, outputs: Callable[[Sequence[Any]], list[Tensor]]) -> float:
        """That of what a function of a batch's inputs returns."""
        errors = [0.0] * len(self.power)
        with torch.no_grad():
            for inputs, wanted in zip(self.samples, self.outputs, strict=True):
                for index, (found, right) in enumerate(zip(outputs(inputs), wanted, strict=True)):
                    errors[index] += float((found.double() - right.double()).square().sum())
        return sum(error / power for error, power in zip(errors, self.power, strict=True)) / len(errors)


@torch.no_grad()
def real_outputs_of(model: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
    """Return the floating-point outputs of a prepared model for a batch's inputs, in its present state."""
    with still(model, None), autocast_off():
        return real_outputs(model(**by_name(model, inputs)))

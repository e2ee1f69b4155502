"""The noise that quantization leaves in the outputs of a model, on samples that nothing was learned from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxquant.tuning.units import is_real
from fxquant.tuning.walk import Walk

WORTH = 0.95  # of the noise, at most, for a choice of calibration to be kept: 0.2 dB, which a few samples tell from chance


class OutputNoise:
    """Measures the floating point outputs of a prepared model against those of its float form.

    The noise is the mean over chunks and outputs of Σ(y' - y)² / Σy²: a chunk counts the same, however large its values are.
    """

    def __init__(self, prepared: fx.GraphModule, chunks: Sequence[Sequence[Any]]) -> None:
        self.prepared, self.chunks = prepared, chunks
        self.nodes = [node for node in prepared.graph.output_node().all_input_nodes if is_real(node)]
        self.wanted = self._outputs(exact=False, chunks=chunks) if self.nodes else []

    def measure(self) -> float:
        """Return the noise of the model as it is now; 0 where it returns no floating point tensor."""
        return self._noise(self._outputs(exact=True, chunks=self.chunks)) if self.nodes else 0.0

    def of_inputs(self, chunks: Sequence[Sequence[Any]]) -> float:
        """Return the noise of the float form with other inputs; the model returns a floating point tensor."""
        return self._noise(self._outputs(exact=False, chunks=chunks))

    def _noise(self, outputs: Sequence[dict[fx.Node, Tensor]]) -> float:
        shares = [_share(found[node], wanted[node]) for found, wanted in zip(outputs, self.wanted, strict=True) for node in self.nodes]
        return sum(shares) / len(shares)

    def _outputs(self, exact: bool, chunks: Sequence[Sequence[Any]]) -> list[dict[fx.Node, Tensor]]:
        """Return the outputs for each chunk, one chunk at a time: what is between the layers is kept for one alone."""
        return [Walk(self.prepared, [chunk], exact=exact).at(self.nodes)[0] for chunk in chunks]


def _share(found: Tensor, wanted: Tensor) -> float:
    error, power = (found.double() - wanted.double()).square().sum(), wanted.double().square().sum()
    return float(error / power.clamp_min(1e-30))


def decibels(noise: float) -> float:
    """Return the signal-to-noise ratio in dB of what `measure` returns; infinite without noise."""
    return -10 * math.log10(noise) if noise > 0 else math.inf

"""The noise that quantization leaves in the outputs of a model, on samples that nothing was learned from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from fxquant.tuning.result import TunedLayer
from fxquant.tuning.units import is_real
from fxquant.tuning.walk import Walk

logger = logging.getLogger("fxquant")

WORTH = 0.95  # of the noise, at most, for a choice of calibration or a tuning to be kept: 0.2 dB, which a few samples tell from chance


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


def is_lower(after: float, before: float) -> bool:
    """Return whether the noise of outputs is clearly lower than before, by 0.2 dB or more."""
    return after < WORTH * before


def judged(
    outputs: OutputNoise,
    before: float,
    rows: Sequence[TunedLayer],
    undo: Callable[[], None],
    what: tuple[str, str],
    attempts: Sequence[Callable[[], None]] = (lambda: None,),
) -> tuple[TunedLayer, ...]:
    """Return the rows of a tuning method if it makes the outputs clearly better; else call `undo`, and return rows that are not kept.

    `before` is the noise of the outputs without it; `what` is the subject and the participle of the log line. Of several `attempts`, which
    each put something else into the model, the first that is clearly better stays. If the model has no floating point outputs to judge by,
    the first stays.
    """
    kept = sum(row.kept for row in rows)
    if not kept:
        return tuple(rows)
    for attempt in attempts:
        attempt()
        after = outputs.measure()
        if is_lower(after, before) or not outputs.nodes:
            logger.info(
                "%s are %s in %d of %d layers%s: on held-out samples the outputs have %.1f dB, and had %.1f dB",
                *what, kept, len(rows), "" if attempt is attempts[0] else " by half", decibels(after), decibels(before),
            )  # fmt: skip
            return tuple(rows)
    undo()
    logger.info(
        "%s are not %s: on held-out samples the outputs have %.1f dB, and %.1f dB with it",
        *what, decibels(before), decibels(after),
    )  # fmt: skip
    return tuple(replace(row, kept=False) for row in rows)


def decibels(noise: float) -> float:
    """Return the signal-to-noise ratio in dB of what `measure` returns; infinite without noise."""
    return -10 * math.log10(noise) if noise > 0 else math.inf

"""Ranges that serve every sample alike: chosen by the noise of each sample in decibels, where the outputs are better for it.

The squared error of all samples together is that of the samples with the largest values. Where a third of the images holds values ten
times the usual, that error keeps these and gives the other images a coarse step. The alternative minimizes the noise of a sample in
decibels, on average over samples (`HistogramObserver.per_sample`), and clips more of the largest values. Neither is better for every
network. Both are measured by the outputs of the model (`output_noise`), and the alternative is taken where it lowers their noise
clearly: a choice of one in two hardly adapts to the samples that it was made by. An output of the model keeps its range.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxquant.calibration.calibration import owned_quantizers
from fxquant.ir.model import repeatable
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.support.progress import progress
from fxquant.tuning.guard import tuning
from fxquant.tuning.output_noise import OutputNoise, decibels, is_lower

logger = logging.getLogger("fxquant")


def counts(prepared: fx.GraphModule) -> dict[str, int]:
    """Return how many batches each quantizer's observer has seen, by the name of its operator and its role."""
    return {name: int(quantizer.observer.count) for name, quantizer in _quantizers(prepared).items() if quantizer.observer is not None}


def observed_since(prepared: fx.GraphModule, before: Mapping[str, int]) -> dict[str, Quantizer]:
    """Return the quantizers whose scale follows what was observed since, and may be chosen by samples."""
    quantizers = _quantizers(prepared)
    return {
        name: quantizers[name]
        for name, count in counts(prepared).items()
        if count > before.get(name, 0) and quantizers[name].can_balance_samples
    }


def balances_better(
    prepared: fx.GraphModule, quantizers: Mapping[str, Quantizer], judging: Sequence[Sequence[Any]], show_progress: bool | None
) -> bool:
    """Return whether ranges by samples lower the noise of the outputs for the chunks `judging`; the scales stay what they were."""
    if not quantizers or not judging:
        return False
    with tuning(prepared), repeatable():
        outputs, noise = OutputNoise(prepared, judging), []
        try:
            for balanced in progress((False, True), 2, "comparing ranges", show_progress):
                put(quantizers, balanced)
                noise.append(outputs.measure())
        finally:
            put(quantizers, False)
    usual, balanced_noise = noise
    better = is_lower(balanced_noise, usual)
    logger.info(
        "ranges are chosen by %s: the outputs have %.1f dB, and %.1f dB with ranges by %s",
        *(("the noise of each sample", *map(decibels, (balanced_noise, usual)), "the squared error of all")
          if better else ("the squared error of all samples", *map(decibels, (usual, balanced_noise)), "the noise of each")),
    )  # fmt: skip
    return better


def put(quantizers: Mapping[str, Quantizer], balanced: bool) -> None:
    """Choose the scales of these quantizers anew, by samples or not."""
    for quantizer in quantizers.values():
        quantizer.balance_samples(balanced)


def is_balanced(prepared: fx.GraphModule) -> bool:
    """Return whether calibration has chosen ranges by the noise of each sample."""
    return any(quantizer.balanced for quantizer in _quantizers(prepared).values())


def _quantizers(prepared: fx.GraphModule) -> dict[str, Quantizer]:
    """Return the quantizers of results and of what residuals are added to, by name."""
    return {
        f"{name}.{index}": quantizer
        for name, operator in quantized_operators(prepared).items()
        if not operator.plain
        for index, quantizer in enumerate(owned_quantizers(operator))
    }

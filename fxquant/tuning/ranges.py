"""Ranges that calibration chooses by the outputs of the model, after observers have chosen each by the error of its own tensor.

A choice has candidates, the usual one first. Each is put into the model, whose outputs are then measured on a few samples (`effects`).
Another one than the usual is taken where the outputs gain clearly by it: a choice of a few hardly adapts to the samples that it was made
by. There are two choices.

*All tensors but outputs, by the noise of each sample.* The squared error of all samples together is that of the samples with the largest
values. Where a third of the images holds values ten times the usual, that error keeps these and gives the other images a coarse step. The
alternative minimizes the noise of a sample in decibels, on average over samples (`HistogramObserver.per_sample`), and clips more of the
largest values. Neither is better for every network.

*An input many of whose values round to 0, divided by a power of two.* A few large values set the scale of such an input: a power
spectrogram, say. The squared error of the input is that of these values, so no observer cuts them off. What they do to the outputs is often
the same at half their size, as behind a sigmoid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.calibration.calibration import owned_quantizers
from fxquant.calibration.lost_inputs import lost
from fxquant.ir.model import repeatable
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.support.progress import progress
from fxquant.tuning.effects import FloatOutputs, best_of, decibels
from fxquant.tuning.guard import tuning

logger = logging.getLogger("fxquant")

POOLED, EACH = "the squared error of all samples", "the noise of each sample"
MANY = 0.2  # of an input's values that are not 0, and become 0
FACTORS = (1.0, 0.5, 0.25, 0.125, 0.0625)

Chunks = Sequence[Sequence[Any]]  # the inputs of the model that judge


def counts(prepared: fx.GraphModule) -> dict[str, int]:
    """Return how many batches each quantizer's observer has seen, by the name of its operator and its role."""
    return {name: int(quantizer.observer.count) for name, quantizer in _quantizers(prepared).items() if quantizer.observer is not None}


def observed_since(prepared: fx.GraphModule, before: Mapping[str, int]) -> dict[str, Quantizer]:
    """Return the quantizers that have observed anything since `counts` were `before`."""
    quantizers = _quantizers(prepared)
    return {name: quantizers[name] for name, count in counts(prepared).items() if count > before.get(name, 0)}


def is_balanced(prepared: fx.GraphModule) -> bool:
    """Return whether calibration has chosen ranges by the noise of each sample."""
    return any(quantizer.balanced for quantizer in _quantizers(prepared).values())


def put(quantizers: Sequence[Quantizer], balanced: bool) -> None:
    """Choose the scales of these quantizers anew, by the noise of each sample or not."""
    for quantizer in quantizers:
        quantizer.balance_samples(balanced)


def balances_better(prepared: fx.GraphModule, quantizers: Sequence[Quantizer], judging: Chunks, show_progress: bool | None) -> bool:
    """Return whether ranges by the noise of each sample are clearly better for the outputs; the scales stay what they were."""
    candidates = {POOLED: partial(put, quantizers, False), EACH: partial(put, quantizers, True)}
    return _chosen(prepared, candidates, judging, "ranges are chosen by", show_progress) == EACH


def narrower(prepared: fx.GraphModule, observed: Mapping[str, Quantizer], judging: Chunks, show_progress: bool | None) -> dict[str, float]:
    """Return the factors below 1 of the ranges of lost inputs with which the outputs are best, by quantize node; the ranges stay.

    Only inputs that the default observer has `observed` have other candidates.
    """
    placeholders = [node.name for node in prepared.graph.find_nodes(op="placeholder")]
    seen = {name: _together([chunk[index] for chunk in judging]) for index, name in enumerate(placeholders)}
    found = {}
    for node, operator, _ in lost(prepared, seen, MANY):
        if f"{node.name}.0" in observed and operator.output.can_narrow:
            factors = {f"{factor:g}": partial(narrow, prepared, {node.name: factor} if factor < 1 else {}) for factor in FACTORS}
            what = f"the range of input {node.all_input_nodes[0].name} is multiplied by"
            found[node.name] = float(_chosen(prepared, factors, judging, what, show_progress))
    return {name: factor for name, factor in found.items() if factor < 1}


def narrow(prepared: fx.GraphModule, factors: Mapping[str, float]) -> None:
    """Multiply the ranges of these quantize nodes."""
    operators = quantized_operators(prepared)
    for name, factor in factors.items():
        operators[name].output.narrow(factor)


def _chosen(prepared: fx.GraphModule, candidates: Mapping[str, Callable[[], None]], judging: Chunks, what: str, show: bool | None) -> str:
    """Return the candidate that is clearly best for the outputs, or the first, the usual one, which the model has again afterwards."""
    usual, *others = candidates
    noise: dict[str, float] = {}
    with tuning(prepared) as tuned, repeatable():
        outputs = FloatOutputs(prepared, judging)
        try:
            for name in progress(candidates, len(candidates), "comparing ranges", show) if outputs.there else ():
                candidates[name]()
                noise[name] = outputs.measure()
                tuned.undo()
        finally:
            candidates[usual]()
    if not noise:
        return usual
    best = best_of(noise, usual)
    other = min(others, key=noise.__getitem__) if best == usual else usual
    logger.info("%s %s: the outputs have %.1f dB, and %.1f dB with %s", what, best, decibels(noise[best]), decibels(noise[other]), other)
    return best


def _together(values: Sequence[Any]) -> Any:
    """Return the elements of an input in all chunks, whichever dimension is the batch; the input itself where it is not a tensor."""
    return torch.cat([value.flatten() for value in values]) if all(isinstance(value, Tensor) for value in values) else values[0]


def _quantizers(prepared: fx.GraphModule) -> dict[str, Quantizer]:
    """Return the quantizers of results and of what residuals are added to, by name."""
    return {
        f"{name}.{index}": quantizer
        for name, operator in quantized_operators(prepared).items()
        if not operator.plain
        for index, quantizer in enumerate(owned_quantizers(operator))
    }

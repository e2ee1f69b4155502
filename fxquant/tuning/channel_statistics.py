"""Statistics of the channels of tensors in the float model: the largest magnitude and the mean square of each.

A few items of a batch may be outliers (`observers.loudness`), whose channels have other proportions. Factors that suit them may spread the
channels of all other items, and a scale may clip the outliers anyway. So they are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.recording import still
from fxquant.ir.graph import by_name
from fxquant.ir.model import repeatable
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State

LOUD = 4.0  # items with more than so many times the median magnitude are outliers, and do not show how far apart channels are
Seen = tuple[Tensor, Tensor, int]  # max |x| and Σ x̄² for each label of a tensor, and how many tensors were seen
Statistics = dict[str, Seen]  # by node


@torch.no_grad()
def statistics(prepared: fx.GraphModule, watched: Mapping[str, Tensor], batches: Iterable[Sequence[Any]]) -> Statistics:
    """Return the statistics, over these batches, of the tensors whose labels are given."""
    found: Statistics = {}

    def watch(module: QuantizedOperator, _: Any, result: Tensor) -> None:
        labels = watched[module.name]
        if result.dim() != labels.dim() + 1 or not result.is_floating_point() or not result.numel():
            return
        reduced = [0, *(dim + 1 for dim, size in enumerate(labels.shape) if size == 1)]
        usual = _usual(result)
        taken = result if bool(usual.all()) else result[usual]
        largest = taken.abs().amax(reduced, keepdim=True).squeeze(0).double().cpu()
        power = taken.square().mean(reduced, keepdim=True, dtype=torch.float64).squeeze(0).cpu()
        _add(found, module.name, (largest, power, 1))

    operators = quantized_operators(prepared)
    handles = [operators[name].register_forward_hook(watch) for name in watched]
    try:
        with still(prepared, State.FLOAT):
            for inputs in batches:
                with repeatable():
                    prepared(**by_name(prepared, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return found


def together(gathered: Sequence[Statistics]) -> Statistics:
    """Combine the statistics of all ranks."""
    found: Statistics = {}
    for one in gathered:
        for name, seen in one.items():
            _add(found, name, seen)
    return found


def _add(found: Statistics, name: str, seen: Seen) -> None:
    largest, power, count = seen
    before = found.get(name)
    found[name] = seen if before is None else (torch.maximum(before[0], largest), before[1] + power, before[2] + count)


def _usual(value: Tensor) -> Tensor:
    """Return which items of a batch are not outliers in magnitude, bool of shape (items,); NaN is not left out."""
    loudness = value.abs().flatten(1).amax(1)
    return ~(loudness > LOUD * loudness.median())

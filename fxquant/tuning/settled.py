"""The decisions of `round_weights` for one layer, as a value that other ranks and checkpoints can hold."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fxquant.numerics.rounding import AdaptiveRounding
from fxquant.prepared.operators import QuantizedOperator
from fxquant.quantization.learning import LSQ
from fxquant.quantization.weights import Coverage, WeightQuantizer


class Settled(NamedTuple):
    """The rounding decision of one layer.

    offset  of its roundings, in steps, shape of the weight; None: its rounding stays
    share   of its largest magnitude that the scale covers, (C,) or (1,); None: all, or the scale is learned
    scale   where a learned scale starts, (C,) or (1,); None: the scale is not learned
    """

    offset: Tensor | None
    share: Tensor | None = None
    scale: Tensor | None = None

    def cpu(self) -> Settled:
        """Return the same numbers in the memory of the host."""
        return Settled(*(None if each is None else each.cpu() for each in self))


def settled(quantizer: WeightQuantizer) -> Settled:
    """Return the decisions that a weight rounded by samples has."""
    assert isinstance(quantizer.rounding, AdaptiveRounding)
    learned = quantizer.learned if quantizer.learned is not None and quantizer.learned.method is LSQ else None
    share = None if quantizer.coverage is None else quantizer.coverage.share
    return Settled(quantizer.rounding.offset, share, None if learned is None else learned.current())


def put(operator: QuantizedOperator, decided: Settled) -> None:
    """Give the operator this rounding, this coverage and this learned scale, those of them that are not None."""
    offset, share, scale = decided
    present = [each for each in decided if each is not None]
    if not present:
        return
    quantizer, device = operator.weight_quantizer, next(operator.buffers(), present[0]).device
    if offset is not None:
        rounding = AdaptiveRounding(tuple(offset.shape)).to(device)
        rounding.offset.copy_(offset)
        quantizer.rounding = rounding
    if share is not None:
        coverage = Coverage(len(share)).to(device)
        coverage.share.copy_(share)
        quantizer.cover(coverage)
    if scale is not None and quantizer.learned is not None and not quantizer.learned.frozen:
        quantizer.learned.assign(scale.to(device))

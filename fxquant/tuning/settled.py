"""The decisions of `round_weights` for one layer, as a value that other ranks and checkpoints can hold."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fxquant.numerics.rounding import AdaptiveRounding
from fxquant.prepared.operators import QuantizedOperator
from fxquant.quantization.learning import LSQ
from fxquant.quantization.weights import Coverage, WeightQuantizer
from fxquant.tuning.learning import Learned


class Settled(NamedTuple):
    """The rounding decision of one layer.

    offset  of its roundings, in steps, shape of the weight
    share   of its largest magnitude that the scale covers, (C,) or (1,); None: all, or the scale is learned
    scale   where a learned scale starts, (C,) or (1,); None: the scale is not learned
    """

    offset: Tensor
    share: Tensor | None = None
    scale: Tensor | None = None

    def cpu(self) -> Settled:
        """Return the same numbers in the memory of the host."""
        return Settled(*(None if each is None else each.cpu() for each in self))  # type: ignore[arg-type]


def settled(quantizer: WeightQuantizer) -> Settled:
    """Return the decisions that a weight rounded by samples has."""
    assert isinstance(quantizer.rounding, AdaptiveRounding)
    learned = quantizer.learned if quantizer.learned is not None and quantizer.learned.method is LSQ else None
    share = None if quantizer.coverage is None else quantizer.coverage.share
    return Settled(quantizer.rounding.offset, share, None if learned is None else learned.current())


def learned_of(name: str, quantizer: WeightQuantizer) -> Learned:
    """Return the decisions in the form that a checkpoint holds."""
    offset, share, scale = settled(quantizer)
    return Learned({name: offset}, {} if scale is None else {name: scale}, {} if share is None else {name: share})


def put(operator: QuantizedOperator, decided: Settled) -> None:
    """Give the operator this rounding, and where they are not None, this coverage and this learned scale."""
    offset, share, scale = decided
    quantizer, device = operator.weight_quantizer, next(operator.buffers(), offset).device
    rounding = AdaptiveRounding(tuple(offset.shape)).to(device)
    rounding.offset.copy_(offset)
    quantizer.rounding = rounding
    if share is not None:
        coverage = Coverage(len(share)).to(device)
        coverage.share.copy_(share)
        quantizer.cover(coverage)
    if scale is not None and quantizer.learned is not None and not quantizer.learned.frozen:
        quantizer.learned.assign(scale.to(device))

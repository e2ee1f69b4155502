"""The first samples of a calibration, by which weights are rounded and biases corrected behind it.

Weights of few bits are rounded by them (`second_moment`). What is left of their errors, what those of 8 bits make of an operand whose mean
is not 0, and what clipped operands shift, is on average taken from biases (`bias`), if there are samples enough for a mean. Where an
arithmetic only floors, of a sum that half a step was added to, biases make up for that, too: every number in the middle between two
integers goes up. Sums of many products hardly ever are there; the mean of four numbers is in one case of four, and so every pixel of a
pooled image is an eighth of a step too large on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, fx

import fxquant.quantization.distributed as ranks
from fxquant.tuning import bias, second_moment
from fxquant.tuning.units import weighted_nodes
from fxquant.tuning.walk import HELD_OUT_OF, Samples, batch_axes, count_of, cut

ENOUGH = 64  # samples: so many are kept, of the first batches, and biases are corrected if there are so many
LARGEST = 2**24  # elements of what is kept
LARGEST_FOR_BIAS = 2**21  # a mean needs fewer
CHUNK = 16  # samples

Found = TypeVar("Found")


class FirstSamples:
    """Collects them; none are kept where nothing is to be done by them.

    `round_weights` and `correct_bias` say what is done: True all layers, False none; None: weights of less than 8 bits are rounded, and
    biases corrected if at least `ENOUGH` samples go by, in all ranks together.
    """

    def __init__(self, prepared: fx.GraphModule, round_weights: bool | None = None, correct_bias: bool | None = None) -> None:
        self.prepared, self.seen, self.samples, self.elements = prepared, 0, 0, 0
        self.bits = second_moment.FEW_BITS if round_weights is None else second_moment.ALL_BITS if round_weights else 0
        self.rounds = second_moment.is_wanted(prepared, self.bits)
        self.corrects = correct_bias is not False and bool(weighted_nodes(prepared))
        self.enough = ENOUGH if correct_bias is None else 0
        self.kept: list[list[Any]] = []

    def take(self, inputs: Sequence[Any]) -> None:
        """The model's inputs of the next batch."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        axes = batch_axes(self.prepared)
        if any(axis is not None for axis in axes):
            count = count_of(inputs, axes)
        else:  # every size is fixed: the first dimension is the batch, as a rule
            count = len(tensors[0]) if tensors and tensors[0].dim() else len(tensors[:1])
        self.seen += count
        if (self.rounds or self.corrects) and self.samples < ENOUGH and self.elements < LARGEST and tensors:
            self.kept.append([value.clone() if isinstance(value, Tensor) else value for value in inputs])  # a loader may reuse its memory
            self.samples += count
            self.elements += sum(value.numel() for value in tensors)

    def use(self, distributed: bool, show_progress: bool | None) -> None:
        """Round and correct by them; where ranks calibrate together, by those of the first."""
        if self.rounds:

            def rounded() -> second_moment.Rounded:
                found = second_moment.rounded(self.prepared, cut(self.prepared, self.kept, 4), self.bits, show_progress)
                return {name: (offset.cpu(), None if share is None else share.cpu()) for name, (offset, share) in found.items()}

            second_moment.settle(self.prepared, self._of_first_rank(distributed, rounded, {}))
        if self.corrects and self._seen_by_all(distributed) >= self.enough:

            def corrected() -> dict[str, list[float]]:
                return bias.corrections(self.prepared, self._few(), show_progress)

            bias.settle(self.prepared, self._of_first_rank(distributed, corrected, {}))

    def _seen_by_all(self, distributed: bool) -> int:
        """How many samples went by in the ranks that calibrate together."""
        return sum(ranks.gathered(self.seen)) if distributed and ranks.count() > 1 else self.seen

    def _of_first_rank(self, distributed: bool, find: Callable[[], Found], nothing: Found) -> Found:
        if not distributed or ranks.count() == 1:
            return find() if self.kept else nothing
        found = nothing
        try:
            if self.kept and not ranks.index():
                found = find()
        finally:
            every: Sequence[Found] = ranks.gathered(found)  # also where it raises: others wait
        return every[0]

    def _few(self) -> Samples:
        """As many as a mean needs, in at least so many chunks that some can be held out."""
        each = max(self.elements // max(self.samples, 1), 1)
        size = max(1, min(CHUNK, LARGEST_FOR_BIAS // (HELD_OUT_OF * each)))
        return Samples(cut(self.prepared, self.kept, size).chunks[: max(HELD_OUT_OF, LARGEST_FOR_BIAS // (size * each))])

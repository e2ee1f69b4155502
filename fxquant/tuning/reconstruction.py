"""Block reconstruction: roundings and scales of activations are learned together, block by block (see `blocks` and `learning`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxquant.support.arguments import POSITIVE, checked
from fxquant.tuning.blocks import block_units
from fxquant.tuning.checkpoint import CHECKPOINT
from fxquant.tuning.course import learn
from fxquant.tuning.guard import tuning
from fxquant.tuning.learning import Settings
from fxquant.tuning.result import TuningResult
from fxquant.tuning.walk import taken

ROUNDED = 0.5


@checked(steps=POSITIVE, checkpoint=CHECKPOINT)
def reconstruct(
    prepared: fx.GraphModule,
    batches: Any,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    steps: int = 2000,
    batch_size: int = 16,
    seed: int = 0,
    checkpoint: str | None = None,
    show_progress: bool | None = None,
) -> TuningResult:
    """Learn the roundings of weights and the scales of activations of each block, so that it returns its float result.

    BRECQ (Li et al. 2021) with QDrop (Wei et al. 2022): a block is a residual block, or a few layers in a row. While it learns, each
    element of an activation is rounded with probability one half. Scales that are given, frozen, powers of two, or shared with an operator
    outside of the block stay. Held-out samples judge each block, whether it takes both the learned roundings and the learned
    scales, and the outputs of the model.
    `seed`, `checkpoint`, memory, errors and everything else are as in `adaround`.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, batch_fn, batch_size, show_progress)
        call = {"method": "reconstruct", "steps": steps, "seed": seed, "batch_size": batch_size}
        settings = Settings(steps, rounded=ROUNDED, scales=True)
        return learn(tuned, block_units(prepared), samples, settings, seed, call, checkpoint, show_progress)

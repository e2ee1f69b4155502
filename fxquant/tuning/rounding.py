"""AdaRound: learn for each weight whether it is rounded up or down, layer by layer (`learning` has the formulas)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxquant.support.arguments import POSITIVE, checked
from fxquant.tuning.checkpoint import CHECKPOINT
from fxquant.tuning.course import learn
from fxquant.tuning.guard import tuning
from fxquant.tuning.learning import Settings
from fxquant.tuning.result import TuningResult
from fxquant.tuning.units import layer_units
from fxquant.tuning.walk import taken


@checked(steps=POSITIVE, checkpoint=CHECKPOINT)
def adaround(
    prepared: fx.GraphModule,
    batches: Any,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    steps: int = 1000,
    batch_size: int = 16,
    seed: int = 0,
    checkpoint: str | None = None,
    show_progress: bool | None = None,
) -> TuningResult:
    """Learn whether each weight is rounded up or down, so that layers return their float results; the model is left in VALIDATE.

    Nagel et al. 2020, in the order that layers run: each sees operands that are integers already, and learns its float result, behind its
    fused limits and a function that alone reads it, in so many `steps` of `batch_size` samples. A quarter of the samples is held out, and
    judges, also of one batch: a layer whose mean squared error there does not fall, or with which the outputs of the model lose more than
    0.2 dB, is left as it was, and so are all layers unless the outputs gain 0.2 dB. Layers with a rounding of the user's own are
    left out. What was decided is an `AdaptiveRounding` in place of `Nearest`, in the file of `save` and in `state_dict`.

    The same seed, model and batches give the same bits, on one machine with one number of threads; no global generator is read. After a
    kill, the same call with the same `checkpoint` continues behind the last layer that was finished, and ends with the bits of one that
    was not interrupted. The inputs are kept, and of what is between the layers two values, float and integer, for each that is still to be
    read.

    Raises NotCalibrated before calibration, CalibrationError for batches that do not fit, and ConfigurationError for a checkpoint that is
    of another call; if anything is raised, the model is what it was.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, batch_fn, batch_size, show_progress)
        call = {"method": "adaround", "steps": steps, "seed": seed, "batch_size": batch_size}
        return learn(tuned, layer_units(prepared), samples, Settings(steps), seed, call, checkpoint, show_progress)

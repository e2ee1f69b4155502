"""Calibrate a prepared model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxquant.calibration import calibration
from fxquant.calibration.calibration import having
from fxquant.calibration.scales import warn_of_lost_inputs
from fxquant.prepared.batches import as_batches
from fxquant.reporting.forms import Batches
from fxquant.support import logger
from fxquant.support.arguments import checked
from fxquant.tuning.equalization import by_first_batch
from fxquant.tuning.first_samples import FirstSamples


@checked()
def calibrate(
    prepared: fx.GraphModule,
    batches: Batches,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    distributed: bool = True,
    only_missing: bool = False,
    equalize: bool = True,
    round_weights: bool | None = None,
    correct_bias: bool | None = None,
    balance_samples: bool | None = None,
    show_progress: bool | None = None,
) -> fx.GraphModule:
    """Observe the batches, set every scale, and leave the model in state VALIDATE; return it.

    `batches` yields tensors, tuples or dicts (a DataLoader does); a tensor or a dict is one batch. The leading items,
    nested or not, or those that are named like forward's parameters, fill the model's inputs; the rest (labels) is
    dropped, with one log line. `batch_fn` maps a batch to the inputs. `num_batches` is the number of batches to take, and no more are read.
    Memory does not grow with their number.

    If torch.distributed is in use, every rank calls this with its own shard, with any number of batches, and all
    get equal scales, those of everything observed. `distributed=False` is for a rank that calibrates alone.

    Calibrating again adds to what was observed, with bits equal to one call with all batches: the first samples are kept with
    the model, but in no file, and weights and biases are rounded and corrected again. If samples of observed batches are missing,
    a warning says so. Operators that `set_state` has put into FLOAT are left out and stay there, as are those in TRAIN or VALIDATE with
    known scales while others are in CALIBRATE; a line of the log names them. A tensor of an operator in FLOAT is still
    observed for readers that take it as integers. `only_missing` observes only tensors without a scale, and leaves the others
    unchanged; if there are none, no batch is taken.

    Before observation, channels whose ranges in the first batch differ much are equalized by powers of two, if that
    clearly reduces the error of weights and activations (`fxq.equalize`); `equalize=False` disables this. After observation, weights of
    less than 8 bits are rounded so that their errors cancel on the first 64 samples and in the model's outputs
    (`fxq.tuning.round_weights`): with `round_weights=True` all weights are, each kept if the outputs gain 0.2 dB, with
    False none. With 64 samples or more, biases then
    compensate the mean shift of outputs by rounding (`fxq.tuning.correct_bias`): with `correct_bias=True` with fewer as well, with False
    never. With as many samples, ranges minimize the noise of each sample in decibels, instead of the squared error of all, if that
    lowers the noise of the outputs: with `balance_samples=True` always, with False never. Unless it is False, the range of an input many of
    whose values round to 0 is divided by a power of two, if the outputs are nearer to float with it.

    Raises CalibrationError if batches are missing, do not fit the model, or hold NaN or infinite
    values, and ConfigurationError for unusable arguments; what was observed before stays observed.
    """
    calibration.require_prepared(prepared)
    batches = as_batches(batches)
    out = calibration.out_of_calibration(prepared)
    if out:
        names = ", ".join(f"%{each.name} ({each.state.value})" for each in out)
        logger.info("left out of calibration, by the state they are in: %s", names)
    with having(out, left_out=True):
        samples = FirstSamples(prepared, round_weights, correct_bias, balance_samples)
        first_inputs: list[Any] = []

        def take(inputs: Sequence[Any]) -> None:
            samples.take(inputs)
            if not first_inputs:  # a loader may reuse its memory
                first_inputs.extend(value.clone() if isinstance(value, torch.Tensor) else value for value in inputs)

        if samples.lost and not only_missing and (samples.rounds or samples.corrects):
            logger.warning(
                "this calibration goes on from batches whose samples are not there any more: weights are rounded, and biases corrected,"
                " by the samples of this call alone; to have what one call gives, calibrate a model that fxq.prepare has just returned"
            )
        with samples.remembered():
            observed = calibration.calibrate(
                prepared,
                batches,
                calibration.CalibrationOptions(num_batches, batch_fn, distributed, only_missing, show_progress),
                first=by_first_batch(prepared, distributed) if equalize else None,
                each=take,
            )
            if observed:
                samples.use(distributed, show_progress)
                warn_of_lost_inputs(prepared, first_inputs)
    return prepared

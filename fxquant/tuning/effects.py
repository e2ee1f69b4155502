"""The effect of a change on a model's outputs: how far they are from what they were.

    noise of an output    Σ(y' - y)² / Σy²,   y' with the change

A change is anything that makes outputs differ: integers in place of floats, one tensor or weight that is rounded, a range, a bias. Advice,
the searches, and all that calibration and tuning choose by the outputs measure it here, on samples that nothing was learned from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxquant.analysis.recording import still
from fxquant.ir.graph import by_name
from fxquant.ir.model import autocast_off
from fxquant.quantization.spec import State
from fxquant.support import logger
from fxquant.tuning.result import TunedLayer

GAIN = 0.2228  # dB at the outputs, 5 % of the noise: what a range, an observer or a tuning has to gain; a few samples tell it from chance

Candidate = TypeVar("Candidate")
Run = Callable[[Sequence[Any]], list[Tensor]]  # from a model's inputs to its floating-point outputs


def is_lower(after: float, before: float) -> bool:
    """Return whether noise is lower than before by more than `GAIN` dB."""
    return after < before * 10 ** (-GAIN / 10)


def best_of(noise: Mapping[Candidate, float], usual: Candidate) -> Candidate:
    """Return the candidate with the least noise if that is clearly lower than the usual one's, else the usual one."""
    best = min(noise, key=noise.__getitem__)
    return best if is_lower(noise[best], noise[usual]) else usual


def decibels(noise: float) -> float:
    """Return the signal to noise ratio in dB, given the noise to signal ratio; infinite without noise."""
    return math.inf if noise <= 0 else -10 * math.log10(noise)


def is_real(value: Any) -> bool:
    """Return whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def real_outputs(result: Any) -> list[Tensor]:
    """Return the floating-point tensors among a model's outputs."""
    return [value for value in pytree.tree_leaves(result) if is_real(value)]


def outputs_of(prepared: fx.GraphModule, inputs: Sequence[Any], state: State | None = None) -> list[Tensor]:
    """Return the floating-point outputs of a prepared model for its inputs, in its present state or in this one."""
    with still(prepared, state), autocast_off():
        return real_outputs(prepared(**by_name(prepared, inputs)))


@dataclass(frozen=True)
class Noise:
    """The squared errors Σ(y' - y)² and the powers Σy² of each output in each chunk of samples, where y is finite.

    Where only y' is not finite, the error is infinite. An output whose power is 0 has its squared error in place of a ratio.
    """

    errors: tuple[tuple[float, ...], ...]
    powers: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(wanted: Iterable[Sequence[Tensor]], found: Iterable[Sequence[Tensor]]) -> Noise:
        """Return the noise of outputs, for each chunk those that are wanted and those that were found."""
        chunks = [[_error_and_power(*pair) for pair in zip(*both, strict=True)] for both in zip(wanted, found, strict=True)]
        return Noise(*(tuple(tuple(pair[part] for pair in chunk) for chunk in chunks) for part in (0, 1)))

    @property
    def outputs(self) -> tuple[float, ...]:
        """The noise to signal ratio of each output over all chunks, without outputs that are 0 and remain so."""
        sums = zip(map(sum, zip(*self.errors, strict=True)), map(sum, zip(*self.powers, strict=True)), strict=True)
        return tuple(error / (power or 1.0) for error, power in sums if error or power)

    @property
    def pooled(self) -> float:
        """The mean of `outputs`; 0 without any."""
        return sum(self.outputs) / len(self.outputs) if self.outputs else 0.0

    @property
    def mean(self) -> float:
        """The mean over chunks and outputs, so that a chunk counts the same, however large its values are; 0 without any."""
        pairs = [pair for both in zip(self.errors, self.powers, strict=True) for pair in zip(*both, strict=True)]
        return sum(error / (power or 1.0) for error, power in pairs) / len(pairs) if pairs else 0.0


def _error_and_power(wanted: Tensor, changed: Tensor) -> tuple[float, float]:
    reference, other = wanted.double(), changed.double()
    finite = torch.isfinite(reference)
    if not bool(finite.all()):
        reference, other = reference[finite], other[finite]
    error = float((other - reference).square().sum())
    return (math.inf if math.isnan(error) else error), float(reference.square().sum())


class Outputs:
    """The floating-point outputs of a model for some chunks of inputs, from which those of a changed model are so far."""

    def __init__(self, run: Run, chunks: Sequence[Sequence[Any]]) -> None:
        self.chunks = chunks
        with torch.no_grad():
            self.wanted = [run(chunk) for chunk in chunks]

    @property
    def there(self) -> bool:
        """Whether the model returns any floating-point tensor."""
        return any(self.wanted)

    def noise(self, run: Run, chunks: Sequence[Sequence[Any]] | None = None) -> Noise:
        """Return the noise of the outputs of `run`, for the same inputs or those of `chunks`, one chunk at a time."""
        with torch.no_grad():
            return Noise.of(self.wanted, (run(chunk) for chunk in (self.chunks if chunks is None else chunks)))


class FloatOutputs(Outputs):
    """The outputs of a prepared model in its float form."""

    def __init__(self, prepared: fx.GraphModule, chunks: Sequence[Sequence[Any]]) -> None:
        self.prepared = prepared
        super().__init__(self.float_form, chunks)

    def float_form(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs in float, with the changes that hooks on operators make (see `simulation`)."""
        return outputs_of(self.prepared, inputs, State.FLOAT)

    def measure(self) -> float:
        """Return the mean noise of the model in its present state, with what it has been given by now."""
        return self.noise(partial(outputs_of, self.prepared)).mean


def judged(
    outputs: FloatOutputs,
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
        if is_lower(after, before) or not outputs.there:
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

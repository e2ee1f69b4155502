"""The one judge of all that calibration and tuning choose: the outputs, on samples that nothing was learned from.

An attempt puts something into the model. It is taken where the outputs are clearly nearer to the float model's with it: by more than
`measure.GAIN`, and no part of them loses as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxquant.accuracy.checkpoint import Checkpoint
from fxquant.accuracy.choices import tuning
from fxquant.accuracy.measure import Noise, Parts, Run, best_of, outputs_of
from fxquant.accuracy.result import TunedLayer
from fxquant.accuracy.walk import batch_axes, count_of
from fxquant.ir.model import repeatable
from fxquant.lowering.eager import constants_kept
from fxquant.quantization.spec import State
from fxquant.support import logger


class FloatOutputs:
    """The floating-point outputs of a prepared model in its float form for some chunks of inputs, from which others are so far.

    current  the noise of the model as it is now, where that was measured already
    """

    def __init__(self, prepared: fx.GraphModule, chunks: Sequence[Sequence[Any]]) -> None:
        self.prepared, self.chunks, self.current = prepared, chunks, cast("Noise | None", None)
        axes = batch_axes(prepared)
        self.counts = [count_of(chunk, axes) for chunk in chunks]

    @cached_property
    def parts(self) -> Parts | None:
        """The parts of the outputs; None without chunks."""
        return Parts(self.prepared, self.chunks[0], State.FLOAT) if self.chunks else None

    @cached_property
    def wanted(self) -> list[list[Tensor]]:
        """The parts of the outputs of each chunk in float, computed when they are first asked for."""
        with torch.no_grad():
            return [self.apart(self.float_form(chunk)) for chunk in self.chunks]

    def apart(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of floating-point outputs."""
        return [] if self.parts is None else [part for parts in self.parts.of(outputs) for _, part in parts]

    @property
    def there(self) -> bool:
        """Whether the model returns any floating-point tensor."""
        return any(self.wanted)

    def noise(self, run: Run, chunks: Sequence[Sequence[Any]] | None = None) -> Noise:
        """Return the noise of the outputs of `run`, for the same inputs or those of `chunks`, one chunk at a time."""
        with torch.no_grad(), constants_kept():
            return Noise.of(self.wanted, (self.apart(run(chunk)) for chunk in (self.chunks if chunks is None else chunks)), self.counts)

    def float_form(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs in float, with the changes that hooks on operators make (see `simulation`)."""
        return outputs_of(self.prepared, inputs, State.FLOAT)

    def measure(self) -> Noise:
        """Return the noise of the model in its present state, with what it has been given by now."""
        return self.noise(partial(outputs_of, self.prepared))


def pick(
    judge: FloatOutputs, attempts: Mapping[str, Callable[[], Any]], usual: str, noises: Mapping[str, Noise] = MappingProxyType({}), *,
    supported: Callable[[Noise, Noise], bool] = lambda after, before: True, several: bool = False, show_progress: bool | None = False,
) -> tuple[str, dict[str, Noise]]:  # fmt: skip
    """Return the name of the attempt with which the outputs are clearly best, or else `usual`, and the noise of each; the model stays.

    `noises` holds the noise that is known already. An attempt is no candidate unless its gain is `supported`, given the noise with it and
    with the usual one. Several ranks divide the attempts. Without floating-point outputs nothing is measured, and `usual` is returned.
    """
    with tuning(judge.prepared) as tuned, repeatable():

        def measured(name: str) -> Noise:
            attempts[name]()
            noise = judge.measure()
            tuned.undo()
            return noise

        asked = [name for name in attempts if name not in noises] if judge.there else []
        try:
            noise = Checkpoint(None, {}, several).gather({name: partial(measured, name) for name in asked}, "comparing", show_progress)
        finally:
            tuned.undo()
    noise = {**noises, **noise}
    if usual not in noise:
        return usual, {}
    return best_of({name: each for name, each in noise.items() if name == usual or supported(each, noise[usual])}, usual), noise


def judged(
    outputs: FloatOutputs, before: Noise, rows: Sequence[TunedLayer], undo: Callable[[], None], what: tuple[str, str],
    attempts: Mapping[str, Callable[[], Sequence[TunedLayer]]] | None = None, noises: Mapping[str, Noise] = MappingProxyType({}),
) -> tuple[TunedLayer, ...]:  # fmt: skip
    """Return the rows of a tuning method if it makes the outputs clearly better; else call `undo`, and return rows that are not kept.

    `before` is the noise of the outputs without it; `what` is the subject and the participle of the log line. Of several `attempts`, which
    each put something else into the model and return its rows, the best stays, and the first without floating-point outputs to judge by.
    `noises` holds the noise of some, by name.
    """
    if not any(row.kept for row in rows):
        return tuple(rows)
    attempts = attempts or {"as found": lambda: rows}
    best, noise = pick(outputs, attempts, "", {"": before, **noises})
    if not outputs.there:
        best, noise = next(iter(attempts)), dict.fromkeys(attempts, before)
    if best:
        result = tuple(attempts[best]())
        logger.info(
            "%s are %s in %d of %d layers, %s: the outputs have %.1f dB, and had %.1f dB",
            *what, sum(row.kept for row in result), len(rows), best, noise[best].level, before.level,
        )  # fmt: skip
        return result
    undo()
    logger.info(
        "%s are not %s: the outputs have %.1f dB, and %.1f dB with it",
        *what, before.level, max(noise[name].level for name in attempts),
    )  # fmt: skip
    return tuple(replace(row, kept=False) for row in rows)

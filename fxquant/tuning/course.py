"""Let units (layers or blocks) learn in turn, each with the units before it finished and kept in a checkpoint; `adaround` by layers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch import fx

from fxquant.numerics.rounding import AdaptiveRounding, Nearest
from fxquant.support.arguments import POSITIVE, checked
from fxquant.support.progress import progress
from fxquant.tuning.checkpoint import CHECKPOINT, LayerCheckpoint, digest, model_digest
from fxquant.tuning.choices import Tuned, tuning
from fxquant.tuning.effects import FloatOutputs, is_lower, judged
from fxquant.tuning.learning import Settings, Student
from fxquant.tuning.result import TunedLayer, TuningResult
from fxquant.tuning.walk import Lesson, Samples, Unit, Walk, layer_units, shared_weights, taken, weighted_nodes


def learn(
    tuned: Tuned,
    units: Sequence[Unit],
    samples: Samples,
    settings: Settings,
    seed: int,
    call: dict[str, Any],
    checkpoint: str | None,
    show_progress: bool | None,
) -> TuningResult:
    """Let units learn, one after the other; a unit keeps what it learned if its error falls, and that of the outputs does not clearly rise.

    All of it is undone if the outputs of the model have no clear gain in the end.
    """
    prepared = tuned.model
    known = LayerCheckpoint(checkpoint, {**call, "model": model_digest(prepared), "samples": digest(samples.tensors)})
    skipped = left_out(prepared)
    tried = [Unit(unit.nodes, free) for unit in units if (free := tuple(node for node in unit.weighted if node.name not in skipped))]
    outputs = FloatOutputs(prepared, [samples.chunks[index] for index in samples.judging])
    start = noise = outputs.measure()
    exact, real = Walk(prepared, samples.chunks, exact=True), Walk(prepared, samples.chunks, exact=False)

    def run() -> Iterator[None]:
        nonlocal noise
        for unit in tried:
            row = known.rows.get(unit.name)
            if row is None:
                noise = yield from _taught(Lesson(unit, samples, exact, real), settings, _seed(seed, unit.name), known, outputs, noise)
                continue
            if row.kept:
                known.learned(row).put(prepared, unit)
                noise = min(noise, outputs.measure())
            for _ in range(settings.steps):
                yield

    for _ in progress(run(), len(tried) * settings.steps, call["method"], show_progress):
        pass
    rows = judged(outputs, start, [known.rows[unit.name] for unit in tried], tuned.undo, ("weights", f"learned by {call['method']}"))
    return TuningResult(call["method"], rows, tuple(skipped.items()), exact.largest + real.largest)


def _taught(
    lesson: Lesson, settings: Settings, seed: int, known: LayerCheckpoint, outputs: FloatOutputs, noise: float
) -> Generator[None, None, float]:
    """Train one unit, and keep what it learned if its error falls and the outputs are not clearly noisier; return their least noise."""
    before, student = lesson.error(), Student(lesson, settings, seed)
    yield from student.study()
    learned, after = student.settled(lesson.error)
    learned_noise = outputs.measure()
    kept = after < before and not is_lower(noise, learned_noise)
    if not kept:
        student.undo()
    names = tuple(node.name for node in lesson.unit.weighted)
    known.add(TunedLayer(lesson.unit.name, names, before, after, kept, lesson.signal()), learned if kept else None)
    return min(noise, learned_noise) if kept else noise


def left_out(prepared: fx.GraphModule) -> dict[str, str]:
    """Return the weighted nodes whose rounding is not to be changed, by name, and why."""
    shared = shared_weights(prepared)
    found = {}
    for node, operator in weighted_nodes(prepared).items():
        rounding = operator.weight_quantizer.rounding
        if type(rounding) not in (Nearest, AdaptiveRounding):
            found[node.name] = f"it has a different rounding, {type(rounding).__name__}"
        elif node in shared:
            found[node.name] = "other operators read its weight, too, and would round it otherwise"
    return found


def _seed(seed: int, name: str) -> int:
    """Return one for each unit, so that none depends on those before it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


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
    fused limits and a function that alone reads it, in so many `steps` of `batch_size` samples. `batches` are as in `calibrate`. A quarter
    of the samples is held out, and judges, also of one batch: a layer whose mean squared error there does not fall, or with which the
    outputs of the model lose more than 0.2 dB, is left as it was, and so are all layers unless the outputs gain 0.2 dB. Layers with a
    rounding of the user's own are left out. What was decided is an `AdaptiveRounding` in place of `Nearest`, in the file of `save` and in
    `state_dict`.

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

"""Bias correction: subtract from an operator's bias the mean shift that its rounded weight and rounded operands cause in its output.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction, ICCV 2019, section 4.2
and appendix D, empirical and sequential. The correction is the mean of the float model's output over samples and places, minus that of
the integers', per output channel. Operators are corrected in order, so that each sees operands that are corrected already.

Where limits are fused into the operator, as of a ReLU6, means are matched after them:

    mean clamp(ŷ + c) = mean clamp(y)

A rectifier turns noise of mean zero into noise with a positive mean, so matching means before the limits leaves a shift after them. The
left side grows with c, and Newton's method finds c for each channel. Where limits are fused, layers are corrected a second time, with
means matched before the limits. Then the corrections of each way, all of them or half of each, are judged by the outputs of the model on
held-out samples (`effects`): the best are kept, and none where none of the four clearly lowers the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.model import repeatable
from fxquant.lowering.eager import constants_kept
from fxquant.lowering.lowering import Clamp
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.weights import BiasCorrection
from fxquant.support import logger
from fxquant.support.arguments import checked
from fxquant.support.progress import progress
from fxquant.tuning.checkpoint import Checkpoint, call_of
from fxquant.tuning.choices import Tuned, tuning
from fxquant.tuning.effects import FloatOutputs, Noise, Run, judged, outputs_of, real_outputs
from fxquant.tuning.result import TunedLayer, TuningResult
from fxquant.tuning.walk import (
    Lesson,
    Samples,
    Unit,
    Walk,
    arguments_of,
    bound_arguments,
    by_channel,
    constant_arguments,
    layer_units,
    real_result,
    taken,
    weight_of,
)

WAYS = AFTER, BEFORE = "after", "before"  # the fused limits, where means are matched
SHARES = (1.0, 0.5)  # of the corrections

_Way = tuple[list[TunedLayer], dict[str, list[float]]]  # a row for each layer, and the corrections of those that are better with it
NEWTON = 6  # steps: the mean after limits is nearly linear in what is added
FEWEST = 0.05  # of a channel's values that are taken to lie within the limits, at least: what is always cut off has no slope
PLACES = 2**15  # of a channel, about, by which means after limits are matched
OUTLIER = 6.0  # times the median magnitude of a channel's differences: what is beyond counts as so much


@checked()
def correct_bias(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> TuningResult:  # fmt: skip
    """Correct the bias of every weighted operator whose output is nearer to the float model's with it; the model is left in VALIDATE.

    A layer keeps the bias it had unless its mean squared error on held-out samples falls, and so do all layers unless the outputs of the
    model gain 0.2 dB. A log line says what was decided, and lines of level DEBUG say it of each layer. The correction is stored next to
    the bias, which does not change. So state FLOAT is not affected, `convert`, `save` and `state_dict` include the correction, and a
    batch norm that is trained live replaces it.

    The bits do not depend on the number of threads. Batches, memory, errors and ranks are as in `adaround`.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, options, show_progress)
        call = call_of(prepared, samples, method="correct_bias", batch_size=options.batch_size)
        with repeatable():
            judging = [samples.chunks[index] for index in samples.judging]
            checkpoint = Checkpoint(options.checkpoint, call, options.distributed, divided=False)
            return checkpoint.agreed(prepared, _correct(prepared, samples, judging, tuned, checkpoint, show_progress))


def corrections(
    prepared: fx.GraphModule, samples: Samples, judging: Sequence[Sequence[Any]], show_progress: bool | None
) -> dict[str, list[float]]:
    """Correct biases by these samples, judged by the outputs for the chunks `judging`; return what is added to each now, by layer.

    Nothing is done with one chunk alone.
    """
    if len(samples.chunks) < 2:
        return {}
    with tuning(prepared) as tuned, repeatable():
        result = _correct(prepared, samples, judging, tuned, Checkpoint(None, {}), show_progress)
    added = {name: tuned.operators[name].weight_quantizer.correction for layer in result.kept for name in layer.layers}
    return {name: each.value.tolist() for name, each in added.items() if each is not None}


def apply(prepared: fx.GraphModule, by_layer: Mapping[str, list[float]]) -> None:
    """Set the bias corrections (C,) of layers, by the layer's name."""
    operators = quantized_operators(prepared)
    for name, value in by_layer.items():
        _put(operators[name], value)


def _correct(
    prepared: fx.GraphModule, samples: Samples, judging: Sequence[Sequence[Any]], tuned: Tuned, checkpoint: Checkpoint,
    show_progress: bool | None,
) -> TuningResult:  # fmt: skip
    outputs, operators = FloatOutputs(prepared, judging), tuned.operators
    before, previous = outputs.measure(), {name: operator.weight_quantizer.correction for name, operator in operators.items()}
    units, ways, skipped, memory, noises = layer_units(prepared), dict[str, _Way](), dict[str, str](), 0, dict[str, Noise]()

    def put(way: str, share: float) -> list[TunedLayer]:
        rows, values = ways[way]
        for name, had in previous.items():
            operators[name].weight_quantizer.correct(had)
            if name in values:
                value = torch.tensor(values[name], dtype=torch.float32, device="cpu")
                start = torch.zeros_like(value) if had is None else had.value.cpu()
                _put(operators[name], start + share * (value - start))
        return rows

    limited = any(constant_arguments(prepared, unit.weighted[0], operators[unit.weighted[0].name]).get("clamp") for unit in units)
    used = WAYS if limited else WAYS[:1]  # without limits both are the same
    for way in used:
        exact, real = Walk(prepared, samples.chunks, exact=True), Walk(prepared, samples.chunks, exact=False)
        ways[way] = [], {}
        put(way, 0.0)
        for unit in progress(units, len(units), f"correcting biases {way} their limits", show_progress):
            operator = operators[unit.weighted[0].name]
            outcome = checkpoint.at(f"{way} {unit.name}", partial(_found, unit, samples, exact, real, operator, way))
            if outcome is None:
                skipped[unit.name] = "its channels are not those of its weight"
                continue
            row = TunedLayer.of(outcome["row"])
            ways[way][0].append(row)
            if row.kept:
                _put(operator, outcome["value"])
                ways[way][1][operator.name] = outcome["value"]
        if outputs.there and ways[way][1] and not any(previous.values()):  # which `put` adds with a rounding
            noises[f"{way} their limits"] = outputs.noise(_walked(prepared, samples, exact))
        memory = max(memory, exact.largest + real.largest)
    attempts = {f"{way} their limits{' by half' * (share < 1)}": partial(put, way, share) for way in used for share in SHARES}
    rows = max((rows for rows, _ in ways.values()), key=lambda rows: sum(row.kept for row in rows))
    result = TuningResult(
        "correct_bias", judged(outputs, before, rows, tuned.undo, ("biases", "corrected"), attempts, noises), tuple(skipped.items()), memory
    )
    logger.debug("%s", result)
    return result


def _walked(prepared: fx.GraphModule, samples: Samples, exact: Walk) -> Run:
    """Return a function from a chunk of inputs to the model's outputs, which are taken from `exact` for the chunks that it has walked."""
    (output,) = prepared.graph.find_nodes(op="output")
    ends = dict(zip(map(id, samples.chunks), exact.at(output.all_input_nodes), strict=True))

    def run(inputs: Sequence[Any]) -> list[Tensor]:
        values = ends.get(id(inputs))
        return outputs_of(prepared, inputs) if values is None else real_outputs(fx.map_arg(output.args, values.__getitem__))

    return run


def _found(unit: Unit, samples: Samples, exact: Walk, real: Walk, operator: QuantizedOperator, way: str) -> dict[str, Any] | None:
    """Return the outcome for one layer, as a file holds it: its row, and what is added to its bias if that is better."""
    lesson = Lesson(unit, samples, exact, real)
    correction = _correction(lesson, operator, way)
    if correction is None:
        return None
    row = _tried(lesson, operator, correction)
    added = operator.weight_quantizer.correction
    return {"row": asdict(row), "value": added.value.tolist() if row.kept and added is not None else None}


def _put(operator: QuantizedOperator, value: list[float] | Tensor) -> None:
    added = BiasCorrection(len(value)).to(next((buffer.device for buffer in operator.buffers()), "cpu"))
    added.value.copy_(torch.as_tensor(value, device="cpu", dtype=torch.float32))
    operator.weight_quantizer.correct(added)


@torch.no_grad()
@constants_kept()
def _correction(lesson: Lesson, operator: QuantizedOperator, way: str) -> Tensor | None:
    """Return the bias correction (C,) that matches means of the learning samples after the fused limits, or before them."""
    node, learning = lesson.unit.weighted[0], lesson.samples.learning
    total, count = torch.zeros((), device="cpu", dtype=torch.float32), 0
    float_values, values, clamp = [], [], None
    for index in learning:
        has = bound_arguments(node, operator, lesson.operands[index])
        weight, clamp, target = weight_of(operator, has), has.get("clamp"), lesson.targets[index].get(node)
        assert weight is not None
        if clamp is not None or target is None:  # without the fused limits
            args, kwargs = operator.multiplied(*arguments_of(node, lesson.float_operands[index]))
            target = operator.operator.function(*args, **{name: value for name, value in kwargs.items() if name != "clamp"})
        results = target, real_result(operator, has, whole=False)
        real, integer = (by_channel(result.double(), len(weight), weight.dim()) for result in results)
        if real is None or integer is None:
            return None
        difference = _without_outliers(real - integer)
        total, count = total + difference.sum(1), count + difference.shape[1]
        if clamp is not None and way == AFTER:
            apart = max(1, real.shape[1] * len(learning) // PLACES) | 1  # odd: it meets every column of an image
            float_values.append(real[:, ::apart])
            values.append((real - difference)[:, ::apart])
    mean = total / max(count, 1)
    return (mean if clamp is None or not float_values else _clamped(clamp, torch.cat(float_values, 1), torch.cat(values, 1), mean)).float()


def _clamped(clamp: Clamp, float_values: Tensor, values: Tensor, start: Tensor) -> Tensor:
    """Return c (C,) with mean clamp(values + c) = mean clamp(float_values), by Newton's method from `start` (C,); values (C, places)."""
    low, high = (end if end is not None else other for end, other in zip(clamp, (-math.inf, math.inf), strict=True))
    target, added = float_values.clamp(low, high).mean(1), start.clone()
    longest = (float_values - values).square().mean(1).sqrt()  # where hardly anything is within the limits a step could be of any length
    for _ in range(NEWTON):
        moved = values + added.unsqueeze(1)
        slope = (((moved > low) & (moved < high)).sum(1).double() / moved.shape[1]).clamp_min(FEWEST)
        step = (target - moved.clamp(low, high).mean(1)) / slope
        added += torch.minimum(torch.maximum(step, -longest), longest)
    return added


def _without_outliers(rows: Tensor) -> Tensor:
    """Limit the values of each row to some times their median magnitude: where an operand was cut off, differences are not rounding's."""
    limit = OUTLIER * rows.abs().median(1, keepdim=True).values
    return rows.clamp(-limit, limit)


def _tried(lesson: Lesson, operator: QuantizedOperator, correction: Tensor) -> TunedLayer:
    """Apply the correction, and keep it if it lowers the error on held-out samples."""
    quantizer, previous = operator.weight_quantizer, operator.weight_quantizer.correction
    before = lesson.error()
    _put(operator, correction if previous is None else previous.value + correction)
    after = lesson.error()
    if not after < before:
        quantizer.correct(previous)
    return TunedLayer(lesson.unit.name, (lesson.unit.weighted[0].name,), before, after, after < before, lesson.signal())
